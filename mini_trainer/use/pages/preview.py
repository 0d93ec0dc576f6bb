"""Preview of samples with the trained text highlighted: in the terminal, or as one page for a browser.

The page is made from preview.html, preview.css and preview.js (`make_page`). All text of the data is escaped. Images
are re-encoded as thumbnails, so the page has no other data of their files.
"""

import html
import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from mini_trainer.data.chat.conversation import TokenizedChat
from mini_trainer.data.columns.base import COLUMNS, IGNORED, Bars, DataTask
from mini_trainer.data.rows.report import DROPPED, Totals, percentile
from mini_trainer.data.rows.writer import TokenizedSample
from mini_trainer.data.stores.image_files import as_data_url, name_reference, open_image
from mini_trainer.distributed.messages import has_colours, make_visible, print_as_is, say
from mini_trainer.use.pages.page import escape_json, fold, make_page

PAGE = Path(__file__).with_name("preview.html")
NUM_PAGE_SAMPLES = 200
MAX_PAGE_SEGMENT_CHARS = 8_000  # longer segments lose their middle on the page
MAX_PAGE_CHARS = 40_000  # longer samples lose their end on the page
MAX_SEGMENT_CHARS = 800  # longer segments lose their middle in the terminal
NUM_THUMBNAILS = 400  # on a page; further images are shown by their sizes
THUMBNAIL_SIDE = 144  # pixels, at most
NUM_BINS = 36
NUM_REASONS_ON_PAGE = 20

# Colours by (is_trained, is_special), so that a trained stop token stands out.
COLOURS = {
    (True, False): "\033[32m",
    (True, True): "\033[1;7;32m",
    (False, False): "\033[2m",
    (False, True): "\033[35m",
}
RESET = "\033[0m"
OPEN, CLOSE = "[[", "]]"  # around trained text, without colours


@dataclass(frozen=True)
class Segment:
    """A part of a sample: one special token, all tokens of an image, or a run of others of the same kind."""

    text: str
    is_trained: bool
    is_special: bool
    weight: float | None  # None if the sample has no weights, or the text is not trained
    image: int | None = None  # index of the image that it stands for


