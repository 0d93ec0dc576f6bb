"""Preparation of process_data.py before it tokenizes: tokenizer, template, and how rows become samples, or random
tokens in place of rows."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mini_trainer.data.chat.conversation import TokenizedChat, TrainedSpan
from mini_trainer.data.chat.masking import ChatMasker, ImageExpander
from mini_trainer.data.chat.rendering import set_date
from mini_trainer.data.columns.base import FEEDBACK, SEQUENCES, VISION, DataTask
from mini_trainer.data.rows import labelled
from mini_trainer.data.rows.chat_rows import ImageFolders
from mini_trainer.data.rows.column_names import Fields
from mini_trainer.data.rows.files import CHUNK_BYTES, CHUNK_ROWS, Chunk, Source, read_chunks
from mini_trainer.data.rows.formats import OWN_NAMES, PATHS, FieldPaths, read_text_row
from mini_trainer.data.rows.labelled_tokens import LabelledTokenizer
from mini_trainer.data.rows.rows import Preparation, read_rows
from mini_trainer.data.rows.worker_pool import run_in_order
from mini_trainer.data.stores.image_files import load_processor
from mini_trainer.data.stores.model_files import find_model
from mini_trainer.data.stores.tokenizers import change_tokenizer, load_stop_token_ids, load_tokenizer
from mini_trainer.distributed.process import without_collector
from mini_trainer.options import RowOptions, parse_named_values
from mini_trainer.options.doors import MASKED_FORMATS, NAMED_FORMATS
from mini_trainer.options.tools import ProcessDataOptions

BYTES_PER_WORKER = 1 << 20  # with less input, starting one more process takes longer than it saves
DEFAULT_LENGTH = 2048
SEED = 42
BYTES_PER_TOKEN = 4
NAME = "random tokens"


@dataclass(frozen=True)
class Prepared:
    """Inputs and settings, known before the rows are tokenized."""

    sources: list[Source]
    model_dir: str
    tokenizer: Any
    added_tokens: dict[str, int]
    preparation: Preparation[Any]
    stop_token_id: int | None
    open_turns: set[str]
    notes: list[str]
    date: str | None  # that the chat template writes into rows; None if it writes none
    made_with: dict[str, Any] = field(default_factory=dict)  # all that the data set depends on; set by process_data.py


def prepare(options: ProcessDataOptions, sources: list[Source], today: str) -> Prepared:
    """Loads the tokenizer, checks the template, chooses how rows become samples. `today`: the data set's first day."""
    trusts = options.trust_remote_code
    model_dir = find_model(options.model_name_or_path, revision=options.model_revision, trust_remote_code=trusts)
    with without_collector():  # imports transformers
        tokenizer = load_tokenizer(model_dir, trust_remote_code=trusts)
    added_tokens = {}
    if changes_tokenizer(options):
        template, special_tokens = options.rows.chat_template, options.rows.add_special_tokens
        added_tokens = change_tokenizer(tokenizer, template=template, special_tokens=special_tokens)
    stop_token_id, open_turns, notes = None, set(), []
    dated, template_args, date = set_date(tokenizer, parse_named_values(options.contents.template_args), today)
    if options.rows.mock_data is not None:
        preparation = prepare_random(tokenizer, options.rows)
    elif options.rows.format == labelled.CLASSIFICATION:
        preparation = prepare_classification(dated, sources, options.rows, template_args)
    else:
        expander = None
        if options.rows.images:
            processor = load_processor(model_dir, trust_remote_code=trusts)
            expander = ImageExpander(processor, directory=Path(options.output_file).resolve().parent)
        masker = ChatMasker(
            dated,
            stop_token_ids=load_stop_token_ids(model_dir),
            missing_stop_token=options.rows.missing_stop_token,
            thinking_prefix=options.rows.thinking_prefix,
            refused=options.contents.refuse,
            expander=expander,
            template_args=template_args,
        )
        notes = check_template(masker, options)
        preparation = choose_preparation(masker, sources, options)
        stop_token_id, open_turns = masker.chats.find_stop_token(), masker.chats.open_turns
    return Prepared(sources, model_dir, tokenizer, added_tokens, preparation, stop_token_id, open_turns, notes, date)


def choose_paths(options: ProcessDataOptions) -> FieldPaths:
    """Paths to the tokenized values of rows; formats that are never detected have readers of their own."""
    rows = options.rows
    if rows.format in NAMED_FORMATS:
        return OWN_NAMES
    paths = {name: rows.column(name) for name in PATHS}
    return FieldPaths(**paths, ignored=rows.ignore_columns, data_format=rows.format)


def changes_tokenizer(options: ProcessDataOptions) -> bool:
    return options.rows.chat_template is not None or bool(options.rows.add_special_tokens)


def choose_preparation(masker: ChatMasker, sources: Sequence[Source], options: ProcessDataOptions) -> Preparation[Any]:
    """How rows of conversations, preferences, feedback, completions and documents become samples."""
    rows, folders = options.rows, None
    if rows.format in MASKED_FORMATS:
        return MASKED_FORMATS[FEEDBACK if rows.feedback_from_pairs else rows.format](masker, rows)
    if rows.images:
        of_files = {source.name: source.path.resolve().parent for source in sources}
        if len(of_files) < len(sources):
            raise ValueError("--images: two input files have the same name: pass their common directory instead")
        folders = ImageFolders(of_files, Path(options.output_file).resolve().parent)
    read = partial(read_text_row, is_given=rows.format is not None, paths=choose_paths(options), folders=folders)
    task = DataTask(VISION) if rows.images else DataTask()
    return Preparation(task, read, masker.mask, masker.chats.stop_token_ids)


