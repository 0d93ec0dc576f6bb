"""What caches hold: made.json says for which key files were made, and their hashes."""

import json
from collections.abc import Iterable
from pathlib import Path

from mini_trainer.data.stores.contents import find_change, hash_once, is_edited, sign
from mini_trainer.data.stores.disk import write_text
from mini_trainer.distributed.ending import log
from mini_trainer.options.reading import read_fields

MADE = "made.json"


def record_made(record: Path, key: str, files: Iterable[Path]) -> None:
    """Writes which files of a cache, next to the file `record` or below, were made under this key."""
    entries = {
        str(file.relative_to(record.parent)): {"size": file.stat().st_size, "sha256": hash_once(file)} for file in files
    }
    write_text(record, json.dumps(sign({"key": key, "files": entries}), indent=2) + "\n")


def is_as_made(record: Path, key: str) -> bool:
    """Whether a cache has the files that were made under this key, unchanged; a warning says of others why not."""
    if not record.exists():
        return False
    try:
        known = read_fields(record, {"key": str, "files": dict}, written_by="mini-trainer")
        if is_edited(known) or known["key"] != key:
            raise ValueError(f"{record}: is damaged, or of something else")
        for name, entry in known["files"].items():
            if (change := find_change(record.parent / name, entry, record=str(record))) is not None:
                raise ValueError(change)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning(f"warning: {error}: it is made again")
        return False
    return True
