"""Reasoning within texts: the tags that open and close it, in rows, in templates and in prompts."""

import re

TAGS = (  # open and close reasoning
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<|think|>", "<|/think|>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<think:opensource>", "</think:opensource>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)
OPENINGS = {opening: closing for opening, closing in TAGS}
OPENING, CLOSING = (re.compile("|".join(map(re.escape, tags))) for tags in zip(*TAGS, strict=True))
ANY_TAG = re.compile(f"{OPENING.pattern}|{CLOSING.pattern}")
PROMPTED = re.compile(rf"(?:{OPENING.pattern})\s*(?:(?:{CLOSING.pattern})\s*)?\Z")  # at a prompt's end
NO_REASONING = re.compile("|".join([*(rf"(?:{re.escape(a)})?\s*{re.escape(b)}\s*" for a, b in TAGS), ""]))  # or nothing
THOUGHT = "xQ99997Qx"  # reasoning of a stand-in assistant turn


def split_reasoning(text: str) -> tuple[str, str] | None:
    """The reasoning that begins a text and the answer after it, without the line breaks between; None if the text has
    none, or no end of it that is certain. The opening tag may be missing, as in what R1 and QwQ return, if the closing
    one is a line of its own: others only speak of it."""
    if not (tags := list(ANY_TAG.finditer(text))):
        return None
    start = 0
    if tags[0][0] in OPENINGS:
        opening, *tags = tags
        if text[: opening.start()].strip() or not tags or tags[0][0] != OPENINGS[opening[0]]:
            return None
        start = opening.end()
    elif len(tags) > 1 or tags[0][0] not in (line.strip() for line in text.splitlines()):
        return None
    return text[start : tags[0].start()].strip("\n"), text[tags[0].end() :].lstrip("\n")
