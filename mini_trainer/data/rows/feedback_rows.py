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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mini_trainer.data.chat.conversation import ASSISTANT, Chat, Completion, Message, TokenizedChat
from mini_trainer.data.chat.masking import ChatMasker
from mini_trainer.data.chat.rendering import catch_error
from mini_trainer.data.columns.base import FEEDBACK, DataTask
from mini_trainer.data.columns.encoding import TokenizedFeedback, add_mismatched
from mini_trainer.data.rows.chat_rows import TEMPLATE_ARGS, build_chat, read_system, require_text
from mini_trainer.data.rows.column_names import TURNS, Fields, look_up
from mini_trainer.data.rows.files import Chunk
from mini_trainer.data.rows.formats import refuse_images
from mini_trainer.data.rows.preference_rows import (
    BESIDE,
    PROMPTS,
    check_beside,
    find_name,
    read_answer,
    read_messages,
    read_number,
    read_plain_prompt,
    read_preference,
    read_prompt,
    read_turns,
)
from mini_trainer.data.rows.rows import Preparation
from mini_trainer.data.rows.turn_texts import check_ends, leave_untrained
from mini_trainer.data.stores.json_lines import quote
from mini_trainer.options import RowOptions

LABELS = ("label", "kto_tag")


@dataclass(frozen=True)
class Feedback:
    """An answer to a prompt, and whether it is good."""

    prompt: str | list[Message]
    answer: Chat | Completion
    is_good: bool
    weight: float | None = None  # of the sample in the mean loss

    @property
    def identity(self) -> str | list[Message]:
        return self.prompt


def prepare_feedback(masker: ChatMasker, options: RowOptions) -> Preparation[Feedback]:
    """How rows with a good or bad answer, or preferences as two such rows, become samples."""
    read = partial(read_pairs if options.feedback_from_pairs else read_feedback, options=options)
    return Preparation(DataTask(FEEDBACK), read, partial(mask_feedback, masker), masker.chats.stop_token_ids)


def read_feedback(values: Fields, chunk: Chunk, tally: Counter[str], *, options: RowOptions) -> list[Feedback]:
    return [read_row(values, options, tally)]


def read_pairs(values: Fields, chunk: Chunk, tally: Counter[str], *, options: RowOptions) -> list[Feedback]:
    """Both answers of a preference."""
    pair = read_preference(values, options, tally)
    if pair.margin is not None:
        raise ValueError("'margin' has no meaning for single answers (--feedback-from-pairs)")
    sides = ((pair.chosen, True), (pair.rejected, False))
    return [Feedback(pair.prompt, answer, is_good, pair.weight) for answer, is_good in sides]


def read_row(values: Fields, options: RowOptions, tally: Counter[str]) -> Feedback:
    """The row's feedback. Raises ValueError for a missing prompt, answer or label."""
    ignored, prompt_field, answer_field = options.ignore_columns, options.column("prompt"), options.column("completion")
    values = read_turns(values, (prompt_field, answer_field), ignored, tally)
    label_name = find_name(values, options.column("label"), LABELS, option="--columns label=")
    is_good = look_up(values, label_name)
    if not isinstance(is_good, bool):
        raise ValueError(f"{label_name!r} is {quote(is_good)}, allowed: true, false")
    prompt_name = find_name(values, prompt_field, PROMPTS, option="--columns prompt=")
    is_whole = prompt_name in TURNS and answer_field is None and values.get("completion") is None
    name = None if is_whole else find_name(values, answer_field, ("completion",), option="--columns completion=")
    read = {label_name, prompt_name, name, *BESIDE} - {None, "margin"}
    check_beside(values, read, ignored, tally, why="Feedback does not read such columns")
    weight, answer = read_number(values, "weight"), None if name is None else look_up(values, name)
    if isinstance(answer, str) and (prompt := read_plain_prompt(values, prompt_name, prompt_field)) is not None:
        return Feedback(prompt, Completion(prompt, require_text({name: answer}, name)), is_good, weight)
    if is_whole:
        whole = read_messages(look_up(values, prompt_name), prompt_name, tally, ignored)
        messages = [*read_system(values), *whole]
        num_prompt = len(messages) - 1
    else:
        beginning = [*read_system(values), *read_prompt(values, prompt_name, tally, ignored)]
        messages, num_prompt = [*beginning, *read_answer(answer, name, tally, ignored)], len(beginning)
    return Feedback(*build_answer(messages, num_prompt, values), is_good, weight)


def build_answer(messages: list[Any], num_prompt: int, values: Fields) -> tuple[list[Message], Chat]:
    """The prompt's messages, and a chat in which everything after them is trained on."""
    chat = build_chat(messages, {key: values[key] for key in ("tools", TEMPLATE_ARGS) if key in values})
    refuse_images(chat)
    if num_prompt < 1 or chat.messages[num_prompt]["role"] != ASSISTANT:
        raise ValueError("the answer must be an assistant's message after a prompt")
    check_ends(chat.messages, num_prompt, "the answer")
    return chat.messages[:num_prompt], leave_untrained(chat, num_prompt)


def mask_feedback(masker: ChatMasker, rows: Sequence[Feedback]) -> list[TokenizedFeedback | ValueError]:
    """Each row's tokens, followed by its prompt with the answer of the next row of its kind: KTO's reference point is
    the loss of an unrelated answer. A row without such another row has one sequence."""
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
