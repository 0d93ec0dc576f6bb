"""Tokenizes chats, completions or documents to a data set with a loss mask, with a report and a preview of samples.

    python process_data.py --input-file chats.jsonl --output-file chats.arrow --model-name-or-path M
    python process_data.py --format classification --input-file reviews.csv --output-file reviews.arrow ...

Rows stream through: files are read in chunks, worker processes tokenize and mask them, and results are written in the
input's order, so memory stays flat and the output does not depend on the number of processes. Everything is written
aside and renamed when complete; the sidecar OUTPUT.meta.json records the data's sources and tokenizer.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from command_line import parse_options
from options import ProcessDataOptions, RowOptions

if __name__ == "__main__":
    options = parse_options(ProcessDataOptions)  # before the slow imports: --help and typos answer at once

from chat.masking import ChatMasker, load_stop_token_ids
from chat.pictures import ImageExpander, load_processor
from chat.templates import change_tokenizer, load_tokenizer
from corpus.columns import describe_unread
from corpus.feedback import FEEDBACK, FeedbackFields
from corpus.files import Source, find_sources
from corpus.formats import OWN_NAMES, FieldPaths
from corpus.hub_rows import find_dataset
from corpus.index import keep_index
from corpus.labelled import CLASSIFICATION, FieldNames
from corpus.labelled_tokens import LabelledTokenizer, describe_pairs
from corpus.labels import describe_similar
from corpus.outputs import Outputs
from corpus.preferences import PREFERENCE, PreferenceFields
from corpus.preview import NUM_PAGE_SAMPLES, print_samples, write_page
from corpus.random_rows import make_random_source, prepare_random
from corpus.report import (
    DROPPED,
    Totals,
    add_up,
    describe_lengths,
    describe_remarks,
    describe_sources,
    print_report,
    print_sides,
    report_progress,
)
from corpus.rows import (
    IMPLEMENTED_ROWS,
    Preparation,
    prepare_chats,
    prepare_feedback,
    prepare_labelled,
    prepare_pictured,
    prepare_preferences,
    process_chunk,
    read_formatted_chunks,
    write_rejected,
)
from corpus.sidecar import describe_data_set
from corpus.split import SIDES, SideWriter, describe_split, mark_place
from corpus.stops import check_stops
from corpus.survey import describe_repeats, survey_rows
from corpus.worker_pool import run_in_order
from corpus.writer import BlockCutter, open_output
from disk import hash_file, written_aside
from options.choices import check_choices
from pretrained.files import find_model
from ranks.ending import ExitCode, exit_with_message
from ranks.garbage import without_collector
from ranks.messages import say

BYTES_PER_WORKER = 1 << 20  # with less input, starting one more process takes longer than it saves
NUM_REASONS_SHOWN = 10

interrupted = threading.Event()  # set by the handler of Ctrl-C and SIGTERM


def process_data(options: ProcessDataOptions) -> None:
    """Writes the data set and its sidecar, prints the report. ValueError or OSError for errors that a user can fix."""
    check_choices(options, IMPLEMENTED_ROWS)
    # What can be refused is refused before any row is read.
    sources = open_sources(options.rows)
    outputs = Outputs(
        Path(options.output_file),
        page=None if options.preview_html is None else Path(options.preview_html),
        is_split=options.rows.validation_share is not None,
    )
    outputs.check([source.path for source in sources if source.read is None])
    model_dir = find_model(
        options.model_name_or_path, revision=options.model_revision, trust_remote_code=options.trust_remote_code
    )
    with without_collector():  # imports transformers
        tokenizer, added_tokens = prepare_tokenizer(options, model_dir)
    stop_token_id, open_turns, notes = None, set(), []
    if options.rows.mock_data is not None:
        preparation = prepare_random(tokenizer, options.rows)
    elif options.rows.format == CLASSIFICATION:
        preparation, notes = prepare_classification(tokenizer, sources, options.rows)
    else:
        masker = ChatMasker(
            tokenizer,
            stop_token_ids=load_stop_token_ids(model_dir),
            allow_missing_stop_token=options.rows.allow_missing_stop_token,
            append_stop_token=options.rows.append_stop_token,
            thinking_prefix=options.rows.thinking_prefix,
            strict_reasoning=options.rows.strict_reasoning,
            expander=open_expander(model_dir, options),
        )
        notes = check_template(masker, options)
        preparation = choose_preparation(masker, sources, options)
        stop_token_id, open_turns = masker.find_stop_token(), masker.open_turns
    task = preparation.task
    # Everything is written under hidden names, which are renamed to the outputs' names when all of it is complete.
    start = time.perf_counter()
    with written_aside(*outputs.in_order) as asides:
        aside = dict(zip(outputs.in_order, asides, strict=True))
        with open(aside[outputs.rejected], "wb") as rejected_rows:
            paths = [aside[files.data] for files in outputs.data_sets]
            sides, reasons = write_data(
                paths,
                sources=sources,
                preparation=preparation,
                eos_token_id=tokenizer.eos_token_id,
                options=options,
                rejected_rows=rejected_rows,
            )
        check_interrupt()
        totals = add_up(sides)
        notes += describe_remarks(totals)
        notes += describe_lengths(totals, task, model_max_length=tokenizer.model_max_length)
        check_totals(totals, reasons, sources=sources, skip_invalid=options.rows.skip_invalid)
        notes += describe_unread(totals.columns, options.rows.ignore_columns)
        stop = None if stop_token_id is None else tokenizer.convert_ids_to_tokens(stop_token_id)
        notes += check_stops(totals, options.rows, stop=stop, open_turns=open_turns)
        if outputs.is_split:
            check_sides(sides, share=options.rows.validation_share)
        if not reasons:
            aside[outputs.rejected].unlink()
        describe = partial(
            describe_data_set,
            task=task,
            options=options,
            sources=sources,
            tokenizer=tokenizer,
            stop_token_id=stop_token_id,
            added_tokens=added_tokens,
        )
        write_companions(outputs, aside, sides, options=options, tokenizer=tokenizer, describe=describe)
        if outputs.page is not None:
            title = sources[0].name if len(sources) == 1 else describe_sources(sources)
            directory = Path(options.output_file).resolve().parent
            write_page(aside[outputs.page], totals, task, tokenizer=tokenizer, title=title, directory=directory)
    for files in outputs.data_sets:
        keep_index(files.data)
    # The report comes last, below anything that libraries may print.
    print_report(totals, task, seconds=time.perf_counter() - start, sources=sources)
    if outputs.is_split:
        print_sides(dict(zip(SIDES, sides, strict=True)), task)
    for note in notes:
        say(f"note: {note}")
    print_outputs(outputs, added_tokens=added_tokens)
    print_samples(totals.samples[: options.preview], tokenizer, mask=options.string_for_printing_masks)


def open_sources(options: RowOptions) -> list[Source]:
    """The sources of the rows."""
    if options.mock_data is not None:
        return [make_random_source(options)]
    if options.input_dataset is not None:
        return [find_dataset(options)]
    return find_sources(options.input_file)


def choose_paths(options: RowOptions) -> FieldPaths:
    """Paths to the tokenized values of rows; formats that are never detected have readers of their own."""
    if options.format in (CLASSIFICATION, PREFERENCE, FEEDBACK):
        return OWN_NAMES
    fields = (options.messages_field, options.prompt_field, options.completion_field, options.text_field)
    return FieldPaths(*fields, ignored=options.ignore_columns)


def changes_tokenizer(options: ProcessDataOptions) -> bool:
    return options.rows.chat_template is not None or bool(options.rows.add_special_tokens)


def prepare_tokenizer(options: ProcessDataOptions, model_dir: str) -> tuple[Any, dict[str, int]]:
    """The model's tokenizer, changed according to the options, and the new entries of its vocabulary."""
    tokenizer = load_tokenizer(model_dir, trust_remote_code=options.trust_remote_code)
    if not changes_tokenizer(options):
        return tokenizer, {}
    added = change_tokenizer(
        tokenizer, template=options.rows.chat_template, special_tokens=options.rows.add_special_tokens
    )
    return tokenizer, added


