"""Converts rows of preferences to `Preference`, a prompt with a chosen and a rejected answer, and rows of binary
feedback to `Feedback`, a prompt, an answer, and whether it is good.

| keys of preferences                              | becomes                                                |
|--------------------------------------------------|--------------------------------------------------------|
| prompt, chosen, rejected: texts                  | text and two completions, without a chat template      |
| prompt, chosen, rejected: messages, or both      | two chats with the prompt's messages in common         |
| chosen, rejected: whole chats                    | two chats; their common beginning is the prompt        |
| chosen, rejected: "Human: ... Assistant: ..."    | the same (Anthropic's HH)                              |
| question or instruction, input, system; answers  | two chats of a user's message and an answer            |
| messages or conversations, chosen, rejected      | two chats (ShareGPT, LLaMA-Factory)                    |

| keys of feedback                                 | becomes                                                |
|--------------------------------------------------|--------------------------------------------------------|
| prompt, completion, label: texts                 | text and a completion, without a chat template         |
| prompt, completion: messages, or both            | a chat; the completion is trained                      |
| messages or conversations, label                 | a whole chat; the assistant's last turn is trained     |
| chosen and rejected (--feedback-from-pairs)      | the two answers of a preference, one good and one bad  |

Answers may also be called chosen_response and rejected_response; `label` (or kto_tag) is true or false. Optional:
tools, margin, weight.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mini_trainer.data.chat.conversation import ASSISTANT, Chat, Completion, Message, TokenizedChat
from mini_trainer.data.chat.masking import ChatMasker
from mini_trainer.data.chat.normalizing import TOOL_ROLES
from mini_trainer.data.chat.rendering import catch_error
from mini_trainer.data.chat.skeletons import common_length
from mini_trainer.data.columns.base import FEEDBACK, PREFERENCE, DataTask
from mini_trainer.data.columns.encoding import TokenizedFeedback, TokenizedPair, add_mismatched, pair_up
from mini_trainer.data.rows import chat_rows, column_names
from mini_trainer.data.rows.column_names import Fields, Names, find_name
from mini_trainer.data.rows.files import Chunk
from mini_trainer.data.rows.formats import refuse_images
from mini_trainer.data.rows.rows import Preparation
from mini_trainer.data.stores.json_lines import quote
from mini_trainer.options import RowOptions

PROMPTS = ("prompt", "question", "instruction", *column_names.TURNS)
CHOSEN = ("chosen", "chosen_response")
REJECTED = ("rejected", "rejected_response")
NUMBERS = ("margin", "weight")
# Columns that are read beside prompt and answers.
BESIDE = ("system", "tools", "input", chat_rows.TEMPLATE_ARGS, *NUMBERS)
SPEAKERS = re.compile(r"\n\n(Human|Assistant):")  # of a whole chat in one text
ROLES = {"Human": "user", "Assistant": ASSISTANT}


@dataclass(frozen=True)
class Preference:
    """A chosen and a rejected answer to one prompt. Chats: messages of the prompt are not trained."""

    prompt: str | list[Message]
    chosen: Chat | Completion
    rejected: Chat | Completion
    margin: float | None = None  # how much better the chosen answer should be
    weight: float | None = None  # of the pair in the mean loss

    @property
    def identity(self) -> str | list[Message]:
        return self.prompt


def prepare_preferences(masker: ChatMasker, options: RowOptions) -> Preparation[Preference]:
    """How rows with a chosen and a rejected answer become samples."""
    read, mask = partial(read_preferences, options=options), partial(mask_preferences, masker)
    return Preparation(DataTask(PREFERENCE), read, mask, masker.chats.stop_token_ids)


def read_preferences(values: Fields, chunk: Chunk, tally: Counter[str], *, options: RowOptions) -> list[Preference]:
    return [read_preference(values, options, tally)]


def read_preference(values: Fields, options: RowOptions, tally: Counter[str]) -> Preference:
    """The row's preference. Raises ValueError for missing or equal answers, and answers to different prompts."""
    ignored, prompt_field = options.ignore_columns, options.column("prompt")
    chosen, rejected = options.column("chosen"), options.column("rejected")
    values = read_turns(values, (prompt_field, chosen, rejected), ignored, tally)
    names = (
        find_name(values, chosen, CHOSEN, option="--columns chosen="),
        find_name(values, rejected, REJECTED, option="--columns rejected="),
    )
    answers = [column_names.look_up(values, name) for name in names]
    is_whole = all(map(is_whole_chat, answers))
    prompt_name = None if is_whole else find_name(values, prompt_field, PROMPTS, option="--columns prompt=")
    # With whole chats, `prompt` and `messages` repeat what is in them.
    read = {*names, *BESIDE, *((*PROMPTS, prompt_field) if is_whole else (prompt_name,))} - {None}
    check_beside(values, read, ignored, tally, why="Preferences do not read such columns")
    numbers = {name: read_number(values, name) for name in NUMBERS}
    has_texts = not is_whole and all(isinstance(answer, str) for answer in answers)
    if has_texts and (prompt := read_plain_prompt(values, prompt_name, prompt_field)) is not None:
        return read_texts(prompt, *answers, numbers)
    if is_whole:
        refuse_unread(values, ("input",), "whole chats")
    messages = [] if is_whole else read_prompt(values, prompt_name, tally, ignored)
    beginning = [*chat_rows.read_system(values), *messages]
    chat_rows.count_prompt(beginning)  # refuses one that the answers continue
    read_side = read_whole_chat if is_whole else read_answer
    sides = [[*beginning, *read_side(side, name, tally, ignored)] for side, name in zip(answers, names, strict=True)]
    return build_preference(*sides, values, numbers)


