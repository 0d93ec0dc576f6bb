"""Compares stored files to the hashes recorded when they were written: data sets, scores, exports, checkpoints, runs.

    python -m mini_trainer verify runs/a chats.arrow

    python -m mini_trainer verify runs/a/hf_format/latest --against vllm

Reads every byte, also of files that this machine has verified before. Exit code 2 if a file is damaged, replaced or
missing; files that may be edited by hand, such as an export's config.json, are only reported. With --against, a reader
of the export answers what its run recorded.
"""

from collections.abc import Iterator
from pathlib import Path

from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import VerifyOptions

if __name__ == "__main__":
    options = parse_options(VerifyOptions)  # before the slow imports: --help and typos answer at once

from mini_trainer.data.rows.parts import MANIFEST as PART
from mini_trainer.data.stores import contents
from mini_trainer.data.stores.disk import is_link_beside
from mini_trainer.data.tokenized.reader import find_recorded_file, read_sidecar
from mini_trainer.distributed.ending import ending_with_message
from mini_trainer.distributed.messages import say
from mini_trainer.options.reading import read_object

SCORES, SIDECAR = ".scores.json", ".meta.json"
# Files without which an export cannot be loaded, listed or not; an adapter's has its own config.
CONFIG, ADAPTER_CONFIG, TOKENIZER = "config.json", "adapter_config.json", "tokenizer_config.json"


def verify(options: VerifyOptions) -> None:
    """Prints one line for each file or directory with recorded hashes; ValueError if any is damaged."""
    if not options.path:
        raise ValueError("give what to verify: data sets, scores, exports, checkpoints, runs or directories of these")
    if options.against is not None:
        from mini_trainer.tools.verify_readers import find_differences  # seconds to import

        for path in options.path:
            if problems := find_differences(Path(path), options.against):
                raise ValueError(f"{path}: {options.against} differs from the trained model: {'; '.join(problems)}")
            say(f"{path}: {options.against} answers as the trained model does")
        return
    num_damaged = 0
    for path in options.path:
        for record in find_records(Path(path)):
            problems = list(check_record(record))
            num_damaged += bool(problems)
            say("\n".join(f"DAMAGED {problem}" for problem in problems) or f"ok {name_verified(record)}")
    if num_damaged:
        raise ValueError(f"{num_damaged} damaged: copy the damaged files again, or make them again")


def find_records(path: Path) -> list[Path]:
    """The files that record hashes of the file or directory, or of files in it; ValueError if there are none."""
    if not path.exists():
        raise ValueError(f"{path}: does not exist")
    if path.is_dir():
        found = [record for record in path.rglob("*") if is_record(record, path)]
    else:
        record = Path(f"{path}{'.json' if path.suffix == '.scores' else SIDECAR}")
        found = [record] if record.is_file() else []
    if not found:
        raise ValueError(
            f"{path}: nothing records a hash: no {contents.MANIFEST} in it, no {SIDECAR} or {SCORES} of it"
        )
    return sorted(found)


def is_record(path: Path, root: Path) -> bool:
    """Whether the file records hashes, and is not in a directory that a killed run left or set aside as damaged, nor in
    a link to one beside it."""
    folders = path.relative_to(root).parts[:-1]
    if any(folder.startswith((".", "damaged_")) for folder in folders) or not path.is_file():
        return False
    if folders and is_link_beside(path.parent):
        return False
    return (path.name == contents.MANIFEST and not contents.is_foreign(path)) or path.name.endswith((SCORES, SIDECAR))


def name_verified(record: Path) -> Path:
    """The file or directory whose hashes are in `record`."""
    if record.name == contents.MANIFEST:
        return record.parent
    if PART.fullmatch(record.name):
        return record.with_name(record.name.replace(SIDECAR, ".rows"))
    return record.with_name(record.name.removesuffix(SIDECAR).removesuffix(".json"))


def check_record(record: Path) -> Iterator[str]:
    """Yields problems of the recorded files."""
    try:
        if record.name == contents.MANIFEST:
            yield from check_directory(record.parent)
            return
        if PART.fullmatch(record.name):
            sidecar = read_object(record)
        elif record.name.endswith(SIDECAR):
            sidecar = read_sidecar(name_verified(record))
        else:
            from mini_trainer.model.scoring.score_files import read_score_sidecar  # seconds to import

            sidecar = read_score_sidecar(record)
        recorded = find_recorded_file(sidecar)
        if contents.is_edited(sidecar):
            say(f"edited: {record}")
        if not recorded:
            yield f"{record}: does not record a hash"
        elif not name_verified(record).is_file():
            yield f"{name_verified(record)}: is missing"
        else:
            contents.check_recorded(name_verified(record), recorded, record=str(record), again=True)
    except (OSError, ValueError) as error:
        yield str(error)


def check_directory(directory: Path) -> Iterator[str]:
    """Yields problems of an export's or a checkpoint's files, missing ones too, and prints which others were edited."""
    try:
        files = contents.load_manifest(directory)["files"]
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from None
    is_export = "state.json" not in files
    config = ADAPTER_CONFIG if ADAPTER_CONFIG in files else CONFIG
    for name in sorted({*files, *((config, TOKENIZER) if is_export else ())}):
        path, recorded = directory / name, files.get(name, {})
        if not path.is_file():
            yield f"{path}: is missing"
        elif is_export and not contents.is_weights(name):
            if contents.is_changed(path, recorded):
                say(f"edited: {path}")
        else:
            try:
                contents.check_recorded(path, recorded, record=contents.MANIFEST, again=True)
            except ValueError as error:
                yield str(error)


if __name__ == "__main__":
    with ending_with_message(when_interrupted="interrupted"):
        verify(options)
