"""URLs in place of paths: the stores and servers that they may name, and what must not be in them."""

import importlib
import importlib.util
import ipaddress
import re
import socket
from contextlib import suppress
from urllib.parse import urlsplit

# Packages that read them, by the URL's scheme.
PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub", "http": "aiohttp", "https": "aiohttp"}
WRITABLE = ("s3", "gs", "hf")
# Credentials in URLs.
QUERY = re.compile(r"([?&][^=&\s]*(?:token|key|secret|password|signature|credential|sig)[^=&\s]*=)[^&\s]+", re.I)
USER = re.compile(r"(\w+://)[^/?#\s]+@")
HIDDEN = "***"


class RefusedRedirect(ValueError):
    """A redirect to an address that is not on the public web."""


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
            " credentials in the environment (docs/reference/data.md)"
        ]
    if split_scheme(url)[0] not in PACKAGES:
        return [f"{given}: must be a local path, or begin with {'://, '.join(PACKAGES)}://"]
    return []


def check_redirect(url: str, target: str) -> None:
    """Raises RefusedRedirect if `url` redirects to a scheme other than http(s), or to an address of this machine or its
    network, which the author of the redirect might be unable to reach; the host of `url` is allowed."""
    parts = urlsplit(target)
    if parts.scheme not in ("http", "https"):
        raise RefusedRedirect(f"is redirected to {remove_query(target)}: allowed are http:// and https://")
    if parts.hostname == urlsplit(url).hostname:
        return
    with suppress(OSError, UnicodeError):  # unknown names are an error of the request
        for *_, (address, *_) in socket.getaddrinfo(parts.hostname, None):
            found = ipaddress.ip_address(address.partition("%")[0])
            found = getattr(found, "ipv4_mapped", None) or found
            if not found.is_global or found.is_multicast:
                raise RefusedRedirect(
                    f"is redirected to {remove_query(target)}, {found}: not a public address: name that host in the URL"
                    " if you mean it"
                )


def remove_query(url: str) -> str:
    """The URL without anything that can be a credential: user, query and fragment."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


SECRET_NAMES = re.compile(r"TOKEN(?!S|IZ)|PASSW(OR)?D|SECRET|API_?KEY|CREDENTIAL|JWT")
NO_SECRETS = re.compile(r"(PATH|FILE|DIR|_ENV)$")  # exceptions, whose values only say where a secret is


def is_secret(name: str) -> bool:
    """Whether an environment variable of this name holds a token or a password."""
    return bool(SECRET_NAMES.search(name.upper())) and not NO_SECRETS.search(name.upper())
