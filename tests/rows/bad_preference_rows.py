"""Rows of preferences and of binary feedback that are refused, each with a part of its message."""

USER, GOOD, BAD = "What is red?", "blue", "a cat"
ASKED = [{"role": "user", "content": USER}]
HH = f"\n\nHuman: {USER}\n\nAssistant: "
PAIR = {"prompt": ASKED, "chosen": GOOD, "rejected": BAD}
FEEDBACK = {"prompt": ASKED, "completion": GOOD, "label": True}


def say(text: str) -> dict:
    return {"role": "assistant", "content": text}


BAD_PAIRS = [
    (PAIR | {"rejected": GOOD}, "are equal"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are equal"),
    (PAIR | {"chosen": None}, "'chosen' or 'chosen_response' is missing or empty"),
    (PAIR | {"rejected": ""}, "'rejected' is '', expected text"),
    (PAIR | {"rejected": 3}, "'rejected' is 3, expected text or messages"),
    ({"chosen": GOOD, "rejected": BAD}, "'prompt' or 'question' or 'instruction'"),
    (PAIR | {"question": USER}, "has both 'prompt' and 'question'"),
    (PAIR | {"chosen_response": GOOD}, "has both 'chosen' and 'chosen_response'"),
    ({"chosen": [*ASKED, say(GOOD)], "rejected": [{"role": "user", "content": "other"}, say(BAD)]}, "in common"),
    ({"chosen": [*ASKED, say(GOOD)], "rejected": ASKED}, "the rejected side has nothing"),
    ({"chosen": [*ASKED, say(GOOD)], "rejected": [*ASKED, *ASKED]}, "the rejected side has the role 'user'"),
    (PAIR | {"chosen": [say(GOOD) | {"train": False}]}, "chosen: no token is trained"),
    (PAIR | {"chosen": [say(GOOD) | {"weight": 0.5}]}, "weighted as a whole"),
    (PAIR | {"margin": -1}, "'margin' is -1, allowed: numbers from 0"),
    (PAIR | {"weight": 0}, "'weight' is 0"),
    (PAIR | {"weight": "much"}, "'weight' is 'much'"),
    ({"prompt": "a", "system": "b", "chosen": "c", "rejected": "d"}, "has 'system'"),
    (PAIR | {"input": "more"}, "has 'input'"),
    (PAIR | {"chosen": [{"role": "bot", "content": "x"}]}, "the role 'bot'"),
    (PAIR | {"prompt": [{"from": "nobody", "value": "x"}]}, "is from 'nobody'"),
    (PAIR | {"prompt": [*ASKED, say("one")]}, "the prompt ends with an assistant's message"),
    ({"chosen": [*ASKED, say(GOOD)], "rejected": [*ASKED, say(BAD), *ASKED]}, "the rejected side ends with the role"),
    ({"chosen": HH + GOOD, "rejected": f"{HH}{BAD}\n\nHuman: thanks"}, "the rejected side ends with the role 'user'"),
    ({"chosen": f"{HH}{GOOD}\n\nHuman: b\n\nAssistant: c", "rejected": HH + GOOD}, "after the 2 messages in common"),
    ({"chosen": HH + GOOD, "rejected": HH}, "message 2 (assistant) has the content ''"),
    (PAIR | {"chosen": [{"role": "assistant", "content": None}]}, "has the content missing or null"),
    (PAIR | {"prompt": []}, "'prompt' is [], expected text or messages"),
    (PAIR | {"chosen": "a cat \ud83d"}, "half a character: the lone surrogate '\\ud83d'"),
    (PAIR | {"margin": float("nan")}, "not JSON: NaN is not a JSON number"),
]
BAD_FEEDBACK = [
    (FEEDBACK | {"label": "good"}, "'label' is 'good', allowed: true, false"),
    (FEEDBACK | {"label": 1}, "'label' is 1, allowed: true, false"),
    (FEEDBACK | {"label": None}, "'label' or 'kto_tag' is missing or empty"),
    (FEEDBACK | {"completion": " "}, "'completion' is ' ', expected text"),
    (FEEDBACK | {"completion": [{"role": "user", "content": "x"}]}, "must be an assistant's message"),
    ({"messages": ASKED, "label": True}, "must be an assistant's message"),
    (FEEDBACK | {"weight": -1}, "'weight' is -1"),
    (FEEDBACK | {"prompt": [*ASKED, say("one")]}, "the prompt ends with an assistant's message"),
    (FEEDBACK | {"completion": [say(GOOD), *ASKED]}, "the answer ends with the role 'user'"),
]