def read_turns(values: Fields, given: Sequence[str | None], ignored: Names, tally: Counter[str]) -> Fields:
    """The row without ignored columns, and with messages for their JSON texts, also in the columns `given`."""
    named = [name for name in given if name is not None]
    return chat_rows.parse_turns(column_names.drop_ignored(values, ignored, tally), (*chat_rows.ANSWERS, *named))


def check_beside(values: Fields, read: Names, ignored: Names, tally: Counter[str], *, why: str) -> None:
    """RefusedColumn, with the reason `why`, for a column not in `read` that weights the row or belongs to the prompt;
    counts other unread columns."""
    meanings = (column_names.WEIGHING, column_names.PROMPTING, column_names.ASKING, column_names.VISION_MODELS)
    column_names.check_columns(values, read=read, paths=read, ignored=ignored, why=why, meanings=meanings, tally=tally)


def read_plain_prompt(values: Fields, name: str, given: str | None) -> str | None:
    """The prompt as one text, which is trained on without a chat template; None if it becomes messages."""
    prompt = column_names.look_up(values, name)
    if name != (given or "prompt") or not isinstance(prompt, str):
        return None
    refuse_unread(values, ("system", "input", "tools", chat_rows.TEMPLATE_ARGS), "a prompt in one text")
    return chat_rows.require_text({"prompt": prompt}, "prompt")


def read_number(values: Fields, name: str) -> float | None:
    if (value := values.get(name)) is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{name!r} is {quote(value)}, allowed: numbers from 0")
    if name == "weight" and value == 0:
        raise ValueError("'weight' is 0: remove the row, from which nothing would be learned")
    return float(value)


def refuse_unread(values: Fields, names: Sequence[str], where: str) -> None:
    """Raises ValueError for one of the columns, which are read only where prompts are messages."""
    if given := [name for name in names if values.get(name)]:
        raise ValueError(f"has {given[0]!r}, which {where} does not read: make it part of the prompt")


def read_texts(prompt: str, chosen: str, rejected: str, numbers: dict[str, float | None]) -> Preference:
    sides = {"chosen": chosen, "rejected": rejected}
    for name in sides:
        chat_rows.require_text(sides, name)
    if chosen == rejected:
        raise ValueError("the chosen and the rejected answer are equal: there is nothing to prefer")
    return Preference(prompt, Completion(prompt, chosen), Completion(prompt, rejected), **numbers)


