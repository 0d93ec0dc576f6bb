"""Writes chats and pairs for preference learning: inquiries about parcels, answered politely or curtly.

    python examples/quickstart/make_preferences.py --output-dir runs/preferences

`train.jsonl` holds chats for supervised fine-tuning: a random half of the answers ends politely, the others curtly.
`pairs.jsonl` holds pairs of a polite (chosen) and a curt (rejected) answer. No held-out prompt shares its wording or
its code with either file: `held_out.jsonl` has the right answers to 400 such prompts, `polite.jsonl` the same prompts
with the polite ending as reference, and `held_out_pairs.jsonl` their pairs.
"""

import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path

import tyro

TRAINED_WORDINGS = (
    "Where is parcel {code}?",
    "Where is my parcel? The code is {code}.",
    "When will parcel {code} be here?",
    "Please look for parcel {code}.",
    "Has parcel {code} left?",
    "Good morning, has {code} left?",
    "My code is {code}. Has the parcel left?",
    "I am waiting for parcel {code}.",
    "Is parcel {code} on its way?",
    "Can you find {code}, please?",
    "Good morning, I am looking for {code}.",
    "Could you find parcel {code}?",
)
HELD_OUT_WORDINGS = (
    "Could you look for {code}, please?",
    "Good morning, where is parcel {code}?",
    "I am waiting for my parcel. The code is {code}.",
    "Good morning, when will {code} be here?",
)
ANSWER = "Parcel {code} is on its way."
POLITE, CURT = "Thanks!", "Bye!"
LETTERS, DIGITS = "BCDFGHJKLMNPQRSTVWXZ", "0123456789"  # of codes: a letter, a digit, a letter


@dataclass(frozen=True, kw_only=True)
class PreferenceDataOptions:
    """Write chats and pairs for preference learning, and held-out prompts."""

    output_dir: str
    """Directory for train.jsonl, pairs.jsonl, held_out.jsonl, polite.jsonl and held_out_pairs.jsonl."""
    num_chats: int = 4000
    """Number of chats for supervised fine-tuning."""
    num_pairs: int = 512
    """Number of pairs to train on."""
    num_held_out: int = 400
    """Number of held-out prompts."""
    seed: int = 0
    """Random seed."""


@dataclass(frozen=True)
class Inquiry:
    """A prompt and its right answer."""

    prompt: str
    answer: str

    def to_chat(self, answer: str) -> dict:
        return {"messages": [{"role": "user", "content": self.prompt}, {"role": "assistant", "content": answer}]}

    def to_pair(self) -> dict:
        prompt = [{"role": "user", "content": self.prompt}]
        return {"prompt": prompt, "chosen": f"{self.answer} {POLITE}", "rejected": f"{self.answer} {CURT}"}


def list_codes() -> list[str]:
    return ["".join(parts) for parts in itertools.product(LETTERS, DIGITS, LETTERS)]


def make_files(options: PreferenceDataOptions) -> dict[str, list[dict]]:
    """The rows of each file."""
    rng = random.Random(options.seed)
    codes = list_codes()
    rng.shuffle(codes)
    held_out_codes, trained_codes = codes[: options.num_held_out], codes[options.num_held_out :]

    def make_inquiries(number: int, wordings: tuple[str, ...], codes: list[str]) -> list[Inquiry]:
        chosen = [codes[i % len(codes)] for i in range(number)]
        return [Inquiry(rng.choice(wordings).format(code=code), ANSWER.format(code=code)) for code in chosen]

    chats, pairs = (
        make_inquiries(number, TRAINED_WORDINGS, trained_codes) for number in (options.num_chats, options.num_pairs)
    )
    held_out = make_inquiries(options.num_held_out, HELD_OUT_WORDINGS, held_out_codes)
    closings = [(POLITE, CURT)[i % 2] for i in range(len(chats))]
    rng.shuffle(closings)
    return {
        "train": [
            inquiry.to_chat(f"{inquiry.answer} {closing}") for inquiry, closing in zip(chats, closings, strict=True)
        ],
        "pairs": [pair.to_pair() for pair in pairs],
        "held_out": [inquiry.to_chat(inquiry.answer) for inquiry in held_out],
        "polite": [inquiry.to_chat(POLITE) for inquiry in held_out],
        "held_out_pairs": [inquiry.to_pair() for inquiry in held_out],
    }


if __name__ == "__main__":
    options = tyro.cli(PreferenceDataOptions)
    output_dir = Path(options.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    for name, rows in make_files(options).items():
        path = output_dir / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"wrote {len(rows):,} rows to {path}")