def open_expander(model_dir: str, options: ProcessDataOptions) -> ImageExpander | None:
    """The expander of images if rows may have them."""
    if not options.rows.images:
        return None
    processor = load_processor(model_dir, trust_remote_code=options.trust_remote_code)
    directory = Path(options.output_file).resolve().parent
    return ImageExpander(processor, directory=directory, may_download=options.rows.allow_downloads)


def choose_preparation(masker: ChatMasker, sources: Sequence[Source], options: ProcessDataOptions) -> Preparation:
    """How rows of conversations, preferences, feedback, completions and documents become samples."""
    rows = options.rows
    if rows.format == PREFERENCE:
        fields = PreferenceFields(rows.prompt_field, rows.chosen_field, rows.rejected_field, rows.ignore_columns)
        return (prepare_feedback if rows.feedback_from_pairs else prepare_preferences)(masker, fields)
    if rows.format == FEEDBACK:
        names = (rows.prompt_field, rows.completion_field, rows.label_field)
        return prepare_feedback(masker, FeedbackFields(*names, ignored=rows.ignore_columns))
    paths, is_given = choose_paths(rows), rows.format is not None
    if not rows.images:
        return prepare_chats(masker, paths, format_is_given=is_given)
    directories = {source.name: source.path.resolve().parent for source in sources}
    if len(directories) < len(sources):
        raise ValueError("--images: two input files have the same name: pass their common directory instead")
    return prepare_pictured(
        masker,
        paths,
        format_is_given=is_given,
        directories=directories,
        output_dir=Path(options.output_file).resolve().parent,
    )


