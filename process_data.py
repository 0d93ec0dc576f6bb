"""Tokenizes chats, completions or documents to a data set with a loss mask, with a report and a preview of samples.

    python process_data.py --input-file chats.jsonl --output-file chats.arrow --model-name-or-path M
    python process_data.py --format classification --input-file reviews.csv --output-file reviews.arrow ...

Rows stream through: files are read in chunks, worker processes tokenize and mask them, and results are written in the
input's order, so memory stays flat and the output does not depend on the number of processes. Everything is written
aside and renamed when complete; the sidecar OUTPUT.meta.json records the data's sources and tokenizer.

Several processes, on any machines, write the same output: each tokenizes a part of the rows, and the last joins them.

    srun --ntasks=8 python process_data.py ...           # or torchrun
    python process_data.py --shard 3/8 ...               # or one command for each part
"""

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from mini_trainer.options import parse_shard
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import ProcessDataOptions

if __name__ == "__main__":
    options = parse_options(ProcessDataOptions)  # before the slow imports: --help and typos answer at once

from mini_trainer.data.rows import parts, preparing, report
from mini_trainer.data.rows.column_names import describe_unread
from mini_trainer.data.rows.files import Folder, Source, check_folder, describe_skipped, find_sources
from mini_trainer.data.rows.hub_rows import find_dataset
from mini_trainer.data.rows.parts import FORMAT_VERSION
from mini_trainer.data.rows.rows import NUM_REASONS_SHOWN, ChunkResult, process_chunk, read_formatted_chunks
from mini_trainer.data.rows.split import SIDES, SideWriter, check_sides, mark_place
from mini_trainer.data.rows.worker_pool import run_in_order
from mini_trainer.data.rows.writer import BlockCutter, open_output
from mini_trainer.data.stores.contents import sign
from mini_trainer.data.stores.disk import identify_file, make_parent, written_aside
from mini_trainer.data.stores.older_keys import save_tokenizer
from mini_trainer.data.tokenized import sidecar
from mini_trainer.data.tokenized.outputs import Outputs
from mini_trainer.distributed.ending import ending_with_message
from mini_trainer.distributed.messages import say
from mini_trainer.distributed.process import find_task
from mini_trainer.options.fields import check_choices
from mini_trainer.options.reading import hash_file, open_own
from mini_trainer.use.pages.preview import NUM_PAGE_SAMPLES, print_samples, write_page

interrupted = threading.Event()  # set by the handler of Ctrl-C and SIGTERM


def process_data(options: ProcessDataOptions) -> None:
    """Writes the data set and its sidecar, prints the report; with `--shard` or `--join` a part of it, or all of its
    parts joined. ValueError or OSError for errors that a user can fix."""
    check_choices(options)
    # Check options and outputs before any row is read.
    if options.rows.mock_data is not None:
        sources = [preparing.make_random_source(options.rows)]
    elif options.rows.input_dataset is not None:
        sources = [find_dataset(options.rows)]
    else:
        sources = find_sources(options.rows.input_file)
    page = None if options.preview_html is None else Path(options.preview_html)
    outputs = Outputs(Path(options.output_file), page, options.rows.validation_share is not None)
    outputs.check([source.path for source in sources if source.is_local])
    before = identify_file(outputs.data)
    directory = parts.name_directory(outputs.data)
    index, count = (1, 1) if options.shard is None else parse_shard(options.shard)
    divided = parts.divide(sources, index, count) if count > 1 else sources
    all_parts = parts.find_count(directory) if options.join and parts.find_parts(directory) else count
    begun = parts.find_date(directory, all_parts, sources) if all_parts > 1 else None
    prepared = prepare(options, sources, begun or date.today().isoformat())
    part = parts.Part(directory, index, count)
    if count > 1 and part.content is None and identify_file(outputs.data) != before:  # joined parts are removed
        return say(f"part {part}: another process has joined all parts to {outputs.data}")
    if (options.join or count > 1) and are_joined(outputs, prepared):
        return say(f"all parts are joined already, to {outputs.data}: nothing is left to do")
    if options.join:
        return join_parts(outputs, parts.find_count(directory), prepared, options)
    if count == 1:
        num_bytes = sum(source.num_bytes for source in sources)
        return write_data_set(outputs, tokenize(sources, prepared, options), num_bytes, prepared, options)
    make_part(part, divided, prepared, options)
    made = parts.list_parts(directory, count)
    if faults := parts.find_faults(made, identify_parts(count, prepared, options)):
        missing = ", ".join(map(str, faults))
        return say(f"the process that makes the last part joins them; still to be made: {missing}")
    try:
        join_parts(outputs, count, prepared, options)
    except parts.JoinedElsewhere as error:  # both were the last; a failure here would make torchrun end the other
        say(f"another process joins the parts: {error}")


