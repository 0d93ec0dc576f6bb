"""Files in object stores and on web servers, read by fsspec as streams and written whole: s3://, gs://, hf://,
http(s)://.

Credentials come from the environment, as each store's own library reads them; URLs that hold any are refused, because
URLs are written to sidecars and logs.

A file appears at a store when all of it is there (S3 and Google Cloud Storage), so a directory is written in such an
order that its last file says that it is complete.
"""

import asyncio
import errno
import functools
import importlib
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urljoin

from fsspec.core import url_to_fs
from fsspec.spec import AbstractBufferedFile

from mini_trainer.distributed.ending import ExitCode, RunError
from mini_trainer.distributed.messages import hide_secrets
from mini_trainer.options import urls
from mini_trainer.options.problems.finding import require

Result = TypeVar("Result")

FETCHED_BYTES = 8 << 20  # of one request
SECONDS_TO_WAIT = (1, 2, 5, 10, 20)  # before each new attempt at the same byte, or file
SECONDS_WITHOUT_BYTES = 60.0  # of a web server, until a request is made again
VERSIONS = ("ETag", "etag", "blob_id", "md5Hash", "Last-Modified", "LastModified", "mtime")  # in a store's answers
WILDCARDS = re.compile(r"[*\[]")
WITHOUT_CREDENTIALS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound")  # errors of botocore
COPYING = {"s3": ("aws", "s3", "sync"), "gs": ("gcloud", "storage", "rsync", "--recursive")}  # commands
KINDS_OF_REPOSITORIES = {"datasets": "dataset", "spaces": "space"}  # the first part of a path at hf://


class BrokenTransfer(Exception):
    """A transfer that ended early."""


def retry(attempt: Callable[[], Result], seconds_to_wait: Sequence[float]) -> Result:
    """The result of `attempt`, which is called again, after each of the waits, if its error may be transient."""
    for seconds in seconds_to_wait:
        try:
            return attempt()
        except Exception as error:  # each store's library has its own
            if is_final(error):
                raise
        time.sleep(seconds)
    return attempt()


def is_final(error: BaseException) -> bool:
    """Whether another attempt would fail in the same way: the request is at fault, and not the store."""
    from huggingface_hub.errors import LocalTokenNotFoundError, OfflineModeIsEnabled

    error = find_cause(error)
    if (status := find_status(error)) is not None:
        return status < 500 and status not in (408, 429)
    final = (FileNotFoundError, ValueError, TypeError, LocalTokenNotFoundError, OfflineModeIsEnabled)
    is_malformed = type(error).__name__ == "ParamValidationError" or getattr(error, "errno", 0) == errno.EINVAL  # S3's
    return isinstance(error, final) or is_malformed or is_denied(error)


def is_denied(error: BaseException) -> bool:
    error = find_cause(error)
    is_known = isinstance(error, PermissionError) or type(error).__name__ in WITHOUT_CREDENTIALS
    return is_known or find_status(error) in (401, 403)


def find_cause(error: BaseException) -> BaseException:
    """The error of the request itself: fsspec and the hub's client may raise FileNotFoundError for any error."""
    while isinstance(error, FileNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def find_status(error: BaseException) -> int | None:
    """The HTTP status in an error of huggingface_hub, openai, botocore or aiohttp; None in others."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return getattr(response, "status_code", None) or getattr(error, "status", None)


def make_error(error: BaseException, message: str, *, had_access: bool = False) -> RunError:
    """The error to raise for one of a store's or server's library: bad input if it is final, else an I/O error. So is
    denied access for who `had_access` before: credentials expire."""
    is_mistake = is_final(error) and not (had_access and is_denied(error))
    return RunError(ExitCode.BAD_INPUT if is_mistake else ExitCode.IO, hide_secrets(message))


def retry_transfer(attempt: Callable[[], Result], what: str, waits: Sequence[float] | None = None) -> Result:
    """`retry`; RunError that begins with `what` if it keeps failing (see `make_error`)."""
    try:
        return retry(attempt, SECONDS_TO_WAIT if waits is None else waits)
    except Exception as error:
        reason = str(error) if isinstance(error, BrokenTransfer) else f"{type(error).__name__}: {error}"
        raise make_error(error, f"{what}: {reason}", had_access=True) from error


@functools.cache
def make_http_settings(seconds: float) -> dict[str, Any]:
    """Settings of fsspec's file system for web servers: timeouts, and a check of redirects."""
    aiohttp = importlib.import_module(urls.PACKAGES["http"])

    async def begin(session: Any, context: Any, request: Any) -> None:
        context.url = str(request.url)

    async def follow(session: Any, context: Any, request: Any) -> None:
        headers = request.response.headers
        target = urljoin(str(request.url), headers.get("Location") or headers.get("URI") or "")
        await asyncio.get_running_loop().run_in_executor(None, urls.check_redirect, context.url, target)

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(begin)
    trace.on_request_redirect.append(follow)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=seconds, sock_read=seconds)
    return {"client_kwargs": {"timeout": timeout, "trace_configs": [trace]}}


