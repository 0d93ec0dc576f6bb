"""Renders chats with a tokenizer's chat template: its input, the form of calls' arguments, and limits on errors, time
and memory.

OpenAI's API sends text, most templates take objects, and some write nothing useful for one of the two: a text is quoted
a second time, an object is printed as Python prints it. The form is tried out, once for each template.

transformers runs them in jinja's sandbox, which keeps them from files and processes, but not from running forever.
"""

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any, TypeVar

from mini_trainer.data.chat import conversation
from mini_trainer.data.chat.conversation import Message, PreparedChat, Tools
from mini_trainer.data.stores.tokenizers import GENERATION_TAG
from mini_trainer.distributed.limits import memory_limit, time_limit

WORDS = "two, three"  # an argument that each notation writes as it is
ARGUMENTS = (
    {"terms": WORDS, "note": "it's", "deep": True, "n": 2},  # quotes, booleans and numbers: JSON differs from Python
    {"terms": WORDS},  # for templates that take only texts
)
RESULT = {"role": "tool", "content": "sum: 5", "tool_call_id": "call00001", "name": "add"}

RENDER_SECONDS = 20.0  # per call; a thousand ordinary chats take less than one second
RENDER_BYTES = 4 << 30  # of memory, per call
RENDER_CHARACTERS = 128 << 20  # per conversation, twice the longest row that is read

LIST_AS_IT_STANDS = re.compile(r"""["']text["']: ?["']\Z""")  # precedes a text in a printed list
EXCHANGE = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "It is 4."}]

T = TypeVar("T")
CLOCK = "strftime_now"
ALWAYS_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", CLOCK)
CLOCK_PARTS = [f"%{part}" for part in (*(f"-{one}" for one in "dmeHIyj"), *"aAbBcCdDeFgGhHIjklmMpPrRSTuUVwWxXyYzZ")]
DATES = {"date_string": "%d %b %Y", "date": "%Y-%m-%d"}  # arguments for a date, in the form that templates give it

WITHOUT_TOOLS = (
    "the chat template leaves out the row's tools: use one that writes them (--chat-template), or describe them in the"
    " system message"
)


def make_tool(properties: dict[str, Any]) -> dict[str, Any]:
    """A tool with these parameters."""
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "add", "description": "Adds numbers.", "parameters": parameters}}


def make_calling(arguments: dict[str, Any] | str) -> list[Message]:
    """A conversation with a call that has these arguments."""
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "user", "content": "How much are both?"},
        {"role": conversation.ASSISTANT, "content": "", "tool_calls": [call]},
        RESULT,
        {"role": conversation.ASSISTANT, "content": "It is 5."},
    ]


def takes_text(render: Callable[[list[Message]], str | None]) -> bool:
    """Whether a template takes arguments as JSON text only: its rendering has them whole if they are given so, and not
    if they are an object. `render` returns None for conversations that the template refuses."""
    for arguments in ARGUMENTS:
        if (rendered := render(make_calling(arguments))) is None:
            continue
        has_words = WORDS in rendered and all(key in rendered for key in arguments)
        # Words without JSON are in a notation of the template's own, unless it is Python's.
        if holds_json(rendered, arguments) or (has_words and repr(arguments) not in rendered):
            return False
    texts = [(arguments, render(make_calling(write_json(arguments)))) for arguments in ARGUMENTS]
    written = [holds_json(rendered, arguments) for arguments, rendered in texts if rendered is not None]
    return bool(written) and all(written)


def holds_json(text: str, arguments: dict[str, Any]) -> bool:
    """Whether `text` has JSON that reads as these arguments."""
    decoder, at = json.JSONDecoder(), text.find("{")
    while at >= 0:
        try:
            if decoder.raw_decode(text, at)[0] == arguments:
                return True
        except ValueError:
            pass
        at = text.find("{", at + 1)
    return False


