"""Chats, completions or documents in, tokenized and label-masked data set out, with a report and samples to look at.

    python process_data.py --input-file chats.jsonl --output-file chats.arrow --model-name-or-path M

Rows stream through: files are read in chunks, worker processes tokenize and mask them, and results are written in the
input's order, so memory stays flat and the output does not depend on the number of processes. Everything is written
aside and renamed when whole; the sidecar OUTPUT.meta.json says what the data was made from, for which tokenizer.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from chat.masking import ChatMasker, load_stop_token_ids
from chat.templates import change_tokenizer, load_tokenizer
from command_line import exit_with_message, parse_options
from corpus.files import Source, find_sources
from corpus.preview import NUM_PAGE_SAMPLES, print_samples, write_page
from corpus.report import DROPPED, Totals, describe_sources, print_report, report_progress
from corpus.rows import count_blocks, process_chunk, read_formatted_chunks, write_rejected
from corpus.sidecar import describe_data_set
from corpus.worker_pool import run_in_order
from corpus.writer import BlockCutter, Outputs, encode_samples, open_output
from disk import written_aside
from model.files import find_model
from options import ProcessDataOptions
from ranks.ending import ExitCode

BYTES_PER_WORKER = 1 << 20  # with less input, one more process takes longer than it saves
NUM_REASONS_SHOWN = 10

interrupted = threading.Event()  # set by the handler of Ctrl-C and SIGTERM


def process_data(options: ProcessDataOptions) -> None:
    """Writes the data set and its sidecar, prints the report. Raises ValueError or OSError for what a user can mend."""
    # What can be refused is refused before any row is read.
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
    # Everything is written under hidden names, which become the outputs' names when all of it is there.
    start = time.perf_counter()
    with written_aside(*outputs.in_order) as asides:
        aside = dict(zip(outputs.in_order, asides, strict=True))
        with open(aside[outputs.rejected], "wb") as rejected_rows:
            totals, reasons = write_data(
                aside[outputs.data], sources=sources, masker=masker, options=options, rejected_rows=rejected_rows
            )
        check_interrupt()
        check_totals(totals, reasons, sources=sources, skip_invalid=options.skip_invalid)
        if not reasons:
            aside[outputs.rejected].unlink()
        if changes_tokenizer(options):
            tokenizer.save_pretrained(aside[outputs.tokenizer])
        sidecar = describe_data_set(
            totals,
            options=options,
            sources=sources,
            masker=masker,
            added_tokens=added_tokens,
            tokenizer_dir=outputs.tokenizer.name if changes_tokenizer(options) else None,
        )
        aside[outputs.sidecar].write_text(json.dumps(sidecar, indent=2) + "\n")
        if outputs.page is not None:
            title = sources[0].name if len(sources) == 1 else describe_sources(sources)
            write_page(aside[outputs.page], totals, tokenizer=tokenizer, title=title)
    # What was made of the rows is said last, below anything that libraries may print.
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
) -> tuple[Totals, list[str]]:
    """Writes samples and rejected rows as they come. Returns the sums, and the first reasons why rows are rejected."""
    # Workers read, tokenize and mask; the files are read, and the samples written, here.
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
    chunks = read_formatted_chunks(sources, options.format)
    cutter = None if options.block_size is None else BlockCutter(options.block_size, masker.tokenizer.eos_token_id)
    totals, reasons = Totals(num_samples_shown(options)), []
    with (
        closing(run_in_order(process, chunks, num_workers=num_workers)) as results,
        open_output(path, ending) as write,
        report_progress(num_bytes) as advance,
    ):
        # A block can hold documents of several chunks, so that blocks are cut here, too.
        def write_blocks(ids: np.ndarray, *, is_last: bool = False) -> None:
            if blocks := cutter.cut(ids, is_last=is_last):
                count_blocks(totals, blocks)
                write(encode_samples(blocks, ending))

        for (chunk, _), result in results:
            check_interrupt()
            totals.add(result.totals)
            if cutter is not None:
                write_blocks(result.samples)
            elif result.totals.rows["kept"]:
                write(result.samples)
            new_reasons = write_rejected(chunk, result.rejected, file=rejected_rows)
            reasons += new_reasons[: NUM_REASONS_SHOWN - len(reasons)]
            advance(result.totals.rows["in"], chunk.num_bytes)
        if cutter is not None:
            write_blocks(np.empty(0, np.int32), is_last=True)
    return totals, reasons


def num_samples_shown(options: ProcessDataOptions) -> int:
    return max(options.preview, NUM_PAGE_SAMPLES if options.preview_html is not None else 0)


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
