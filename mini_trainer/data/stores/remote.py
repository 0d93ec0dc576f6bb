"""Files in object stores and on web servers, read by fsspec as streams and written whole: s3://, gs://, hf://, http(s)://.

Credentials come from the environment, as each store's own library reads them; URLs that hold any are refused, because
URLs are written to sidecars and logs.

A file appears at a store when all of it is there (S3 and Google Cloud Storage), so a directory is written in such an
order that its last file says that it is complete.
"""

import asyncio
import functools
import importlib
import io
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urljoin

from mini_trainer.distributed.messages import hide_secrets
from mini_trainer.options.urls import (
    PACKAGES,
    RefusedRedirect,
    check_redirect,
    find_url_faults,
    remove_query,
    split_scheme,
)

Result = TypeVar("Result")

FETCHED_BYTES = 8 << 20  # of one request
SECONDS_TO_WAIT = (1, 2, 5, 10, 20)  # before each new attempt at the same byte, or file
SECONDS_WITHOUT_BYTES = 60.0  # of a web server, until a request is made again
NUM_QUESTIONS = 3  # at most, for a file's size
VERSIONS = ("ETag", "etag", "blob_id", "md5Hash", "Last-Modified", "LastModified", "mtime")  # in what a store says
WILDCARDS = "*["
WITHOUT_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")  # errors of botocore


class BrokenTransfer(Exception):
    """A transfer that ended early."""


def with_retries(attempt: Callable[[], Result], *, describe: Callable[[], str]) -> Result:
    """The result of `attempt`, which is called again after errors that may be transient.

    ValueError that begins with the text of `describe` if it keeps failing.
    """
    for seconds in (*SECONDS_TO_WAIT, None):
        try:
            return attempt()
        except Exception as error:  # each store's library has its own
            if seconds is None or is_final(error):
                reason = str(error) if isinstance(error, BrokenTransfer) else f"{type(error).__name__}: {error}"
                raise ValueError(hide_secrets(f"{describe()}: {reason}")) from error
        time.sleep(seconds)
    raise AssertionError("the last attempt returns or raises")


def is_final(error: BaseException | None) -> bool:
    """Whether another attempt would fail in the same way."""
    return (
        find_refusal(error) is not None
        or isinstance(error, FileNotFoundError | PermissionError)
        or type(error).__name__ in WITHOUT_CREDENTIALS
    )


def find_refusal(error: BaseException | None) -> RefusedRedirect | None:
    """The redirect whose refusal is the cause of an error."""
    while error is not None and not isinstance(error, RefusedRedirect):
        error = error.__cause__
    return error


REDIRECTED: dict[str, str] = {}  # where web servers have redirected to, without queries, by URL


def find_redirect(url: str) -> str | None:
    """The address that a file was read from, if its web server redirected to another."""
    return REDIRECTED.get(unquote(url))


@functools.cache
def make_http_settings(seconds: float) -> dict[str, Any]:
    """Settings of fsspec's file system for web servers: timeouts, and redirects that are checked and recorded."""
    aiohttp = importlib.import_module(PACKAGES["http"])

    async def begin(session: Any, context: Any, request: Any) -> None:
        context.url = str(request.url)

    async def follow(session: Any, context: Any, request: Any) -> None:
        headers = request.response.headers
        target = urljoin(str(request.url), headers.get("Location") or headers.get("URI") or "")
        await asyncio.get_running_loop().run_in_executor(None, check_redirect, context.url, target)
        REDIRECTED[unquote(context.url)] = remove_query(target)

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(begin)
    trace.on_request_redirect.append(follow)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds)
    return {"client_kwargs": {"timeout": timeout, "trace_configs": [trace]}}


@dataclass(frozen=True)
class RemoteFile:
    """A file, and what its store says of it: its size, and a mark that changes with its content, if there is one."""

    url: str
    num_bytes: int
    version: str | None

    def open(self) -> "RemoteReader":
        return RemoteReader(self)

    def check_unchanged(self) -> None:
        """ValueError if the store has another file there by now."""
        if describe_remote(self.url) != self:
            raise ValueError(f"{self.url}: changed while it was read")


