"""Converts rows of binary feedback to `Feedback`: a prompt, an answer, and whether it is good.

| keys                                        | becomes                                                 |
|---------------------------------------------|---------------------------------------------------------|
| prompt, completion, label: texts            | text and a completion, without a chat template          |
| prompt, completion: messages, or both       | a chat; the completion is trained                       |
| messages or conversations, label            | a whole chat; its last turn of the assistant is trained |
| chosen and rejected (--feedback-from-pairs) | the two answers of a preference, one good and one bad   |

`label` (or kto_tag) is true or false. Optional: tools, weight.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mini_trainer.data.chat.conversation import ASSISTANT, Chat, Completion, Message
from mini_trainer.data.chat.masking import ChatMasker
from mini_trainer.data.chat.rendering import catch_error
from mini_trainer.data.chat.token_spans import TokenizedChat, TokenizedFeedback, add_mismatched
from mini_trainer.data.rows.chat_rows import TEMPLATE_ARGS, build_chat, read_system, require_text
from mini_trainer.data.rows.column_names import (
    ASKING,
    PROMPTING,
    TURNS,
    VISION_MODELS,
    WEIGHING,
    Fields,
    RefusedColumn,
    check_columns,
    drop_ignored,
)
from mini_trainer.data.rows.files import Chunk, iterate_rows
from mini_trainer.data.rows.formats import look_up, parse_row, refuse_images
from mini_trainer.data.rows.preference_rows import (
    BESIDE,
    PROMPTS,
    PreferenceFields,
    find_name,
    read_answer,
    read_messages,
    read_number,
    read_preferences,
    read_prompt,
    refuse_unread,
)
from mini_trainer.data.rows.turn_texts import ANSWERS, check_ends, leave_untrained, parse_turns
from mini_trainer.data.stores.json_lines import Row, quote

FEEDBACK = "feedback"  # the format of rows with an answer that is good or bad
LABELS = ("label", "kto_tag")


@dataclass(frozen=True)
class FeedbackFields:
    """Names of the columns; None: those of the table above."""

    prompt: str | None = None
    completion: str | None = None
    label: str | None = None
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Feedback:
    """An answer to a prompt, and whether it is good."""

    prompt: str | list[Message]
    answer: Chat | Completion
    is_good: bool
    weight: float | None = None  # of the sample in the mean loss


def read_feedback(
    chunk: Chunk, fields: FeedbackFields, tally: Counter[str]
) -> Iterator[tuple[Row, Feedback | ValueError | None]]:
    """Yields the chunk's rows, as `read_preferences` does."""
    for row in iterate_rows(chunk):
        try:
            values = parse_row(row.value, chunk.encoding)
            yield row, None if values is None else read_row(values, fields, tally)
        except RefusedColumn as error:
            raise RefusedColumn(f"{chunk.file}:{row.place}: {error}") from None
        except ValueError as error:
            yield row, error


def read_pairs(
    chunk: Chunk, fields: PreferenceFields, tally: Counter[str]
) -> Iterator[tuple[Row, Feedback | ValueError | None]]:
    """Yields both answers of each preference, each as a row of its own."""
    for row, pair in read_preferences(chunk, fields, tally):
        if pair is None or isinstance(pair, ValueError):
            yield row, pair
        elif pair.margin is not None:
            yield row, ValueError("'margin' has no meaning for single answers (--feedback-from-pairs)")
        else:
            yield row, Feedback(pair.prompt, pair.chosen, True, pair.weight)
            yield row, Feedback(pair.prompt, pair.rejected, False, pair.weight)


