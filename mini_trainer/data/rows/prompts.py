"""Rows of any file -> prompts and references.

Rows have the formats that process_data.py reads (data/rows/formats.py). A chat's last message, if it is the
assistant's, or a completion is the reference, which the model does not see. These rows are accepted as well:

| row                                        | becomes                                                        |
|--------------------------------------------|----------------------------------------------------------------|
| a line of a .txt file                      | a user message; a text to continue if there is no template     |
| question, with or without answer           | the same                                                       |
| prompt, with or without answer; document, text | a text to continue                                         |
| text and label                             | a question and its answer                                      |
| any of these with references               | several correct answers                                        |
"""

import base64
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mini_trainer.data.chat import conversation, rendering
from mini_trainer.data.chat.conversation import Message, Tools
from mini_trainer.data.chat.normalizing import separate_reasoning
from mini_trainer.data.chat.rendering import catch_error, check_unicode, prepare_for, select_args, template_errors
from mini_trainer.data.chat.tokens import count_ending
from mini_trainer.data.rows.chat_rows import parse_turns, require_text
from mini_trainer.data.rows.column_names import Fields
from mini_trainer.data.rows.files import Source, describe_skipped, find_sources, iterate_rows, read_chunks
from mini_trainer.data.rows.formats import find_format, list_conversation, read_example
from mini_trainer.data.rows.lines import parse_row
from mini_trainer.data.rows.values import refuse_non_json
from mini_trainer.data.stores.json_lines import RawRow, quote
from mini_trainer.distributed.messages import say

NUM_REASONS_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A prompt: messages, or a text to continue; with both, messages are used if the tokenizer has a chat template."""

    place: str = ""  # file and line
    row: Fields  # as read from the file
    messages: list[Message] | None = None
    text: str | None = None
    tools: Tools = None
    template_args: dict[str, Any] | None = None
    changes: tuple[str, ...] = ()  # what normalizing has changed
    references: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The prompt as readable text."""
        if self.messages is None:
            return self.text or ""
        if len(self.messages) == 1 and self.messages[0]["role"] == "user":
            return join_content(self.messages[0])
        return "\n\n".join(f"{message['role']}: {join_content(message)}" for message in self.messages)


def read_prompts(paths: Sequence[str], data_format: str | None, *, flag: str = "--prompts") -> list[Prompt]:
    """Reads the prompts of all files, in order. ValueError lists the rows that are not prompts, with their lines."""
    prompts, reasons = [], []
    sources = find_sources(paths, flag=flag)
    for note in describe_skipped(sources):
        say(f"note: {note}")
    for source in sources:
        for found in read_source(source, data_format):
            (prompts if isinstance(found, Prompt) else reasons).append(found)
    if reasons:
        shown = "".join(f"\n  {reason}" for reason in reasons[:NUM_REASONS_SHOWN])
        raise ValueError(f"{flag}: {len(reasons):,} of {len(reasons) + len(prompts):,} rows cannot be used:{shown}")
    if not prompts:
        raise ValueError(f"{flag} {' '.join(paths)}: has no rows")
    return prompts


def read_source(source: Source, data_format: str | None) -> Iterator[Prompt | str]:
    """Yields the file's prompts, or for an invalid row the reason."""
    for chunk in read_chunks(source):
        is_lines = chunk.encoding == "text" and data_format is None
        for row in iterate_rows(chunk):
            for one in split_lines(row) if is_lines else [row]:
                place = f"{source.name}:{one.place}"
                try:
                    if (fields := parse_row(one.value, chunk.encoding)) is not None:
                        fields = {"question": fields["text"]} if is_lines else fields
                        prompt = read_prompt(fields, data_format)
                        yield replace(prompt, place=place, row=drop_non_finite(prompt.row))
                except ValueError as error:
                    yield f"{place}: {error}"


def split_lines(row: RawRow) -> Iterator[RawRow]:
    """Splits a text file, which is read as one row, into lines."""
    if not isinstance(row.value, bytes):
        yield row
        return
    for number, line in enumerate(row.value.splitlines(), start=1):
        yield RawRow(number, number, line)


def read_prompt(row: Fields, data_format: str | None) -> Prompt:
    """Reads a row as a prompt; ValueError if it is not one."""
    is_asked_alone = row.get("completion", row.get("generation")) is None
    row = parse_turns(row, ("prompt",) if is_asked_alone else list_conversation(row))
    prompt = read_question(row, data_format)
    if "references" in row:
        references = row["references"]
        if not isinstance(references, list) or not all(isinstance(text, str) for text in references) or not references:
            raise ValueError(f"'references' is {quote(references)}, expected a list of strings")
        return replace(prompt, references=tuple(references))
    return prompt


def read_question(row: Fields, data_format: str | None) -> Prompt:
    """Reads the question, and its reference if the row's format has one."""
    question = row.get("question", row.get("text") if "label" in row else None)
    if data_format is None and question is not None and "messages" not in row:
        question = require_text({"question": question}, "question")
        answer = row.get("answer", row.get("label"))
        refuse_non_json(answer, "the answer")
        references = () if answer is None else (str(answer),)
        messages = [{"role": "user", "content": question}]
        return Prompt(row=row, messages=messages, text=question, references=references)
    if data_format is None and find_format(row) is None and isinstance(row.get("prompt"), str):
        answer = row.get("answer")
        refuse_non_json(answer, "the answer")
        return Prompt(row=row, text=row["prompt"], references=() if answer is None else (str(answer),))
    if data_format is None and find_format(row) is None and isinstance(row.get("prompt"), list):
        row = row | {"messages": row["prompt"]}
    example = read_example(row, data_format or find_format(row), is_given=data_format is not None)
    if isinstance(example, conversation.Chat):
        return split_chat(example, row)
    if isinstance(example, conversation.Completion):
        return Prompt(row=row, text=example.prompt, references=(example.completion,))
    return Prompt(row=row, text=example.text)


