"""URLs in place of paths: the stores and servers that they may name, and what must not be in them."""

import importlib
import importlib.util
import re

# Packages that read them, by the URL's scheme.
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub", "http": "aiohttp", "https": "aiohttp"}
WRITABLE = ("s3", "gs", "hf")
# Credentials in URLs.
QUERY = re.compile(
    r"([?&][^=&\s]*(?:token|key|secret|password|signature|credential|sig)[^=&\s]*=)[^&\s]+", re.IGNORECASE
)
USER = re.compile(r"(\w+://)[^/?#\s]+@")
HIDDEN = "***"


def is_url(path: str) -> bool:
    return "://" in path


def hide_credentials(text: str) -> str:
    """Replaces the credentials in URLs."""
    return USER.sub(rf"\1{HIDDEN}@", QUERY.sub(rf"\1{HIDDEN}", text))


def split_scheme(url: str) -> tuple[str, str]:
    scheme, _, place = url.partition("://")
    return scheme, place


def list_http_errors() -> tuple[type[Exception], ...]:
    """The base errors of the HTTP clients that huggingface_hub and openai use: httpx2, and httpx in older versions."""
    installed = filter(importlib.util.find_spec, ("httpx2", "httpx"))
    return tuple(importlib.import_module(name).HTTPError for name in installed)


def find_url_faults(url: str, *, flag: str) -> list[str]:
    """Reasons why a URL cannot be read from: credentials in it, or an unknown scheme."""
    given = f"{flag} {hide_credentials(url)}"
    if USER.search(url) or QUERY.search(url):
        return [
            f"{given}: has a password, key or signature in it, which would be written to logs and sidecars: set the"
            " credentials in the environment (docs/data.md)"
        ]
    if split_scheme(url)[0] not in PACKAGES:
        return [f"{given}: must be a local path, or begin with {'://, '.join(PACKAGES)}://"]
    return []


def find_target_faults(url: str, *, flag: str) -> list[str]:
    """Reasons why a URL cannot be written to."""
    if faults := find_url_faults(url, flag=flag):
        return faults
    scheme, place = split_scheme(url)
    if scheme not in WRITABLE:
        stores = "://, ".join(WRITABLE[:-1])
        return [f"{flag} {url}: web servers cannot be written to: give {stores}:// or {WRITABLE[-1]}://, or a path"]
    return [] if place.strip("/") else [f"{flag} {url}: names no bucket: must be {scheme}://BUCKET/PATH"]
