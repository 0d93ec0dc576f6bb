"""Chats in, tokenized and label-masked data set out, with a report and two samples to look at.

    python process_data.py --input-file chats.jsonl --output-file chats.arrow --model-name-or-path M

Rows stream through: lines are read in chunks, worker processes tokenize and mask them, and results are written in the
input's order, so memory stays flat and the output does not depend on the number of processes. Everything is written
aside and renamed when whole; the sidecar OUTPUT.meta.json says what the data was made from, for which tokenizer.
"""

import hashlib
import json
import multiprocessing
import os
import platform
import random
import reprlib
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from heapq import nsmallest
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import pyarrow as pa
import pyarrow.parquet as pq

from chat_masking import (
    IGNORED,
    PRETRAIN,
    Chat,
    ChatMasker,
    Document,
    fingerprint_chat_template,
    fingerprint_tokenizer,
    load_stop_token_ids,
    split_runs,
)
from training_args import ProcessDataOptions, exit_with_message, parse_options

FORMAT_VERSION = 1
ROLES = ("system", "developer", "user", "assistant", "tool")
NOT_SUPPORTED = ("function_call",)  # left unread it would change what is trained
CHUNK_ROWS = 1000  # and so the most rows of an Arrow record batch
CHUNK_BYTES = 4 << 20  # fewer rows where they are long: a token takes a worker some hundred bytes
BYTES_PER_WORKER = 1 << 20  # with less input, one more process takes longer than it saves
NUM_REASONS_SHOWN = 10
LONGEST_REASON = 400  # characters
SECONDS_PER_LINE = 10  # of progress, where there is no terminal
NUM_SAMPLES_SHOWN = 2
SEED = 42  # of the choice of samples shown
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
DROPPED = {"too_long": "dropped: too long", "nothing_trained": "dropped: nothing trained", "invalid": "invalid"}
INTERRUPTED = 130  # what shells report for Ctrl-C

SCHEMA = pa.schema(
    {
        "input_ids": pa.list_(pa.int32()),
        "labels": pa.list_(pa.int32()),
        "len": pa.int32(),
        "num_loss_counted_tokens": pa.int32(),
    }
)

Chunk = list[tuple[int, bytes]]  # line numbers, from 1, and lines


@dataclass(frozen=True)
class Sample:
    """A row that was tokenized. `labels` are unshifted, IGNORED where not trained."""

    line_number: int
    input_ids: list[int]
    labels: list[int]

    @cached_property
    def num_loss_counted_tokens(self) -> int:
        """Targets: the labels that some token comes before, so never the one at position 0."""
        return len(self.labels) - 1 - self.labels[1:].count(IGNORED)


@dataclass
class Totals:
    """Counts over rows, of a chunk or of the whole file; its size does not grow with the rows."""

    rows: Counter[str] = field(default_factory=Counter)  # by what became of them
    lengths: Counter[int] = field(default_factory=Counter)  # samples by number of tokens
    num_loss_counted_tokens: int = 0
    max_token_id: int = -1
    shown: list[tuple[float, Sample]] = field(default_factory=list)  # with the lots drawn; the lowest stay

    @property
    def num_tokens(self) -> int:
        return sum(length * count for length, count in self.lengths.items())

    def add_sample(self, sample: Sample, lot: float) -> None:
        self.rows["kept"] += 1
        self.lengths[len(sample.input_ids)] += 1
        self.num_loss_counted_tokens += sample.num_loss_counted_tokens
        self.max_token_id = max(self.max_token_id, max(sample.input_ids))
        self.show([(lot, sample)])

    def add(self, other: "Totals") -> None:
        self.rows.update(other.rows)
        self.lengths.update(other.lengths)
        self.num_loss_counted_tokens += other.num_loss_counted_tokens
        self.max_token_id = max(self.max_token_id, other.max_token_id)
        self.show(other.shown)

    def show(self, drawn: list[tuple[float, Sample]]) -> None:
        self.shown = nsmallest(NUM_SAMPLES_SHOWN, self.shown + drawn, key=lambda lot_and_sample: lot_and_sample[0])


@dataclass(frozen=True)
class ChunkResult:
    """What a worker makes of a chunk."""

    payload: pa.RecordBatch | bytes  # the samples, in the output's format
    totals: Totals
    rejected: dict[int, str]  # line number -> reason


ProcessChunk = Callable[[Chunk], ChunkResult]


