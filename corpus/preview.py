"""Samples to look at, with what is trained made visible: in the terminal, or as one page for a browser.

The page needs no network and holds everything. All text of the data is escaped; besides, the page's policy lets no
script run but its own, which is named by its hash.
"""

import base64
import hashlib
import html
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from chat.labels import IGNORED
from chat.masking import TokenizedChat
from corpus.report import DROPPED, Totals, percentile
from corpus.writer import TokenizedSample

NUM_PAGE_SAMPLES = 200
MAX_PAGE_SEGMENT_CHARS = 8_000  # on the page, of a run
MAX_PAGE_CHARS = 40_000  # and of a sample
MAX_SEGMENT_CHARS = 800  # in the terminal, of a run of tokens that are trained, or not
NUM_BINS = 36
NUM_REASONS_ON_PAGE = 20

# Colours by (is trained, is special): a stop token shows at once whether it is trained.
COLOURS = {
    (True, False): "\033[32m",
    (True, True): "\033[1;7;32m",
    (False, False): "\033[2m",
    (False, True): "\033[35m",
}
RESET = "\033[0m"
OPEN, CLOSE = "[[", "]]"  # around what is trained, where there are no colours
# What a terminal would obey, not show: control characters, and those that turn the direction of writing.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True)
class Segment:
    """Some text of a sample: one special token, or a run of others of the same kind."""

    text: str
    is_trained: bool
    is_special: bool
    weight: float | None  # None where the sample has no weights, or the text is not trained


