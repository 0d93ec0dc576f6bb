"""The pictures of docs/concepts/, drawn by the program's own code: its masks, its packer.

    python docs/site/pictures.py

Writes docs/concepts/*.svg. Needs the project's dependencies; a test compares the files with what this draws.
"""

import random
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "quickstart")]

from mini_trainer.batch_packer import pack_batch

FOLDER = ROOT / "docs" / "concepts"
TRAINED, READ, PADDING, INK, FAINT = "#2e9e6b", "#d5dde2", "#f3c9b8", "#22313a", "#71828c"
COLOURS = ("#4878a8", "#6fa8a0", "#b5a25a", "#a87ca0", "#8a94a8", "#c08a5e")
WIDTH = 480  # readable on a phone
CHAT = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is the capital of Peru?"},
    {"role": "assistant", "content": "Lima."},
    {"role": "user", "content": "And of Mali?"},
    {"role": "assistant", "content": "Bamako."},
]
NUM_SAMPLES, CAP, NUM_RANKS = 24, 1024, 2


def main() -> None:
    for name, text in draw_all():
        (FOLDER / name).write_text(text)


def draw_all() -> Iterator[tuple[str, str]]:
    """Name and content of each picture."""
    yield "masks.svg", draw_masks()
    yield "packing.svg", draw_packing()
    yield "exactness.svg", draw_exactness()
    yield "osft.svg", draw_osft()


def draw_masks() -> str:
    """A chat as its template writes it, token by token: what is read, and what is trained."""
    from make_tiny_model import train_tokenizer

    from mini_trainer.data.chat.conversation import Chat
    from mini_trainer.data.chat.masking import ChatMasker

    tokenizer = train_tokenizer(
        [message["content"] for message in CHAT] * 3 + ["system user assistant"], vocab_size=340
    )
    (masked,) = ChatMasker(tokenizer).mask([Chat(CHAT)])
    parts, x, y = [], 10, 12
    for token, label in zip(masked.input_ids, masked.labels, strict=True):
        word = tokenizer.decode([token])
        shown = word.replace("\n", "↵").replace(" ", "·")
        width = 7.3 * len(shown) + 7
        if x + width > WIDTH - 10:
            x, y = 10, y + 26
        is_trained = label == token
        parts.append(box(x, y, width - 2, 21, TRAINED if is_trained else READ))
        parts.append(label_at(x + (width - 2) / 2, y + 15, shown, "#fff" if is_trained else INK, mono=True))
        x += width
    y += 40
    parts += legend(
        y, [(READ, "read: the loss leaves it out"), (TRAINED, "trained: what the model will have to write")]
    )
    return svg(y + 44, parts)


def draw_packing() -> str:
    """The same batch padded, and packed by batch_packer.py for two ranks."""
    rng = random.Random(3)
    lengths = [min(CAP - 60, max(24, int(rng.lognormvariate(5.0, 0.9)))) for _ in range(NUM_SAMPLES)]
    scale = (WIDTH - 110) / CAP
    parts = [label_at(10, 16, f"{NUM_SAMPLES} samples, padded to the longest, in the order drawn", INK, anchor="start")]
    y, padded = 24, 0
    for first in range(0, NUM_SAMPLES, 8):
        rows = lengths[first : first + 8]
        longest = max(rows)
        padded += 8 * longest
        for i, length in enumerate(rows):
            parts.append(box(100, y, longest * scale, 7, PADDING))
            parts.append(box(100, y, length * scale, 7, COLOURS[(first + i) % 6]))
            y += 8
        y += 5
    share = 100 * sum(lengths) / padded
    parts.append(label_at(10, y + 14, f"{padded:,} tokens computed, {share:.0f} % of them real", FAINT, anchor="start"))
    y += 44
    table = pack_batch(lengths, CAP, NUM_RANKS, attention_cost=1e-4)
    parts.append(label_at(10, y, f"packed: at most {CAP:,} tokens a row, {NUM_RANKS} ranks", INK, anchor="start"))
    y += 8
    for k, micro_batches in enumerate(table):
        for rank, indices in enumerate(micro_batches):
            parts.append(label_at(94, y + 15, f"{k + 1}, rank {rank}", FAINT, anchor="end"))
            x = 100.0
            for i in indices:
                parts.append(box(x, y, lengths[i] * scale - 1, 20, COLOURS[i % 6]))
                x += lengths[i] * scale
            y += 24
        y += 5
    text = f"{sum(lengths):,} tokens computed, all of them real"
    parts.append(label_at(10, y + 12, text, FAINT, anchor="start"))
    return svg(y + 24, parts)