def write_json(arguments: Any) -> str:
    """Arguments as templates write them with `tojson`."""
    return json.dumps(arguments, ensure_ascii=False)


class UnreadableContent(ValueError):
    """A message's content has a form that the chat template does not read."""


@contextmanager
def template_errors() -> Iterator[None]:
    """Converts any error of a template, which is a third-party program, to a ValueError."""
    try:
        with time_limit(RENDER_SECONDS), memory_limit(RENDER_BYTES):
            yield
    except UnreadableContent:
        raise
    except MemoryError:
        raise ValueError(f"the chat template fails: needs more than {RENDER_BYTES >> 30} GiB") from None
    except Exception as error:
        raise ValueError(f"the chat template fails: {str(error) or type(error).__name__}") from None


def check_length(text: str) -> str:
    """A template's `text`; ValueError if it is too long to be tokenized."""
    if len(text) > RENDER_CHARACTERS:
        raise ValueError(f"the chat template writes {len(text):,} characters, allowed: {RENDER_CHARACTERS:,}")
    return text


def prepare_for(tokenizer: Any, messages: Sequence[Message]) -> list[Message]:
    """The messages in the form that the tokenizer's chat template reads. Used for rows and prompts, so that a model is
    prompted with the text that it was trained on."""
    prepared = prepare_contents(tokenizer, messages)
    if not any(map(conversation.has_calls, prepared)) or not takes_calls_as_text(tokenizer):
        return prepared
    return [
        {**message, "tool_calls": [conversation.replace_arguments(call, write_json) for call in message["tool_calls"]]}
        if conversation.has_calls(message)
        else message
        for message in prepared
    ]


def prepare_contents(tokenizer: Any, messages: Sequence[Message]) -> list[Message]:
    """The messages with contents in the form that the chat template reads."""
    prepared = []
    for message in messages:
        # Reasoning has all of its keys, because gpt-oss reads "thinking" and others "reasoning_content". Null fields
        # are left out, as recent versions of `apply_chat_template` leave them.
        reasoning = message.get("reasoning_content")
        named = message if reasoning is None else {**dict.fromkeys(conversation.REASONING_KEYS, reasoning), **message}
        prepared.append({key: value for key, value in named.items() if value is not None})
    if takes_parts(tokenizer):
        return [as_parts(message) for message in prepared]
    return [
        as_text(message, number) if has_text_parts(message) and not reads_parts(tokenizer, message["role"]) else message
        for number, message in enumerate(prepared, start=1)
    ]


def cached_by_template(function: Callable[..., T]) -> Callable[..., T]:
    """Caches a function of a tokenizer, and of other arguments, also by the tokenizer's template, or all named ones."""
    cached = lru_cache(maxsize=64)(lambda template, *args: function(*args))

    @wraps(function)
    def call(tokenizer: Any, *args: Any) -> T:
        template = tokenizer.chat_template
        return cached(template if isinstance(template, str) else repr(template), tokenizer, *args)

    return call


def try_template(tokenizer: Any, messages: list[Message], tools: Tools = None) -> str | None:
    """The text that the chat template writes; None if it fails."""
    try:
        with template_errors():
            return tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    except ValueError:
        return None


@cached_by_template
def reads_parts(tokenizer: Any, role: str) -> bool:
    """Whether the template writes the text of a content that is a list of parts, for messages of this role."""
    said = {"role": role, "content": "Two and two."}
    others = [message for message in EXCHANGE if message["role"] != role]
    messages = [*others, as_parts(said)] if role in (conversation.ASSISTANT, "tool") else [as_parts(said), *others]
    before, found, _ = (try_template(tokenizer, messages) or "").partition(said["content"])
    return found != "" and LIST_AS_IT_STANDS.search(before) is None


@cached_by_template
def takes_parts(tokenizer: Any) -> bool:
    """Whether the template writes contents only if they are lists of parts, as those of some multi-modal models do."""

    def writes(messages: list[Message]) -> bool:
        text = try_template(tokenizer, messages) or ""
        return all(message["content"] in text for message in EXCHANGE)

    return not writes(EXCHANGE) and writes([as_parts(message) for message in EXCHANGE])