def read_row(values: Fields, fields: FeedbackFields, tally: Counter[str]) -> Feedback:
    """The row's feedback. Raises ValueError for a missing prompt, answer or label."""
    named = [name for name in (fields.prompt, fields.completion) if name is not None]
    values = parse_turns(drop_ignored(values, fields.ignored, tally), (*ANSWERS, *named))
    label_name = find_name(values, fields.label, LABELS, option="--label-field")
    is_good = look_up(values, label_name)
    if not isinstance(is_good, bool):
        raise ValueError(f"{label_name!r} is {quote(is_good)}, allowed: true, false")
    prompt_name = find_name(values, fields.prompt, PROMPTS, option="--prompt-field")
    is_whole = prompt_name in TURNS and fields.completion is None and values.get("completion") is None
    name = None if is_whole else find_name(values, fields.completion, ("completion",), option="--completion-field")
    read = {label_name, prompt_name, name, *BESIDE} - {None, "margin"}
    check_columns(
        values,
        read=read,
        paths=read,
        ignored=fields.ignored,
        why="Feedback does not read such columns",
        meanings=(WEIGHING, PROMPTING, ASKING, VISION_MODELS),
        tally=tally,
    )
    weight, prompt = read_number(values, "weight"), look_up(values, prompt_name)
    answer = None if name is None else look_up(values, name)
    if isinstance(answer, str) and isinstance(prompt, str) and prompt_name == (fields.prompt or "prompt"):
        refuse_unread(values, ("system", "input", "tools", TEMPLATE_ARGS), "a prompt in one text")
        texts = require_text({"prompt": prompt}, "prompt"), require_text({name: answer}, name)
        return Feedback(prompt, Completion(*texts), is_good, weight)
    if is_whole:
        messages = [*read_system(values), *read_messages(prompt, prompt_name, tally, fields.ignored)]
        num_prompt = len(messages) - 1
    else:
        beginning = [*read_system(values), *read_prompt(values, prompt_name, tally, fields.ignored)]
        messages, num_prompt = [*beginning, *read_answer(answer, name, tally, fields.ignored)], len(beginning)
    return Feedback(*build_answer(messages, num_prompt, values), is_good, weight)


def build_answer(messages: list[Any], num_prompt: int, values: Fields) -> tuple[list[Message], Chat]:
    """The prompt's messages, and a chat of which what follows them is trained."""
    chat = build_chat(messages, {key: values[key] for key in ("tools", TEMPLATE_ARGS) if key in values})
    refuse_images(chat)
    if num_prompt < 1 or chat.messages[num_prompt]["role"] != ASSISTANT:
        raise ValueError("the answer must be an assistant's message after a prompt")
    check_ends(chat.messages, num_prompt, "the answer")
    return chat.messages[:num_prompt], leave_untrained(chat, num_prompt)


def mask_feedback(masker: ChatMasker, rows: Sequence[Feedback]) -> list[TokenizedFeedback | ValueError]:
    """Each row's tokens, followed by its prompt with the answer of the next row of its kind: what an unrelated answer
    costs is KTO's point of reference. A row without such another row has one sequence."""
    answers = masker.mask([row.answer for row in rows], divides=True)
    others = find_others(rows)
    swapped = masker.mask([swap_answer(rows[i], rows[j]) for i, j in others.items()], divides=True)
    mismatched = dict(zip(others, swapped, strict=True))
    return [catch_error(join, row, answers[i], mismatched.get(i)) for i, row in enumerate(rows)]


def find_others(rows: Sequence[Feedback]) -> dict[int, int]:
    """For each row the next one, cyclically, with another prompt in the same form."""
    others = {}
    for i, row in enumerate(rows):
        for j in (*range(i + 1, len(rows)), *range(i)):
            if type(rows[j].answer) is type(row.answer) and rows[j].prompt != row.prompt:
                others[i] = j
                break
    return others


def swap_answer(row: Feedback, other: Feedback) -> Chat | Completion:
    """The row's prompt with the other's answer."""
    if isinstance(row.answer, Completion):
        return replace(row.answer, completion=other.answer.completion)
    prompt = row.answer.messages[: len(row.prompt)]
    return replace(row.answer, messages=[*prompt, *other.answer.messages[len(other.prompt) :]])


def join(
    row: Feedback, tokens: TokenizedChat | ValueError, mismatched: TokenizedChat | ValueError | None
) -> TokenizedFeedback:
    if isinstance(tokens, ValueError):
        raise tokens
    if tokens.num_loss_counted_tokens == 0:
        raise ValueError("no token is trained")
    if tokens.is_weighted:
        raise ValueError("a message has a weight; an answer is weighted as a whole, by the row's 'weight'")
    is_usable = isinstance(mismatched, TokenizedChat) and mismatched.num_loss_counted_tokens > 0
    return add_mismatched(tokens, mismatched if is_usable else None, is_good=row.is_good, weight=row.weight)
