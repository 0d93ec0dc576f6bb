"""Tokenized data of `run_training`: InstructLab's second stage, training on the data set in `data_output_dir` that an
earlier call has tokenized, and data sets made from it: a share held out for validation, documents cut into blocks.

These are named after what they are made from, and made once.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_trainer.api.arguments import NOTHING, TrainingArgs
from mini_trainer.api.errors import make_bad_input
from mini_trainer.data.stores.contents import sign
from mini_trainer.data.stores.disk import hash_json, write_text, written_aside
from mini_trainer.data.stores.made import MADE, is_as_made, record_made
from mini_trainer.data.tokenized.detection import ENDING, TOKENS_COLUMN, is_tokenized
from mini_trainer.options.reading import hash_file, read_object
from mini_trainer.options.urls import is_url

DATA_FILE = "data.arrow"  # in InstructLab's directory for tokenized data
ADVICE = "tokenize again (process_data=True), or leave data_path out to train on that data set"


def find_data_file(args: TrainingArgs) -> Path:
    if args.data_output_dir is None:
        raise make_bad_input("data_output_dir is missing: give a directory for the tokenized data")
    if is_url(str(args.data_output_dir)):
        raise make_bad_input(f"data_output_dir {args.data_output_dir}: must be a local directory")
    return Path(args.data_output_dir) / DATA_FILE


def choose_tokenized(args: TrainingArgs) -> tuple[str, ...]:
    """The data sets to train on without tokenizing: those of `data_path`, or the data set made from its chats.
    `data_path` may still name the chats from which an earlier call made `data_output_dir`/data.arrow. BadInputError if
    that data set is not theirs: training would use other rows than those that are given."""
    file, given = find_data_file(args), list_given(args.data_path)
    if not given:
        return (str(file),)
    if all(map(is_tokenized, given)) or not file.exists():  # other files are refused by train.py
        return tuple(given)
    found = f"data_path {' '.join(given)}: the data set {file}"
    try:
        sidecar = read_object(Path(f"{file}{ENDING}"))
    except (OSError, ValueError) as error:
        raise make_bad_input(f"{found} does not record its sources ({error}): {ADVICE}") from None
    recorded = [source.get("sha256") for source in sidecar.get("sources", [])]
    hashes = hash_sources(given, found)
    if not recorded or None in recorded or not set(recorded) <= set(hashes) or len(recorded) != len(hashes):
        names = ", ".join(str(source.get("file")) for source in sidecar.get("sources", []))
        raise make_bad_input(f"{found} was made from other rows ({names}), or the file has changed since: {ADVICE}")
    check_options(args, sidecar, found)
    return (str(file),)


def list_values(given: Any) -> list[Any]:
    """The values of a field that takes one or several: none if it has no value."""
    if given is NOTHING or given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def list_given(value: Any) -> list[str]:
    """The paths of an option that takes one or several."""
    return list(map(str, list_values(value)))


def names_tokenized(args: TrainingArgs) -> bool:
    """Whether `data_path` names data sets, not chats; BadInputError if it names both."""
    given = list_given(args.data_path)
    tokenized = list(filter(is_tokenized, given))
    if tokenized and len(tokenized) < len(given):
        raise make_bad_input(f"data_path: {', '.join(tokenized)}: already tokenized, but other files are not")
    return bool(given) and tokenized == given


def hash_sources(given: list[str], found: str) -> list[str]:
    """SHA-256 of the files of chats, as process_data.py finds them."""
    from mini_trainer.data.rows.files import find_sources

    try:
        return [hash_file(source.path)["sha256"] for source in find_sources(given, flag="data_path")]
    except (OSError, ValueError) as error:
        raise make_bad_input(f"{found} cannot be compared with it ({error}): {ADVICE}") from None


def check_options(args: TrainingArgs, sidecar: dict[str, Any], found: str) -> None:
    """BadInputError if the data was tokenized with another length limit or template than `args` has."""
    known = sidecar.get("options", {})
    template = None if args.chat_tmpl_path is None else Path(args.chat_tmpl_path).name
    for name, given, made_with in (
        ("max_seq_len", args.max_seq_len, known.get("max_sample_num_tokens")),
        ("chat_tmpl_path", template, known.get("chat_template")),
    ):
        if given is not None and given != made_with:
            raise make_bad_input(f"{found} was made with {name}={made_with!r}, and now {given!r} is given: {ADVICE}")


if TYPE_CHECKING:
    import pyarrow as pa

HASH_BYTES = 8
# A sidecar's entries about rows, which differ in a part of the data set.
OF_ROWS = {
    *("num_samples", "num_tokens", "num_loss_counted_tokens", "num_trained_by_role", "max_len"),
    *("rows", "stop_tokens", "file", "split", "sha256"),
}


def derive_data(args: TrainingArgs) -> TrainingArgs:
    """The arguments with the data sets to train on; BadInputError if they cannot be made from those of `data_path`."""
    if not args.validation_split and args.pretraining_config is None:
        return args
    paths = list(choose_tokenized(args)) if args.data_output_dir is not None else list_given(args.data_path)
    if any(map(is_url, paths)):
        raise make_bad_input(
            f"data_path {' '.join(paths)}: must be local files for validation_split or pretraining_config"
        )
    folder = choose_folder(args, paths)
    folder.mkdir(parents=True, exist_ok=True)
    sides = [list(map(Path, paths))]
    if args.validation_split:
        if list_given(args.validation_data_path):
            raise make_bad_input(
                "validation_split and validation_data_path both set the validation data: give only one of them"
            )
        sides = list(zip(*(split_data(path, args.validation_split, folder) for path in sides[0]), strict=True))
    if args.pretraining_config is not None:
        size = args.pretraining_config.block_size
        sides = [[cut_documents(path, size, folder) for path in side] for side in sides]
    trained, *validation = [tuple(map(str, side)) for side in sides]
    given = args.validation_data_path if not validation else validation[0]
    return replace(
        args,
        data_path=trained,
        validation_data_path=given,
        process_data=False,
        validation_split=0.0,
        pretraining_config=None,
        block_size=NOTHING,
        data_output_dir=None,
    )


def choose_folder(args: TrainingArgs, paths: list[str]) -> Path:
    """The directory of derived data sets: `data_output_dir`, or beside the run's, or inside it if the data is."""
    output_dir = args.ckpt_output_dir if args.output_dir in (NOTHING, None) else args.output_dir
    if args.data_output_dir is not None:
        return Path(args.data_output_dir)
    is_inside = Path(output_dir).absolute() in Path(paths[0]).absolute().parents
    return Path(paths[0]).parent if is_inside else Path(f"{output_dir}.data")


