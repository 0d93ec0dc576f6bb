"""Tries a chat template on known conversations before any row is read.

The stop token after a conversation's last turn, where the chat template writes it only if another turn follows.

It is learned from known conversations: the end of an earlier turn, minus the text that the same turn already has as
the last turn.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mini_trainer.data.chat.conversation import ASSISTANT, Chat, Message, has_calls
from mini_trainer.data.chat.prompting import AS_PROMPTED, NUM_SHOWN
from mini_trainer.data.chat.rendering import EXCHANGE, catch_error, check_in_child, prepare_for, takes_parts
from mini_trainer.data.chat.skeletons import Render
from mini_trainer.data.chat.token_spans import DIVIDED, Located, Remark, TokenizedChat, split_by_training
from mini_trainer.data.chat.turns import Stops

MISSING_STOP_TOKEN = (
    "THE MODEL IS NOT TAUGHT TO STOP: the chat template writes no stop token after the assistant's turns, so none is"
    " trained on (--missing-stop-token allow)"
)
QUESTION, ANSWER = EXCHANGE
MORE = [{"role": "user", "content": "And 3 + 3?"}, {"role": "assistant", "content": "It is 6."}]
SYSTEM = {"role": "system", "content": "Be brief."}
THOUGHT = {**ANSWER, "reasoning_content": "Two and two make four."}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {"type": "object", "properties": {"terms": {"type": "string", "description": "Which."}}},
    },
}
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"terms": "2, 2"}}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "sum: 4", "tool_call_id": "call00001", "name": "add"}

PROBES = [
    Chat([QUESTION, ANSWER]),
    Chat([QUESTION, ANSWER, *MORE]),
    Chat([SYSTEM, QUESTION, ANSWER]),
    Chat([QUESTION, THOUGHT]),
    Chat([QUESTION, THOUGHT, *MORE]),
    Chat([QUESTION, CALLING, RESULT, ANSWER], tools=[TOOL]),
]
NUM_REQUIRED_PROBES = 2  # a template may refuse the others


@dataclass(frozen=True)
class TemplateChecker:
    """Masks known conversations and judges the tokens, independently of skeletons and offsets."""

    tokenizer: Any
    stops: Stops
    mask: Callable[[Sequence[Chat]], list[TokenizedChat | ValueError]]
    render: Render
    template_args: Mapping[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    open_turns: set[str] = field(default_factory=set)  # turns without a stop token: "inner", "last"

    def check(self, name: str) -> list[str]:
        """Notes on the template. Raises ValueError, with the template's name, if it cannot be masked with certainty."""
        try:
            check_in_child(self.render_probes)
        except ValueError as error:
            raise ValueError(f"{name} cannot be used: {error}") from None
        for number, chat in enumerate(self.choose_probes()):
            (tokenized,) = self.mask([chat])
            if isinstance(tokenized, ValueError):
                problem = str(tokenized) if number < NUM_REQUIRED_PROBES else None
            else:
                problem = self.find_problem(tokenized, chat)
            if problem is not None:
                raise ValueError(f"{name} cannot be used: {problem}; tried with {chat.messages}")
        if "last" in self.open_turns and "inner" not in self.open_turns:
            self.notes.append(
                "the chat template writes no end-of-turn token after a conversation's last turn, only where another"
                " turn follows"
            )
        if takes_parts(self.tokenizer):
            self.notes.append("the chat template takes contents as lists of parts, so texts are passed as such lists")
        return list(dict.fromkeys(self.notes))

    def choose_probes(self) -> list[Chat]:
        """The probes, all with tools if the template fails without."""
        (plain,) = self.mask(PROBES[:1])
        if not isinstance(plain, ValueError):
            return PROBES
        with_tools = [replace(chat, tools=[TOOL]) for chat in PROBES]
        if isinstance(self.mask(with_tools[:1])[0], ValueError):
            return PROBES
        self.notes.append(f"the chat template works only with tools, and refuses other rows: {plain}")
        return with_tools

    def find_stop_token(self) -> int | None:
        """The token at which generation has to stop: the one that ends a conversation's last turn, or else an earlier
        turn."""
        (tokenized,) = self.mask([self.choose_probes()[1]])
        if isinstance(tokenized, ValueError):
            return None
        stretches = split_by_training(tokenized.input_ids, tokenized.labels)
        ends = [ids for ids, is_trained in reversed(stretches) if is_trained and self.ends_with_special_token(ids)]
        return ends[0][-1] if ends else None

    def list_stop_tokens(self) -> set[int]:
        """The special tokens that end turns of the probes."""
        probes = [chat for chat in self.mask(self.choose_probes()) if not isinstance(chat, ValueError)]
        stretches = [stretch for chat in probes for stretch in split_by_training(chat.input_ids, chat.labels)]
        return {ids[-1] for ids, is_trained in stretches if is_trained and self.ends_with_special_token(ids)}

    def render_probes(self) -> None:
        """Raises MemoryError if the template needs too much; other errors are ignored here, as `check` finds them."""
        for chat in PROBES:
            error = catch_error(self.render, [chat.messages], tools=chat.tools)
            if isinstance(error, ValueError) and isinstance(error.__context__, MemoryError):
                raise error.__context__

    def find_problem(self, tokenized: TokenizedChat, chat: Chat) -> str | None:
        """The problem with a probe's token ids or labels. Adds notes on properties of the template that are allowed but
        unexpected."""
        messages = prepare_for(self.tokenizer, chat.messages)
        expected = self.tokenizer.apply_chat_template(
            messages, tools=chat.tools, return_dict=True, **self.template_args
        )["input_ids"]
        if tokenized.input_ids != expected and Remark(DIVIDED) not in tokenized.remarks:
            return "apply_chat_template returns other token ids"
        stretches = split_by_training(tokenized.input_ids, tokenized.labels)
        trained = [ids for ids, is_trained in stretches if is_trained]
        turns = [message for message in chat.messages if message["role"] == ASSISTANT]
        if len(trained) != len(turns):
            return f"{len(turns)} assistant turns, {len(trained)} stretches of trained tokens"
        for ids, message in zip(trained, turns, strict=True):
            problem = self.find_problem_of_turn(ids, message)
            if problem is not None:
                return problem
            if not self.ends_with_special_token(ids):
                is_last = message is chat.messages[-1]
                if not is_last and not self.stops.may_be_missing:
                    return f"{self.decode(ids)!r} is trained, which does not end with a special token"
                self.open_turns.add("last" if is_last else "inner")
        self.compare_prompt(tokenized, chat)
        return None

    def compare_prompt(self, tokenized: TokenizedChat, chat: Chat) -> None:
        """Adds a note if the prompt differs from the text before the row's last answer, unless one of the row's remarks
        says so."""
        before = tokenized.input_ids[: tokenized.spans[-1].start]
        prompt = self.encode_prompt(chat)
        if prompt == before or any(remark.prompted for remark in tokenized.remarks):
            return
        self.notes.append(
            f"prompts end with {self.decode(prompt)[-NUM_SHOWN:]!r}, but rows have {self.decode(before)[-NUM_SHOWN:]!r}"
            " before the answer"
        )

    def encode_prompt(self, chat: Chat) -> list[int]:
        """Token ids of the prompt for the last answer."""
        messages = prepare_for(self.tokenizer, chat.messages[:-1])
        return self.tokenizer.apply_chat_template(
            messages, tools=chat.tools, add_generation_prompt=True, return_dict=True, **self.template_args
        )["input_ids"]

    def check_as_prompted(self, mask: Callable[[Sequence[Chat]], list[TokenizedChat | ValueError]], name: str) -> None:
        """Raises ValueError if a changed row does not follow the prompt or trains more than the answer, or if no row
        is changed."""
        flag, num_changed = "--thinking-prefix train-as-prompted", 0
        for chat in self.choose_probes():
            (tokenized,) = mask([chat])
            if isinstance(tokenized, ValueError) or all(remark.kind != AS_PROMPTED for remark in tokenized.remarks):
                continue
            start, num_changed = tokenized.spans[-1].start, num_changed + 1
            before, trained = tokenized.input_ids[:start], tokenized.input_ids[start : tokenized.spans[-1].end]
            problem = self.find_problem_of_turn(trained, chat.messages[-1])
            if before != self.encode_prompt(chat):
                problem = "the token ids before the answer are not the prompt's"
            if problem is not None:
                raise ValueError(f"{flag}: {name} cannot be used: {problem}; tried with {chat.messages}")
        if not num_changed:
            raise ValueError(
                f"{flag} has no effect: with {name} answers already follow the text of the generation prompt, or it is"
                " not known how the template closes the reasoning that the prompt opens"
            )

    def ends_with_special_token(self, ids: list[int]) -> bool:
        return self.stops.special.fullmatch(self.tokenizer.convert_ids_to_tokens(ids[-1])) is not None

    def find_problem_of_turn(self, ids: list[int], message: Message) -> str | None:
        """The problem with the trained tokens of a probe's turn; None if none."""
        decoded = self.decode(ids)
        call = message["tool_calls"][0]["function"]["arguments"]["terms"] if "tool_calls" in message else ""
        for text in (message["content"], call):
            if squeeze(text) not in squeeze(decoded):
                return f"{decoded!r} is trained instead of {text!r} and the end-of-turn token"
        others = [QUESTION["content"], MORE[0]["content"], SYSTEM["content"], RESULT["content"]]
        for text in others:
            if squeeze(text) in squeeze(decoded):
                return f"{decoded!r} is trained, which is not all the assistant's"
        return None

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def squeeze(text: str) -> str:
    """`text` without whitespace, which decoders add and drop."""
    return "".join(text.split())


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
            raise ValueError("--missing-stop-token append: the chat template has none, and the tokenizer no eos_token")
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
    flag = f"--missing-stop-token {'allow' if appended is None else 'append'}"
    if not open_turns:
        raise ValueError(f"{flag} has no effect: {name} writes a stop token")
    if appended is not None:
        return [
            f"a stop token, after texts {appended!r}, is appended to a conversation's last turn and trained ({flag})"
        ]
    return [MISSING_STOP_TOKEN] if "inner" in open_turns else []