def split_segments(tokens: TokenizedChat, tokenizer: Any) -> list[Segment]:
    """The text in pieces."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    input_ids, labels = tokens.input_ids, tokens.labels
    weights = tokens.loss_weights or [None] * len(labels)

    def kind(index: int) -> tuple[bool, int | None, float | None]:
        is_trained = labels[index] != IGNORED
        is_special = input_ids[index] in special
        return is_trained, index if is_special else None, weights[index] if is_trained else None

    segments = []
    for (is_trained, special_at, weight), run in groupby(range(len(labels)), key=kind):
        indices = list(run)
        text = decode_run(tokenizer, input_ids, indices[0], indices[-1] + 1)
        segments.append(Segment(text, is_trained, special_at is not None, weight))
    return segments


def decode_run(tokenizer: Any, input_ids: Sequence[int], start: int, end: int) -> str:
    """The text of tokens [start, end). Decoded with the token before them, as decoders strip a text's first space."""

    def decode(first: int, last: int) -> str:
        return tokenizer.decode(input_ids[first:last], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    if start == 0:
        return decode(start, end)
    before, text = decode(start - 1, start), decode(start - 1, end)
    return text.removeprefix(before) if text.startswith(before) else decode(start, end)


def fold(text: str, limit: int) -> str:
    """A long text without its middle."""
    if len(text) <= limit:
        return text
    head, tail = text[: limit * 2 // 3], text[len(text) - limit // 3 :]
    return f"{head} … ({len(text) - len(head) - len(tail):,} characters) … {tail}"


def print_samples(samples: Iterable[TokenizedSample], tokenizer: Any, *, mask: str | None) -> None:
    """Prints each sample: in colours on a terminal, else with brackets; with `mask` for what is not trained."""
    in_colour = sys.stdout.isatty()
    for sample in samples:
        num_tokens = f"{len(sample.tokens.input_ids):,} tokens, {sample.tokens.num_loss_counted_tokens:,} trained"
        print(f"\n--- {sample.place}: {num_tokens}")
        print(format_sample(split_segments(sample.tokens, tokenizer), mask=mask, in_colour=in_colour))


def format_sample(segments: Iterable[Segment], *, mask: str | None, in_colour: bool) -> str:
    """The text of a sample for the terminal."""
    parts = []
    for (is_trained, weight), run in groupby(segments, key=lambda segment: (segment.is_trained, segment.weight)):
        if not is_trained and mask is not None:
            parts.append(mask)
            continue
        shown = format_segments(run, in_colour=in_colour)
        weighted = "" if weight in (None, 1.0) else f"(weight {weight:g}) "
        has_brackets = is_trained and not in_colour and mask is None
        parts.append(f"{OPEN}{weighted}{shown}{CLOSE}" if has_brackets else weighted + shown)
    return "".join(parts)


def format_segments(segments: Iterable[Segment], *, in_colour: bool) -> str:
    """Texts that a terminal can show."""
    shown = []
    for segment in segments:
        text = CONTROLS.sub(lambda found: ascii(found[0])[1:-1], fold(segment.text, MAX_SEGMENT_CHARS))
        colour = COLOURS[segment.is_trained, segment.is_special]
        shown.append(f"{colour}{text}{RESET}" if in_colour else text)
    return "".join(shown)


def write_page(path: Path, totals: Totals, *, tokenizer: Any, title: str) -> None:
    """Writes the page: the report, and the samples of `totals`."""
    script_hash = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    samples = [describe_sample(sample, tokenizer) for sample in totals.samples]
    parts = {
        "POLICY": f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{script_hash}'",
        "TITLE": html.escape(title),
        "STYLE": STYLE,
        "FIGURES": format_figures(totals),
        "ROWS": format_rows(totals),
        "LENGTHS": format_histogram(totals),
        "ROLES": format_roles(totals),
        "NUM_SAMPLES": f"{len(samples):,} of {totals.num_samples:,}",
        "SAMPLES": escape_json(samples),
        "SCRIPT": SCRIPT,
    }
    page = re.sub(r"\$([A-Z_]+)\$", lambda name: parts[name[1]], PAGE)  # once, so that data cannot name a part
    path.write_text(page, encoding="utf-8")


def describe_sample(sample: TokenizedSample, tokenizer: Any) -> dict[str, Any]:
    """A sample for the page; of each part the text, if it is trained, if it is special, and its weight."""
    parts, num_chars = [], 0
    for segment in split_segments(sample.tokens, tokenizer):
        text = fold(segment.text, MAX_PAGE_SEGMENT_CHARS)
        num_chars += len(text)
        parts.append([text, int(segment.is_trained), int(segment.is_special), segment.weight])
        if num_chars > MAX_PAGE_CHARS:
            parts.append([" … (the rest is not shown)", 0, 0, None])
            break
    return {
        "place": sample.place,
        "tokens": len(sample.tokens.input_ids),
        "trained": sample.tokens.num_loss_counted_tokens,
        "parts": parts,
    }


def escape_json(value: Any) -> str:
    """JSON in ASCII without the characters that HTML gives a meaning to."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def format_figures(totals: Totals) -> str:
    share = totals.num_loss_counted_tokens / totals.num_tokens
    figures = {
        "rows": f"{totals.rows['in']:,}",
        "samples": f"{totals.num_samples:,}",
        "tokens": f"{totals.num_tokens:,}",
        "trained": f"{share:.1%}",
        "median length": f"{percentile(totals.lengths, 0.5):,}",
        "longest": f"{max(totals.lengths):,}",
    }
    return "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in figures.items())


def format_rows(totals: Totals) -> str:
    """Bars of what became of the rows, and why those that are invalid are."""
    bars = {label: totals.rows[key] for key, label in {"kept": "kept", **DROPPED}.items()}
    shown = format_bars(bars, whole=totals.rows["in"])
    if not totals.reasons:
        return shown
    reasons = "".join(
        f"<tr><td>{count:,}</td><td>{html.escape(reason)}</td></tr>"
        for reason, count in totals.reasons.most_common(NUM_REASONS_ON_PAGE)
    )
    return f"{shown}<h3>Why rows are invalid</h3><table>{reasons}</table>"


def format_roles(totals: Totals) -> str:
    """Bars of whose tokens are trained, as shares of all tokens."""
    trained = dict(totals.trained_by_role.most_common())
    bars = {f"trained: {role}": count for role, count in trained.items()}
    bars["not trained"] = totals.num_tokens - totals.trained_by_role.total()
    return format_bars(bars, whole=totals.num_tokens)


def format_bars(bars: dict[str, int], *, whole: int) -> str:
    lines = []
    for label, count in bars.items():
        share = count / max(whole, 1)
        kind = "good" if label.startswith(("kept", "trained")) else "rest" if label == "not trained" else "bad"
        lines.append(
            f"<div class=bar><span>{html.escape(label)}</span><b>{count:,}</b><i>{share:.1%}</i>"
            f'<div><div class={kind} style="width:{share:.2%}"></div></div></div>'
        )
    return "".join(lines)


def format_histogram(totals: Totals) -> str:
    """Lengths of samples as an SVG; the longest 1 % share the last bar where they reach far beyond the others."""
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
    picture = f'<svg viewBox="0 0 {len(bins) * 10} 110" preserveAspectRatio=none role=img>{"".join(bars)}</svg>'
    axis = f"<div class=axis><span>{least:,}</span><span>{(least + most) // 2:,}</span><span>{most:,}</span></div>"
    shares = {"5 %": 0.05, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95, "99 %": 0.99}
    listed = "".join(f"<span>{name} <b>{percentile(lengths, at):,}</b></span>" for name, at in shares.items())
    return f"{picture}{axis}<p class=note>tokens per sample{beyond}</p><p class=shares>{listed}</p>"


PAGE = """<!doctype html>
<html lang=en>
<meta charset=utf-8>
<meta http-equiv=Content-Security-Policy content="$POLICY$">
<meta name=viewport content="width=device-width, initial-scale=1">
<title>$TITLE$ · what is trained</title>
<style>$STYLE$</style>
<header>
  <div><p class=kicker>What is trained</p><h1>$TITLE$</h1></div>
  <button id=theme type=button title="light or dark" aria-label="light or dark">◐</button>
</header>
<main>
<dl class=figures>$FIGURES$</dl>
<div class=panels>
  <section><h2>Rows</h2>$ROWS$</section>
  <section><h2>Length</h2>$LENGTHS$</section>
  <section><h2>Tokens by role</h2>$ROLES$</section>
</div>
<section class=browser>
  <div class=tools>
    <h2>Samples</h2>
    <input id=search type=search placeholder="Search" aria-label="search in samples" autocomplete=off spellcheck=false>
    <span id=position role=status></span>
    <button id=previous type=button title="previous (←)" aria-label=previous>←</button>
    <button id=next type=button title="next (→)" aria-label=next>→</button>
  </div>
  <p class=meta><b id=place></b><span id=counts></span><span class=legend>
    <span class=t>trained</span><span>not trained</span><span class=s>special token</span></span></p>
  <div id=text></div>
</section>
<p class=note>$NUM_SAMPLES$ samples, drawn at random. Keys: ← → to turn the pages, / to search.</p>
</main>
<script id=samples type=application/json>$SAMPLES$</script>
<script>$SCRIPT$</script>
"""

STYLE = """
:root { color-scheme: light dark; --serif: "Iowan Old Style", Charter, Georgia, serif;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
  --back: #f7f5f0; --panel: #fffefb; --ink: #23211d; --soft: #716c62; --line: #e4dfd4; --track: #eeeae1;
  --good: #1d7a55; --good-back: #d5f0e0; --good-ink: #0d4a32; --bad: #c2552d; --rest: #b9b2a4;
  --special: #7a4fb5; --special-back: #efe7fa; --found: #ffd75e; --found-ink: #3a2c00 }
:root[data-theme=light] { color-scheme: light }
:root[data-theme=dark] { color-scheme: dark; DARK }
@media (prefers-color-scheme: dark) { :root:not([data-theme=light]) { DARK } }
* { box-sizing: border-box }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 var(--sans) }
header, main { max-width: 1180px; margin: 0 auto; padding: 0 28px }
header { display: flex; justify-content: space-between; align-items: flex-start; padding-top: 36px }
h1 { font: 600 30px/1.25 var(--serif); margin: 0; overflow-wrap: anywhere }
h2 { font: 600 19px/1.3 var(--serif); margin: 0 0 14px }
h3 { font: 600 13px/1.4 var(--sans); margin: 18px 0 6px; color: var(--soft) }
.kicker { margin: 0 0 2px; color: var(--good); font-weight: 600; font-size: 13px }
.note { color: var(--soft); font-size: 13px }
button, input { font: inherit; color: inherit; background: var(--panel); border: 1px solid var(--line);
  border-radius: 8px; height: 36px; padding: 0 12px }
button { cursor: pointer; min-width: 40px } button:hover { border-color: var(--good) }
:focus-visible { outline: 2px solid var(--good); outline-offset: 2px }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); margin: 26px 0;
  border-top: 1px solid var(--line); border-bottom: 1px solid var(--line) }