def prepare(options: ProcessDataOptions, sources: list[Source], today: str) -> preparing.Prepared:
    """`preparing.prepare`, with all that the data set depends on."""
    prepared = preparing.prepare(options, sources, today)
    known = dict(tokenizer=prepared.tokenizer, model_dir=prepared.model_dir, date=prepared.date)
    return replace(prepared, made_with=sidecar.describe_dependencies(options.rows, options.contents, **known))


def write_data_set(
    outputs: Outputs,
    results: Iterator[ChunkResult],
    num_bytes: int,
    prepared: preparing.Prepared,
    options: ProcessDataOptions,
) -> None:
    """Writes the results of all chunks as the data set, with its other files, and prints the report. `num_bytes`: of
    the files, 0 if not known."""
    sources, tokenizer, task = prepared.sources, prepared.tokenizer, prepared.preparation.task
    # Everything is written under hidden names, which are renamed to the outputs' names when all of it is complete.
    start = time.perf_counter()
    for path in outputs.in_order:
        make_parent(path)
    with written_aside(*outputs.in_order) as asides:
        aside = dict(zip(outputs.in_order, asides, strict=True))
        with closing(results), open_own(aside[outputs.rejected], "wb") as rejected:
            paths = [aside[files.data] for files in outputs.data_sets]
            sides, reasons = write_data(
                paths, results=results, num_bytes=num_bytes, prepared=prepared, options=options, rejected=rejected
            )
        check_interrupt()
        totals = report.add_up(sides)
        notes = [*prepared.notes, *describe_skipped(sources), *report.describe_remarks(totals)]
        notes += report.describe_lengths(totals, task, model_max_length=tokenizer.model_max_length)
        report.check_rejected(totals, reasons, skip_invalid=options.rows.skip_invalid)
        report.check_kept(totals, reasons, sources=sources, max_sample_num_tokens=options.rows.max_sample_num_tokens)
        notes += describe_unread(totals.columns, options.rows.ignore_columns, totals.unread_keys)
        if tokenizer.chat_template is not None and totals.trained_by_role["completion"]:
            notes.append(
                "prompts and completions are trained as plain text, without the model's chat template (--format alpaca"
                " in place of completion makes chats of them)"
            )
        stop = None if prepared.stop_token_id is None else tokenizer.convert_ids_to_tokens(prepared.stop_token_id)
        notes += report.check_stops(totals, options.rows, stop=stop, open_turns=prepared.open_turns)
        if outputs.is_split:
            check_sides(sides, share=options.rows.validation_share)
        if not reasons:
            aside[outputs.rejected].unlink()
        write_companions(outputs, aside, sides, options=options, prepared=prepared)
        if outputs.page is not None:
            title = sources[0].name if len(sources) == 1 else report.describe_sources(sources)
            directory = outputs.data.resolve().parent
            write_page(aside[outputs.page], totals, task, tokenizer=tokenizer, title=title, directory=directory)
    seconds = time.perf_counter() - start
    outputs.finish()
    # The report comes last, below anything that libraries may print.
    report.print_report(totals, task, seconds=seconds, sources=sources)
    if outputs.is_split:
        report.print_sides(dict(zip(SIDES, sides, strict=True)), task)
    for note in notes:
        say(f"note: {note}")
    print_outputs(outputs, added_tokens=prepared.added_tokens)
    print_samples(totals.samples[: options.preview], tokenizer, mask=options.string_for_printing_masks)


