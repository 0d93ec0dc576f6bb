"""Local copies of tokenized data sets at URLs, made once on each node for each version that the store has of them.

    {--data-cache-dir}/fetched/{key}/{name}.arrow, next to its other files and source.json, which names the URL

A copy's directory is renamed to its name when it is complete and its content is what the sidecar records.
"""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mini_trainer.data.stores.disk import check_room, hash_json, locked, sync_file, written_aside
from mini_trainer.data.stores.made import MADE, is_as_made, record_made
from mini_trainer.data.stores.remote import (
    FETCHED_BYTES,
    RemoteFile,
    describe_remote,
    find_remote,
    look_up_remote,
    refused_if_unreachable,
)
from mini_trainer.data.tokenized.outputs import DataSetFiles
from mini_trainer.data.tokenized.reader import FOLDER, SOURCE_FILE
from mini_trainer.data.tokenized.sidecar import KEY_LENGTH
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.world import World, call_on_each_node, call_on_rank0
from mini_trainer.options import flag_name
from mini_trainer.options.places import expand
from mini_trainer.options.reading import open_own, parse_object
from mini_trainer.options.urls import is_url

SECONDS_BETWEEN_LINES = 20.0  # about how much of a long download is done
ENDINGS = (".arrow", ".parquet", ".jsonl")


@dataclass(frozen=True)
class RemoteSet:
    """A data set and its other files, as the store describes them now."""

    url: str
    files: dict[str, RemoteFile]  # by their paths next to the data set, which comes last
    sha256: str | None  # of the data set, according to its sidecar

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())

    @property
    def key(self) -> str:
        versions = {name: [file.num_bytes, file.version] for name, file in self.files.items()}
        return hash_json([self.url, versions])[:KEY_LENGTH]

    def place_in(self, cache_dir: str) -> Path:
        """The copy's path, existing or not."""
        return expand(cache_dir) / FOLDER / self.key / self.name


Found = dict[str, RemoteSet]  # by URL


def download_data_sets(
    given: Mapping[str, Sequence[str]], world: World, *, cache_dir: str, beside: Sequence[str] = ()
) -> dict[str, tuple[str, ...]]:
    """Local paths of data sets, for the options that name URLs; one process of each node copies them. `given`: paths
    and URLs by option; rank 0's decide. `beside`: endings of further files that are copied if they exist. All ranks
    call this. ValueError, as RunError, for data that cannot be read."""
    given, found = call_on_rank0(world, lambda: (given, find_sets(given, beside=beside)))
    if found:
        call_on_each_node(world, lambda: fetch_sets(found, cache_dir))
    return locate_sets(given, found, cache_dir)


def find_sets(given: Mapping[str, Sequence[str]], *, beside: Sequence[str] = ()) -> Found:
    """The data sets at the URLs among the options' paths. ValueError for one that is missing or cannot be copied."""
    return {
        path: find_set(path, flag=flag_name(option), beside=beside)
        for option, paths in given.items()
        for path in paths
        if is_url(path)
    }


def find_set(url: str, *, flag: str, beside: Sequence[str] = ()) -> RemoteSet:
    """The files at a URL: the data set, its sidecar, its tokenizer, and files that end in `beside`."""
    folder, _, name = url.rpartition("/")
    with refused_if_unreachable(url, flag=flag):
        if PurePosixPath(name).suffix not in ENDINGS:
            raise ValueError(f"{flag} {url}: must end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}")
        data = describe_remote(url)
        sidecar_name = str(DataSetFiles(Path(name)).sidecar)
        names = [sidecar_name, *(name + ending for ending in beside)]
        others = {other: file for other in names if (file := look_up_remote(f"{folder}/{other}")) is not None}
        # Empty if it is none, which the reader of the copy refuses.
        sidecar = parse_object(others[sidecar_name].open().read()) or {} if sidecar_name in others else {}
        if sidecar.get("tokenizer_dir") is not None:
            others |= find_tokenizer(folder, str(sidecar["tokenizer_dir"]), flag=flag)
    files = others | {name: data}
    unmarked = [file.url for file in files.values() if file.version is None]
    if unmarked:
        raise ValueError(
            f"{flag} {unmarked[0]}: the server sends neither an ETag nor a modification time, so a copy of it could"
            f" be outdated: download it, and name the copy"
        )
    recorded = sidecar.get("file")
    return RemoteSet(url, files, recorded.get("sha256") if isinstance(recorded, dict) else None)


def find_tokenizer(folder: str, name: str, *, flag: str) -> dict[str, RemoteFile]:
    """The files of the tokenizer next to a data set."""
    url = f"{folder}/{name}"
    if folder.startswith("http"):
        raise ValueError(
            f"{flag} {url}: web servers do not list the files of a directory, here of the tokenizer that the data was"
            " made with: download both, and name the copy"
        )
    listed = [] if "/" in name else find_remote(f"{url}/", flag=flag)
    found = {PurePosixPath(name, file): remote for file, remote in listed}
    if not found or any(part in ("..", "/") for path in found for part in path.parts):
        raise ValueError(f"{flag} {url}: is not a directory of a tokenizer as process_data.py writes it")
    return {str(path): remote for path, remote in found.items()}


def fetch_sets(found: Found, cache_dir: str) -> None:
    """Copies missing files."""
    for one in found.values():
        fetch_set(one, cache_dir)


def fetch_set(found: RemoteSet, cache_dir: str) -> None:
    """Copies a data set unless the copy exists. ValueError if it is incomplete or has changed."""
    data = found.place_in(cache_dir)
    folder = data.parent
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f".{folder.name}.lock")):
        if is_as_made(folder / MADE, found.key):
            return log.info(f"data: {found.url} is already here, {data}")
        check_room(folder.parent, found.num_bytes, f"{found.url} in --data-cache-dir {folder.parent}")
        log.info(f"data: copying {found.url} ({found.num_bytes:,} bytes) to {data}")
        with written_aside(folder) as (aside,):
            aside.mkdir()
            for name, file in found.files.items():
                (aside / name).parent.mkdir(exist_ok=True)
                sha256 = download(file, aside / name)
            if found.sha256 not in (None, sha256):
                raise ValueError(
                    f"{found.url}: its SHA-256 is not the one that its .meta.json records: only one of them was"
                    " replaced: write the data set again"
                )
            (aside / SOURCE_FILE).write_text(json.dumps({"url": found.url}) + "\n")
            record_made(aside / MADE, found.key, [aside / name for name in (SOURCE_FILE, *found.files)])


def download(remote: RemoteFile, target: Path) -> str:
    """Copies a file; returns its SHA-256. ValueError if it ends early or changes meanwhile."""
    digest, stream, said = hashlib.sha256(), remote.open(), time.monotonic()
    with open_own(target, "wb") as file:
        while block := stream.read(FETCHED_BYTES):
            digest.update(block)
            file.write(block)
            if time.monotonic() - said > SECONDS_BETWEEN_LINES:
                log.info(f"data: {stream.tell():,} of {remote.num_bytes:,} bytes of {remote.url}")
                said = time.monotonic()
    remote.check_unchanged()
    sync_file(target)
    return digest.hexdigest()


def locate_sets(given: Mapping[str, Sequence[str]], found: Found, cache_dir: str) -> dict[str, tuple[str, ...]]:
    """Local paths, for the options that name URLs."""
    return {
        option: tuple(str(found[path].place_in(cache_dir)) if path in found else path for path in paths)
        for option, paths in given.items()
        if any(map(is_url, paths))
    }
