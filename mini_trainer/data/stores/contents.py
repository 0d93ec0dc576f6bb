"""Stored contents against the hashes recorded when they were written: manifests of checkpoints and exports, sidecars of
data sets and scores.

A large file is hashed whole once on each machine and remembered, under ~/.cache/mini_trainer/verified, by its path,
size, time of change and inode; later starts only read sampled blocks of it.
"""

import hashlib
import json
import os
import socket
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from mini_trainer.data.stores.disk import hash_json, locked, write_text
from mini_trainer.distributed.ending import log
from mini_trainer.options.places import USUAL, expand
from mini_trainer.options.reading import hash_file, open_regular, read_json, read_object

MANIFEST = "manifest.json"
FORMAT = 1  # of manifests
COMPANIONS = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")  # endings of config, tokenizer, code
BLOCK_BYTES = 4096
NUM_BLOCKS = 1024  # blocks read from every large file
MEMORY_DIR = f"{USUAL}/verified"
REMEMBERED_FROM = 64 << 20  # bytes; smaller files are hashed at every start, in a tenth of a second
ANNOUNCED_FROM = 1 << 30  # bytes; takes a second
NUM_THREADS = 8  # files of a model hashed at the same time
ADVICE = "copy it again from its source; --skip-verification uses it anyway"


def fingerprint_file(path: Path) -> str:
    """SHA-256 of a file's size and content; for large files, of 1,024 evenly spaced blocks of 4 KiB."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    num_blocks = -(-size // BLOCK_BYTES)
    chosen = np.linspace(0, num_blocks - 1, min(num_blocks, NUM_BLOCKS)).astype(int)
    with open_regular(path) as file:
        for block in chosen:
            file.seek(int(block) * BLOCK_BYTES)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def hash_once(path: Path, *, again: bool = False) -> str:
    """SHA-256 of a file; remembered for large ones, so that one process of a machine computes it, once. `again`: reads
    the whole file nevertheless."""
    if path.stat().st_size < REMEMBERED_FROM:
        return hash_file(path)["sha256"]
    folder = expand(MEMORY_DIR)
    memory = folder / f"{hash_json([socket.gethostname(), str(path.resolve())])[:32]}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(memory.with_suffix(".lock")):
            return (None if again else recall(path, memory)) or remember(path, memory)
    except OSError:  # no place to remember anything
        return hash_file(path)["sha256"]


def recall(path: Path, memory: Path) -> str | None:
    """The remembered hash; None if there is none, or the file has changed."""
    try:
        known = read_object(memory)
    except ValueError:
        return None
    fits = known.get("identity") == identify(path) and known.get("sampled") == fingerprint_file(path)
    return known.get("sha256") if fits else None


def remember(path: Path, memory: Path) -> str:
    """Hashes a file and remembers the hash."""
    size, identity = path.stat().st_size, identify(path)
    if size >= ANNOUNCED_FROM:
        log.info(f"verifying {path}: {size / 1e9:.1f} GB, once on this machine")
    known = {"path": str(path), "identity": identity, "sampled": fingerprint_file(path)} | hash_file(path)
    with suppress(OSError):
        write_text(memory, json.dumps(known) + "\n")
    return known["sha256"]


def identify(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def check_recorded(path: Path, recorded: Mapping[str, Any], *, record: str, again: bool = False) -> None:
    """ValueError unless the file has the size and SHA-256 `recorded` in the file `record` (see `hash_once`)."""
    if (change := find_change(path, recorded, record=record, again=again)) is not None:
        raise ValueError(f"{change}: {ADVICE}")


def find_change(path: Path, recorded: Mapping[str, Any], *, record: str, again: bool = False) -> str | None:
    """What differs from the size and SHA-256 `recorded` in the file `record`; None if nothing does."""
    if (size := path.stat().st_size) != recorded["size"]:
        return f"{path}: {size:,} bytes, but {record} says {recorded['size']:,}"
    is_same = recorded["sha256"] == hash_once(path, again=again)
    return None if is_same else f"{path}: its SHA-256 is not the one in {record}: it is damaged or was replaced"


def write_json(path: Path, value: Any) -> dict[str, Any]:
    """Writes and flushes a new JSON file; returns its entry for the manifest."""
    data = json.dumps(value, indent=1).encode()
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def sign(content: dict[str, Any]) -> dict[str, Any]:
    """The content of a JSON file with a checksum of itself."""
    return content | {"sha256": hash_json(content)}


def is_edited(content: dict[str, Any]) -> bool:
    """Whether a signed file was changed later; sidecars made by hand are not signed."""
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return content.get("sha256", expected := hash_json(rest)) != expected


def warn_of_edited(path: Path | str, content: dict[str, Any]) -> None:
    if is_edited(content):
        log.warning(f"warning: {path}: was edited, or is damaged: it is not as it was written")


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Writes manifest.json, with a checksum of its own content."""
    write_json(directory / MANIFEST, sign(manifest))


