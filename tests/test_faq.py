"""docs/reference/faq.md: each message it explains is one that the program can print."""

import ast
import re
from collections.abc import Iterator

from program import ROOT, list_sources

# What the program fills in; in a quote also a part of a message that is left out.
GAP = "…"


def iterate_texts(source: str) -> Iterator[str]:
    """Every string of a module, with GAP for each value that is filled in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else GAP for part in node.values)


def is_quoted(message: str, texts: list[str]) -> bool:
    """Whether one text has the quote's pieces, in order, and nothing but filled-in values for its gaps."""
    pieces = [re.escape(piece) for piece in message.split(GAP)]
    pattern = re.compile("(?:[^a-zA-Z]*…[^a-zA-Z]*)+?".join(pieces).replace(r"\ ", r"\s+"))
    return any(pattern.search(text) for text in texts)


def test_every_quoted_message_is_in_the_source():
    texts = [text for source in list_sources().values() for text in iterate_texts(source) if len(text) > 8]
    messages = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "reference" / "faq.md").read_text(), flags=re.MULTILINE)
    assert len(messages) >= 20
    assert [message for message in messages if not is_quoted(message, texts)] == []


def test_a_message_that_nobody_prints_is_found():
    texts = list(iterate_texts('raise ValueError(f"{name}: the disk has {size} free;" f" free {what}")'))
    assert is_quoted("the disk has … free; free …", texts)
    assert not is_quoted("the disk has … left; free …", texts)
    assert not is_quoted("the disk … free", texts)