def prepare_classification(
    tokenizer: Any, sources: Sequence[Source], options: RowOptions, template_args: dict[str, Any]
) -> Preparation[labelled.Labelled]:
    """Reads all rows for their labels; returns the preparation of rows."""
    labels = survey_labels(sources, options, num_workers=count_workers(sources, options))
    max_length = options.max_sample_num_tokens if options.truncate else None
    made = LabelledTokenizer(tokenizer, labels, max_length=max_length, template_args=template_args)
    return Preparation(labels.task, partial(labelled.read_labelled, options=options), made.tokenize)


def check_template(masker: ChatMasker, options: ProcessDataOptions) -> list[str]:
    """Notes on the template. Without one, rows other than chats can still be tokenized."""
    if masker.tokenizer.chat_template is not None:
        given = options.rows.chat_template
        return masker.check_template("the model's chat template" if given is None else f"--chat-template {given}")
    useless = {
        f"--missing-stop-token {options.rows.missing_stop_token}": options.rows.missing_stop_token != "refuse",
        "--thinking-prefix": options.rows.thinking_prefix != "as-rendered",
        "--template-args": bool(options.contents.template_args),
    }
    for flag, is_given in useless.items():
        if is_given:
            raise ValueError(f"{flag} has no effect: the tokenizer has no chat template")
    return []


def count_workers(sources: Sequence[Source], options: RowOptions) -> int:
    if any(source.num_bytes == 0 and source.read is not None for source in sources):
        return options.num_proc  # the size of the input is not known
    return min(options.num_proc, 1 + sum(source.num_bytes for source in sources) // BYTES_PER_WORKER)


def make_random_source(options: RowOptions) -> Source:
    """A source of `--mock-data` rows, which hold only their number."""
    length = options.block_size or DEFAULT_LENGTH
    num_bytes = BYTES_PER_TOKEN * length
    num_rows = min(CHUNK_ROWS, 1 + CHUNK_BYTES // num_bytes)

    def read(source: Source) -> Iterator[Chunk]:
        for first in range(1, options.mock_data + 1, num_rows):
            numbers = range(first, min(first + num_rows, options.mock_data + 1))
            lines = [(number, {"number": str(number)}) for number in numbers]
            yield Chunk(NAME, first, "text", lines, b"", num_bytes * len(lines))

    return Source(Path(NAME), NAME, num_bytes * options.mock_data, format="mock", read=read)


def prepare_random(tokenizer: Any, options: RowOptions) -> Preparation[int]:
    """Prepares samples drawn by their number from the vocabulary's ordinary tokens."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    token_ids = np.array(sorted(set(tokenizer.get_vocab().values()) - special), np.int32)
    if not len(token_ids):
        raise ValueError("--mock-data: the tokenizer has only special tokens")
    draw = partial(draw_samples, token_ids=token_ids, length=options.block_size or DEFAULT_LENGTH)
    return Preparation(DataTask(), read_numbers, draw)


def read_numbers(values: Fields, chunk: Chunk, tally: Counter[str]) -> list[int]:
    return [int(values["number"])]


def draw_samples(numbers: Sequence[int], *, token_ids: np.ndarray, length: int) -> list[TokenizedChat]:
    """Samples of which all tokens are trained on."""
    drawn = [np.random.default_rng([SEED, number]).choice(token_ids, length).tolist() for number in numbers]
    return [TokenizedChat(ids, [TrainedSpan(0, length, "random")]) for ids in drawn]


def survey_labels(sources: Sequence[Source], rows: RowOptions, *, num_workers: int) -> labelled.Labels:
    """The meaning of the labels of all rows. ValueError if it is ambiguous."""
    known = None if rows.labels_from is None else labelled.read_known_labels(rows.labels_from)
    names = rows.label_names
    if known is None and not names:
        names = labelled.find_declared_names(sources, rows.column("label"))
    counts, first = labelled.LabelCounts(), None
    read = (chunk for source in sources for chunk in read_chunks(source))
    with closing(run_in_order(partial(survey_chunk, rows=rows), read, num_workers=num_workers)) as results:
        for _, (found, first_found) in results:
            counts.add(found)
            first = first or first_found
    if first is None and known is None:
        return labelled.Labels(DataTask(SEQUENCES, "single"), takes_indices=False)  # every row is refused, with reasons
    return labelled.decide_labels(counts, first=first, label_type=rows.label_type, label_names=names, known=known)


def survey_chunk(chunk: Chunk, *, rows: RowOptions) -> tuple[labelled.LabelCounts, labelled.Labelled | None]:
    """The labels of a chunk's readable rows, and the first of these. Others are refused in the second pass."""
    counts, first = labelled.LabelCounts(), None
    for row, found in read_rows(chunk, partial(labelled.read_labelled, options=rows), Counter()):
        if isinstance(found, labelled.Labelled):
            counts.add_row(found, f"{chunk.file}:{row.place}")
            first = first or found
    return counts, first