.figures div { padding: 14px 0 }
dt { color: var(--soft); font-size: 13px } dd { margin: 0; font: 600 25px/1.25 var(--serif);
  font-variant-numeric: lining-nums tabular-nums }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 18px; margin-bottom: 18px }
section { background: var(--panel); border: 1px solid var(--line); border-radius: 14px;
  padding: 20px 22px; min-width: 0 }
.bar { display: grid; grid-template-columns: 1fr auto 58px; gap: 1px 8px; font-size: 14px; margin-bottom: 11px;
  font-variant-numeric: tabular-nums }
.bar i { font-style: normal; color: var(--soft); text-align: right }
.bar > div { grid-column: 1 / -1; height: 7px; border-radius: 4px; background: var(--track); overflow: hidden }
.bar > div > div { height: 100%; border-radius: 4px }
.good { background: var(--good) } .bad { background: var(--bad) } .rest { background: var(--rest) }
table { border-collapse: collapse; font-size: 13px; width: 100% }
td { padding: 3px 0; vertical-align: top; overflow-wrap: anywhere }
td:first-child { white-space: nowrap; width: 1%; text-align: right; padding-right: 12px; font-weight: 600;
  font-variant-numeric: tabular-nums }
svg { display: block; width: 100%; height: 128px; border-bottom: 1px solid var(--line) }
rect { fill: var(--good) } rect:hover { fill: var(--special) }
.axis { display: flex; justify-content: space-between; color: var(--soft); font-size: 12px; margin-top: 3px;
  font-variant-numeric: tabular-nums }