def is_whole_chat(side: Any) -> bool:
    """Whether an answer comes with its prompt: messages that do not begin with the assistant's, or a text of turns."""
    if isinstance(side, str):
        return SPEAKERS.match(side) is not None and "\n\nAssistant:" in side
    first = side[0] if isinstance(side, list) and side else None
    return isinstance(first, dict) and normalize(first, 1).get("role") not in (ASSISTANT, *TOOL_ROLES)


def normalize(message: Any, number: int) -> Any:
    """A message; a turn of ShareGPT becomes one."""
    return chat_rows.read_turn(message, number) if isinstance(message, dict) and "from" in message else message


def read_messages(value: Any, name: str, tally: Counter[str], ignored: Names) -> list[Any]:
    """The messages of a list, or of a single object."""
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{name!r} is {quote(value)}, expected text or messages")
    read = dict(marks=column_names.MARKS, meanings=(column_names.WEIGHING,))
    checked = [column_names.check_keys(message, name, ignored, tally, **read) for message in messages]
    return [normalize(message, number) for number, message in enumerate(checked, start=1)]


def read_whole_chat(side: Any, name: str, tally: Counter[str], ignored: Names) -> list[Any]:
    if not isinstance(side, str):
        return read_messages(side, name, tally, ignored)
    pieces = SPEAKERS.split(side)[1:]  # speaker, text, speaker, text, ...
    turns = list(zip(pieces[::2], pieces[1::2], strict=True))
    return [{"role": ROLES[speaker], "content": text.strip()} for speaker, text in turns]


def read_prompt(values: Fields, name: str, tally: Counter[str], ignored: Names) -> list[Any]:
    """The prompt's messages; a text is the user's, followed by a non-empty `input` after a blank line."""
    prompt, extra = column_names.look_up(values, name), values.get("input") or ""
    if isinstance(prompt, str):
        text = chat_rows.require_text({name: prompt}, name)
        return [{"role": "user", "content": f"{text}\n\n{chat_rows.require_text(values, 'input')}" if extra else text}]
    refuse_unread(values, ("input",), "a prompt of messages")
    return read_messages(prompt, name, tally, ignored)


def read_answer(side: Any, name: str, tally: Counter[str], ignored: Names) -> list[Any]:
    """The answer's messages; a text is the assistant's."""
    if isinstance(side, str):
        return [{"role": ASSISTANT, "content": chat_rows.require_text({name: side}, name)}]
    return read_messages(side, name, tally, ignored)


def build_preference(
    chosen: list[Any], rejected: list[Any], values: Fields, numbers: dict[str, float | None]
) -> Preference:
    """The preference between two chats, whose common beginning is not trained."""
    tools = {key: values[key] for key in ("tools", chat_rows.TEMPLATE_ARGS) if key in values}
    chats = [chat_rows.build_chat(messages, tools) for messages in (chosen, rejected)]
    first, second = (chat.messages for chat in chats)
    num_common = common_length(first, second)
    if len(first) == len(second) == num_common:
        raise ValueError("the chosen and the rejected answer are equal: there is nothing to prefer")
    if num_common == 0:
        raise ValueError("the answers have no prompt in common: their first messages differ")
    for chat, name in zip(chats, ("chosen", "rejected"), strict=True):
        refuse_images(chat)
        own = chat.messages[num_common:]
        if not own or own[0]["role"] != ASSISTANT:
            has = f"the role {own[0]['role']!r}" if own else "nothing"
            raise ValueError(
                f"the answers are not to the same prompt: after the {num_common} messages in common, the {name} side"
                f" has {has}, expected an assistant's message"
            )
        chat_rows.check_ends(chat.messages, num_common, f"the {name} side")
    prompt = first[:num_common]
    sides = [chat_rows.leave_untrained(chat, num_common) for chat in chats]
    return Preference(prompt, *sides, **numbers)


def mask_preferences(masker: ChatMasker, rows: Sequence[Preference]) -> list[TokenizedPair | ValueError]:
    """Each row's two sequences with their masks, or the error that makes it unusable."""
    sides = masker.mask([side for row in rows for side in (row.chosen, row.rejected)], divides=True)
    return [join_sides(row, *sides[2 * i : 2 * i + 2]) for i, row in enumerate(rows)]


