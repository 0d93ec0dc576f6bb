"""The stop token after a conversation's last turn, where the chat template writes it only if another turn follows.

It is learned from known conversations: the end of an earlier turn, minus the text that the same turn already has as
the last turn.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Protocol

from mini_trainer.data.chat.examples import ASSISTANT, Chat, Message
from mini_trainer.data.chat.placeholders import has_calls
from mini_trainer.data.chat.rendering import catch_error
from mini_trainer.data.chat.template_check import MISSING_STOP_TOKEN, PROBES, TemplateChecker
from mini_trainer.data.chat.token_spans import Located
from mini_trainer.data.chat.turns import Stops


class Weighted(Protocol):
    """A conversation with the weight of each message; 0: not trained."""

    messages: list[Message]
    weights: list[float]


class StopAppender:
    """Appends the missing stop token after the last turn of conversations, for one chat template.

    `locate` renders a conversation and finds the trained passages; `stop_token_ids` end turns. If the template ends no
    turn with a stop token, the tokenizer's eos token is appended.
    """

    def __init__(
        self, locate: Callable[[Chat], Located], checker: TemplateChecker, stop_token_ids: Collection[int]
    ) -> None:
        self.tokenizer, self.stops, self.stop_token_ids = checker.tokenizer, checker.stops, stop_token_ids
        after_text = learn_ending(locate, self.stops, checker.choose_probes()[1])
        self.after_text = self.tokenizer.eos_token if after_text is None else after_text
        if self.after_text is None:
            raise ValueError("--append-stop-token: the chat template writes none, and the tokenizer has no eos_token")
        self.after_calls = learn_ending(locate, self.stops, PROBES[-1])

    def append(self, located: Located, chat: Weighted) -> Located:
        """The rendered conversation, plus a trained stop token if its last turn is a trained assistant turn that lacks
        one."""
        if chat.messages[-1]["role"] != ASSISTANT or chat.weights[-1] == 0 or not located.passages:
            return located
        last = located.passages[-1]
        stop = find_last_stop(located.text[last.start : last.end].rstrip(), self.stops)
        if stop is not None and self.tokenizer.convert_tokens_to_ids(stop) in self.stop_token_ids:
            return located
        after = located.text[last.end :]
        if after.strip():
            raise ValueError(f"the chat template writes {after!r} after the last turn: no stop token can be appended")
        ending = self.after_calls if has_calls(chat.messages[-1]) else self.after_text
        if ending is None:
            raise ValueError("ends with tool calls, and no stop token is known to end those, so none can be appended")
        text = located.text + ending
        passages = [*located.passages[:-1], replace(last, end=len(text))]
        return replace(located, text=text, passages=passages, is_stop_appended=True)


def learn_ending(locate: Callable[[Chat], Located], stops: Stops, probe: Chat) -> str | None:
    """The text that ends the probe's first assistant turn and is missing if the conversation ends there."""
    whole = catch_error(locate, probe)
    cut = catch_error(locate, replace(probe, messages=probe.messages[:2]))
    if isinstance(whole, ValueError) or not whole.passages:
        return None
    said = whole.text[whole.passages[0].start : whole.passages[0].end]
    stop = find_last_stop(said, stops)
    if stop is None or isinstance(cut, ValueError) or not cut.passages:
        return stop
    shorter = cut.text[cut.passages[0].start :]
    is_beginning = said.startswith(shorter) and said != shorter
    return said.removeprefix(shorter) if is_beginning else stop  # some templates write the last turn differently


def find_last_stop(text: str, stops: Stops) -> str | None:
    """The special token that `text` ends with."""
    *_, last = stops.special.findall(text) or [""]
    return last if last and text.endswith(last) else None


def describe_open_turns(open_turns: Collection[str], name: str, *, appended: str | None) -> list[str]:
    """Notes on a template whose inner or last turns lack a stop token, for a user who allows that or has `appended`
    added to last turns. Raises ValueError if the template has no such turns."""
    flag = "--allow-missing-stop-token" if appended is None else "--append-stop-token"
    if not open_turns:
        raise ValueError(f"{flag} has no effect: {name} writes a stop token")
    if appended is not None:
        return [
            f"a stop token, after texts {appended!r}, is appended to a conversation's last turn and trained ({flag})"
        ]
    return [MISSING_STOP_TOKEN] if "inner" in open_turns else []
