"""Doubts about rows that a mask cannot settle: a linter beside it, whose findings are counted or refused (--refuse).

A control token is any added token of the tokenizer, special or not, but for those of whitespace and of reasoning.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from mini_trainer.data.chat import conversation
from mini_trainer.data.chat.conversation import ASSISTANT, Located, Message, PreparedChat, Remark, list_calls, text_of
from mini_trainer.data.chat.reasoning import ANY_TAG, OPENINGS, split_reasoning
from mini_trainer.data.chat.rendering import EXCHANGE, prepare_contents, try_template

LEFT_OUT, CUT, TAGS = "left-out", "cut-reasoning", "reasoning-tags"
UNKNOWN_TOOLS, NO_TOOLS, RESULTS_FIRST = "unknown-tools", "no-tools", "results-first"
TOOLS_TWICE, MARKERS, NULL_ARGUMENTS = "tools-twice", "markers", "null-arguments"
DOUBTS = {  # in the order of options.doors.DOUBTS; {rendered}: what was found
    LEFT_OUT: "the chat template leaves out reasoning, or other words, of an answer, which is trained without them",
    CUT: "an answer ends within its reasoning, as one that a limit of tokens has cut off",
    TAGS: "an answer has tags of reasoning that do not pair at its beginning, such as {rendered}",
    UNKNOWN_TOOLS: "calls that the row's tools lack, such as {rendered}",
    NO_TOOLS: "calls without tools in the row, such as {rendered}",
    RESULTS_FIRST: "a call's result that follows no message of the assistant",
    TOOLS_TWICE: "tools that the system message has, too, so the template writes them a second time",
    MARKERS: "the texts have {rendered}, which the model reads as the template's own, and learns to write where it is"
    " trained on",
    NULL_ARGUMENTS: "null arguments of calls, such as {rendered}, which pandas and Arrow write for keys that only other"
    " rows have",
}
MIN_MARKER = 4  # characters of a template's marker


class Linter:
    """Finds doubtful rows of one tokenizer. `refused`: kinds of findings that make a row unusable."""

    def __init__(self, tokenizer: Any, refused: Collection[str] = ()) -> None:
        self.tokenizer, self.refused = tokenizer, refused

    @cached_property
    def markers(self) -> re.Pattern[str]:
        """Control tokens, and the words with which the template begins a user's and an assistant's turn."""
        found = (token.content for token in self.tokenizer.added_tokens_decoder.values())
        tokens = join_patterns(token for token in found if token.strip(" \t\r\n▁") and not ANY_TAG.fullmatch(token))
        words = {part.strip() for line in self.list_borders() for part in tokens.split(ANY_TAG.sub("", line))}
        own = (part for part in words if len(part) >= MIN_MARKER and not part.isalnum())
        return re.compile(f"{tokens.pattern}|{join_patterns(own).pattern}")

    def list_borders(self) -> list[str]:
        """The lines that the template writes between a user's and an assistant's texts."""
        messages = prepare_contents(self.tokenizer, [*EXCHANGE, *EXCHANGE])
        text = "" if self.tokenizer.chat_template is None else try_template(self.tokenizer, messages) or ""
        question, answer = (re.escape(message["content"]) for message in EXCHANGE)
        between = re.findall(f"(?<={question})(.*?){answer}|(?<={answer})(.*?){question}", text, re.DOTALL)
        return [line for pair in between for part in pair for line in part.splitlines()]

    def lint(self, located: Located, chat: PreparedChat | None = None) -> Located:
        """The row with remarks on what is doubtful in its text, or in its chat's texts and messages. ValueError if it
        is to be refused."""
        texts = [located.text] if chat is None else [*chat.values, *([chat.tools_text] if chat.tools else [])]
        found = [*located.remarks, *self.find_markers(texts), *(() if chat is None else lint_chat(chat))]
        for remark in found:
            if remark.kind in self.refused:
                said = DOUBTS[remark.kind].format(rendered=repr(remark.rendered))
                raise ValueError(f"{said} (--refuse {remark.kind})")
        return located if len(found) == len(located.remarks) else replace(located, remarks=tuple(found))

    def find_markers(self, texts: Collection[Any]) -> list[Remark]:
        found = (self.markers.search(text) for text in texts if isinstance(text, str))
        marker = next((match[0] for match in found if match is not None), None)
        return [] if marker is None else [Remark(MARKERS, rendered=marker)]


def join_patterns(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of the texts, the longest first."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=lambda text: (-len(text), text)))) or r"(?!)")


def lint_chat(chat: PreparedChat) -> Iterator[Remark]:
    """Remarks on a chat's messages, with any template."""
    for message, weight in zip(chat.messages, chat.weights, strict=True):
        if message["role"] == ASSISTANT and weight > 0:
            yield from lint_reasoning(message)
    names = [function_of(tool).get("name") for tool in chat.tools or ()]
    before = None
    for message in chat.messages:
        for call in map(function_of, list_calls(message)):
            if not chat.tools:
                yield Remark(NO_TOOLS, rendered=str(call.get("name")))
            elif call.get("name") not in names:
                yield Remark(UNKNOWN_TOOLS, rendered=str(call.get("name")))
            if (key := find_null(call.get("arguments"))) is not None:
                yield Remark(NULL_ARGUMENTS, rendered=key)
        if message["role"] == "tool" and before not in (ASSISTANT, "tool"):
            yield Remark(RESULTS_FIRST)
        before = message["role"]
    systems = [message for message in chat.messages if message["role"] in conversation.SYSTEM_ROLES]
    if chat.tools and any(describes(message, names) for message in systems):
        yield Remark(TOOLS_TWICE)


def find_null(value: Any, key: str = "") -> str | None:
    """The key of a null within a call's arguments."""
    if value is None:
        return key
    items = [(key, one) for one in value] if isinstance(value, list) else ()
    inner = value.items() if isinstance(value, dict) else items
    return next((found for name, one in inner if (found := find_null(one, name)) is not None), None)


def lint_reasoning(message: Message) -> Iterator[Remark]:
    """Remarks on an answer whose reasoning is cut off, or whose tags do not pair."""
    text = text_of(message)
    if (first := ANY_TAG.search(text)) is None:
        return
    parts = split_reasoning(text)
    begins = first[0] in OPENINGS and not text[: first.start()].strip()
    is_all = parts is not None and not parts[1] and not list_calls(message)
    if begins and (OPENINGS[first[0]] not in text or is_all):
        yield Remark(CUT)
    elif not begins or parts is None or ANY_TAG.search(parts[1]):
        yield Remark(TAGS, rendered=first[0])


def function_of(called: Any) -> dict[str, Any]:
    """A tool's, or a call's, name and what belongs to it."""
    inner = called.get("function") if isinstance(called, dict) else None
    return inner if isinstance(inner, dict) else called if isinstance(called, dict) else {}


def describes(message: Message, names: Collection[Any]) -> bool:
    """Whether a text has the JSON of all tools with these names."""
    text = text_of(message)
    return '"parameters"' in text and all(isinstance(name, str) and f'"{name}"' in text for name in names)
