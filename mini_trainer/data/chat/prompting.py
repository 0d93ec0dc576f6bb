"""Generation prompts and stop tokens: what templates write before and after an answer, in rows and in known
conversations that are tried before any row is read.

Some templates prompt with more than they write into a row: R1's distills open `<think>`, but a row without reasoning
has none. The model is then never trained on answers after its actual prompt. Such rows are counted, or changed
(`--thinking-prefix train-as-prompted`): the prompt's text goes before the last answer as context, and the template's
text that closes the reasoning is trained with the answer. Both are constants of the template, inserted after the row's
mask is found.

Some templates write the stop token after a turn only if another turn follows. It is learned from known conversations:
the end of an earlier turn, minus the text that the same turn already has as the last turn.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mini_trainer.data.chat import conversation
from mini_trainer.data.chat.conversation import Chat, Located, Message, PreparedChat, Remark, TokenizedChat
from mini_trainer.data.chat.linting import LEFT_OUT
from mini_trainer.data.chat.reasoning import ANY_TAG, NO_REASONING, OPENINGS, THOUGHT
from mini_trainer.data.chat.rendering import EXCHANGE, catch_error, make_calling, make_tool, prepare_for, takes_parts
from mini_trainer.data.chat.skeletons import Beginning, Render, Span, common_length
from mini_trainer.data.chat.tokens import split_by_training
from mini_trainer.data.chat.turns import Stops

NUM_SHOWN = 80  # last characters of a prompt shown in remarks

AS_RENDERED, AS_PROMPTED = "as rendered", "as prompted"
EARLIER, UNREAD_KEY = "earlier turn", "unread key"
READ_OR_CHECKED = {"role", "content", "tool_calls", *conversation.REASONING_KEYS}  # keys that other checks cover
READ_OF_RESULTS = {("tool", "tool_call_id"), ("tool", "name")}  # by role

MISSING_STOP_TOKEN = (
    "THE MODEL IS NOT TAUGHT TO STOP: the chat template writes no stop token after the assistant's turns, so none is"
    " trained on (--missing-stop-token allow)"
)
QUESTION, ANSWER = EXCHANGE
MORE = [{"role": "user", "content": "And 3 + 3?"}, {"role": "assistant", "content": "It is 6."}]
SYSTEM = {"role": "system", "content": "Be brief."}
THINKING = {**ANSWER, "reasoning_content": "Two and two make four."}
TOOL = make_tool({"terms": {"type": "string", "description": "Which."}})
_, CALLING, RESULT, _ = make_calling({"terms": "2, 2"})

PROBES = [
    Chat([QUESTION, ANSWER]),
    Chat([QUESTION, ANSWER, *MORE]),
    Chat([SYSTEM, QUESTION, ANSWER]),
    Chat([QUESTION, THINKING]),
    Chat([QUESTION, THINKING, *MORE]),
    Chat([QUESTION, CALLING, RESULT, ANSWER], tools=[TOOL]),
]
NUM_REQUIRED_PROBES = 2  # a template may refuse the others


@dataclass
class PromptMatcher:
    """Compares beginnings, and changes the last one if `as_prompted`. Remembers how the template closes reasoning."""

    encode: Callable[[str], Any]  # a text's encoding
    template: str
    as_prompted: bool
    closings: dict[tuple[str, str, bool], str | None] = field(default_factory=dict)

    def match(
        self, text: str, spans: list[Span], chat: PreparedChat, render: Render
    ) -> tuple[str, list[Span], list[Remark]]:
        """The row and its spans, changed if `as_prompted`, and remarks on its trained turns."""
        own = [span for span in spans if chat.messages[span.message]["role"] == conversation.ASSISTANT]
        last = max(own, key=lambda span: span.start, default=None)
        remarks = []
        for span in own:
            if chat.weights[span.message] == 0:
                continue
            if lacks := lacks_words(text, span, chat.messages[span.message]):
                remarks.append(Remark(LEFT_OUT))
            if is_prompted(text, span):
                continue
            changes = self.as_prompted and span is last and not lacks and can_begin_so(text, span)
            closing = self.find_closing(span.turn.beginning, render, bool(chat.tools)) if changes else None
            remarks.append(describe_difference(text, span, closing, is_last=span is last))
            if closing is not None:
                text, spans = begin_as_prompted(text, spans, span, closing)
        return text, spans, remarks

    def find_closing(self, beginning: Beginning, render: Render, has_tools: bool) -> str | None:
        """The text between the prompt and an answer without reasoning; None if it is not known."""
        if beginning.prompted is None:
            return None
        key = (beginning.header, beginning.prompted, has_tools)
        if key not in self.closings:
            closing = find_closing(beginning.prompted, self.template, render)
            candidates = [] if closing is None else [closing, closing.lstrip()]
            ids = self.encode(beginning.prompt).ids
            # No token may span the border between the prompt and the closing.
            apart = (c for c in candidates if self.encode(beginning.prompt + c).ids[: len(ids)] == ids)
            self.closings[key] = next(apart, None)
        return self.closings[key]


def describe_difference(text: str, span: Span, closing: str | None, *, is_last: bool) -> Remark:
    """A remark on a turn that begins differently from its prompt. `closing`: the beginning of a changed turn."""
    beginning = span.turn.beginning
    if closing is not None:
        return Remark(AS_PROMPTED, beginning.prompt[-NUM_SHOWN:], closing)
    kept = beginning.header + text[span.opens : span.start]
    return Remark(AS_RENDERED if is_last else EARLIER, beginning.prompt[-NUM_SHOWN:], kept[-NUM_SHOWN:])


def is_prompted(text: str, span: Span) -> bool:
    """Whether the turn begins as its prompt does."""
    if (beginning := span.turn.beginning) is None:
        return True
    return beginning.prompted is not None and text.startswith(beginning.prompted, span.opens)


def lacks_words(text: str, span: Span, message: Message) -> bool:
    """Whether the turn lacks words of its message: reasoning under a key, or a part of the content beside tags."""
    if span.turn.lacks_reasoning:
        return True
    content, written = conversation.text_of(message).strip(), text[span.opens : span.end]
    if content in written:
        return False
    return any(part.strip() not in written for part in ANY_TAG.split(content))


def find_unread_keys(messages: Sequence[Message], text: str, render: Render) -> list[Remark]:
    """Remarks on message keys that the template does not read: without them it writes the same `text`."""
    unchecked = {(message["role"], key) for message in messages for key in message.keys() - READ_OR_CHECKED}
    if not (others := sorted(unchecked - READ_OF_RESULTS)):
        return []

    def writes_same(without: Sequence[tuple[str, str]]) -> bool:
        kept = [{key: m[key] for key in m if (m["role"], key) not in without} for m in messages]
        return catch_error(render, [kept]) == [text]

    unread = others if writes_same(others) else [other for other in others if writes_same([other])]
    return [Remark(UNREAD_KEY, role, key) for role, key in unread]


def find_closing(prompted: str, template: str, render: Render) -> str | None:
    """The text that closes the reasoning left open by `prompted`: the template's own, or, if it only contains the
    closing tag, an empty line and that tag. "" if no reasoning is open, None if the text is not known."""
    if not (tags := ANY_TAG.findall(prompted)):
        return None
    if tags[-1] not in OPENINGS:
        return ""
    before, closing = render_reasoning(render)
    if closing is not None and before.endswith(prompted):
        return closing
    opening, closing = tags[-1], OPENINGS[tags[-1]]
    opened, whole = prompted[prompted.rindex(opening) :], f"{opening}\n\n{closing}\n\n"
    return whole[len(opened) :] if closing in template and whole.startswith(opened) else None


def render_reasoning(render: Render) -> tuple[str, str | None]:
    """The template's text before an answer's reasoning, and between reasoning and content (None: not written)."""
    answer = {"role": conversation.ASSISTANT, "content": conversation.STAND_IN, "reasoning_content": THOUGHT}
    texts = catch_error(render, [[{"role": "user", "content": conversation.OTHER_STAND_IN}, answer]])
    if isinstance(texts, ValueError):
        return "", None
    before, thought, after = texts[0].partition(THOUGHT)
    between, content, _ = after.partition(conversation.STAND_IN)
    return (before, between) if thought and content else ("", None)


def can_begin_so(text: str, span: Span) -> bool:
    """Whether the turn begins with the template's text for answers without reasoning, and its content has none."""
    if (written := span.turn.beginning.written) is None or not text.startswith(written, span.opens):
        return False
    after = span.opens + NO_REASONING.match(written).end()
    return ANY_TAG.match(text, after + len(text[after:]) - len(text[after:].lstrip())) is None


