"""Files of rows in object stores and on web servers, read by fsspec as streams: s3://, gs://, hf://, http(s)://.

Credentials come from the environment, as each store's own library reads them; URLs that hold any are refused, because
URLs are written to sidecars and logs.
"""

import io
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ranks.messages import QUERY, USER, hide_secrets

PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub", "http": "aiohttp", "https": "aiohttp"}
FETCHED_BYTES = 8 << 20  # of one request
SECONDS_TO_WAIT = (1, 2, 5, 10, 20)  # before each new attempt at the same byte
VERSIONS = ("ETag", "etag", "blob_id", "md5Hash", "Last-Modified", "LastModified", "mtime")  # in what a store says
WILDCARDS = "*["


def is_url(path: str) -> bool:
    return "://" in path


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
        for seconds in (*SECONDS_TO_WAIT, None):
            try:
                if self.file is None:
                    self.file = self.filesystem.open(self.path, "rb", block_size=FETCHED_BYTES, cache_type="readahead")
                self.file.seek(self.position)
                data = self.file.read(num_bytes)
                if data:
                    return data
                reason = "the connection ended"
            except Exception as error:  # each store's library has its own
                reason = f"{type(error).__name__}: {error}"
                if isinstance(error, FileNotFoundError | PermissionError):
                    seconds = None
            self.file = None
            if seconds is None:
                break
            time.sleep(seconds)
        size = self.remote.num_bytes
        raise ValueError(hide_secrets(f"{self.remote.url}: broke off at byte {self.position:,} of {size:,}: {reason}"))


def open_filesystem(url: str, *, flag: str = "") -> tuple[Any, str]:
    """The store's file system, and the URL's path in it. ValueError if its package is missing, or it is unknown."""
    import fsspec

    protocol = url.partition("://")[0]
    if protocol not in PACKAGES:
        raise ValueError(f"{flag} {url}: must be a local path, or begin with {'://, '.join(PACKAGES)}://".strip())
    try:
        return fsspec.core.url_to_fs(url)
    except ImportError:
        raise ValueError(
            f"{flag} {url}: needs the package {PACKAGES[protocol]} (pip install {PACKAGES[protocol]})".strip()
        ) from None


def find_remote(url: str, *, flag: str) -> list[tuple[str, RemoteFile]]:
    """The file of a URL, those that match its wildcards, or all of a folder; each with its path there. ValueError if
    there is none, or the URL holds credentials."""
    if USER.search(url) or QUERY.search(url):
        raise ValueError(
            f"{flag} {hide_secrets(url)}: has a password, key or signature in it, which would be written to logs and"
            " sidecars: set the credentials in the environment (docs/data.md)"
        )
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
    info = filesystem.info(path)
    if info.get("size") is None:
        raise ValueError(f"{url}: the server does not say the file's length: download it first")
    version = next((str(info[name]) for name in VERSIONS if info.get(name)), None)
    return RemoteFile(url, info["size"], version)


@contextmanager
def refused_if_unreachable(url: str, *, flag: str) -> Iterator[None]:
    """Raises ValueError naming the URL if its store cannot be asked."""
    try:
        yield
    except ValueError:
        raise
    except FileNotFoundError as error:  # also if a web server does not answer
        why = "" if error.__cause__ is None else f", or it cannot be reached: {error.__cause__}"
        raise ValueError(hide_secrets(f"{flag} {url}: no such file{why}")) from None
    except Exception as error:  # each store's library has its own
        raise ValueError(hide_secrets(f"{flag} {url}: cannot be read: {type(error).__name__}: {error}")) from None