@cached_by_template
def takes_calls_as_text(tokenizer: Any) -> bool:
    """Whether the template takes the arguments of calls as JSON text, not as an object."""

    def render(messages: list[Message]) -> str | None:
        prepared = prepare_contents(tokenizer, messages)
        tool = make_tool({key: {"type": "string"} for key in ARGUMENTS[0]})
        for tools in ([tool], None):  # some templates work only with tools, or only without
            for part in (prepared, prepared[:2]):  # some know no role of tools
                if (text := try_template(tokenizer, part, tools)) is not None:
                    return text
        return None

    return takes_text(render)


def as_parts(message: Message) -> Message:
    """The message with its text as a list of one part, the only form that some multi-modal templates write."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if conversation.is_text(content) else message


def has_text_parts(message: Message) -> bool:
    """Whether the content is a list of text parts only."""
    parts = message.get("content")
    return isinstance(parts, list) and parts != [] and all(map(conversation.is_text_part, parts))


def as_text(message: Message, number: int) -> Message:
    """The message with its only part as a text. Several parts are refused: they could be joined in several ways."""
    parts = message["content"]
    if len(parts) > 1:
        raise UnreadableContent(
            f"the chat template reads the content of message {number} ({message['role']}) only as a text, not as a list"
            f" of {len(parts)} parts: join them, with the spaces or line breaks that belong between them"
        )
    return {**message, "content": parts[0]["text"]}


def catch_error(function: Callable[..., T], value: Any, *args: Any, **options: Any) -> T | ValueError:
    """function(value, *args, **options), or the ValueError that it raised or that is among the arguments."""
    for argument in (value, *args):
        if isinstance(argument, ValueError):
            return argument
    try:
        return function(value, *args, **options)
    except ValueError as error:
        return error


def check_unicode(text: str) -> str:
    """`text`; ValueError if it cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"contains half a character: the lone surrogate {text[error.start]!r}") from None
    return text


@cached_by_template
def list_variables(tokenizer: Any) -> frozenset[str] | None:
    """The variables that the template reads; None if it cannot be parsed, which is said when it is tried."""
    from jinja2 import Environment, TemplateError, meta

    templates = tokenizer.chat_template
    texts = list(templates.values()) if isinstance(templates, dict) else [templates or ""]
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = [environment.parse(GENERATION_TAG.sub("", text)) for text in texts]
    except TemplateError:
        return None
    return frozenset().union(*map(meta.find_undeclared_variables, parsed))