class RemoteReader(io.RawIOBase):
    """The bytes of a remote file. After a broken connection the request is made again from the byte reached.
    ValueError if it breaks too often there, or ends before the length that the store has said.
    """

    def __init__(self, remote: RemoteFile) -> None:
        self.remote, self.position, self.file = remote, 0, None
        self.filesystem, self.path = open_filesystem(remote.url)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        starts = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.remote.num_bytes}
        self.position = starts[whence] + offset
        return self.position

    def readinto(self, buffer: Any) -> int:
        num_bytes = min(len(buffer), self.remote.num_bytes - self.position)
        if num_bytes <= 0:
            return 0
        data = self.fetch(num_bytes)
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)

    def fetch(self, num_bytes: int) -> bytes:
        def read() -> bytes:
            file, self.file = self.file, None  # opened again after an error
            if file is None:
                file = self.filesystem.open(self.path, "rb", block_size=FETCHED_BYTES, cache_type="readahead")
            file.seek(self.position)
            data = file.read(num_bytes)
            if not data:
                raise BrokenTransfer("the connection ended")
            self.file = file
            return data

        def describe() -> str:
            return f"{self.remote.url}: broke off at byte {self.position:,} of {self.remote.num_bytes:,}"

        return with_retries(read, describe=describe)


def open_filesystem(url: str, *, flag: str = "") -> tuple[Any, str]:
    """The store's file system, and the URL's path in it. ValueError if its package is missing."""
    import fsspec

    package = PACKAGES[split_scheme(url)[0]]
    try:
        settings = make_http_settings(SECONDS_WITHOUT_BYTES) if package == "aiohttp" else {}
        return fsspec.core.url_to_fs(url, **settings)
    except ImportError:
        raise ValueError(f"{flag} {url}: needs the package {package} (pip install {package})".strip()) from None


def find_remote(url: str, *, flag: str) -> list[tuple[str, RemoteFile]]:
    """The file of a URL, those that match its wildcards, or all of a folder; each with its path there. ValueError if
    there is none, or the URL holds credentials."""
    if faults := find_url_faults(url, flag=flag):
        raise ValueError("\n".join(faults))
    filesystem, path = open_filesystem(url, flag=flag)
    with refused_if_unreachable(url, flag=flag):
        if any(character in path for character in WILDCARDS):
            root = path[: min(path.find(character) for character in WILDCARDS if character in path)]
            root, found = root[: root.rfind("/") + 1], filesystem.glob(path)
        elif not url.startswith("http") and filesystem.isdir(path):
            root, found = path.rstrip("/") + "/", filesystem.find(path)
        else:
            root, found = path[: path.rfind("/") + 1], [path]
        urls = [filesystem.unstrip_protocol(one) for one in sorted(found)]
        root = filesystem.unstrip_protocol(root)
        return [(one.removeprefix(root), describe_remote(one)) for one in urls]


def describe_remote(url: str) -> RemoteFile:
    """A file as its store describes it now. ValueError if that is without its length."""
    filesystem, path = open_filesystem(url)
    filesystem.invalidate_cache()
    info = ask(filesystem, path)
    if info.get("size") is None:
        raise ValueError(f"{url}: the server does not say the file's length: download it first")
    version = next((str(info[name]) for name in VERSIONS if info.get(name)), None)
    return RemoteFile(url, info["size"], version)


def ask(filesystem: Any, path: str) -> dict[str, Any]:
    """A store's entry for a file; asks again if a web server does not answer. FileNotFoundError if there is none."""
    for attempt in range(1, NUM_QUESTIONS + 1):
        try:
            return filesystem.info(path)
        except FileNotFoundError as error:
            is_unreachable = isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError)
            if attempt == NUM_QUESTIONS or not is_unreachable:
                raise
        time.sleep(SECONDS_TO_WAIT[attempt - 1])
    raise AssertionError("the last attempt returns or raises")


def has_remote(url: str) -> bool:
    filesystem, path = open_filesystem(url)
    filesystem.invalidate_cache()
    try:
        ask(filesystem, path)  # `exists` would ask a web server for the content
    except FileNotFoundError:
        return False
    return True


@contextmanager
def refused_if_unreachable(url: str, *, flag: str) -> Iterator[None]:
    """Raises ValueError naming the URL if its store cannot be asked."""
    try:
        yield
    except ValueError:
        raise
    except FileNotFoundError as error:  # also if a web server does not answer
        if (refusal := find_refusal(error)) is not None:
            raise ValueError(hide_secrets(f"{flag} {url}: {refusal}")) from None
        why = "" if error.__cause__ is None else f", or it cannot be reached: {error.__cause__}"
        raise ValueError(hide_secrets(f"{flag} {url}: no such file{why}")) from None
    except Exception as error:  # each store's library has its own
        raise ValueError(hide_secrets(f"{flag} {url}: cannot be read: {type(error).__name__}: {error}")) from None


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