def load_manifest(directory: Path) -> dict[str, Any]:
    """The manifest; ValueError if it is missing, damaged, or of another format."""
    manifest = read_json(directory / MANIFEST)
    if not isinstance(manifest, dict) or "sha256" not in manifest or is_edited(manifest):
        raise ValueError(f"{MANIFEST} is damaged")
    del manifest["sha256"]
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{MANIFEST} has format {manifest.get('format')}; this version reads format {FORMAT}")
    return manifest


def list_recorded(directory: Path) -> tuple[dict[str, Any], Path] | None:
    """The entries of a model's files by name, and their manifest: the directory's, or of an adapter that of the export
    around it. None if there is none, or if it is not one of this project's."""
    around = directory.absolute().parent
    for place, prefix in ((directory, ""), (around, f"{directory.name}/")):
        if (prefix and not (place / "config.json").is_file()) or is_foreign(place / MANIFEST):
            continue
        try:
            files = load_manifest(place)["files"]
        except ValueError as error:
            raise ValueError(f"{place}: {error}, so no file can be verified: {ADVICE}") from None
        if found := {name.removeprefix(prefix): entry for name, entry in files.items() if name.startswith(prefix)}:
            return found, place / MANIFEST
    return None


def is_foreign(manifest: Path) -> bool:
    """Whether the file is missing, or another program's."""
    if not manifest.is_file():
        return not manifest.exists()
    try:
        return {"files", "sha256"}.isdisjoint(read_object(manifest))
    except ValueError:
        return False


def verify_model(directory: Path, weights: Collection[str]) -> None:
    """Checks a model's or adapter's files against its manifest; the log says if there is none. ValueError if any of the
    `weights`, names of files, differs or is not listed. A warning names other files that were edited."""
    if (found := list_recorded(directory)) is None:
        log.debug(f"{directory}: has no {MANIFEST}: its weights are used unverified")
        return
    recorded, manifest = found
    if unlisted := sorted(set(weights) - recorded.keys()):
        raise ValueError(f"{directory / unlisted[0]}: is not listed in {manifest}, so it was added later: {ADVICE}")
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        list(pool.map(lambda name: check_recorded(directory / name, recorded[name], record=str(manifest)), weights))
    companions = (name for name in sorted(recorded) if name.endswith(COMPANIONS) and not is_weights(name))
    if edited := [name for name in companions if "/" not in name and is_changed(directory / name, recorded[name])]:
        log.warning(f"warning: {directory}: differs from its {MANIFEST}: {', '.join(edited)}")


def verify_file(path: Path) -> None:
    """Checks a single file of an export against its manifest; the log says if none lists it."""
    recorded, manifest = list_recorded(path.parent) or ({}, None)
    if path.name not in recorded:
        log.debug(f"{path}: no {MANIFEST} lists it: it is used unverified")
        return
    check_recorded(path, recorded[path.name], record=str(manifest))


def is_weights(name: str) -> bool:
    """Whether it is a file of weights or their index; others, such as config and tokenizer, can be edited by hand."""
    return name.endswith((".safetensors", ".safetensors.index.json"))


def is_changed(path: Path, recorded: Mapping[str, Any]) -> bool:
    return not path.is_file() or hash_file(path) != recorded
