"""Drawing samples from a model that is asked nothing: it begins where its chat template has a user begin, or a text.

The chat is the one of Magpie (arXiv 2406.08464): a question by the model, the template's words before an answer, an
answer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mini_trainer.data.chat.rendering import template_errors
from mini_trainer.data.rows.prompts import Prompt, encode_text
from mini_trainer.use.inference.engine import Request
from mini_trainer.use.inference.hf_engine import EncodedRequest, HFEngine

QUESTION, ANSWER, NEXT = "QUESTION", "ANSWER", "NEXT"  # of a chat that is rendered to find the words between them
CHAT, WITHOUT_SYSTEM, TEXT = "chat", "chat without the system line", "text"


@dataclass(frozen=True)
class Opening:
    """What a sample begins with."""

    kind: str
    ids: list[int]
    bridge: list[int] = field(default_factory=list)  # between a question's last word and the answer's first


@dataclass(frozen=True)
class Drawn:
    """A sample; not drawn are the words of the template."""

    kind: str
    input_ids: list[int]
    is_drawn: list[bool]

    def extend(self, ids: Sequence[int], *, is_drawn: bool) -> "Drawn":
        return replace(self, input_ids=[*self.input_ids, *ids], is_drawn=[*self.is_drawn, *[is_drawn] * len(ids)])


def draw_samples(
    engine: HFEngine, num_samples: int, *, show: Callable[[Iterable[Any]], Iterable[Any]] = iter
) -> list[Drawn]:
    """Draws the samples, each kind as often as the others. `show`: takes the batches, and yields them."""
    openings = find_openings(engine.tokenizer)
    begun = {i: openings[i % len(openings)] for i in range(num_samples)}
    samples = {i: Drawn(one.kind, [], []).extend(one.ids, is_drawn=False) for i, one in begun.items()}
    for turn in (0, 1):
        waiting = list(samples) if turn == 0 else [i for i, one in begun.items() if ends_question(samples[i], one)]
        if turn == 1:
            samples |= {i: samples[i].extend(begun[i].bridge[1:], is_drawn=False) for i in waiting}
        nothing = Prompt(row={})
        requests: list[EncodedRequest] = [(Request(i, turn, nothing), samples[i].input_ids) for i in waiting]
        room = engine.max_length
        requests = [one for one in requests if room is None or len(one[1]) < room]
        for batch in show(engine.plan_batches(requests)):
            for (request, _), ids in zip(batch, engine.draw(batch), strict=True):
                samples[request.index] = samples[request.index].extend(ids, is_drawn=True)
    return list(samples.values())


def ends_question(sample: Drawn, opening: Opening) -> bool:
    """Whether the model has ended its question with the token that the template has there."""
    return bool(opening.bridge) and sample.is_drawn[-1] and sample.input_ids[-1] == opening.bridge[0]


def find_openings(tokenizer: Any) -> list[Opening]:
    """The openings that the tokenizer has; ValueError for one without any."""
    openings = [] if tokenizer.chat_template is None else find_chat_openings(tokenizer)
    first = tokenizer("")["input_ids"] or [tokenizer.bos_token_id, tokenizer.eos_token_id]
    ids = [token for token in first if token is not None][:1]
    if ids:
        openings.append(Opening(TEXT, ids))
    if not openings:
        raise ValueError("the tokenizer has neither a chat template nor a token that a text begins with")
    return openings


def find_chat_openings(tokenizer: Any) -> list[Opening]:
    """A chat up to its first question: as the template renders it, and, if that has more before the user's turn, the
    turn alone. Empty for a template that renders no such chat."""
    user, assistant = {"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}
    try:
        before, after = render(tokenizer, [user], asks=True).split(QUESTION)
        end = render(tokenizer, [user, assistant]).split(ANSWER)[1]
        between = render(tokenizer, [user, assistant, {"role": "user", "content": NEXT}]).split(ANSWER)[1]
    except (ValueError, IndexError):
        return []
    bridge = encode_text(after, tokenizer, is_rendered=True)
    turn = between.split(NEXT)[0].removeprefix(end).removeprefix(tokenizer.decode(bridge[:1]))
    kinds, system = {CHAT: before}, before.removesuffix(turn)
    if turn.strip() and before.endswith(turn) and has_words(system, tokenizer):
        begins = tokenizer.bos_token or ""
        kinds[WITHOUT_SYSTEM] = f"{begins}{turn}" if before.startswith(begins) else turn
    return [Opening(kind, encode_text(text, tokenizer, is_rendered=True), bridge) for kind, text in kinds.items()]


def has_words(text: str, tokenizer: Any) -> bool:
    """Whether there is more than special tokens."""
    ids = encode_text(text, tokenizer, is_rendered=True)
    return bool(tokenizer.decode(ids, skip_special_tokens=True).strip())


def render(tokenizer: Any, messages: list[dict[str, str]], *, asks: bool = False) -> str:
    with template_errors():
        return tokenizer.apply_chat_template(messages, add_generation_prompt=asks, tokenize=False)