def join_sides(
    row: Preference, chosen: TokenizedChat | ValueError, rejected: TokenizedChat | ValueError
) -> TokenizedPair | ValueError:
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if isinstance(side, ValueError):
            return ValueError(f"{name}: {side}")
        if side.is_weighted:
            return ValueError(f"{name}: a message has a weight; a pair is weighted as a whole, by the row's 'weight'")
        if side.num_loss_counted_tokens == 0:
            return ValueError(f"{name}: no token is trained")
    starts = [side.spans[0].start for side in (chosen, rejected)]
    if min(starts) == 0 or chosen.input_ids[: starts[0]] != rejected.input_ids[: starts[1]]:
        return ValueError(
            "the two sides do not have the same tokens before their answers: the template or the tokenizer writes the"
            f" prompt differently ({starts[0]} and {starts[1]} tokens)"
        )
    if chosen.input_ids == rejected.input_ids:
        return ValueError("the chosen and the rejected answer have the same tokens: there is nothing to prefer")
    return pair_up(chosen, rejected, margin=row.margin, weight=row.weight)


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


def read_pairs(values: Fields, chunk: Chunk, tally: Counter[str], *, options: RowOptions) -> list[Feedback]:
    """Both answers of a preference."""
    pair = read_preference(values, options, tally)
    if pair.margin is not None:
        raise ValueError("'margin' has no meaning for single answers (--feedback-from-pairs)")
    sides = ((pair.chosen, True), (pair.rejected, False))
    return [Feedback(pair.prompt, answer, is_good, pair.weight) for answer, is_good in sides]


def read_feedback(values: Fields, chunk: Chunk, tally: Counter[str], *, options: RowOptions) -> list[Feedback]:
    """The row's feedback. Raises ValueError for a missing prompt, answer or label."""
    ignored, prompt_field, answer_field = options.ignore_columns, options.column("prompt"), options.column("completion")
    values = read_turns(values, (prompt_field, answer_field), ignored, tally)
    label_name = find_name(values, options.column("label"), LABELS, option="--columns label=")
    is_good = column_names.look_up(values, label_name)
    if not isinstance(is_good, bool):
        raise ValueError(f"{label_name!r} is {quote(is_good)}, allowed: true, false")
    prompt_name = find_name(values, prompt_field, PROMPTS, option="--columns prompt=")
    is_whole = prompt_name in column_names.TURNS and answer_field is None and values.get("completion") is None
    name = None
    if not is_whole:
        name = find_name(values, answer_field, ("completion",), option="--columns completion=")
    read = {label_name, prompt_name, name, *BESIDE} - {None, "margin"}
    check_beside(values, read, ignored, tally, why="Feedback does not read such columns")
    weight, answer = read_number(values, "weight"), None if name is None else column_names.look_up(values, name)
    if isinstance(answer, str) and (prompt := read_plain_prompt(values, prompt_name, prompt_field)) is not None:
        assert name is not None
        return [Feedback(prompt, Completion(prompt, chat_rows.require_text({name: answer}, name)), is_good, weight)]
    if is_whole:
        whole = read_messages(column_names.look_up(values, prompt_name), prompt_name, tally, ignored)
        messages, num_prompt = [*chat_rows.read_system(values), *whole], None
    else:
        beginning = [*chat_rows.read_system(values), *read_prompt(values, prompt_name, tally, ignored)]
        messages = [*beginning, *read_answer(answer, name, tally, ignored)]
        num_prompt = chat_rows.count_prompt(beginning)
    # Everything after the prompt's messages is trained on.
    tools = {key: values[key] for key in ("tools", chat_rows.TEMPLATE_ARGS) if key in values}
    chat = chat_rows.build_chat(messages, tools)
    refuse_images(chat)
    num_prompt = len(chat.messages) - 1 if num_prompt is None else num_prompt
    if num_prompt < 1 or chat.messages[num_prompt]["role"] != ASSISTANT:
        raise ValueError("the answer must be an assistant's message after a prompt")
    chat_rows.check_ends(chat.messages, num_prompt, "the answer")
    return [Feedback(chat.messages[:num_prompt], chat_rows.leave_untrained(chat, num_prompt), is_good, weight)]


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
