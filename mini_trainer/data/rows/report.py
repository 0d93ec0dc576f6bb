"""Counts of processed rows, their report in the terminal, progress, and the rows that refuse a data set.

Whether the rows of a data set teach the model to stop.
"""

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import nsmallest
from operator import itemgetter

import numpy as np

from mini_trainer.data.chat.conversation import DIVIDED, NORMALIZED, Remark
from mini_trainer.data.chat.linting import DOUBTS
from mini_trainer.data.chat.prompting import AS_PROMPTED, AS_RENDERED, EARLIER, UNREAD_KEY
from mini_trainer.data.columns.base import COLUMNS, DataTask, format_count
from mini_trainer.data.rows.column_names import count_column
from mini_trainer.data.rows.files import Source
from mini_trainer.data.rows.writer import TokenizedSample
from mini_trainer.distributed.messages import say, shows_progress
from mini_trainer.options import RowOptions

DROPPED = {"too_long": "dropped: too long", "nothing_trained": "dropped: nothing trained", "invalid": "invalid"}
SHOWN_SAMPLES_SEED = 42  # seed of the lots that choose the samples to show
SECONDS_PER_LINE = 10  # between progress lines without a terminal
MAX_REASON_KINDS = 200  # further kinds of reasons are counted together
MAX_REMARK_KINDS = 200  # further remarks are counted without their texts
LOST_NULLS, MISSING_CELL = "lost nulls", "missing cell"  # kinds of remarks on rows of tables
NUM_EXAMPLES = 8  # of a kind of remark
REMARKS = {  # {prompted}, {rendered}, {place}: of the most frequent remark of the kind; {all}: of each
    AS_RENDERED: "THE MODEL IS NOT TRAINED AS IT IS PROMPTED: the generation prompt ends with {prompted}, and the last"
    " answer is trained after {rendered} (see --thinking-prefix in docs/reference/data.md)",
    EARLIER: "an answer before the last is trained after {rendered}, as the template writes it there; the generation"
    " prompt ends with {prompted}",
    AS_PROMPTED: "the last answer is trained after the generation prompt's {prompted}, and begins with {rendered}"
    " (--thinking-prefix train-as-prompted)",
    LOST_NULLS: "nulls within {prompted} are left out (first {place}): Parquet also has them where a row lacks a key"
    " that others have; to keep those that a row has, write {prompted} as JSON text",
    MISSING_CELL: "cells are texts that pandas and Python print for missing values, and read as they are: {all} (first"
    " {place}); leave such cells empty if nothing is there",
    DIVIDED: "the tokenizer would merge the end of the prompt and the beginning of an answer into one token; they are"
    " encoded separately, as at inference, and all of the answer is trained on",
    NORMALIZED: "read in another form: {all} (see docs/reference/data.md)",
    **{kind: f"{said} (first {{place}}; --refuse {kind})" for kind, said in DOUBTS.items()},
}
VARIABLE_PART = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\d[\d,]*")

LEAST_SHARE = 0.5  # share of the rows that must have a trained stop token