def make_part(
    part: parts.Part, divided: list[Source], prepared: preparing.Prepared, options: ProcessDataOptions
) -> None:
    """Writes a part, unless it exists. ValueError for rows that cannot be used."""
    made_with = identify_parts(part.count, prepared, options)
    if part.content is not None and not parts.find_faults([part], made_with):
        return say(f"part {part}: already there, {part.rows}")
    counts, reasons = Counter[str](), []

    def count_rows() -> Iterator[ChunkResult]:
        with closing(tokenize(divided, prepared, options)) as results, report.report_progress(num_bytes) as advance:
            for result in results:
                check_interrupt()
                for side in result.sides:
                    counts.update(side.totals.rows)
                reasons.extend(result.reasons[: NUM_REASONS_SHOWN - len(reasons)])
                advance(sum(side.totals.rows["in"] for side in result.sides), result.num_bytes)
                yield result
        report.check_rejected(report.Totals(0, rows=counts), reasons, skip_invalid=options.rows.skip_invalid)

    def describe() -> dict[str, Any]:
        if parts.identify_sources(prepared.sources) != made_with["sources"]:
            raise ValueError(f"part {part}: an input file changed while it was read: make the part again")
        # Number, format and hash of each source whose end is in this part.
        numbers = {str(source): number for number, source in enumerate(prepared.sources)}
        read = [[numbers[str(one)], one.format, one.sha256] for one in divided if one.sections.end is None]
        return {"made_with": made_with, "read": read, "rows": dict(counts)}

    num_bytes = parts.count_bytes(divided)
    parts.write_part(part, count_rows(), describe)
    say(f"part {part}: {counts['in']:,} rows, {counts['kept']:,} kept, in {part.rows}")


def identify_parts(count: int, prepared: preparing.Prepared, options: ProcessDataOptions) -> dict[str, Any]:
    """The configuration that all parts of a data set must have in common."""
    how = {"preview": num_samples_shown(options), "output_file": Path(options.output_file).suffix}
    return prepared.made_with | {
        "options": prepared.made_with["options"] | how,
        "sources": parts.identify_sources(prepared.sources),
        "number of parts": count,
        "format of parts": FORMAT_VERSION,
    }


def are_joined(outputs: Outputs, prepared: preparing.Prepared) -> bool:
    """Whether the outputs exist, made from these rows with these options, and no parts do."""
    files = [outputs.page, *(path for one in outputs.data_sets for path in (one.data, one.sidecar))]
    if not all(path is None or path.exists() for path in files) or parts.find_parts(parts.name_directory(outputs.data)):
        return False
    known = prepared.sources, prepared.made_with
    return all(sidecar.is_made_of(one.data, one.sidecar, *known) for one in outputs.data_sets)


def join_parts(outputs: Outputs, count: int, prepared: preparing.Prepared, options: ProcessDataOptions) -> None:
    """Writes the data set from its parts, and removes them. ValueError for missing ones, or other configurations."""
    directory = parts.name_directory(outputs.data)
    with parts.joining(directory):
        made = parts.list_parts(directory, count)
        faults = parts.find_faults(made, identify_parts(count, prepared, options))
        if len(faults) == count and outputs.data.exists() and not options.join:
            say(f"another process has joined the parts to {outputs.data}")
        elif faults:
            listed = "".join(f"\n  part {part} {fault}: make it by --shard {part}" for part, fault in faults.items())
            raise ValueError(f"{len(faults)} of {count} parts in {directory} cannot be joined:{listed}")
        else:
            parts.fill_in(prepared.sources, made)
            firsts: dict[Folder, Source] = {}
            for source in prepared.sources:
                check_folder(source, firsts)
            num_bytes = sum(source.num_bytes for source in prepared.sources)
            write_data_set(outputs, parts.read_results(made), num_bytes, prepared, options)
            parts.remove_parts(made)


def write_companions(
    outputs: Outputs,
    aside: dict[Path, Path],
    sides: Sequence[report.Totals],
    *,
    options: ProcessDataOptions,
    prepared: preparing.Prepared,
) -> None:
    """Writes each data set's sidecar, and the tokenizer if it differs from the model's."""
    describe = partial(
        sidecar.describe_data_set,
        task=prepared.preparation.task,
        made_with=prepared.made_with,
        model_name_or_path=options.model_name_or_path,
        sources=prepared.sources,
        stop_token_id=prepared.stop_token_id,
        added_tokens=prepared.added_tokens,
    )
    for i, (files, totals) in enumerate(zip(outputs.data_sets, sides, strict=True)):
        if preparing.changes_tokenizer(options):
            save_tokenizer(prepared.tokenizer, aside[files.tokenizer])
        split = None
        if outputs.is_split:
            other = outputs.data_sets[1 - i].data.name
            split = {"side": SIDES[i], "validation_share": options.rows.validation_share, "other_side": other}
        tokenizer_dir = files.tokenizer.name if preparing.changes_tokenizer(options) else None
        made = {"tokenizer_dir": tokenizer_dir, "split": split, "file": hash_file(aside[files.data])}
        aside[files.sidecar].write_text(json.dumps(sign(describe(totals) | made), indent=2) + "\n")