def process_data(options: ProcessDataOptions) -> None:
    """Writes the data set and its sidecar, prints the report. Raises ValueError or OSError for what a user can mend."""
    source, output = Path(options.input_file), Path(options.output_file)
    sidecar, rejected = output.with_name(f"{output.name}.meta.json"), output.with_name(f"{output.stem}.rejected.jsonl")
    check_paths(source, written=[output, sidecar, rejected])
    tokenizer = load_tokenizer(options.model_name_or_path)
    masker = ChatMasker(tokenizer, stop_token_ids=load_stop_token_ids(options.model_name_or_path))
    if masker.tokenizer.chat_template is not None:  # without one, pretraining text can still be tokenized
        for note in masker.check_template():
            print(f"note: {note}")
    process = partial(
        process_chunk, masker=masker, file_format=output.suffix, max_sample_num_tokens=options.max_sample_num_tokens
    )
    num_bytes, digest, start = source.stat().st_size, hashlib.sha256(), time.perf_counter()
    with written_aside([rejected, sidecar, output]) as (rejected_aside, sidecar_aside, output_aside):
        chunks = read_chunks(source, digest)
        results = run_in_order(process, chunks, num_workers=min(options.num_proc, 1 + num_bytes // BYTES_PER_WORKER))
        with (
            closing(results),
            open_writer(output_aside, output.suffix) as write,
            open(rejected_aside, "wb") as rejected_rows,
            report_progress(num_bytes) as advance,
        ):
            totals, reasons = write_results(results, write=write, rejected_rows=rejected_rows, advance=advance)
        check_totals(totals, reasons, source=source, skip_invalid=options.skip_invalid)
        if not reasons:
            rejected_aside.unlink()
        description = describe(totals, options=options, tokenizer=masker.tokenizer, sha256=digest.hexdigest())
        sidecar_aside.write_text(json.dumps(description, indent=2) + "\n")
    print_report(totals, seconds=time.perf_counter() - start, source=source, output=output)
    if reasons:
        print(f"rejected rows, with reasons: {rejected}")
    for sample in [sample for _, sample in totals.shown]:
        print_sample(sample, masker.tokenizer, mask=options.string_for_printing_masks)


def check_paths(source: Path, *, written: list[Path]) -> None:
    """Refuses what would fail or destroy something after the work."""
    if not source.is_file():
        raise ValueError(f"--input-file {source}: {'is a directory' if source.is_dir() else 'no such file'}")
    output = written[0]
    if not output.parent.is_dir():
        raise ValueError(f"--output-file {output}: there is no directory {output.parent}; create it first")
    for path in written:
        if path.is_dir():
            raise ValueError(f"--output-file {output}: {path} is a directory")
        if path.exists() and path.samefile(source):
            raise ValueError(f"--output-file {output}: would overwrite the input {source}; choose another name")


def load_tokenizer(model_name_or_path: str) -> Any:
    """The model's tokenizer as transformers loads it."""
    from transformers import AutoTokenizer  # seconds to import, which --help and mistyped flags do not need

    try:
        return AutoTokenizer.from_pretrained(model_name_or_path)
    except Exception as error:  # reads files of any origin, and the network
        raise ValueError(f"--model-name-or-path {model_name_or_path}: no tokenizer: {one_line(error)}") from None


@contextmanager
def written_aside(targets: list[Path]) -> Iterator[list[Path]]:
    """Hidden names beside `targets` to write to. They take the targets' places, in order, when the block ends well;
    a target that was not written is removed, as it would belong to an older run. Otherwise nothing is left."""
    asides = [target.with_name(f".{target.name}.{os.getpid()}.part") for target in targets]
    try:
        yield asides
        for aside, target in zip(asides, targets, strict=True):
            if aside.exists():
                aside.replace(target)
            else:
                target.unlink(missing_ok=True)
    finally:
        for aside in asides:
            aside.unlink(missing_ok=True)


@contextmanager
def open_writer(path: Path, file_format: str) -> Iterator[Callable[[Any], Any]]:
    """A function that appends a payload of `encode_samples`."""
    if file_format == ".jsonl":
        with open(path, "wb") as file:
            yield file.write
    elif file_format == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
            yield writer.write_batch
    else:
        with pq.ParquetWriter(path, SCHEMA) as writer:
            yield writer.write_batch


@contextmanager
def report_progress(num_bytes: int) -> Iterator[Callable[[int, int], None]]:
    """A function to call with the rows and bytes done since the last call: a bar, or a line every ten seconds."""
    from tqdm import tqdm

    num_rows, num_done, start = 0, 0, time.monotonic()
    next_line = start + SECONDS_PER_LINE
    bar = tqdm(total=num_bytes, unit="B", unit_scale=True, disable=not sys.stderr.isatty())

    def advance(rows: int, done: int) -> None:
        nonlocal num_rows, num_done, next_line
        num_rows, num_done, now = num_rows + rows, num_done + done, time.monotonic()
        speed = f"{num_rows / (now - start):,.0f} rows/s"
        bar.set_postfix_str(speed, refresh=False)
        bar.update(done)
        if bar.disable and now >= next_line:
            print(f"{num_rows:,} rows, {num_done / num_bytes:.0%}, {speed}", file=sys.stderr, flush=True)
            next_line = now + SECONDS_PER_LINE

    with bar:
        yield advance


def read_chunks(source: Path, digest: Any) -> Iterator[Chunk]:
    """The file's lines in chunks; `digest` takes in every byte. Lines end at line feeds and nothing else."""
    chunk: Chunk = []
    num_bytes = 0
    with open(source, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            digest.update(line)
            chunk.append((number, line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line))
            num_bytes += len(line)
            if len(chunk) == CHUNK_ROWS or num_bytes >= CHUNK_BYTES:
                yield chunk
                chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def run_in_order(
    process: ProcessChunk, chunks: Iterable[Chunk], *, num_workers: int
) -> Iterator[tuple[Chunk, ChunkResult]]:
    """Chunks and their results, in order, by `num_workers` processes, or in this one if that is 1."""
    if num_workers == 1:
        yield from ((chunk, process(chunk)) for chunk in chunks)
        return
    pool = ProcessPoolExecutor(
        num_workers,
        # forked workers share the tokenizer that is already loaded; elsewhere than on Linux forking is not safe
        mp_context=multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn"),
        initializer=start_worker,
        initargs=(process,),
    )
    pending: deque[tuple[Chunk, Future[ChunkResult]]] = deque()
    try:
        for chunk in chunks:
            pending.append((chunk, pool.submit(run_in_worker, chunk)))
            if len(pending) > 2 * num_workers:  # enough to keep all busy; more would only fill memory
                chunk, future = pending.popleft()
                yield chunk, future.result()
        for chunk, future in pending:
            yield chunk, future.result()
    except BrokenProcessPool:
        raise ValueError(
            "a worker process was killed, perhaps for want of memory: nothing was written; try a smaller --num-proc"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def start_worker(process: ProcessChunk) -> None:
    """Called once in each worker. The parent alone hears Ctrl-C, and ends the workers; they end with it."""
    global process_in_worker
    process_in_worker = process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """A parent that is killed cannot end its workers, which would wait for chunks for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def run_in_worker(chunk: Chunk) -> ChunkResult:
    return process_in_worker(chunk)


def process_chunk(
    chunk: Chunk, *, masker: ChatMasker, file_format: str, max_sample_num_tokens: int | None
) -> ChunkResult:
    """Reads, tokenizes and masks the rows of a chunk. Raises ValueError for what is wrong with more than a row."""
    totals, rejected, chats = Totals(), {}, {}
    for number, line in chunk:
        if not line.strip():
            totals.rows["blank_lines"] += 1
            continue
        totals.rows["in"] += 1
        try:
            chats[number] = read_chat(line)
        except ValueError as error:
            rejected[number] = one_line(error)
    samples = []
    draw = random.Random(f"{SEED} {chunk[0][0]}").random
    for number, masked in zip(chats, masker.mask(list(chats.values())), strict=True):
        if isinstance(masked, ValueError):
            rejected[number] = one_line(masked)
            continue
        sample = Sample(number, masked.input_ids, masked.labels)
        if max_sample_num_tokens is not None and len(sample.input_ids) > max_sample_num_tokens:
            totals.rows["too_long"] += 1
        elif sample.num_loss_counted_tokens == 0:
            totals.rows["nothing_trained"] += 1
        else:
            totals.add_sample(sample, draw())
            samples.append(sample)
    totals.rows["invalid"] += len(rejected)
    return ChunkResult(encode_samples(samples, file_format), totals, rejected)


def encode_samples(samples: list[Sample], file_format: str) -> pa.RecordBatch | bytes:
    """The samples as SCHEMA says: an Arrow record batch, or JSON lines."""
    columns = {
        "input_ids": [sample.input_ids for sample in samples],
        "labels": [sample.labels for sample in samples],
        "len": [len(sample.input_ids) for sample in samples],
        "num_loss_counted_tokens": [sample.num_loss_counted_tokens for sample in samples],
    }
    if file_format != ".jsonl":
        return pa.RecordBatch.from_pydict(columns, schema=SCHEMA)
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write_results(
    results: Iterable[tuple[Chunk, ChunkResult]],
    *,
    write: Callable[[Any], Any],
    rejected_rows: BinaryIO,
    advance: Callable[[int, int], None],
) -> tuple[Totals, list[str]]:
    """Writes samples and rejected rows as they come. Returns the sums, and the first reasons with line numbers."""
    totals, reasons = Totals(), []
    for chunk, result in results:
        if result.totals.rows["kept"]:
            write(result.payload)
        totals.add(result.totals)
        lines = dict(chunk) if result.rejected else {}
        for number, reason in sorted(result.rejected.items()):
            row = {
                "line": number,
                "reason": reason,
                "row": lines[number].decode(errors="backslashreplace").rstrip("\r\n"),
            }
            rejected_rows.write(json.dumps(row).encode() + b"\n")
            if len(reasons) < NUM_REASONS_SHOWN:
                reasons.append(f"{number}: {reason}")
        advance(len(chunk), sum(len(line) for _, line in chunk))
    return totals, reasons


def check_totals(totals: Totals, reasons: list[str], *, source: Path, skip_invalid: bool) -> None:
    """Refuses invalid rows, shown with their lines, unless they are to be skipped; and a data set without samples."""
    shown = "".join(f"\n  {source.name}:{reason}" for reason in reasons)
    if reasons and not skip_invalid:
        more = ", the first of them" if totals.rows["invalid"] > len(reasons) else ""
        raise ValueError(
            f"{totals.rows['invalid']:,} of {totals.rows['in']:,} rows cannot be used{more}:{shown}\n"
            "mend them, or add --skip-invalid to go on without them"
        )
    if totals.rows["in"] == 0:
        raise ValueError(f"--input-file {source}: has no rows")
    if totals.rows["kept"] == 0:
        dropped = ", ".join(f"{totals.rows[key]:,} {label}" for key, label in DROPPED.items() if totals.rows[key])
        raise ValueError(f"--input-file {source}: no row is left of {totals.rows['in']:,}: {dropped}{shown}")


def read_chat(line: bytes) -> Chat | Document:
    """A line of messages JSONL. Raises ValueError with the reason if it cannot be used."""
    try:
        row = STRICT_JSON.decode(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8: {error.object[error.start : error.end]!r} at byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError(f"expected an object with 'messages', got {quote(row)}")
    messages, unmask = row.get("messages"), row.get("unmask")
    if not isinstance(messages, list) or not messages:
        raise ValueError("'messages' has to be a list of at least one message")
    if not isinstance(unmask, bool | None):
        raise ValueError(f"'unmask' is {quote(unmask)}, allowed: true, false")
    if not isinstance(row.get("tools"), list | None):
        raise ValueError(f"'tools' is {quote(row['tools'])}, expected a list")
    is_document = len(messages) == 1  # a 'pretrain' message stands alone
    for number, message in enumerate(messages, start=1):
        check_message(message, number, roles=(*ROLES, PRETRAIN) if is_document else ROLES)
    if messages[0]["role"] == PRETRAIN:
        return Document(messages[0]["content"])
    return Chat(messages, unmask=bool(unmask), tools=row.get("tools") or None)


def check_message(message: Any, number: int, *, roles: tuple[str, ...]) -> None:
    """Raises ValueError for a message that is no message, or that says more than can be honoured."""
    if not isinstance(message, dict):
        raise ValueError(f"message {number} is {quote(message)}, expected an object with 'role' and 'content'")
    role, content = message.get("role"), message.get("content")
    if role not in roles:
        alone = " ('pretrain' only as a row's single message)" if role == PRETRAIN else ""
        raise ValueError(f"message {number} has the role {quote(role)}, allowed: {', '.join(roles)}{alone}")
    calls = message.get("tool_calls")
    if not isinstance(calls, list | None) or (calls and role != "assistant"):
        raise ValueError(f"message {number} ({role}) has the tool calls {quote(calls)}, expected an assistant's list")
    if not (calls and content in (None, "")) and (not isinstance(content, str) or not content.strip()):
        raise ValueError(f"message {number} ({role}) has the content {quote(content)}, expected text")
    for key in NOT_SUPPORTED:
        if message.get(key) is not None:
            raise ValueError(f"message {number} ({role}) has {key!r}, which is not supported")


def refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of two values of one key, readers disagree which one counts."""
    values = dict(pairs)
    if len(values) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"not JSON that can be relied on: the key {quote(key)} is there twice")
    return values


def refuse_constant(name: str) -> None:
    raise ValueError(f"not JSON: {name} is no JSON number")


STRICT_JSON = json.JSONDecoder(object_pairs_hook=refuse_repeated_keys, parse_constant=refuse_constant)


def quote(value: Any) -> str:
    """A value as it is shown in a message: on one line, and short."""
    return "missing or null" if value is None else reprlib.repr(value)


def one_line(error: Exception) -> str:
    """What an error says, on one line and not too long: templates and libraries can say pages."""
    text = " ".join(str(error).split())
    return text if len(text) <= LONGEST_REASON else text[:LONGEST_REASON] + " ..."


def describe(totals: Totals, *, options: ProcessDataOptions, tokenizer: Any, sha256: str) -> dict[str, Any]:
    """The sidecar: what the data was made from, how, and for which tokenizer. The same for every --num-proc."""
    import tokenizers
    import transformers

    model = Path(options.model_name_or_path)
    return {
        "format_version": FORMAT_VERSION,
        "tokenizer_fingerprint": fingerprint_tokenizer(tokenizer),
        "chat_template_fingerprint": fingerprint_chat_template(tokenizer),
        "max_token_id": totals.max_token_id,
        "num_samples": totals.rows["kept"],
        "num_tokens": totals.num_tokens,
        "num_loss_counted_tokens": totals.num_loss_counted_tokens,
        "max_len": max(totals.lengths),
        "rows": {key: totals.rows[key] for key in ("blank_lines", "in", "kept", *DROPPED)},
        "source": {"file": Path(options.input_file).name, "sha256": sha256},
        "options": {
            "model_name_or_path": model.resolve().name if model.is_dir() else options.model_name_or_path,
            "max_sample_num_tokens": options.max_sample_num_tokens,
            "skip_invalid": options.skip_invalid,
        },
        "versions": {
            "python": platform.python_version(),
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }


def print_report(totals: Totals, *, seconds: float, source: Path, output: Path) -> None:
    """Rows by what became of them, tokens, the share that is trained, and how long the samples are."""
    rows, share = totals.rows, totals.num_loss_counted_tokens / totals.num_tokens
    blank = f", {rows['blank_lines']:,} blank lines" if rows["blank_lines"] else ""
    print(f"{source}: {rows['in']:,} rows{blank}, {rows['in'] / seconds:,.0f} rows/s")
    for key, label in {"kept": "kept", **DROPPED}.items():
        print(f"  {label:<24}{rows[key]:>14,}")
    print(f"  {'tokens':<24}{totals.num_tokens:>14,}")
    print(f"  {'trained tokens':<24}{totals.num_loss_counted_tokens:>14,}  {share:.1%}")
    shares = {"shortest": 0, "5 %": 0.05, "25 %": 0.25, "median": 0.5, "75 %": 0.75, "95 %": 0.95, "99 %": 0.99}
    lengths = [f"{name} {percentile(totals.lengths, at):,}" for name, at in shares.items()]
    print(f"  tokens per sample: {', '.join(lengths)}, longest {max(totals.lengths):,}")
    print(f"wrote {output} and {output.name}.meta.json")


def percentile(counts: Counter[int], share: float) -> int:
    """The smallest value that is not exceeded by at least `share` of all."""
    needed = share * counts.total()
    for value in sorted(counts):
        needed -= counts[value]
        if needed <= 0:
            return value
    raise AssertionError(f"{share} of {counts.total()} values")


def print_sample(sample: Sample, tokenizer: Any, *, mask: str) -> None:
    """The sample's text, and the same with `mask` for each run of tokens that are not trained."""
    runs = split_runs(sample.input_ids, sample.labels)
    trained = "".join(tokenizer.decode(ids) if is_trained else mask for ids, is_trained in runs)
    num_tokens = f"{len(sample.input_ids):,} tokens, {sample.num_loss_counted_tokens:,} trained"
    print(f"\n--- line {sample.line_number}: {num_tokens}\n{tokenizer.decode(sample.input_ids)}")
    print(f"--- line {sample.line_number}: trained, with {mask} for the rest\n{trained}")


def raise_interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def main() -> None:
    options = parse_options(ProcessDataOptions)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # --num-proc says how many cores are used
    signal.signal(signal.SIGTERM, raise_interrupt)
    sys.stdout.reconfigure(errors="backslashreplace")  # samples can hold what the terminal cannot show
    try:
        process_data(options)
    except (ValueError, OSError) as error:
        exit_with_message(str(error))
    except KeyboardInterrupt:
        exit_with_message("interrupted; what was unfinished is removed", code=INTERRUPTED)


if __name__ == "__main__":
    main()