def select_args(tokenizer: Any, template_args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments without those that the chat template does not read and that say nothing: null, false, or empty.
    ValueError for any other that it does not read."""
    read = list_variables(tokenizer) if template_args else None
    if read is None:
        return dict(template_args)
    said = {name for name, value in template_args.items() if not (value in (None, "", [], {}) or value is False)}
    if unread := [name for name in template_args if name in said - read]:
        others = ", ".join(sorted(read - {*ALWAYS_GIVEN, *tokenizer.special_tokens_map})) or "none"
        raise ValueError(f"the chat template does not read the argument {unread[0]!r}; it reads: {others}")
    return {name: value for name, value in template_args.items() if name in read}


def set_date(tokenizer: Any, template_args: Mapping[str, Any], today: str) -> tuple[Any, dict[str, Any], str | None]:
    """The tokenizer with a template whose clock stands still, arguments of the template for its date, and that date;
    None if the template writes none. `template_args` may have a `date`, YYYY-MM-DD; else it is `today`. ValueError for
    one that the template does not write."""
    read, args = list_variables(tokenizer) or frozenset(), dict(template_args)
    is_given = "date" in args
    date = args.pop("date", today)
    try:
        day = datetime.strptime(date, "%Y-%m-%d")
    except (ValueError, TypeError):
        raise ValueError(f"--template-args date={date}: expected YYYY-MM-DD") from None
    date = day.strftime(DATES["date"])
    own = {name: day.strftime(form) for name, form in DATES.items() if name in read}
    if CLOCK not in read and not (is_given and own):
        if is_given:
            raise ValueError(f"--template-args date={date}: the chat template writes no date")
        return tokenizer, args, None
    if CLOCK in read:
        # Templates begin with a macro that writes this day: transformers passes no functions to them.
        parts = "".join(f"|replace({part!r}, {day.strftime(part)!r})" for part in CLOCK_PARTS)
        clock = f"{{% macro {CLOCK}(format) %}}{{{{ format{parts} }}}}{{% endmacro %}}{{{{ '' }}}}"
        tokenizer, templates = copy.copy(tokenizer), tokenizer.chat_template
        is_dict = isinstance(templates, dict)
        tokenizer.chat_template = {k: clock + text for k, text in templates.items()} if is_dict else clock + templates
    return tokenizer, args | (own if is_given else {}), date


@dataclass(frozen=True)
class Rendered:
    """A conversation's text, and the passages that the template marks as generated (None: it has no markers)."""

    text: str
    marked: list[tuple[int, int]] | None = None


class ChatRenderer:
    """Renders chats with one tokenizer's template, and with arguments of the template, all of which it has to read."""

    def __init__(self, tokenizer: Any, template_args: Mapping[str, Any]) -> None:
        self.tokenizer, self.template_args = tokenizer, select_args(tokenizer, template_args)

    def render_each(self, chats: Sequence[PreparedChat | ValueError]) -> list[Rendered | ValueError]:
        """Renders all chats with the same tools at once, which is faster; if one fails, each alone, to find which."""
        results: list[Any] = list(chats)
        by_tools: dict[str, list[int]] = {}
        for i, chat in enumerate(chats):
            if not isinstance(chat, ValueError):
                by_tools.setdefault(chat.tools_text, []).append(i)
        for indices in by_tools.values():
            conversations, tools = [chats[i].messages for i in indices], chats[indices[0]].tools
            rendered = catch_error(self.render_marked, conversations, tools=tools)
            if isinstance(rendered, ValueError):
                rendered = [catch_error(self.render_one, messages, tools=tools) for messages in conversations]
            for i, result in zip(indices, rendered, strict=True):
                results[i] = result
        return results

    def render_one(self, messages: list[Message], *, tools: Tools) -> Rendered:
        (rendered,) = self.render_marked([messages], tools=tools)
        return rendered

    def render_marked(self, conversations: Sequence[list[Message]], *, tools: Tools) -> list[Rendered]:
        """The texts, and the passages that the template marks as generated if it has markers."""
        template = self.tokenizer.get_chat_template(None, tools)
        if GENERATION_TAG.search(template) is None:
            return [Rendered(text) for text in self.render(conversations, tools=tools)]
        from transformers.utils.chat_template_utils import render_jinja_template

        with template_errors():
            prepared = [prepare_for(self.tokenizer, messages) for messages in conversations]
            given = dict(tools=tools, chat_template=template, return_assistant_tokens_mask=True)
            args = dict(**self.tokenizer.special_tokens_map, **self.template_args)
            texts, marked = render_jinja_template(prepared, **given, **args)
        return [Rendered(text, passages) for text, passages in zip(texts, marked, strict=True)]

    def render(
        self, conversations: Sequence[list[Message]], *, tools: Tools = None, generation_prompt: bool = False
    ) -> list[str]:
        """The texts that `apply_chat_template` tokenizes."""
        with template_errors():
            prepared = [prepare_for(self.tokenizer, messages) for messages in conversations]
            given = dict(tools=tools, tokenize=False, add_generation_prompt=generation_prompt)
            return self.tokenizer.apply_chat_template(prepared, **given, **self.template_args)