def split_chat(chat: conversation.Chat, row: Fields) -> Prompt:
    """Makes a prompt of a chat; a last message of the assistant becomes the reference."""
    messages = [{key: one[key] for key in one if key not in conversation.ONLY_FOR_MASKING} for one in chat.messages]
    references = ()
    if messages[-1]["role"] == conversation.ASSISTANT:
        references = (join_content(messages.pop()),)
        if not messages:
            raise ValueError("has only an assistant message, so there is nothing to answer")
    own = dict(tools=chat.tools, template_args=chat.template_args, changes=chat.changes)
    return Prompt(row=row, messages=messages, references=references, **own)


def join_content(message: Message) -> str:
    """A message's text, or its tool calls as text if it has none."""
    content = message.get("content")
    is_said = content or isinstance(content, list)
    return conversation.text_of(message) if is_said else str(message.get("tool_calls") or "")


def encode_prompt(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Encodes the model's input: the tokens that process_data.py makes of the same row, up to the answer."""
    text, is_rendered = render_prompt(prompt, tokenizer)
    return encode_text(text, tokenizer, is_rendered=is_rendered)


def render_prompt(prompt: Prompt, tokenizer: Any) -> tuple[str, bool]:
    """Returns the model's input as text, and whether the chat template rendered it, including special tokens."""
    if prompt.messages is None or (prompt.text is not None and tokenizer.chat_template is None):
        return prompt.text, False
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{prompt.place}: a chat, but the tokenizer has no chat template: give prompts as text, or use a chat model"
        )
    try:
        prompt = replace(
            prompt,
            messages=separate_reasoning(tokenizer, conversation.Chat(prompt.messages, changes=prompt.changes)).messages,
            template_args=select_args(tokenizer, prompt.template_args or {}),
        )
        check_completeness(prompt, tokenizer)
        return check_unicode(apply_template(prompt, prompt.messages, prompt.tools, tokenizer)), True
    except ValueError as error:
        raise ValueError(f"{prompt.place}: {error}") from None


def apply_template(prompt: Prompt, messages: list[Message], tools: Tools, tokenizer: Any) -> str:
    """Renders messages with the prompt's arguments, and the generation prompt. ValueError if the template fails."""
    args = prompt.template_args or {}
    with template_errors():
        return tokenizer.apply_chat_template(
            prepare_for(tokenizer, messages), tools=tools, add_generation_prompt=True, tokenize=False, **args
        )


def check_completeness(prompt: Prompt, tokenizer: Any) -> None:
    """ValueError, as in process_data.py, if the template omits the tools or a non-assistant message."""
    outline = conversation.make_outline(prompt.messages)
    text = apply_template(prompt, outline.messages, prompt.tools, tokenizer)
    # A template that reads the tools writes something else without them, or fails.
    if prompt.tools and catch_error(apply_template, prompt, outline.messages, None, tokenizer) == text:
        raise ValueError("the chat template leaves out the tools: remove them, or describe them in the system message")
    written = set(conversation.split_at_placeholders(text)[0])
    for i, leaf in enumerate(outline.leaves):
        role = outline.messages[leaf.message]["role"]
        if leaf.kind == "content" and role != conversation.ASSISTANT and i not in written:
            raise ValueError(f"the chat template leaves out the content of message {leaf.message + 1} ({role})")


def as_protocol(messages: Sequence[Message]) -> list[Message]:
    """Converts messages to OpenAI's API: without nulls, and with arguments as JSON text, which servers parse."""
    return [
        {key: [wrap_call(call) for call in value] if key == "tool_calls" else value for key, value in message.items()}
        for message in ({key: value for key, value in one.items() if value is not None} for one in messages)
    ]


def wrap_call(call: Fields) -> Fields:
    """A call, or its {"name": ..., "arguments": ...} alone, in OpenAI's form."""
    wrapped = call if "function" in call else {"function": call}
    return {"type": "function", **conversation.replace_arguments(wrapped, rendering.write_json)}


def encode_text(text: str, tokenizer: Any, *, is_rendered: bool) -> list[int]:
    """Tokenizes a text from `render_prompt`, without a final end-of-text token, since an answer follows."""
    ids = tokenizer(text, add_special_tokens=not is_rendered)["input_ids"]
    if is_rendered:
        return ids
    return ids[: len(ids) - count_ending(ids, text, tokenizer.eos_token_id, tokenizer.eos_token)]


def find_refusal(num_tokens: int, context: int | None) -> str | None:
    """Why a prompt of this length has no answer in a context of so many tokens; None if it has one."""
    if context is None or num_tokens < context:
        return None
    return f"has {num_tokens:,} tokens, but the model's context of {context:,} must also hold the answer"


def drop_non_finite(value: Any) -> Any:
    """The value with null for NaN and infinity, which JSON lacks and which differ from themselves when read again."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: drop_non_finite(item) for key, item in value.items()}
    return [drop_non_finite(item) for item in value] if isinstance(value, list) else value


def as_json(value: Any) -> Any:
    """Converts values that JSON lacks, such as a table's bytes and dates, to text."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