.shares { display: flex; flex-wrap: wrap; gap: 2px 16px; font-size: 13px; color: var(--soft); margin-bottom: 0 }
.shares b { color: var(--ink); font-variant-numeric: tabular-nums }
.tools { display: flex; flex-wrap: wrap; align-items: center; gap: 8px }
.tools h2 { margin: 0 auto 0 0 } #search { width: min(300px, 100%) }
#position { min-width: 92px; text-align: center; color: var(--soft); font-variant-numeric: tabular-nums }
.meta { display: flex; flex-wrap: wrap; gap: 4px 18px; align-items: baseline; font-size: 13px; color: var(--soft);
  margin: 14px 0 10px; padding-top: 12px; border-top: 1px solid var(--line) }
.meta b { color: var(--ink); font-family: var(--mono); overflow-wrap: anywhere }
.legend { margin-left: auto; display: flex; gap: 12px; align-items: baseline }
#text { font: 14px/1.75 var(--mono); white-space: pre-wrap; overflow-wrap: anywhere; color: var(--soft);
  max-height: 68vh; min-height: 260px; overflow-y: auto; unicode-bidi: isolate }
.t { background: var(--good-back); color: var(--good-ink); border-radius: 3px; padding: 2px 0;
  -webkit-box-decoration-break: clone; box-decoration-break: clone }
