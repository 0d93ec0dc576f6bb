"""What an engine answers, beside transformers; the table of all comparisons."""

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

NUM_TOKENS = 16  # of each answer
# Largest difference of a token's log-probability, and share of tokens that must be equal.
EXACT, ROUNDED, ANY = (1e-4, 1.0), (0.1, 0.9), (float("inf"), 0.0)
BOUNDS = {"float32": EXACT, "bfloat16": ROUNDED}


@dataclass
class Said:
    """An answer by token ids."""

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]  # of these ids
    stopped: bool  # by a stop token
    gaps: list[float] = field(default_factory=list)  # between the two most probable tokens, where it is known


def expect(
    model: Path, chats: Sequence[list[dict[str, str]]], *, dtype: str = "float32", adapter: Path | None = None
) -> list[Said]:
    """Greedy answers of transformers, with peft for an adapter, each chat on its own."""
    tokenizer = AutoTokenizer.from_pretrained(adapter or model)
    net = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    if adapter is not None:
        from peft import PeftModel

        net = PeftModel.from_pretrained(net, adapter).eval()
    return [expect_one(net, tokenizer, chat) for chat in chats]


@torch.no_grad()
def expect_one(net: Any, tokenizer: Any, chat: list[dict[str, str]]) -> Said:
    given = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = net.generate(
        **given, do_sample=False, max_new_tokens=NUM_TOKENS, return_dict_in_generate=True, output_logits=True
    )
    prompt = given["input_ids"][0].tolist()
    ids = made.sequences[0, len(prompt) :].tolist()
    logprobs = torch.stack(made.logits, dim=1)[0].float().log_softmax(-1)  # (tokens, vocab)
    top = logprobs.topk(2).values
    stops = net.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    return Said(
        prompt, ids, logprobs[range(len(ids)), ids].tolist(), ids[-1] in stops, (top[:, 0] - top[:, 1]).tolist()
    )


@torch.no_grad()
def score(model: Path, rows: Sequence[Any]) -> torch.Tensor:
    """transformers' logits of texts, of pairs of texts, or of chats rendered by the template; (rows, labels)."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    net = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    made = [
        tokenizer.apply_chat_template(row, return_tensors="pt", return_dict=True) if isinstance(row, list) else
        tokenizer(*([row] if isinstance(row, str) else row), return_tensors="pt")
        for row in rows
    ]  # fmt: skip
    return torch.cat([net(**one).logits for one in made])


@torch.no_grad()
def describe_pictures(model: Path, chats: Sequence[list], pictures: Sequence[str]) -> list[list[int]]:
    """Greedy answers of transformers to chats about one image each, by token ids."""
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(model)
    net = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    answers = []
    for chat, picture in zip(chats, pictures, strict=True):
        text = processor.apply_chat_template(chat, add_generation_prompt=True)
        given = processor(text=text, images=Image.open(picture), return_tensors="pt")
        made = net.generate(**given, do_sample=False, max_new_tokens=NUM_TOKENS)
        answers.append(made[0, given["input_ids"].shape[1] :].tolist())
    return answers


def list_frequencies(values: dict[str, Any]) -> list[list[float]]:
    """Rotary frequencies and scale of a config as JSON, by the rotary modules of its model; none if it is unknown."""
    model_type = values["model_type"]
    if model_type not in CONFIG_MAPPING:
        return []
    config = CONFIG_MAPPING[model_type].from_dict(dict(values))
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    found = []
    for name, kind in vars(module).items():
        if name.endswith("RotaryEmbedding") and kind.__module__ == module.__name__ and "Vision" not in name:
            rotary = kind(config=config)
            found.append([*rotary.inv_freq.double().tolist(), rotary.attention_scaling])
    return found


def decode(model: Path, said: list[Said]) -> list[str]:
    return AutoTokenizer.from_pretrained(model).batch_decode([one.ids for one in said], skip_special_tokens=True)


def count_equal(given: list[str], expected: list[str]) -> str:
    """The table's cell; AssertionError if any text differs. Of a character that the length cuts, some show nothing."""
    pairs = [(one.rstrip("\ufffd"), other.rstrip("\ufffd")) for one, other in zip(given, expected, strict=True)]
    assert all(one == other for one, other in pairs), [pair for pair in pairs if pair[0] != pair[1]]
    return f"{len(given)} of {len(given)} texts"


@dataclass
class Row:
    """A line of the table; None: not compared."""

    engine: str
    kind: str
    greedy: str | None = None
    logprob: float | None = None
    stops: bool | None = None
    prompts: bool | None = None
    seconds: float = 0.0


class Table:
    """The lines of a session."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.begun = time.monotonic()

    def __call__(self, **columns: Any) -> None:
        now = time.monotonic()
        self.rows.append(Row(**columns, seconds=now - self.begun))
        self.begun = now

    def compare(
        self,
        engine: str,
        kind: str,
        expected: Sequence[Said],
        given: Sequence[Said],
        bounds: tuple[float, float] = EXACT,
    ) -> None:
        """Adds a line; AssertionError beyond the bounds: the largest difference of a token's log-probability, and the
        share of tokens that must be equal. With a share of 0 answers may be others, and then end elsewhere."""
        tolerance, share = bounds
        pairs = list(zip(expected, given, strict=True))
        commons = [count_common(one, other, tie=tolerance if share else 0.0) for one, other in pairs]
        equal, compared = sum(common.equal for common in commons), sum(common.compared for common in commons)
        largest = max(
            abs(a - b) for common, (one, other) in zip(commons, pairs, strict=True)
            for a, b in zip(one.logprobs[: common.equal], other.logprobs[: common.equal], strict=True)
        )  # fmt: skip
        ends = [
            one.stopped == other.stopped or common.is_tie for common, (one, other) in zip(commons, pairs, strict=True)
        ]
        stops = all(ends) if share else None
        prompts = all(one.prompt == other.prompt for one, other in pairs)
        self(engine=engine, kind=kind, greedy=f"{equal} of {compared}", logprob=largest, stops=stops, prompts=prompts)
        assert prompts, f"{engine}, {kind}: other prompt tokens"
        assert equal >= share * compared and stops is not False, f"{engine}, {kind}: {equal} of {compared}, ends {ends}"
        assert largest <= tolerance, f"{engine}, {kind}: log-probabilities {largest:.2g} apart"

    def lines(self) -> list[str]:
        head = f"{'engine':<24} {'export':<26} {'greedy tokens':<14} {'log-probability':<15} stops  prompts  seconds"
        return [head, *map(show_row, self.rows)]


def show_row(row: Row) -> str:
    logprob = "" if row.logprob is None else f"{row.logprob:.1e}"
    words = {True: "equal", False: "DIFFER", None: ""}
    return (
        f"{row.engine:<24} {row.kind:<26} {row.greedy or '':<14} {logprob:<15} {words[row.stops]:<6} "
        f"{words[row.prompts]:<7}  {row.seconds:7.1f}"
    )


@dataclass(frozen=True)
class Common:
    """How far two answers agree."""

    equal: int
    compared: int
    is_tie: bool  # the first difference is between two tokens that are about equally probable


def count_common(one: Said, other: Said, *, tie: float) -> Common:
    """Compares two answers up to their first difference; what follows a tie is not compared."""
    for i, (a, b) in enumerate(zip(one.ids, other.ids, strict=False)):
        if a != b:
            is_tie = one.gaps[i] <= 2 * tie
            return Common(i, i if is_tie else len(one.ids), is_tie)
    return Common(min(len(one.ids), len(other.ids)), len(one.ids), False)