@dataclass
class Totals:
    """Counts over rows, of a chunk or of all files; its size does not grow with the rows."""

    num_shown: int  # samples to keep for the preview
    rows: Counter[str] = field(default_factory=Counter)  # rows by outcome
    lengths: Counter[int] = field(default_factory=Counter)  # samples by number of tokens
    trained_by_role: Counter[str] = field(default_factory=Counter)  # trained tokens by role
    reasons: Counter[str] = field(default_factory=Counter)  # invalid rows by their reasons
    columns: Counter[str] = field(default_factory=Counter)  # rows by unread columns
    stops: Counter[str] = field(default_factory=Counter)  # kept rows: all, with a trained stop token, with one appended
    kinds: Counter[str] = field(default_factory=Counter)  # kept rows by the kinds of their remarks
    remarks: Counter[Remark] = field(default_factory=Counter)  # kept rows by the remarks on their answers
    places: dict[Remark, str] = field(default_factory=dict)  # of the first row with a remark
    labels: Counter[str] = field(default_factory=Counter)  # samples, or words, by their labels
    longest: tuple[int, str] = (0, "")  # the first of the longest samples: its tokens, and its place
    num_loss_counted_tokens: int = 0
    max_token_id: int = -1
    has_weights: bool = False  # whether some sample has loss weights
    # Samples, with the lots drawn for them; the lowest are kept.
    shown: list[tuple[float, TokenizedSample]] = field(default_factory=list)

    @property
    def num_samples(self) -> int:
        return self.lengths.total()

    @property
    def num_tokens(self) -> int:
        return sum(length * count for length, count in self.lengths.items())

    @property
    def samples(self) -> list[TokenizedSample]:
        return [sample for _, sample in self.shown]

    @property
    def unread_keys(self) -> dict[str, int]:
        """Rows by keys of messages that the chat template does not write, each with its message's role."""
        found = sorted((one.rendered, one.prompted, n) for one, n in self.remarks.items() if one.kind == UNREAD_KEY)
        return {f"{key} of {role}" if role else "others": num_rows for key, role, num_rows in found}

    def add_sample(self, sample: TokenizedSample, lot: float) -> None:
        self.lengths[length := len(sample.tokens.input_ids)] += 1
        self.longest = max(self.longest, (length, sample.place), key=itemgetter(0))
        self.num_loss_counted_tokens += sample.tokens.num_loss_counted_tokens
        self.max_token_id = max(self.max_token_id, max(sample.tokens.input_ids))
        self.has_weights |= sample.tokens.is_weighted
        self.shown.append((lot, sample))
        if len(self.shown) > 2 * self.num_shown:
            self.keep_shown()

    def add_invalid(self, reason: str) -> None:
        """Counts a reason, without the row's own text in it."""
        self.count_reason(VARIABLE_PART.sub("…", reason)[:200], 1)

    def count_reason(self, kind: str, count: int) -> None:
        is_known = kind in self.reasons or len(self.reasons) < MAX_REASON_KINDS
        self.reasons[kind if is_known else "other reasons"] += count

    def add_remarks(self, remarks: Iterable[Remark], place: str) -> None:
        """Counts a row's remarks."""
        self.kinds.update({remark.kind for remark in remarks})
        for remark in set(remarks):
            self.count_remark(remark, 1, place)

    def count_remark(self, remark: Remark, count: int, place: str) -> None:
        is_known = remark in self.remarks or len(self.remarks) < MAX_REMARK_KINDS
        counted = remark if is_known else Remark(remark.kind)
        self.remarks[counted] += count
        self.places.setdefault(counted, place)

    def add(self, other: "Totals") -> None:
        self.rows.update(other.rows)
        self.lengths.update(other.lengths)
        self.longest = max(self.longest, other.longest, key=itemgetter(0))
        self.trained_by_role.update(other.trained_by_role)
        for name, count in other.columns.items():
            count_column(self.columns, name, count)
        self.stops.update(other.stops)
        self.kinds.update(other.kinds)
        for remark, count in other.remarks.items():
            self.count_remark(remark, count, other.places[remark])
        self.labels.update(other.labels)
        for kind, count in other.reasons.items():
            self.count_reason(kind, count)
        self.num_loss_counted_tokens += other.num_loss_counted_tokens
        self.max_token_id = max(self.max_token_id, other.max_token_id)
        self.has_weights |= other.has_weights
        self.shown += other.shown
        self.keep_shown()

    def keep_shown(self) -> None:
        self.shown = nsmallest(self.num_shown, self.shown, key=lambda lot_and_sample: lot_and_sample[0])


def add_up(parts: Sequence[Totals]) -> Totals:
    """Sums the totals of all parts."""
    whole = Totals(parts[0].num_shown)
    for part in parts:
        whole.add(part)
    return whole