def split_segments(tokens: TokenizedChat, tokenizer: Any) -> list[Segment]:
    """The sample's text in segments."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    input_ids, labels = tokens.input_ids, tokens.labels
    weights = tokens.loss_weights or [None] * len(labels)
    pictures = tokens.pictures
    spans = [] if pictures is None else pictures.spans
    image_at = {at: number for number, (start, end) in enumerate(spans) for at in range(start, end)}  # by token

    def kind(index: int) -> tuple[int | None, bool, int | None, float | None]:
        if index in image_at:
            return image_at[index], False, None, None
        is_trained = labels[index] != IGNORED
        is_special = input_ids[index] in special
        return None, is_trained, index if is_special else None, weights[index] if is_trained else None

    segments = []
    for (image, is_trained, special_at, weight), run in groupby(range(len(labels)), key=kind):
        indices = list(run)
        if image is not None:
            (height, width), (start, end) = pictures.sizes[image], pictures.spans[image]
            text = f"[image {image + 1}: {width} x {height} pixels, {end - start:,} tokens]"
            segments.append(Segment(text, False, True, None, image))
            continue
        text = decode_run(tokenizer, input_ids, indices[0], indices[-1] + 1)
        segments.append(Segment(text, is_trained, special_at is not None, weight))
    return segments


def draw_thumbnail(reference: str, directory: Path) -> str | None:
    """The thumbnail as a data: URL; None if the image can no longer be read."""
    try:
        image = open_image(reference, directory=directory)
    except ValueError:
        return None
    image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    file = io.BytesIO()
    image.save(file, "WEBP", quality=80)
    return as_data_url(file.getvalue())


def decode_run(tokenizer: Any, input_ids: Sequence[int], start: int, end: int) -> str:
    """The text of tokens [start, end), decoded with the token before them because decoders strip the first space."""

    def decode(first: int, last: int) -> str:
        return tokenizer.decode(input_ids[first:last], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    if start == 0:
        return decode(start, end)
    before, text = decode(start - 1, start), decode(start - 1, end)
    return text.removeprefix(before) if text.startswith(before) else decode(start, end)


def print_samples(samples: Iterable[TokenizedSample], tokenizer: Any, *, mask: str | None) -> None:
    """Prints each sample: in colours on a terminal, else with brackets; `mask` replaces untrained text."""
    in_colour = has_colours()
    if mask is None:
        legend = Segment("trained", True, False, None), Segment(" not trained", False, False, None)
        say(f"\nlegend: {format_sample(legend, mask=None, in_colour=in_colour)}")
    for sample in samples:
        say(f"\n--- {sample.place}: {sample.tokens.summary}")
        for title, tokens in sample.tokens.shown:
            if title:
                say(f"{title}:")
            text = format_sample(split_segments(tokens, tokenizer), mask=mask, in_colour=in_colour)
            print_as_is(f"{text}\n", sys.stdout)


def format_sample(segments: Iterable[Segment], *, mask: str | None, in_colour: bool) -> str:
    """The text of a sample for the terminal."""
    parts = []
    for (is_trained, weight), run in groupby(segments, key=lambda segment: (segment.is_trained, segment.weight)):
        if not is_trained and mask is not None:
            parts.append(mask)
            continue
        shown = ""
        for segment in run:
            text = make_visible(fold(segment.text, MAX_SEGMENT_CHARS))
            shown += f"{COLOURS[is_trained, segment.is_special]}{text}{RESET}" if in_colour else text
        weighted = "" if weight in (None, 1.0) else f"(weight {weight:g}) "
        has_brackets = is_trained and not in_colour and mask is None
        parts.append(f"{OPEN}{weighted}{shown}{CLOSE}" if has_brackets else weighted + shown)
    return "".join(parts)


def write_page(
    path: Path, totals: Totals, task: DataTask, *, tokenizer: Any, title: str, directory: Path | None = None
) -> None:
    """Writes the page with the report and the samples of `totals`. Image paths are relative to `directory`."""
    samples: list[dict[str, Any]] = []
    for sample in totals.samples:  # its sequences, each with a title, stand next to each other
        sides = [{"title": title, "parts": describe_parts(tokens, tokenizer)} for title, tokens in sample.tokens.shown]
        samples.append({"place": sample.place, "summary": sample.tokens.summary, "sides": sides})
    add_thumbnails(samples, totals, directory)
    targets = COLUMNS[task.objective].draw(totals, task)
    parts = {
        "FIGURES": format_figures(totals, task),
        "ROWS": format_rows(totals),
        "LENGTHS": format_histogram(totals),
        "TARGETS_TITLE": targets.title,
        "TARGETS": format_targets(targets),
        "NUM_SAMPLES": f"{len(samples):,} of {totals.num_samples:,}",
        "SAMPLES": escape_json(samples),
    }
    policy = "; img-src data:" if any("images" in sample for sample in samples) else ""
    path.write_text(make_page(PAGE, parts, title=title, policy=policy), encoding="utf-8")


def describe_parts(tokens: TokenizedChat, tokenizer: Any) -> list[list[Any]]:
    """The parts of a sequence, each as [text, is_trained, is_special, weight, image]."""
    parts, num_chars = [], 0
    for segment in split_segments(tokens, tokenizer):
        text = fold(segment.text, MAX_PAGE_SEGMENT_CHARS)
        num_chars += len(text)
        parts.append([text, int(segment.is_trained), int(segment.is_special), segment.weight, segment.image])
        if num_chars > MAX_PAGE_CHARS:
            parts.append([" … (the rest is not shown)", 0, 0, None, None])
            break
    return parts


def add_thumbnails(samples: Sequence[dict[str, Any]], totals: Totals, directory: Path | None) -> None:
    """Adds to each sample its images as [name, thumbnail or None]."""
    num_drawn = 0
    for shown, sample in zip(samples, totals.samples, strict=True):
        if (pictures := sample.tokens.pictures) is None:
            continue
        shown["images"] = []
        for reference in pictures.references:
            thumbnail = draw_thumbnail(reference, directory) if num_drawn < NUM_THUMBNAILS else None
            shown["images"].append([name_reference(reference), thumbnail])
            num_drawn += 1


def format_figures(totals: Totals, task: DataTask) -> str:
    label, value = COLUMNS[task.objective].summarize(totals, task)
    figures = {
        "rows": f"{totals.rows['in']:,}",
        "samples": f"{totals.num_samples:,}",
        "tokens": f"{totals.num_tokens:,}",
        label: value,
        "median length": f"{percentile(totals.lengths, 0.5):,}",
        "longest": f"{max(totals.lengths):,}",
    }
    return "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in figures.items())


def format_rows(totals: Totals) -> str:
    """Bars of rows by outcome, and the reasons for invalid ones."""
    bars = {label: totals.rows[key] for key, label in {"kept": "kept", **DROPPED}.items()}
    shown = format_bars(bars, whole=totals.rows["in"])
    if not totals.reasons:
        return shown
    reasons = "".join(
        f"<tr><td>{count:,}</td><td>{html.escape(reason)}</td></tr>"
        for reason, count in totals.reasons.most_common(NUM_REASONS_ON_PAGE)
    )
    return f"{shown}<h3>Why rows are invalid</h3><table>{reasons}</table>"


def format_targets(targets: Bars) -> str:
    if targets.whole is None:
        numbers = [f"{name} {value:{',' if isinstance(value, int) else 'g'}}" for name, value in targets.counts.items()]
        return f"<p>{', '.join(numbers)}</p>"
    return format_bars(targets.counts, whole=targets.whole)


def format_bars(bars: dict[str, int], *, whole: int) -> str:
    lines = []
    for label, count in bars.items():
        share = count / max(whole, 1)
        is_good = label.startswith(("kept", "trained", "label: "))
        kind = "good" if is_good else "rest" if label == "not trained" else "bad"
        lines.append(
            f"<div class=bar><span>{html.escape(label)}</span><b>{count:,}</b><i>{share:.1%}</i>"
            f'<div><div class={kind} style="width:{share:.2%}"></div></div></div>'
        )
    return "".join(lines)


def format_histogram(totals: Totals) -> str:
    """Lengths of samples as an SVG; the longest 1 % share the last bar if they are far longer than the others."""
    lengths, longest = totals.lengths, max(totals.lengths)
    least, most = min(lengths), percentile(lengths, 0.99)
    most = longest if longest <= 1.5 * most else most
    width = max(1, -(-(most + 1 - least) // NUM_BINS))
    bins = [0] * (-(-(most + 1 - least) // width))
    for length, count in lengths.items():
        bins[min((length - least) // width, len(bins) - 1)] += count
    bars = []
    for i, count in enumerate(bins):
        start = least + i * width
        end = longest if i == len(bins) - 1 else start + width - 1
        height = 100 * count / max(bins)
        bars.append(
            f"<rect x={i * 10 + 1} y={110 - height:.2f} width=8 height={height:.2f} rx=1>"
            f"<title>{start:,} to {end:,} tokens: {count:,} samples</title></rect>"
        )
    beyond = f", the last bar up to {longest:,}" if longest > most else ""
    shape = f'viewBox="0 0 {len(bins) * 10} 110" preserveAspectRatio=none role=img aria-label="samples by length"'
    picture = f"<svg {shape}>{''.join(bars)}</svg>"
    axis = f"<div class=axis><span>{least:,}</span><span>{(least + most) // 2:,}</span><span>{most:,}</span></div>"
    shares = {"5 %": 0.05, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95, "99 %": 0.99}
    listed = "".join(f"<span>{name} <b>{percentile(lengths, at):,}</b></span>" for name, at in shares.items())
    return f"{picture}{axis}<p class=note>tokens per sample{beyond}</p><p class=shares>{listed}</p>"