.s { color: var(--special); background: var(--special-back); font-size: 12px; border-radius: 5px; padding: 1px 5px }
.s.t { color: var(--good-ink); background: var(--good-back); box-shadow: inset 0 0 0 1.5px var(--good) }
.legend .t { padding: 1px 6px } .legend .s { margin: 0 }
.w { font: 600 11px/1 var(--sans); color: var(--good); margin: 0 4px; vertical-align: 1px }
mark { background: var(--found); color: var(--found-ink); border-radius: 2px }
.nl { opacity: .38; user-select: none }
@media (max-width: 640px) { header, main { padding: 0 16px } header { padding-top: 22px } .legend { margin-left: 0 } }
""".replace(
    "DARK",
    """--back: #131416; --panel: #1b1d20; --ink: #ece9e2; --soft: #a09b90; --line: #303338; --track: #2a2d31;
  --good: #4fc08d; --good-back: #153d2c; --good-ink: #b5f0d0; --bad: #e5845c; --rest: #6a675f;
  --special: #c5a5f0; --special-back: #2f2640; --found: #8a6a00; --found-ink: #fff3c9""",
)

SCRIPT = r"""
"use strict";
const byId = id => document.getElementById(id);
const samples = JSON.parse(byId("samples").textContent);
const texts = samples.map(sample => sample.parts.map(part => part[0]).join("").toLowerCase());
let found = samples.map((_, i) => i), at = 0;

function make(kind, className, text) {
  const node = document.createElement(kind);
  node.className = className;
  node.textContent = text;
  return node;
}

// Text is only ever put in as text. Line breaks are made visible, and so is what was searched for.
function fill(node, text, wanted) {
  const lower = text.toLowerCase(), same = lower.length === text.length;
  for (let from = 0; from < text.length;) {
    const hit = wanted && same ? lower.indexOf(wanted, from) : -1;
    const end = hit < 0 ? text.length : hit;
    text.slice(from, end).split("\n").forEach((line, i) => {
      if (i) node.append(make("span", "nl", "↵"), "\n");
      node.append(line);
    });
    if (hit >= 0) node.append(make("mark", "", text.slice(hit, hit + wanted.length)));
    from = hit < 0 ? end : hit + wanted.length;
  }
}

function show() {
  const sample = samples[found[at]], box = byId("text"), wanted = byId("search").value.toLowerCase();
  byId("position").textContent = found.length ? `${at + 1} of ${found.length}` : "none";
  byId("previous").disabled = byId("next").disabled = found.length < 2;
  box.replaceChildren();
  byId("place").textContent = sample ? sample.place : "";
  byId("counts").textContent = sample
    ? `${sample.tokens.toLocaleString("en")} tokens, ${sample.trained.toLocaleString("en")} trained` : "";
  if (!sample) { box.textContent = "Nothing found."; return; }
  let weightBefore = null;
  for (const [text, trained, special, weight] of sample.parts) {
    if (trained && weight !== null && weight !== weightBefore) box.append(make("span", "w", "×" + weight));
    weightBefore = trained ? weight : null;
    const node = make("span", (trained ? "t" : "") + (special ? " s" : ""), "");
    fill(node, text, wanted);
    box.append(node);
  }
  const first = box.querySelector("mark");
  box.scrollTop = first ? first.offsetTop - box.offsetTop - 60 : 0;
}

function turn(by) {
  if (!found.length) return;
  at = (at + by + found.length) % found.length;
  show();
}

byId("search").addEventListener("input", event => {
  const wanted = event.target.value.toLowerCase();
  found = samples.map((_, i) => i).filter(i => texts[i].includes(wanted));
  at = 0;
  show();
});
byId("previous").addEventListener("click", () => turn(-1));
byId("next").addEventListener("click", () => turn(1));
byId("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = root.dataset.theme || (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
});
addEventListener("keydown", event => {
  if (event.target === byId("search")) { if (event.key === "Enter") turn(1); return; }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "ArrowLeft") turn(-1);
  if (event.key === "ArrowRight") turn(1);
  if (event.key === "/") { event.preventDefault(); byId("search").focus(); }
});
show();
"""