@contextmanager
def report_progress(num_bytes: int) -> Iterator[Callable[[int, int], None]]:
    """A function to call with the rows and bytes done since the last call: shows a bar, or a line every ten seconds.
    `num_bytes` is 0 if the total is not known."""
    from tqdm import tqdm

    num_rows, num_done, start = 0, 0, time.monotonic()
    next_line = start + SECONDS_PER_LINE
    bar = tqdm(total=num_bytes or None, unit="B", unit_scale=True, disable=not shows_progress())

    def advance(rows: int, done: int) -> None:
        nonlocal num_rows, num_done, next_line
        # Files are read ahead of the rows, beyond the end of a part.
        done = min(done, num_bytes - num_done) if num_bytes else done
        num_rows, num_done, now = num_rows + rows, num_done + done, time.monotonic()
        speed = f"{num_rows / (now - start):,.0f} rows/s"
        bar.set_postfix_str(speed, refresh=False)
        bar.update(done)
        if bar.disable and now >= next_line:
            left = (now - start) * (num_bytes - num_done) / max(num_done, 1)
            share = f"{num_done / num_bytes:.0%}, {speed}, {tqdm.format_interval(left)} left" if num_bytes else speed
            say(f"{num_rows:,} rows, {share}", is_error=True)
            next_line = now + SECONDS_PER_LINE

    with bar:
        yield advance


def describe_sources(sources: Sequence[Source]) -> str:
    return str(sources[0]) if len(sources) == 1 else f"{len(sources):,} files"


def print_report(totals: Totals, task: DataTask, *, seconds: float, sources: Sequence[Source]) -> None:
    """Prints rows by outcome, tokens, trained tokens or labels, and the lengths of samples."""
    rows = totals.rows
    blank = f", {rows['blank_lines']:,} blank lines" if rows["blank_lines"] else ""
    formats = ", ".join(sorted({source.format for source in sources if source.format is not None}))
    read_as = f", read as {formats}" if formats else ""
    speed = f"{rows['in'] / seconds:,.0f} rows/s"
    say(f"{describe_sources(sources)}: {rows['in']:,} rows{blank}{read_as}, {speed}")
    for key, label in {"kept": "kept", **DROPPED}.items():
        say(format_count(label, rows[key]))
    if totals.num_samples != rows["kept"]:
        say(format_count("blocks", totals.num_samples))
    say(format_count("tokens", totals.num_tokens))
    for line in COLUMNS[task.objective].report(totals, task):
        say(line)
    shares = {"shortest": 0, "5 %": 0.05, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95, "99 %": 0.99}
    lengths = [f"{name} {percentile(totals.lengths, at):,}" for name, at in shares.items()]
    say(f"  tokens per sample: {', '.join(lengths)}, longest {max(totals.lengths):,}")


def describe_lengths(totals: Totals, task: DataTask, *, model_max_length: int) -> list[str]:
    """A note on classified texts longer than the tokenizer's model_max_length; other data has no such note."""
    num_longer = sum(count for length, count in totals.lengths.items() if length > model_max_length)
    if not (COLUMNS[task.objective].has_labels and num_longer):
        return []
    return [
        f"{num_longer:,} of the samples have more than {model_max_length:,} tokens, the model's maximum according to"
        f" its tokenizer: pass --max-sample-num-tokens {model_max_length}, with --truncate to cut instead of drop them"
    ]


def describe_remarks(totals: Totals) -> list[str]:
    """A note on each kind of remark, with the number of rows that have one."""
    notes = []
    for kind, count in sorted(totals.kinds.items(), key=lambda item: (-item[1], item[0])):
        if kind == UNREAD_KEY:  # `describe_unread` names them
            continue
        own = [item for item in totals.remarks.items() if item[0].kind == kind]
        own.sort(key=lambda item: (-item[1], repr(item[0])))
        listed = [
            f"{one.rendered!r} ({one.prompted})" if one.prompted else one.rendered for one, _ in own if one.rendered
        ]
        more = f" and {len(own) - NUM_EXAMPLES} more" if len(own) > NUM_EXAMPLES else ""
        first = own[0][0]
        words = dict(prompted=repr(first.prompted), rendered=repr(first.rendered), place=totals.places[first])
        said = REMARKS[kind].format(**words, all=", ".join(listed[:NUM_EXAMPLES]) + more)
        notes.append(f"{count:,} of {totals.rows['kept']:,} rows: {said}")
    return notes