def is_web(url: str) -> bool:
    return url.startswith("http")


def open_filesystem(url: str) -> tuple[Any, str]:
    """The store's file system, and the URL's path in it. ImportError if its package is missing."""
    return url_to_fs(url, **make_http_settings(SECONDS_WITHOUT_BYTES) if is_web(url) else {})


@dataclass(frozen=True)
class RemoteFile:
    """A remote file with its store's metadata: its size, and a mark that changes with its content, if any."""

    url: str
    num_bytes: int
    version: str | None

    def open(self) -> "RemoteReader":
        return RemoteReader(self)

    def check_unchanged(self) -> None:
        """ValueError if the store has another file there by now; RunError if it cannot say."""
        if retry_transfer(lambda: describe_remote(self.url), f"{self.url}: cannot be looked up again", ()) != self:
            raise ValueError(f"{self.url}: changed while it was read")


class RemoteReader(AbstractBufferedFile):
    """The bytes of a remote file, by requests that are made again if they fail. RunError if one keeps failing, or the
    file ends before the length that the store has said."""

    def __init__(self, remote: RemoteFile) -> None:
        super().__init__(*open_filesystem(remote.url), block_size=FETCHED_BYTES, size=remote.num_bytes)
        self.url = remote.url

    def _fetch_range(self, start: int, end: int) -> bytes:
        """The bytes that fsspec asks for, to read ahead."""

        def read() -> bytes:
            data = self.fs.cat_file(self.path, start=start, end=end)
            if len(data) != end - start:
                raise BrokenTransfer(f"{len(data):,} of {end - start:,} bytes came")
            return data

        return retry_transfer(read, f"{self.url}: broke off after byte {start:,} of {self.size:,}")


def find_remote(url: str, *, flag: str) -> list[tuple[str, RemoteFile]]:
    """The file of a URL, those that match its wildcards, or all of a folder; each with its path there. ValueError if
    there is none, or the URL holds credentials."""
    with refused_if_unreachable(url, flag=flag):
        filesystem, path = open_filesystem(url)
        literal, *pattern = WILDCARDS.split(path, maxsplit=1)
        if pattern:
            found = filesystem.glob(path)
        elif is_web(url):  # web servers do not list their files
            found = [path]
        else:
            found = filesystem.find(path) or [path]
        folder = path.rstrip("/") + "/"
        is_folder = any(one.startswith(folder) for one in found)
        root = folder if is_folder else literal[: literal.rfind("/") + 1]
        return [(one.removeprefix(root), describe_remote(filesystem.unstrip_protocol(one))) for one in sorted(found)]


def describe_remote(url: str) -> RemoteFile:
    """A file as its store describes it now. FileNotFoundError if there is none, ValueError if its length is unknown."""
    filesystem, path = open_filesystem(url)
    filesystem.invalidate_cache()
    waits = SECONDS_TO_WAIT[:2] if is_web(url) else ()  # the stores' own libraries ask again
    info = retry(lambda: filesystem.info(path), waits)
    if info.get("size") is None:
        raise ValueError(f"{url}: the server does not say the file's length: download it first")
    version = next((str(info[name]) for name in VERSIONS if info.get(name)), None)
    return RemoteFile(url, info["size"], version)


def look_up_remote(url: str) -> RemoteFile | None:
    """A file as its store describes it now; None if there is none."""
    try:
        return describe_remote(url)
    except FileNotFoundError as error:
        if not is_final(error):
            raise
        return None


