"""Chats, completions or documents in, tokenized and label-masked data set out, with a report and samples to look at.

    python process_data.py --input-file chats.jsonl --output-file chats.arrow --model-name-or-path M

Rows stream through: files are read in chunks, worker processes tokenize and mask them, and results are written in the
input's order, so memory stays flat and the output does not depend on the number of processes. Everything is written
aside and renamed when whole; the sidecar OUTPUT.meta.json says what the data was made from, for which tokenizer.
"""

import json
import os
import platform
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from chat.masking import (
    ChatMasker,
    Document,
    fingerprint_chat_template,
    fingerprint_tokenizer,
    load_stop_token_ids,
)
from chat.templates import change_tokenizer, load_tokenizer
from command_line import exit_with_message, parse_options
from corpus.files import Chunk, Row, Source, TooLong, find_sources, iterate_rows, read_chunks
from corpus.formats import detect_format, one_line, read_examples
from corpus.preview import NUM_PAGE_SAMPLES, print_samples, write_page
from corpus.report import DROPPED, Totals, describe_sources, print_report, report_progress
from corpus.worker_pool import run_in_order
from corpus.writer import BlockCutter, Outputs, Payload, Sample, SampleWriter, encode_samples
from disk import written_aside
from model.files import find_model
from options import ProcessDataOptions
from ranks.ending import ExitCode

FORMAT_VERSION = 2
BYTES_PER_WORKER = 1 << 20  # with less input, one more process takes longer than it saves
NUM_REASONS_SHOWN = 10
SEED = 42  # of the choice of samples shown

interrupted = threading.Event()  # set by the handler of Ctrl-C and SIGTERM


@dataclass(frozen=True)
class Task:
    """A chunk, and what its rows should be; None as long as no row of the file has shown it."""

    chunk: Chunk
    data_format: str | None


@dataclass(frozen=True)
class ChunkResult:
    """What a worker makes of a chunk."""

    payload: Payload | np.ndarray  # the samples, in the output's format; where they are cut later, their token ids
    has_weights: bool
    totals: Totals
    rejected: dict[int, str]  # number of the row -> reason


def process_data(options: ProcessDataOptions) -> None:
    """Writes the data set and its sidecar, prints the report. Raises ValueError or OSError for what a user can mend."""
    sources = find_sources(options.input_file)
    outputs = Outputs(Path(options.output_file), None if options.preview_html is None else Path(options.preview_html))
    outputs.check([source.path for source in sources])
    model_dir = find_model(
        options.model_name_or_path, revision=options.model_revision, trust_remote_code=options.trust_remote_code
    )
    tokenizer, added_tokens = prepare_tokenizer(options, model_dir)
    masker = ChatMasker(
        tokenizer,
        stop_token_ids=load_stop_token_ids(model_dir),
        allow_missing_stop_token=options.allow_missing_stop_token,
    )
    notes = check_template(masker, options)
    start = time.perf_counter()
    with written_aside(*outputs.in_order) as asides:
        aside = dict(zip(outputs.in_order, asides, strict=True))
        with open(aside[outputs.rejected], "wb") as rejected_rows:
            totals, reasons, has_weights = write_data(
                aside[outputs.data], sources=sources, masker=masker, options=options, rejected_rows=rejected_rows
            )
        check_interrupt()
        check_totals(totals, reasons, sources=sources, skip_invalid=options.skip_invalid)
        if not reasons:
            aside[outputs.rejected].unlink()
        if changes_tokenizer(options):
            tokenizer.save_pretrained(aside[outputs.tokenizer])
        sidecar = describe(totals, options=options, sources=sources, masker=masker)
        sidecar |= {"has_loss_weights": has_weights, "added_special_tokens": added_tokens}
        sidecar |= {"tokenizer_dir": outputs.tokenizer.name if changes_tokenizer(options) else None}
        aside[outputs.sidecar].write_text(json.dumps(sidecar, indent=2) + "\n")
        if outputs.page is not None:
            title = sources[0].name if len(sources) == 1 else describe_sources(sources)
            write_page(aside[outputs.page], totals, tokenizer=tokenizer, title=title)
    print_report(totals, seconds=time.perf_counter() - start, sources=sources)
    for note in notes:
        print(f"note: {note}")
    print_outputs(outputs, added_tokens=added_tokens)
    print_samples(totals.samples[: options.preview], tokenizer, mask=options.string_for_printing_masks)