def begin_as_prompted(text: str, spans: list[Span], span: Span, closing: str) -> tuple[str, list[Span]]:
    """The row with the prompt's text before this turn, and all spans, the later ones moved."""
    beginning = span.turn.beginning
    rest = span.opens + NO_REASONING.match(beginning.written).end()
    words = beginning.prompted + closing
    by = len(words) - (rest - span.opens)
    moved = [one if one.start < span.start else replace(one, start=one.start + by, end=one.end + by) for one in spans]
    changed = replace(span, start=span.opens + len(beginning.prompted), end=span.end + by)
    spans = [changed if old is span else new for old, new in zip(spans, moved, strict=True)]
    return text[: span.opens] + words + text[rest:], spans


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
        """The token at which generation has to stop: it ends a conversation's last turn, or else an earlier one."""
        (tokenized,) = self.mask([self.choose_probes()[1]])
        if isinstance(tokenized, ValueError):
            return None
        ends = [ids[-1] for ids in list_trained(tokenized) if self.ends_with_special_token(ids)]
        return ends[-1] if ends else None

    def list_stop_tokens(self) -> set[int]:
        """The special tokens that end turns of the probes."""
        probes = [chat for chat in self.mask(self.choose_probes()) if not isinstance(chat, ValueError)]
        return {ids[-1] for chat in probes for ids in list_trained(chat) if self.ends_with_special_token(ids)}

    def find_problem(self, tokenized: TokenizedChat, chat: Chat) -> str | None:
        """The problem with a probe's token ids or labels. Notes properties of the template that are only unexpected."""
        is_divided = Remark(conversation.DIVIDED) in tokenized.remarks
        if tokenized.input_ids != self.encode(chat) and not is_divided:
            return "apply_chat_template returns other token ids"
        trained = list_trained(tokenized)
        turns = [message for message in chat.messages if message["role"] == conversation.ASSISTANT]
        if len(trained) != len(turns):
            return f"{len(turns)} assistant turns, {len(trained)} stretches of trained tokens"
        for ids, message in zip(trained, turns, strict=True):
            if (problem := self.find_problem_of_turn(ids, message)) is not None:
                return problem
            if not self.ends_with_special_token(ids):
                is_last = message is chat.messages[-1]
                if not is_last and not self.stops.may_be_missing:
                    return f"{self.decode(ids)!r} is trained, which does not end with a special token"
                self.open_turns.add("last" if is_last else "inner")
        self.compare_prompt(tokenized, chat)
        return None

    def compare_prompt(self, tokenized: TokenizedChat, chat: Chat) -> None:
        """Notes if the prompt differs from the text before the last answer, unless a remark of the row says so."""
        before = tokenized.input_ids[: tokenized.spans[-1].start]
        prompt = self.encode(chat, is_prompt=True)
        if prompt == before or any(remark.prompted for remark in tokenized.remarks):
            return
        ends = [self.decode(ids)[-NUM_SHOWN:] for ids in (prompt, before)]
        if ends[0] == ends[1]:  # other tokens of the same text
            start = common_length(prompt, before)
            ends = [
                " ".join(self.tokenizer.convert_ids_to_tokens(ids[start:]))[-NUM_SHOWN:] for ids in (prompt, before)
            ]
        self.notes.append(f"prompts end with {ends[0]!r}, but rows have {ends[1]!r} before the answer")

    def encode(self, chat: Chat, *, is_prompt: bool = False) -> list[int]:
        """Token ids of the chat, or of the prompt for its last answer."""
        messages = prepare_for(self.tokenizer, chat.messages[:-1] if is_prompt else chat.messages)
        given = dict(tools=chat.tools, add_generation_prompt=is_prompt, return_dict=True)
        return self.tokenizer.apply_chat_template(messages, **given, **self.template_args)["input_ids"]

    def check_as_prompted(self, mask: Callable[[Sequence[Chat]], list[TokenizedChat | ValueError]], name: str) -> None:
        """ValueError if a changed row does not follow the prompt or trains more than the answer, or none is changed."""
        flag, num_changed = "--thinking-prefix train-as-prompted", 0
        for chat in self.choose_probes():
            (tokenized,) = mask([chat])
            if isinstance(tokenized, ValueError) or all(remark.kind != AS_PROMPTED for remark in tokenized.remarks):
                continue
            start, num_changed = tokenized.spans[-1].start, num_changed + 1
            before, trained = tokenized.input_ids[:start], tokenized.input_ids[start : tokenized.spans[-1].end]
            problem = self.find_problem_of_turn(trained, chat.messages[-1])
            if before != self.encode(chat, is_prompt=True):
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
        for text in (QUESTION["content"], MORE[0]["content"], SYSTEM["content"], RESULT["content"]):
            if squeeze(text) in squeeze(decoded):
                return f"{decoded!r} is trained, which is not all the assistant's"
        return None

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def list_trained(chat: TokenizedChat) -> list[list[int]]:
    """The chat's maximal stretches of trained tokens."""
    return [ids for ids, is_trained in split_by_training(chat.input_ids, chat.labels) if is_trained]


