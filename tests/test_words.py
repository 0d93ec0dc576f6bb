"""The English of docstrings, help and comments: words that a native engineer would not write."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest
from program import list_sources

BEGINNINGS = re.compile(r"(Of|As|Those|By|Whatever)\b")
BANNED = {
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bwhatever\b": "any",
    r"\b(goes|go|going|went) on\b(?! (the|a|its|with the))": "continue, resume",
    r"\b(is|are|was|were) told\b": "report, raise, say",
    r"\b(tell|tells|told) of\b": "report",
    r"\bask(s|ed)? a model\b": "generate from",
    r"\banew\b": "again",
    r"\bfor ever\b": "forever",
    r"\btime-outs?\b": "timeout",
    r", too\b(?=[.,;:])": "also",
    r"\bonce an? (sequence|layer|step|file|rank|epoch)\b": "once per",
    r"\bwithout a word\b": "silently, without a report",
    r"\bthere already\b": "already exists",
    r"\bof no matter\b": "irrelevant",
}


def list_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of docstrings, also of the fields of options."""
    for node in ast.walk(ast.parse(source)):
        for child in getattr(node, "body", ()) if isinstance(getattr(node, "body", None), list) else ():
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                yield child.lineno, child.value.value


def list_comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def find_faults(path: str, source: str) -> list[str]:
    docstrings = list(list_docstrings(source))
    found = [f"{path}:{line}: begins with {text.split()[0]}" for line, text in docstrings if BEGINNINGS.match(text)]
    for line, text in [*docstrings, *list_comments(source)]:
        for word, better in BANNED.items():
            if match := re.search(word, text, re.IGNORECASE):
                found.append(f"{path}:{line}: {match.group()!r}: write {better}")
    return found


def test_docstrings_and_comments_are_in_the_fields_words():
    faults = [fault for path, source in list_sources().items() for fault in find_faults(path, source)]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('def f():\n    """Of a row the tokens."""', "f.py:2: begins with Of"),
        ("x = 1  # mend it", "f.py:1: 'mend': write fix"),
        ('class A:\n    x: int = 0\n    """Whatever it is."""', "f.py:3: begins with Whatever"),
    ],
)
def test_faults_are_found(text, found):
    assert found in find_faults("f.py", text)
