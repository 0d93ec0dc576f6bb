"""Tool calls: the rule of masks (mask_oracle.py) over every template there is x kinds of conversations.

python -m pytest tests/test_tool_call_masks.py -s -k table     # prints the table
"""

import copy
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from mask_oracle import find_faults
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from trait_templates import TRAITS
from transformers import PreTrainedTokenizerFast

from chat.masking import ChatMasker

HERE = Path(__file__).parent / "chat_templates"
TRL = find_spec("trl")

# eos_token and generation_config.json's eos_token_id, by what a template's name begins with: the longest counts
STOPS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "command_r": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "gemma": ("<eos>", "<end_of_turn>"),
    "gemma4": ("<eos>", "<turn|>", "<|tool_response>"),
    "diffusion_gemma": ("<eos>", "<turn|>", "<|tool_response>"),
    "glm4": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|endoftext|>", "<|call|>"),
    "idefics3": ("<end_of_utterance>",),
    "smolvlm": ("<end_of_utterance>",),
    "llama": ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    "llama2": ("</s>",),
    "llava_next": ("</s>",),
    "muse_glimmer": ("<|eot|>", "<|eom|>"),
    "phi3": ("<|endoftext|>", "<|assistant|>", "<|end|>"),
    "phi4_mini": ("<|endoftext|>", "<|end|>"),
    "qwen": ("<|im_end|>", "<|endoftext|>"),
    "mistral": ("</s>",),
    "nemotron_mini": ("</s>",),
    "nemotron_super": ("<|eot_id|>", "<|end_of_text|>"),
    "vicuna": ("</s>",),
    "zephyr": ("</s>",),
    "falcon": ("<|endoftext|>",),
    "granite": ("<|end_of_text|>",),
    "olmo": ("<|endoftext|>",),
    "": ("<|im_end|>",),
}
SPECIAL = re.compile(
    r"<\|[^|<>'\" ]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_[a-z]+>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z_]+\]|<SPECIAL_[0-9]+>"
)

USER, MORE = {"role": "user", "content": "How many are there?"}, {"role": "user", "content": "And now?"}
ANSWER = {"role": "assistant", "content": "Five of them."}
PARAMETERS = {"type": "object", "properties": {"terms": {"type": "string", "description": "Which ones."}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": PARAMETERS}}
    for name in ("add", "look_up")
]


def call(arguments: dict | str, *, name: str = "add", id: str = "abc123def") -> dict:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict, **fields) -> dict:
    return {"role": "assistant", "content": "", "tool_calls": list(calls), **fields}


def result(text: str = "sum: 5 apples", *, name: str = "add", id: str = "abc123def") -> dict:
    return {"role": "tool", "content": text, "tool_call_id": id, "name": name}


def without_content(message: dict) -> dict:
    return {key: value for key, value in message.items() if key != "content"}


