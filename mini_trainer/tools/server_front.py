"""A front for transformers' server: its own model's paths alone, for clients that name an expected host.

The server behind it loads any model that a client names to POST /load_model, and unloads all at /reset, for whoever
reaches its port, web pages in the user's browser included.
"""

import json
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health")
LOOPBACK = ("localhost", "127.0.0.1", "::1")

# The types of ASGI (https://asgi.readthedocs.io/en/latest/specs/www.html)
Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class Front:
    """An ASGI application that passes requests on to another one, or refuses them.

    `hosts`: names in a request's Host, without ports; None for any. A page of another site is refused by its Origin,
    unless `allows_origins`.
    """

    def __init__(self, behind: Application, *, hosts: Collection[str] | None, allows_origins: bool = False) -> None:
        self.behind, self.hosts, self.allows_origins = behind, hosts, allows_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close"})
        refusal = self.find_refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            return await self.behind(scope, receive, send)
        status, reason = refusal
        body = json.dumps({"error": {"message": reason, "type": "invalid_request_error", "code": status}}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def find_refusal(self, scope: Scope) -> tuple[int, str] | None:
        """The status and the reason of a refused request; None for one to pass on."""
        headers = [(name.lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        given = [value for name, value in headers if name == b"host"]
        host = find_hostname(f"//{given[0]}") if len(given) == 1 else None
        if host is None or (self.hosts is not None and host not in self.hosts):
            expected = "one" if self.hosts is None else ", ".join(self.hosts)
            return 421, f"Host: given {', '.join(given) or 'none'}, allowed: {expected} (--allowed-hosts)"
        if not self.allows_origins:
            for origin in (value for name, value in headers if name == b"origin"):
                if find_hostname(origin) not in {host, *(self.hosts or ())}:
                    return 403, f"Origin: given {origin}; pages of other sites may not use this server"
        if scope["path"] not in PATHS:
            return 404, f"given {scope['path']}, allowed: {', '.join(PATHS)}"
        return None


def choose_hosts(address: str, allowed: Sequence[str]) -> tuple[str, ...] | None:
    """The names that a request's Host may have, for a server that listens on `address`; None for any.

    On a loopback address, other names are refused: a site can make its own name resolve to this address, for its pages
    to reach the server (DNS rebinding).
    """
    found = {entry[4][0] for entry in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)}
    if all(ip_address(one).is_loopback for one in found):
        return tuple(dict.fromkeys([*LOOPBACK, address.lower(), *map(str.lower, allowed)]))
    return tuple(map(str.lower, allowed)) or None


def find_hostname(url: str) -> str | None:
    """The host in a URL, in lower case, an IPv6 address without brackets; None if there is none."""
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def run_behind_front(words: list[str], *, hosts: Collection[str] | None, allows_origins: bool) -> None:
    """Runs `transformers` with these words in this process, until it ends; its server has a front."""
    from transformers.cli.serving import server

    build = server.build_server  # which `serve` imports when it runs

    def build_with_front(*args: Any, **kwargs: Any) -> Front:
        return Front(build(*args, **kwargs), hosts=hosts, allows_origins=allows_origins)

    server.build_server = build_with_front  # pyrefly: ignore[bad-assignment]
    from transformers.cli.transformers import app

    app(args=words, prog_name="transformers")