def prepare_classification(
    tokenizer: Any, sources: Sequence[Source], options: RowOptions
) -> tuple[Preparation, list[str]]:
    """Reads all rows for their labels; returns the preparation of rows, and notes on them."""
    names = (options.text_field, options.text_pair_field, options.label_field, options.label_separator)
    fields = FieldNames(*names, ignored=options.ignore_columns)
    survey = survey_rows(sources, fields, options, num_workers=count_workers(sources, options))
    labelled_tokenizer = LabelledTokenizer(
        tokenizer, survey.labels, max_length=options.max_sample_num_tokens, truncates=options.truncate
    )
    notes = [
        *describe_repeats(survey.repeats),
        *describe_similar(survey.labels.task.label_names),
        *describe_pairs(tokenizer, has_pairs=survey.has_pairs),
    ]
    return prepare_labelled(labelled_tokenizer, fields), notes


def check_template(masker: ChatMasker, options: ProcessDataOptions) -> list[str]:
    """Notes on the template. Without one, rows other than chats can still be tokenized."""
    if masker.tokenizer.chat_template is not None:
        given = options.rows.chat_template
        return masker.check_template("the model's chat template" if given is None else f"--chat-template {given}")
    useless = {
        "--allow-missing-stop-token": options.rows.allow_missing_stop_token,
        "--append-stop-token": options.rows.append_stop_token,
        "--thinking-prefix": options.rows.thinking_prefix != "as-rendered",
        "--strict-reasoning": options.rows.strict_reasoning,
    }
    for flag, is_given in useless.items():
        if is_given:
            raise ValueError(f"{flag} has no effect: the tokenizer has no chat template")
    return []


def write_companions(
    outputs: Outputs,
    aside: dict[Path, Path],
    sides: Sequence[Totals],
    *,
    options: ProcessDataOptions,
    tokenizer: Any,
    describe: Callable[[Totals], dict[str, Any]],
) -> None:
    """Writes each data set's sidecar, from `describe`, and the tokenizer if it differs from the model's."""
    for i, (files, totals) in enumerate(zip(outputs.data_sets, sides, strict=True)):
        if changes_tokenizer(options):
            tokenizer.save_pretrained(aside[files.tokenizer])
        other = outputs.data_sets[1 - i].data if outputs.is_split else None
        split = None if other is None else describe_split(SIDES[i], share=options.rows.validation_share, other=other)
        tokenizer_dir = files.tokenizer.name if changes_tokenizer(options) else None
        made = {"tokenizer_dir": tokenizer_dir, "split": split, "file": hash_file(aside[files.data])}
        aside[files.sidecar].write_text(json.dumps(describe(totals) | made, indent=2) + "\n")