def print_sides(sides: dict[str, Totals], task: DataTask) -> None:
    """Prints each side's share of the data set, including dropped rows."""
    num_rows, has_labels = sum(totals.rows["in"] for totals in sides.values()), COLUMNS[task.objective].has_labels
    for name, totals in sides.items():
        dropped = "".join(f", {totals.rows[key]:,} {label}" for key, label in DROPPED.items() if totals.rows[key])
        trained = "" if has_labels else f", {totals.num_loss_counted_tokens:,} trained"
        say(
            f"  {name:<24}{totals.num_samples:>14,}  samples of {totals.num_tokens:,} tokens{trained};"
            f" {totals.rows['in'] / num_rows:.1%} of the rows{dropped}"
        )


def percentile(counts: Counter[int], share: float) -> int:
    """The smallest value such that at least `share` of all values do not exceed it."""
    return int(np.quantile(list(counts), share, weights=list(counts.values()), method="inverted_cdf"))


def check_stops(totals: Totals, options: RowOptions, *, stop: str | None, open_turns: Collection[str]) -> list[str]:
    """Notes on rows without a trained stop token, such as `stop`. ValueError if more than half of the rows have none
    because the chat template leaves some turns open (`open_turns`: inner, last), unless that is allowed."""
    num_rows, num_trained = totals.stops["rows"], totals.stops["trained"]
    choice = options.missing_stop_token
    if choice == "append" and not totals.stops["appended"]:
        return ["--missing-stop-token append had no effect: no row ends with a trained turn that lacks a stop token"]
    if num_trained == num_rows:
        needless = choice == "allow" and "inner" not in open_turns
        return ["--missing-stop-token allow is not needed: every row has a trained stop token"] if needless else []
    found = f"{num_trained:,} of {num_rows:,} rows have a trained stop token"
    found += f" such as {stop!r}" if stop is not None else ""
    is_enough = num_trained >= LEAST_SHARE * num_rows
    if is_enough or choice == "allow" or not open_turns:
        return [found if is_enough else f"{found}: the model may not learn to stop"]
    if choice == "append":
        raise ValueError(
            f"only {found} with --missing-stop-token append, which appends it to rows that end with a trained turn of"
            " the assistant: let more rows end with one, or pass --missing-stop-token allow instead"
        )
    raise ValueError(
        f"only {found}, so the model would not learn to stop: the chat template writes none after a conversation's last"
        " turn. Pass --missing-stop-token append to append one there and train on it, or --missing-stop-token allow to"
        " train without"
    )


def check_rejected(totals: Totals, reasons: list[tuple[str, str]], *, skip_invalid: bool) -> None:
    """Refuses invalid rows, listing the first, unless they are to be skipped."""
    if reasons and not skip_invalid:
        more = ", the first of them" if totals.rows["invalid"] > len(reasons) else ""
        skipping = ", or pass --skip-invalid to skip them" if totals.rows["invalid"] < totals.rows["in"] else ""
        raise ValueError(
            f"{totals.rows['invalid']:,} of {totals.rows['in']:,} rows cannot be used{more}:{list_below(reasons)}\n"
            f"fix them{skipping}"
        )


def list_below(reasons: list[tuple[str, str]]) -> str:
    """Lines that say each reason once, with the first row that has it and the places of the others."""
    places: dict[str, list[str]] = {}
    for place, reason in reasons:
        places.setdefault(reason, []).append(place)
    lines = []
    for reason, (first, *others) in places.items():
        lines += [f"\n  {first}: {reason}", *([f"\n    also {', '.join(others)}"] if others else [])]
    return "".join(lines)


def check_kept(
    totals: Totals, reasons: list[tuple[str, str]], *, sources: Sequence[Source], max_sample_num_tokens: int | None
) -> None:
    """Refuses a data set without samples."""
    if totals.rows["in"] == 0:
        raise ValueError(f"{describe_sources(sources)}: has no rows")
    if totals.rows["kept"] == 0:
        dropped = ", ".join(f"{totals.rows[key]:,} {label}" for key, label in DROPPED.items() if totals.rows[key])
        hint = f"; raise --max-sample-num-tokens {max_sample_num_tokens}" if totals.rows["too_long"] else ""
        hint += "; a chat needs an answer of the assistant" if totals.rows["nothing_trained"] else ""
        raise ValueError(
            f"{describe_sources(sources)}: no row is left of {totals.rows['in']:,}: {dropped}{hint}"
            f"{list_below(reasons)}"
        )