@contextmanager
def refused_if_unreachable(url: str, *, flag: str) -> Iterator[None]:
    """Raises ValueError naming the URL if it is faulty, or its store cannot be asked (see `make_error`)."""
    if faults := urls.find_url_faults(url, flag=flag):
        raise ValueError("\n".join(faults))
    require(urls.PACKAGES[urls.split_scheme(url)[0]], flag=f"{flag} {url}:")
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # each store's library has its own
        cause = find_cause(error)
        is_missing = isinstance(cause, FileNotFoundError) or find_status(cause) == 404
        why = "no such file" if is_missing else f"cannot be read: {type(cause).__name__}: {cause}"
        raise make_error(error, f"{flag} {url}: {why}") from None


def upload_file(source: Path, url: str, waits: Sequence[float] | None = None) -> None:
    """Copies a file to a store; RunError if that keeps failing. `waits`: seconds before each new attempt."""
    filesystem, path = open_filesystem(url)
    size = source.stat().st_size

    def put() -> None:
        filesystem.put_file(str(source), path)
        filesystem.invalidate_cache()
        if (found := filesystem.info(path)["size"]) != size:
            raise BrokenTransfer(f"{found:,} of {size:,} bytes exist")

    retry_transfer(put, f"{url}: could not be written", waits)


def remove_remote(url: str, waits: Sequence[float] | None = None) -> None:
    """Removes a file if it exists."""
    filesystem, path = open_filesystem(url)

    def remove() -> None:
        if look_up_remote(url) is not None:
            filesystem.rm_file(path)

    retry_transfer(remove, f"{url}: could not be removed", waits)


def list_remote(folder: str, waits: Sequence[float] | None = None) -> list[str]:
    """Paths of all files below a folder, relative to it."""
    filesystem, path = open_filesystem(folder)
    filesystem.invalidate_cache()
    root = path.rstrip("/") + "/"
    found = retry_transfer(lambda: filesystem.find(path), f"{folder}: could not be listed", waits)
    return sorted(one.removeprefix(root) for one in found if one.startswith(root))


def upload_directory(source: Path, url: str, *, last: Sequence[str] = (), waits: Sequence[float] | None = None) -> None:
    """Makes the files at `url` those of a directory. Files named as in `last`, without which nobody takes the others
    for complete, are removed first and written last, in that order."""

    def rank(name: str) -> tuple[int, str]:
        base = name.rpartition("/")[2]
        return last.index(base) + 1 if base in last else 0, name

    names = sorted((str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()), key=rank)
    outdated = [name for name in list_remote(url, waits) if name not in names or rank(name)[0]]
    for name in sorted(outdated, key=rank, reverse=True):
        remove_remote(f"{url}/{name}", waits)
    for name in names:
        upload_file(source / name, f"{url}/{name}", waits)


def check_writable(folder: str) -> None:
    """ValueError if nothing can be written below a URL: no such bucket, no credentials or permission, an outage."""
    is_hub = urls.split_scheme(folder)[0] == "hf"
    try:
        filesystem, path = open_filesystem(f"{folder.rstrip('/')}/.mini_trainer")  # an empty file, to try
        if is_hub:  # anything written is a commit
            filesystem.resolve_path(path)
            return
        filesystem.pipe_file(path, b"")
        with suppress(Exception):  # whoever may write need not be allowed to remove
            filesystem.rm_file(path)
    except FileNotFoundError as error:
        what = "repository" if is_hub else "bucket"
        raise ValueError(f"the store has no such {what}: create it first ({error})") from error
    except Exception as error:  # each store's library has its own
        advice = ": set the credentials in the environment (docs/reference/data.md)" if is_denied(error) else ""
        message = f"cannot be written: {type(error).__name__}: {str(error).rstrip('.')}{advice}"
        raise make_error(error, message, had_access=True) from error


def describe_upload(directory: Path, url: str) -> str:
    """A command that copies a directory to a store."""
    scheme, place = urls.split_scheme(url)
    if scheme in COPYING:
        return shlex.join([*COPYING[scheme], str(directory), url])
    parts, options = place.strip("/").split("/"), []
    if parts[0] in KINDS_OF_REPOSITORIES:
        options = ["--repo-type", KINDS_OF_REPOSITORIES[parts.pop(0)]]
    return shlex.join(["hf", "upload", "/".join(parts[:2]), str(directory), "/".join(parts[2:]) or ".", *options])