def write_data(
    paths: Sequence[Path],
    *,
    sources: Sequence[Source],
    preparation: Preparation,
    eos_token_id: int | None,
    options: ProcessDataOptions,
    rejected_rows: BinaryIO,
) -> tuple[list[Totals], list[str]]:
    """Writes samples to the `paths` of their sides, and rejected rows, as they come. Returns each side's totals, and
    the first reasons of rejected rows."""
    # Workers read, tokenize and mask; the files are read, and the samples written, here.
    ending = Path(options.output_file).suffix
    process = partial(
        process_chunk,
        preparation=preparation,
        ending=ending,
        num_shown=num_samples_shown(options),
        max_sample_num_tokens=options.rows.max_sample_num_tokens,
        cuts_blocks=options.rows.block_size is not None,
        validation_share=options.rows.validation_share,
    )
    num_bytes = sum(source.num_bytes for source in sources)
    chunks = read_formatted_chunks(sources, options.rows.format, choose_paths(options.rows))
    reasons = []
    with (
        closing(run_in_order(process, chunks, num_workers=count_workers(sources, options.rows))) as results,
        ExitStack() as files,
        report_progress(num_bytes) as advance,
    ):
        writers = [
            SideWriter(
                files.enter_context(open_output(path, ending, preparation.task)),
                ending=ending,
                num_shown=num_samples_shown(options),
                cutter=make_cutter(side, eos_token_id=eos_token_id, block_size=options.rows.block_size),
            )
            for path, side in zip(paths, SIDES, strict=False)
        ]
        for (chunk, _), result in results:
            check_interrupt()
            for writer, side in zip(writers, result.sides, strict=True):
                writer.add(side)
            new_reasons = write_rejected(chunk, result.rejected, file=rejected_rows)
            reasons += new_reasons[: NUM_REASONS_SHOWN - len(reasons)]
            advance(sum(side.totals.rows["in"] for side in result.sides), chunk.num_bytes)
        for writer in writers:
            writer.finish()
    return [writer.totals for writer in writers], reasons


def count_workers(sources: Sequence[Source], options: RowOptions) -> int:
    if any(source.num_bytes == 0 and source.read is not None for source in sources):
        return options.num_proc  # the size of the input is not known
    return min(options.num_proc, 1 + sum(source.num_bytes for source in sources) // BYTES_PER_WORKER)


def make_cutter(side: str, *, eos_token_id: int | None, block_size: int | None) -> BlockCutter | None:
    """A side's cutter; None unless documents are cut into blocks."""
    if block_size is None:
        return None
    return BlockCutter(block_size, eos_token_id, name=mark_place("block {:,}", side))


def num_samples_shown(options: ProcessDataOptions) -> int:
    return max(options.preview, NUM_PAGE_SAMPLES if options.preview_html is not None else 0)


def check_totals(totals: Totals, reasons: list[str], *, sources: Sequence[Source], skip_invalid: bool) -> None:
    """Refuses invalid rows, listing the first, unless they are to be skipped; and a data set without samples."""
    shown, where = "".join(f"\n  {reason}" for reason in reasons), describe_sources(sources)
    if reasons and not skip_invalid:
        more = ", the first of them" if totals.rows["invalid"] > len(reasons) else ""
        raise ValueError(
            f"{totals.rows['invalid']:,} of {totals.rows['in']:,} rows cannot be used{more}:{shown}\n"
            "fix them, or pass --skip-invalid to skip them"
        )
    if totals.rows["in"] == 0:
        raise ValueError(f"{where}: has no rows")
    if totals.rows["kept"] == 0:
        dropped = ", ".join(f"{totals.rows[key]:,} {label}" for key, label in DROPPED.items() if totals.rows[key])
        raise ValueError(f"{where}: no row is left of {totals.rows['in']:,}: {dropped}{shown}")


def check_sides(sides: Sequence[Totals], *, share: float) -> None:
    """Refuses a split with nothing on one side."""
    num_kept = sum(side.rows["kept"] for side in sides)
    for name, totals, change in zip(SIDES, sides, ("smaller", "larger"), strict=True):
        if totals.rows["kept"] == 0:
            raise ValueError(
                f"--validation-share {share}: of {num_kept:,} kept rows, none is left for {name}; use a {change} share,"
                " or more rows (rows with the same text always fall on the same side)"
            )


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


def main(options: ProcessDataOptions) -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # --num-proc sets the number of cores
    signal.signal(signal.SIGINT, raise_interrupt)
    signal.signal(signal.SIGTERM, raise_interrupt)
    sys.stdout.reconfigure(errors="backslashreplace")  # samples can hold what the terminal cannot show
    try:
        process_data(options)
    except ValueError as error:
        exit_with_message(str(error))
    except OSError as error:
        exit_with_message(f"--output-file {options.output_file}: cannot be written, nothing is left: {error}")
    except KeyboardInterrupt:
        exit_with_message("interrupted; unfinished files are removed", code=ExitCode.INTERRUPTED)


if __name__ == "__main__":
    main(options)