def split_data(path: Path, share: float, folder: Path) -> tuple[Path, Path]:
    """The rows to train on, and those to validate on: about `share` of all. A row's side depends on its tokens alone,
    so equal rows are on one side."""
    if not 0 < share < 1:
        raise make_bad_input(f"validation_split {share}: must be above 0 and below 1")
    stem = folder / name_derived(path, {"validation_split": share})
    targets = [stem.with_suffix(".arrow"), stem.with_suffix(".validation.arrow")]
    record = Path(f"{stem}.{MADE}")
    if not is_as_made(record, stem.name):
        with written_aside(*targets) as asides:
            counts = write_sides(path, share, asides)
            if 0 in counts:
                rows = f"{sum(counts):,} rows, {counts[1]:,} of them for validation"
                raise make_bad_input(f"validation_split {share}: {path} has {rows}: both sides need some")
        for target in targets:
            write_sidecar(path, target)
        record_made(record, stem.name, targets)
    return targets[0], targets[1]


def write_sides(path: Path, share: float, targets: list[Path]) -> list[int]:
    """Writes each row to its side; returns the rows of each."""
    import pyarrow as pa

    counts, (schema, batches) = [0, 0], read_rows(path)
    with ExitStack() as stack:
        writers = [stack.enter_context(pa.ipc.new_file(str(target), schema)) for target in targets]
        for batch in batches:
            digests = [hashlib.sha256(ids.values.to_numpy().tobytes()).digest() for ids in batch.column(TOKENS_COLUMN)]
            sides = [int.from_bytes(one[:HASH_BYTES], "big") < share * 256**HASH_BYTES for one in digests]
            for side, writer in enumerate(writers):
                part = batch.filter(pa.array([found == side for found in sides]))
                counts[side] += part.num_rows
                writer.write_batch(part)
    return counts