def draw_exactness() -> str:
    """Two micro-batches with different numbers of trained tokens: the mean of means is not the mean."""
    losses = [[2.4, 2.8, 2.6], [0.6, 0.9, 0.5, 0.8, 0.7, 0.6, 0.9, 0.7, 0.8, 0.5, 0.7, 0.6]]
    scale, base, parts, x = 46, 160, [], 40
    for number, (values, colour) in enumerate(zip(losses, (COLOURS[0], COLOURS[1]), strict=True), start=1):
        start = x
        for value in values:
            parts.append(box(x, base - scale * value, 13, scale * value, colour))
            x += 16
        mean = sum(values) / len(values)
        text = f"micro-batch {number}: {len(values)} trained tokens, mean {mean:.2f}"
        parts.append(label_at(start, base + 18 * number, text, INK, anchor="start"))
        x += 14
    every = [value for values in losses for value in values]
    right = sum(every) / len(every)
    wrong = sum(sum(values) / len(values) for values in losses) / len(losses)
    for value, colour, text in (
        (right, TRAINED, "mean over all tokens"),
        (wrong, "#c0492f", "mean of the means"),
    ):
        y = base - scale * value
        parts.append(f'<path d="M36 {y:.1f}H{x}" stroke="{colour}" stroke-width="2" stroke-dasharray="6 4"/>')
        parts.append(label_at(x + 8, y + 5, f"{value:.2f}: {text}", colour, anchor="start"))
    parts.append(f'<path d="M36 {base}H{x}" stroke="{FAINT}"/>')
    parts.append(label_at(40, 16, "loss of each trained token of a step", FAINT, anchor="start"))
    return svg(base + 50, parts)


def draw_osft() -> str:
    """The singular values of a matrix with a few strong directions: kept, and free for the new task."""
    rng = np.random.default_rng(0)
    size, ratio = 48, 0.25
    matrix = rng.normal(size=(size, 8)) @ rng.normal(size=(8, size)) / 6 + rng.normal(size=(size, size)) / 5
    values = np.linalg.svd(matrix, compute_uv=False)
    num_kept = int(size * (1 - ratio))
    scale, base, step = 150 / values[0], 190, (WIDTH - 40) / size
    parts = [label_at(20, 18, f"singular values of a weight, {size} × {size}", FAINT, anchor="start")]
    for i, value in enumerate(values):
        height = max(1.0, scale * value)
        parts.append(box(20 + i * step, base - height, step - 2, height, COLOURS[0] if i < num_kept else TRAINED))
    for first, last, colour, text in (
        (0, num_kept, COLOURS[0], f"kept exactly: {num_kept} directions"),
        (num_kept, size, TRAINED, f"may change: {size - num_kept}"),
    ):
        left, right = 20 + step * first, 20 + step * last - 2
        line = f"M{left:.1f} {base + 8}H{right:.1f}"
        parts.append(f'<path d="{line}" stroke="{colour}" stroke-width="3"/>')
        parts.append(label_at((left + right) / 2, base + 26, text, colour))
    parts.append(label_at(WIDTH - 20, 40, f"--osft-unfreeze-rank-ratio {ratio}", INK, anchor="end", mono=True))
    return svg(base + 38, parts)


def legend(y: float, entries: list[tuple[str, str]]) -> list[str]:
    parts = []
    for line, (colour, text) in enumerate(entries):
        parts.append(box(10, y + 20 * line, 14, 14, colour))
        parts.append(label_at(30, y + 12 + 20 * line, text, INK, anchor="start"))
    return parts


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="{colour}"/>'


def label_at(x: float, y: float, text: str, colour: str, *, anchor: str = "middle", mono: bool = False) -> str:
    family = ' font-family="monospace" font-size="12"' if mono else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}"{family}>{escape(text)}</text>'


def svg(height: float, parts: list[str]) -> str:
    """A picture on white, which also fits a dark page."""
    size, font = f'viewBox="0 0 {WIDTH} {height:.0f}"', 'font-family="sans-serif" font-size="13"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}>'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height:.0f}" rx="6" fill="#fff"/>', *parts, "</svg>", ""])


if __name__ == "__main__":
    main()