def changes_tokenizer(options: ProcessDataOptions) -> bool:
    return options.chat_template is not None or bool(options.add_special_tokens)


def prepare_tokenizer(options: ProcessDataOptions, model_dir: str) -> tuple[Any, dict[str, int]]:
    """The model's tokenizer, changed as the options say, and the entries its vocabulary did not have."""
    tokenizer = load_tokenizer(model_dir, trust_remote_code=options.trust_remote_code)
    if not changes_tokenizer(options):
        return tokenizer, {}
    added = change_tokenizer(tokenizer, template=options.chat_template, special_tokens=options.add_special_tokens)
    return tokenizer, added


def check_template(masker: ChatMasker, options: ProcessDataOptions) -> list[str]:
    """What there is to know about the template. Without one, what is no chat can still be tokenized."""
    if masker.tokenizer.chat_template is not None:
        given = options.chat_template
        return masker.check_template("the model's chat template" if given is None else f"--chat-template {given}")
    if options.allow_missing_stop_token:
        raise ValueError("--allow-missing-stop-token has no effect: the tokenizer has no chat template")
    return []


def write_data(
    path: Path,
    *,
    sources: Sequence[Source],
    masker: ChatMasker,
    options: ProcessDataOptions,
    rejected_rows: BinaryIO,
) -> tuple[Totals, list[str], bool]:
    """Writes samples and rejected rows as they come. Returns the sums, the first reasons, and if there are weights."""
    ending = Path(options.output_file).suffix
    process = partial(
        process_chunk,
        masker=masker,
        ending=ending,
        num_shown=num_samples_shown(options),
        format_is_given=options.format is not None,
        max_sample_num_tokens=options.max_sample_num_tokens,
        cuts_blocks=options.block_size is not None,
    )
    num_bytes = sum(source.num_bytes for source in sources)
    num_workers = min(options.num_proc, 1 + num_bytes // BYTES_PER_WORKER)
    totals, reasons = Totals(num_samples_shown(options)), []
    with (
        closing(run_in_order(process, read_tasks(sources, options.format), num_workers=num_workers)) as results,
        closing(SampleWriter(path, ending)) as writer,
        report_progress(num_bytes) as advance,
    ):
        write_blocks = None
        if options.block_size is not None:
            cutter = BlockCutter(options.block_size, masker.tokenizer.eos_token_id)
            write_blocks = partial(cut_and_write, cutter=cutter, writer=writer, totals=totals, ending=ending)
        for task, result in results:
            check_interrupt()
            totals.add(result.totals)
            if write_blocks is not None:
                write_blocks(result.payload)
            elif result.totals.rows["kept"]:
                writer.write(result.payload, has_weights=result.has_weights)
            new_reasons = write_rejected(task.chunk, result.rejected, file=rejected_rows)
            reasons += new_reasons[: NUM_REASONS_SHOWN - len(reasons)]
            advance(result.totals.rows["in"], task.chunk.num_bytes)
        if write_blocks is not None:
            write_blocks(np.empty(0, np.int32), is_last=True)
        return totals, reasons, writer.has_weights


def num_samples_shown(options: ProcessDataOptions) -> int:
    return max(options.preview, NUM_PAGE_SAMPLES if options.preview_html is not None else 0)


def read_tasks(sources: Sequence[Source], data_format: str | None) -> Iterator[Task]:
    """The chunks of all files, with the format that was given, or that the file's first row shows."""
    for source in sources:
        source.format = data_format
        for chunk in read_chunks(source):
            if source.format is None:
                source.format = detect_format(chunk)
            yield Task(chunk, source.format)


def process_chunk(
    task: Task,
    *,
    masker: ChatMasker,
    ending: str,
    num_shown: int,
    format_is_given: bool,
    max_sample_num_tokens: int | None,
    cuts_blocks: bool,
) -> ChunkResult:
    """Reads, tokenizes and masks the rows of a chunk. Raises ValueError for what is wrong with more than a row."""
    chunk, totals, rejected = task.chunk, Totals(num_shown), {}
    rows, examples = [], []
    for row, example in read_examples(chunk, task.data_format, is_given=format_is_given):
        totals.rows["blank_lines" if example is None else "in"] += 1
        if cuts_blocks and not isinstance(example, Document | ValueError | None):
            example = ValueError("no document: --block-size cuts documents, and nothing else")
        if isinstance(example, ValueError):
            rejected[row.number] = one_line(example)
        elif example is not None:
            rows.append(row)
            examples.append(example)
    samples = []
    draw = random.Random(f"{SEED} {chunk.file} {chunk.first_row}").random
    for row, tokens in zip(rows, masker.mask(examples), strict=True):
        if isinstance(tokens, ValueError):
            rejected[row.number] = one_line(tokens)
            continue
        num_targets = tokens.num_loss_counted_tokens
        if max_sample_num_tokens is not None and len(tokens.input_ids) > max_sample_num_tokens:
            totals.rows["too_long"] += 1
        elif num_targets == 0:
            totals.rows["nothing_trained"] += 1
        else:
            totals.rows["kept"] += 1
            for span in tokens.spans:
                totals.trained_by_role[span.role] += span.num_targets
            sample = Sample(f"{chunk.file}:{row.place}", tokens)
            samples.append(sample)
            if not cuts_blocks:
                totals.add_sample(sample, draw())
    for reason in rejected.values():
        totals.add_invalid(reason)
    totals.rows["invalid"] += len(rejected)
    has_weights = any(sample.tokens.is_weighted for sample in samples)
    if cuts_blocks:
        payload = np.array([token for sample in samples for token in sample.tokens.input_ids], np.int32)
    else:
        payload = encode_samples(samples, ending, has_weights=has_weights)
    return ChunkResult(payload, has_weights, totals, rejected)


def cut_and_write(
    ids: np.ndarray, *, cutter: BlockCutter, writer: SampleWriter, totals: Totals, ending: str, is_last: bool = False
) -> None:
    """Writes the blocks that are full now."""
    blocks = cutter.cut(ids, is_last=is_last)
    for block in blocks:
        totals.add_sample(block, random.Random(f"{SEED} {block.place}").random())
    if blocks:
        writer.write(encode_samples(blocks, ending, has_weights=False), has_weights=False)


def write_rejected(chunk: Chunk, rejected: dict[int, str], *, file: BinaryIO) -> list[str]:
    """Writes the rows with their reasons, and returns these with their places."""
    rows = [row for row in iterate_rows(chunk) if row.number in rejected] if rejected else []
    for row in rows:
        entry = {"file": chunk.file, "line": row.line, "reason": rejected[row.number], "row": show_row(row)}
        file.write(json.dumps(entry).encode() + b"\n")
    return [f"{chunk.file}:{row.place}: {rejected[row.number]}" for row in rows]


def show_row(row: Row) -> str:
    """The row as text; of one that was passed over, the beginning."""
    if isinstance(row.value, dict):
        return json.dumps(row.value, default=repr)
    raw = row.value.beginning + b"..." if isinstance(row.value, TooLong) else row.value
    return raw.decode(errors="backslashreplace").rstrip("\r\n")


def check_totals(totals: Totals, reasons: list[str], *, sources: Sequence[Source], skip_invalid: bool) -> None:
    """Refuses invalid rows, shown with their lines, unless they are to be skipped; and a data set without samples."""
    shown, where = "".join(f"\n  {reason}" for reason in reasons), f"--input-file {describe_sources(sources)}"
    if reasons and not skip_invalid:
        more = ", the first of them" if totals.rows["invalid"] > len(reasons) else ""
        raise ValueError(
            f"{totals.rows['invalid']:,} of {totals.rows['in']:,} rows cannot be used{more}:{shown}\n"
            "mend them, or add --skip-invalid to go on without them"
        )
    if totals.rows["in"] == 0:
        raise ValueError(f"{where}: has no rows")
    if totals.rows["kept"] == 0:
        dropped = ", ".join(f"{totals.rows[key]:,} {label}" for key, label in DROPPED.items() if totals.rows[key])
        raise ValueError(f"{where}: no row is left of {totals.rows['in']:,}: {dropped}{shown}")


def describe(
    totals: Totals, *, options: ProcessDataOptions, sources: Sequence[Source], masker: ChatMasker
) -> dict[str, Any]:
    """The sidecar: what the data was made from, how, and for which tokenizer. The same for every --num-proc."""
    import tokenizers
    import transformers

    model = Path(options.model_name_or_path)
    named = None if options.chat_template is None else Path(options.chat_template).name
    return {
        "format_version": FORMAT_VERSION,
        "tokenizer_fingerprint": fingerprint_tokenizer(masker.tokenizer),
        "chat_template_fingerprint": fingerprint_chat_template(masker.tokenizer),
        "stop_token_id": masker.find_stop_token(),
        "max_token_id": totals.max_token_id,
        "num_samples": totals.num_samples,
        "num_tokens": totals.num_tokens,
        "num_loss_counted_tokens": totals.num_loss_counted_tokens,
        "num_trained_by_role": dict(sorted(totals.trained_by_role.items())),
        "max_len": max(totals.lengths),
        "rows": {key: totals.rows[key] for key in ("blank_lines", "in", "kept", *DROPPED)},
        "sources": [{"file": source.name, "format": source.format, "sha256": source.sha256} for source in sources],
        "options": {
            "model_name_or_path": model.resolve().name if model.is_dir() else options.model_name_or_path,
            "format": options.format,
            "chat_template": named,
            "add_special_tokens": list(options.add_special_tokens),
            "max_sample_num_tokens": options.max_sample_num_tokens,
            "block_size": options.block_size,
            "skip_invalid": options.skip_invalid,
            "allow_missing_stop_token": options.allow_missing_stop_token,
        },
        "versions": {
            "python": platform.python_version(),
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }


def print_outputs(outputs: Outputs, *, added_tokens: dict[str, int]) -> None:
    print(f"wrote {outputs.data} and {outputs.sidecar.name}")
    if outputs.rejected.exists():
        print(f"rejected rows, with reasons: {outputs.rejected}")
    if outputs.tokenizer.exists():
        added = ", ".join(f"{token} (id {token_id})" for token, token_id in added_tokens.items())
        print(f"tokenizer, which training uses: {outputs.tokenizer}; added to its vocabulary: {added or 'nothing'}")
    if outputs.page is not None:
        print(f"page to look at: {outputs.page}")


def raise_interrupt(*_: object) -> NoReturn:
    interrupted.set()
    raise KeyboardInterrupt


def check_interrupt() -> None:
    """Raises what a signal's handler raised in vain: in a finalizer or another callback, Python only prints it."""
    if interrupted.is_set():
        raise KeyboardInterrupt


def main() -> None:
    options = parse_options(ProcessDataOptions)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # --num-proc says how many cores are used
    signal.signal(signal.SIGINT, raise_interrupt)
    signal.signal(signal.SIGTERM, raise_interrupt)
    sys.stdout.reconfigure(errors="backslashreplace")  # samples can hold what the terminal cannot show
    try:
        process_data(options)
    except ValueError as error:
        exit_with_message(str(error))
    except OSError as error:
        exit_with_message(f"--output-file {options.output_file}: cannot be written whole, nothing is left: {error}")
    except KeyboardInterrupt:
        exit_with_message("interrupted; what was unfinished is removed", code=ExitCode.INTERRUPTED)


if __name__ == "__main__":
    main()
