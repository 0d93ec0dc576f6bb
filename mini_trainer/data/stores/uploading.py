"""Writes to object stores: whole files, with retries, their lengths checked after.

A file appears at a store when all of it is there (S3 and Google Cloud Storage), so a directory is written in such an
order that its last file says that it is complete.
"""

import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mini_trainer.data.stores.remote import BrokenTransfer, has_remote, is_final, open_filesystem, with_retries
from mini_trainer.distributed.messages import hide_secrets
from mini_trainer.options.urls import split_scheme

PROBE = ".mini_trainer"  # name of the empty file by which the right to write is tested
KINDS_OF_REPOSITORIES = {"datasets": "dataset", "spaces": "space"}  # the first part of a path at hf://


def upload_file(source: Path, url: str) -> None:
    """Copies a file to a store; ValueError, caused by the store's error, if that keeps failing."""
    filesystem, path = open_filesystem(url)
    size = source.stat().st_size

    def put() -> None:
        filesystem.put_file(str(source), path)
        filesystem.invalidate_cache()
        found = filesystem.info(path)["size"]
        if found != size:
            raise BrokenTransfer(f"{found:,} of {size:,} bytes are there")

    with_retries(put, describe=lambda: f"{url}: could not be written")


def remove_remote(url: str) -> None:
    """Removes a file, if it is there."""
    filesystem, path = open_filesystem(url)

    def remove() -> None:
        if has_remote(url):
            filesystem.rm_file(path)

    with_retries(remove, describe=lambda: f"{url}: could not be removed")


def list_remote(folder: str) -> list[str]:
    """Paths of all files below a folder, relative to it."""
    filesystem, path = open_filesystem(folder)
    filesystem.invalidate_cache()
    root = path.rstrip("/") + "/"
    found = with_retries(lambda: filesystem.find(path), describe=lambda: f"{folder}: could not be listed")
    return sorted(one.removeprefix(root) for one in found if one.startswith(root))


def upload_directory(source: Path, url: str, *, last: Sequence[str], done: set[str]) -> None:
    """Makes the files at `url` those of a directory.

    Files named as in `last`, without which nobody takes the others for complete, are removed first and written last,
    in that order. `done`: names that an earlier attempt has written, to which this one adds its own.
    """

    def rank(name: str) -> tuple[int, str]:
        base = name.rpartition("/")[2]
        return last.index(base) + 1 if base in last else 0, name

    names = sorted((str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()), key=rank)
    there = list_remote(url)
    outdated = [name for name in there if name not in done and (name not in names or rank(name)[0])]
    for name in sorted(outdated, key=rank, reverse=True):
        remove_remote(f"{url}/{name}")
    for name in names:
        if name not in done:
            upload_file(source / name, f"{url}/{name}")
            done.add(name)


def check_writable(folder: str) -> None:
    """ValueError if nothing can be written below a URL: no such bucket, no credentials, no permission."""
    filesystem, path = open_filesystem(folder)
    scheme, place = split_scheme(folder)
    try:
        if scheme == "hf":  # anything written is a commit
            filesystem.ls(name_repository(place))
            return
        filesystem.pipe_file(f"{path.rstrip('/')}/{PROBE}", b"")
        with suppress(Exception):  # whoever may write need not be allowed to remove
            filesystem.rm_file(f"{path.rstrip('/')}/{PROBE}")
    except FileNotFoundError as error:
        what = "repository" if scheme == "hf" else "bucket"
        raise ValueError(f"the store has no such {what}: create it first ({error})") from error
    except Exception as error:  # each store's library has its own
        advice = ": set the credentials in the environment (docs/data.md)" if is_final(error) else ""
        reason = f"{type(error).__name__}: {str(error).rstrip('.')}"
        raise ValueError(hide_secrets(f"cannot be written: {reason}{advice}")) from error


def name_repository(place: str) -> str:
    """The repository of a path at hf://, such as datasets/OWNER/NAME."""
    parts = place.split("/")
    return "/".join(parts[: 3 if parts[0] in KINDS_OF_REPOSITORIES else 2])


def describe_upload(directory: Path, url: str) -> str:
    """A command that copies a directory to a store."""
    scheme, place = split_scheme(url)
    if scheme == "s3":
        return shlex.join(["aws", "s3", "sync", str(directory), url])
    if scheme == "gs":
        return shlex.join(["gcloud", "storage", "rsync", "--recursive", str(directory), url])
    repository = name_repository(place)
    kind, _, name = repository.partition("/")
    is_model = kind not in KINDS_OF_REPOSITORIES
    below = place.removeprefix(repository).strip("/") or "."
    words = ["hf", "upload", repository if is_model else name, str(directory), below]
    return shlex.join([*words, *([] if is_model else ["--repo-type", KINDS_OF_REPOSITORIES[kind]])])