def squeeze(text: str) -> str:
    """`text` without whitespace, which decoders add and drop."""
    return "".join(text.split())


class StopAppender:
    """Appends the missing stop token after the last turn of conversations, for one chat template. `locate` renders a
    conversation and finds the trained passages; `stop_token_ids` end turns. If the template ends no turn with a stop
    token, the tokenizer's eos token is appended."""

    def __init__(
        self, locate: Callable[[Chat], Located], checker: TemplateChecker, stop_token_ids: Collection[int]
    ) -> None:
        self.tokenizer, self.stops, self.stop_token_ids = checker.tokenizer, checker.stops, stop_token_ids
        after_text = learn_ending(locate, self.stops, checker.choose_probes()[1])
        self.after_text = self.tokenizer.eos_token if after_text is None else after_text
        if self.after_text is None:
            raise ValueError("--missing-stop-token append: the chat template has none, and the tokenizer no eos_token")
        self.after_calls = learn_ending(locate, self.stops, PROBES[-1])

    def append(self, located: Located, chat: PreparedChat) -> Located:
        """The rendered conversation; a last turn that is trained and lacks a stop token gets one, also trained."""
        if chat.messages[-1]["role"] != conversation.ASSISTANT or chat.weights[-1] == 0 or not located.passages:
            return located
        last = located.passages[-1]
        stop = find_last_stop(located.text[last.start : last.end].rstrip(), self.stops)
        if stop is not None and self.tokenizer.convert_tokens_to_ids(stop) in self.stop_token_ids:
            return located
        after = located.text[last.end :]
        if after.strip():
            raise ValueError(f"the chat template writes {after!r} after the last turn: no stop token can be appended")
        if (ending := self.after_calls if conversation.has_calls(chat.messages[-1]) else self.after_text) is None:
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
    if (stop := find_last_stop(said, stops)) is None or isinstance(cut, ValueError) or not cut.passages:
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