def tokenize(
    sources: Sequence[Source], prepared: preparing.Prepared, options: ProcessDataOptions
) -> Iterator[ChunkResult]:
    """The results of the sources' chunks, in order. Workers read, tokenize and mask; the files are read here."""
    process = partial(
        process_chunk,
        preparation=prepared.preparation,
        ending=Path(options.output_file).suffix,
        num_shown=num_samples_shown(options),
        max_sample_num_tokens=options.rows.max_sample_num_tokens,
        cuts_blocks=options.rows.document_block is not None,
        validation_share=options.rows.validation_share,
    )
    chunks = read_formatted_chunks(sources, options.rows.format, preparing.choose_paths(options))
    with closing(run_in_order(process, chunks, num_workers=preparing.count_workers(sources, options.rows))) as results:
        yield from (result for _, result in results)


def write_data(
    paths: Sequence[Path],
    *,
    results: Iterator[ChunkResult],
    num_bytes: int,
    prepared: preparing.Prepared,
    options: ProcessDataOptions,
    rejected: BinaryIO,
) -> tuple[list[report.Totals], list[str]]:
    """Writes samples to the `paths` of their sides, and rejected rows, as they come. Returns each side's totals, and
    the first reasons of rejected rows."""
    ending, block_size, reasons = Path(options.output_file).suffix, options.rows.document_block, []
    with ExitStack() as files, report.report_progress(num_bytes) as advance:
        writers = [
            SideWriter(
                files.enter_context(open_output(path, ending, prepared.preparation.task)),
                ending=ending,
                num_shown=num_samples_shown(options),
                cutter=None
                if block_size is None
                else BlockCutter(block_size, prepared.tokenizer.eos_token_id, name=mark_place("block {:,}", side)),
            )
            for path, side in zip(paths, SIDES, strict=False)
        ]
        for result in results:
            check_interrupt()
            for writer, side in zip(writers, result.sides, strict=True):
                writer.add(side)
            rejected.write(result.rejected)
            reasons += result.reasons[: NUM_REASONS_SHOWN - len(reasons)]
            advance(sum(side.totals.rows["in"] for side in result.sides), result.num_bytes)
        for writer in writers:
            writer.finish()
    return [writer.totals for writer in writers], reasons


def num_samples_shown(options: ProcessDataOptions) -> int:
    return max(options.preview, NUM_PAGE_SAMPLES if options.preview_html is not None else 0)


def print_outputs(outputs: Outputs, *, added_tokens: dict[str, int]) -> None:
    for files in outputs.data_sets:
        say(f"wrote {files.data} and {files.sidecar.name}")
    if outputs.has_stale_validation:
        say(f"removed {outputs.validation.data}, which an earlier run split off")
    if outputs.rejected.exists():
        say(f"rejected rows, with reasons: {outputs.rejected}")
    tokenizers = [str(files.tokenizer) for files in outputs.data_sets if files.tokenizer.exists()]
    if tokenizers:
        added = ", ".join(f"{token} (id {token_id})" for token, token_id in added_tokens.items())
        where = " and ".join(tokenizers)
        say(f"tokenizer, which training uses: {where}; added to its vocabulary: {added or 'nothing'}")
    if outputs.page is not None:
        say(f"preview page: {outputs.page}")


def raise_interrupt(*_: object) -> NoReturn:
    interrupted.set()
    raise KeyboardInterrupt


def check_interrupt() -> None:
    """Raises KeyboardInterrupt again if a signal handler raised it in a callback, where Python only prints it."""
    if interrupted.is_set():
        raise KeyboardInterrupt


def choose_part(options: ProcessDataOptions) -> ProcessDataOptions:
    """The options with the part of this process, if torchrun or srun started several: they have one output."""
    task = find_task()
    if task is None or options.shard is not None or options.join:
        return options
    shard = f"{task[0]}/{task[1]}"
    say(f"process {task[0]} of {task[1]} that torchrun or srun started: makes part {shard} (--shard 1/1: all)")
    return replace(options, shard=shard)


def main(options: ProcessDataOptions) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # --num-proc sets the number of cores
    signal.signal(signal.SIGINT, raise_interrupt)
    signal.signal(signal.SIGTERM, raise_interrupt)
    sys.stdout.reconfigure(errors="backslashreplace")  # samples can hold what the terminal cannot show
    with ending_with_message(when_interrupted="interrupted; unfinished files are removed"):
        process_data(choose_part(options))


if __name__ == "__main__":
    main(options)