def in_parts(message: dict) -> dict:
    """The message with OpenAI's list of parts as its content."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


TEXT, EMPTY = call({"terms": "two, three", "n": 2}), call({})
FLAG = call({"deep": True})
VALUES = call({"a": True, "b": False, "c": None, "d": "", "e": {}, "f": [], "g": 7, "h": -2.5})
NESTED = call({"terms": "two, three", "where": {"in": ["a box", {"deep": False, "n": 3}], "of": {}}})
SECOND = call({"terms": "four, five"}, name="look_up", id="ghi456jkl")
SECOND_RESULT = result("a house", name="look_up", id="ghi456jkl")
CASES = {
    "text": [USER, calling(TEXT), result(), ANSWER],
    "no arguments": [USER, calling(EMPTY), result(), ANSWER],
    "a boolean": [USER, calling(FLAG), result(), ANSWER],
    "values": [USER, calling(VALUES), result(), ANSWER],
    "nested": [USER, calling(NESTED), result(), ANSWER],
    "content": [USER, calling(TEXT, content="Let me see."), result(), ANSWER],
    "content, no arguments": [USER, calling(EMPTY, content="Let me see."), result(), ANSWER],
    "null content": [USER, calling(FLAG, content=None), result(), ANSWER],
    "no content": [USER, without_content(calling(NESTED)), result(), ANSWER],
    "two calls": [USER, calling(TEXT, SECOND), result(), SECOND_RESULT, ANSWER],
    "two empty calls": [
        USER, calling(EMPTY, call({}, name="look_up", id="ghi456jkl")), result(), SECOND_RESULT, ANSWER
    ],
    "two rounds": [
        USER, calling(TEXT), result(), calling(SECOND), SECOND_RESULT, ANSWER, MORE, {**ANSWER, "content": "Six of us."}
    ],
    "same ids": [USER, calling(TEXT), result(), calling(FLAG), result("true enough"), ANSWER],
    "reasoning": [
        USER, calling(TEXT, reasoning_content="I have to add."), result(),
        {**ANSWER, "reasoning_content": "That is it then."},
    ],
    "reasoning, no arguments": [USER, calling(EMPTY, reasoning_content="I have to add."), result(), ANSWER],
    "call last": [USER, calling(FLAG)],
    "content and call last": [USER, calling(EMPTY, content="Let me see.")],
    "result last": [USER, calling(TEXT), result()],
    "content and result last": [USER, calling(TEXT, content="Let me see."), result()],
    "arguments as text": [USER, calling(call('{"terms": "two, three", "n": 2}')), result(), ANSWER],
    "ids with names": [
        USER, calling(call({"deep": True}, id="functions.add:0")), result(id="functions.add:0"), ANSWER
    ],
    "parts": [in_parts(USER), in_parts(ANSWER), in_parts(MORE), in_parts({**ANSWER, "content": "Six of us."})],
    "parts and calls": [in_parts(USER), calling(FLAG), in_parts(result()), in_parts(ANSWER)],
}  # fmt: skip


def find_templates() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Every template: its text, and the stop tokens, of which the first is the tokenizer's."""
    found = {}
    folders = {"": HERE} | ({"trl:": Path(TRL.origin).parent / "chat_templates"} if TRL else {})
    for prefix, folder in folders.items():
        for path in sorted(folder.glob("*.jinja")):
            stops = STOPS[max((start for start in STOPS if path.stem.startswith(start)), key=len)]
            found[prefix + path.stem] = (path.read_text(), stops)
    return found | TRAITS


TEMPLATES = find_templates()


def make_tokenizer(template: str, stops: tuple[str, ...]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["How many? Five of them. Be brief. user assistant tool"] * 5, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=stops[0], bos_token="<s>")
    special = sorted({*stops, *SPECIAL.findall(template)} - {"<s>"})
    wrapped.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    wrapped.chat_template = template
    return wrapped


@cache
def make_masker(name: str) -> ChatMasker:
    template, stops = TEMPLATES[name]
    tokenizer = make_tokenizer(template, stops)
    return ChatMasker(tokenizer, stop_token_ids=tokenizer.convert_tokens_to_ids(list(stops)))


def look_at(name: str, case: str) -> list[str] | ValueError:
    template, _ = TEMPLATES[name]
    return find_faults(make_masker(name), copy.deepcopy(CASES[case]), TOOLS if "tools" in template else None)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_rule(name):
    """What the assistant wrote is trained, whole, and nothing else is; or the row is refused."""
    faults = {}
    for case in CASES:
        found = look_at(name, case)
        if not isinstance(found, ValueError) and found:
            faults[case] = found
    assert not faults


def test_table():
    """Printed with -s: which conversations each template takes, and why it refuses the others."""
    print("\n| template | " + " | ".join(CASES) + " |\n|" + "---|" * (len(CASES) + 1))
    reasons: dict[str, int] = {}
    counts = {"ok": 0, "refused": 0, "WRONG": 0}
    for name in TEMPLATES:
        cells = []
        for case in CASES:
            found = look_at(name, case)
            if isinstance(found, ValueError):
                number = reasons.setdefault(
                    re.sub(r"'.*'", "'...'", str(found), flags=re.DOTALL)[:160], len(reasons) + 1
                )
                cells.append(f"[{number}]")
                counts["refused"] += 1
            else:
                cells.append("WRONG" if found else "ok")
                counts[cells[-1]] += 1
        print(f"| {name} | " + " | ".join(cells) + " |")
    print("\n".join(f"[{number}] {reason}" for reason, number in reasons.items()))
    print(counts)
    assert counts["WRONG"] == 0