def cut_documents(path: Path, block_size: int, folder: Path) -> Path:
    """Blocks of `block_size` tokens of all documents, joined; the last one may be shorter."""
    import pyarrow as pa

    from mini_trainer.data.columns.token_columns import TEXTS
    from mini_trainer.data.rows.writer import BlockCutter

    if block_size < 2:
        raise make_bad_input(f"pretraining_config: block_size {block_size}: must be at least 2")
    schema, batches = read_rows(path)
    if "labels" in schema.names:
        raise make_bad_input(
            f"pretraining_config: {path} has labels, so it does not hold documents that can be cut into blocks: leave"
            " pretraining_config out to train on its rows, or give documents"
        )
    target = folder / f"{name_derived(path, {'block_size': block_size})}.arrow"
    record = Path(f"{target}.{MADE}")
    if is_as_made(record, target.name):
        return target

    def iterate_blocks() -> Iterator[list[Any]]:
        cutter = None
        for batch in batches:
            ids = batch.column(TOKENS_COLUMN).flatten().cast(pa.int32()).to_numpy()
            # Every document ends with the same token, which must not begin a block: a first token is not a target.
            cutter = cutter or BlockCutter(block_size, int(batch.column(TOKENS_COLUMN)[0].values[-1].as_py()))
            yield cutter.cut(ids)
        yield cutter.cut(ids[:0], is_last=True)

    with written_aside(target) as (aside,), pa.ipc.new_file(str(aside), TEXTS.schema) as writer:
        for blocks in filter(None, iterate_blocks()):
            writer.write_batch(TEXTS.encode([block.tokens for block in blocks]))
    record_made(record, target.name, [target])
    return target


def read_rows(path: Path) -> "tuple[pa.Schema, Iterator[pa.RecordBatch]]":
    """The columns and the rows of a data set; BadInputError if it cannot be read."""
    from mini_trainer.data.columns.token_columns import TEXTS
    from mini_trainer.data.tokenized.converted import convert_to_arrow
    from mini_trainer.data.tokenized.index import ArrowFile, iterate_batches
    from mini_trainer.options.data import DATA_CACHE_DIR
    from mini_trainer.options.places import expand

    try:
        is_arrow = path.suffix == ".arrow"
        file = ArrowFile(path if is_arrow else convert_to_arrow(path, TEXTS, cache_dir=expand(DATA_CACHE_DIR)))
    except (OSError, ValueError) as error:
        raise make_bad_input(f"data_path {path}: cannot be read as a tokenized data set: {error}") from None
    if TOKENS_COLUMN not in file.schema.names:
        raise make_bad_input(f"data_path {path}: has no column {TOKENS_COLUMN}")
    return file.schema, (batch for batch in iterate_batches(file) if batch.num_rows)


def name_derived(path: Path, made_with: dict[str, Any]) -> str:
    try:
        return f"{path.stem}-{hash_json([hash_file(path)['sha256'], made_with])[:12]}"
    except OSError as error:
        raise make_bad_input(f"data_path {path}: {error.strerror}") from None


def write_sidecar(path: Path, target: Path) -> None:
    """Writes a sidecar for a part of a data set: the whole's, except for entries about rows."""
    source = Path(f"{path}{ENDING}")
    if source.exists():
        known = {name: value for name, value in read_object(source).items() if name not in OF_ROWS}
        write_text(Path(f"{target}{ENDING}"), json.dumps(sign(known | {"file": hash_file(target)}), indent=2))
