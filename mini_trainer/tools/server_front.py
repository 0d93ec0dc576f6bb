"""A front for transformers' server: its own model's paths alone, for clients that name an expected host and the key.

The server behind it loads any model that a client names to POST /load_model, and unloads all at /reset, for whoever
reaches its port, web pages in the user's browser included.
"""

import json
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from hmac import compare_digest
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from mini_trainer.tools.server_requests import CHAT, TEXT, Refused, Served

MODELS, HEALTH = "/v1/models", "/health"
METHODS = {CHAT: "POST", TEXT: "POST", MODELS: "GET", HEALTH: "GET"}
LOOPBACK = ("localhost", "127.0.0.1", "::1")
MAX_BODY = 16 << 20  # bytes
OF_BODIES = (b"content-length", b"content-type", b"transfer-encoding")
# What pages of other sites may do, if they may use the server.
FOR_PAGES = [(b"access-control-allow-origin", b"*"), (b"access-control-allow-headers", b"authorization, *")]

# The types of ASGI (https://asgi.readthedocs.io/en/latest/specs/www.html)
Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


async def read_body(receive: Receive) -> bytes:
    """A request's body; Refused if it is too large or ends early."""
    body, has_more = bytearray(), True
    while has_more:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > MAX_BODY or message["type"] == "http.disconnect":
            raise Refused(413, f"the body has more than {MAX_BODY:,} bytes, or ends early")
        has_more = message.get("more_body", False)
    return bytes(body)


def cut_at_stops(send: Send, stops: Sequence[str]) -> Send:
    """A `send` for one JSON answer, whose texts end before the first stop text: the server behind ends after it."""
    start, body = {}, b""

    async def send_cut(message: Mapping[str, Any]) -> None:
        nonlocal start, body
        start, body = (message if "status" in message else start), body + message.get("body", b"")
        if message["type"] == "http.response.body" and not message.get("more_body"):
            cut = cut_answer(body, stops) if start["status"] == 200 else body
            await send({**start, "headers": describe_json(cut, start["headers"])})
            await send({"type": "http.response.body", "body": cut})

    return send_cut


def cut_answer(body: bytes, stops: Sequence[str]) -> bytes:
    answer = json.loads(body)
    for choice in answer["choices"]:
        texts = choice.get("message", choice)
        for name in ("reasoning_content", "content", "text"):
            if ends := [text.find(stop) for text in [texts.get(name) or ""] for stop in stops if stop in text]:
                texts[name], choice["finish_reason"] = texts[name][: min(ends)], "stop"
    return json.dumps(answer).encode()


def describe_json(body: bytes, others: Sequence[tuple[bytes, bytes]] = ()) -> list[tuple[bytes, bytes]]:
    """The headers of a body of JSON, and those of `others` that do not describe a body."""
    kept = [header for header in others if header[0].lower() not in OF_BODIES]
    return [*kept, (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]


@dataclass(eq=False)
class Front:
    """An ASGI application that passes requests on to another one, or refuses them. `hosts`: names in a request's Host,
    without ports; None for any. A page of another site is refused by its Origin, unless `allows_origins`. `key`: bearer
    token of requests to /v1; None for none."""

    behind: Application
    _: KW_ONLY
    served: Served
    hosts: Collection[str] | None
    allows_origins: bool = False
    key: str | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            return await send({"type": "websocket.close"})
        if scope["type"] != "http":
            return await self.behind(scope, receive, send)
        try:
            self.check(scope)
            if scope["method"] == "OPTIONS":  # a browser's question before a page's request
                return await self.reply(send, 200, {})
            if scope["path"] == MODELS:
                return await self.reply(send, 200, self.served.list_models())
            if scope["path"] == HEALTH:
                return await self.behind(scope, receive, send)
            request = self.served.prepare(scope["path"], await read_body(receive))
        except Refused as refused:
            error = {"message": refused.reason, "type": "invalid_request_error", "code": refused.code}
            return await self.reply(send, refused.status, {"error": error})
        body = json.dumps(request).encode()
        messages = iter([{"type": "http.request", "body": body}])

        async def receive_prepared() -> Mapping[str, Any]:
            return next(messages, None) or await receive()

        send = cut_at_stops(send, request["stop"]) if "stop" in request else send
        await self.behind({**scope, "headers": describe_json(body, scope["headers"])}, receive_prepared, send)

    async def reply(self, send: Send, status: int, content: Mapping[str, Any]) -> None:
        body = json.dumps(content).encode()
        headers = describe_json(body, FOR_PAGES if self.allows_origins else ())
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def check(self, scope: Scope) -> None:
        """Refused for a request of an unexpected host, site, path or method, or without the key."""
        headers = [(name.lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        given = [value for name, value in headers if name == b"host"]
        host = find_hostname(f"//{given[0]}") if len(given) == 1 else None
        if host is None or (self.hosts is not None and host not in self.hosts):
            expected = "one" if self.hosts is None else ", ".join(self.hosts)
            raise Refused(421, f"Host: given {', '.join(given) or 'none'}, allowed: {expected} (--allowed-hosts)")
        if not self.allows_origins:
            for origin in (value for name, value in headers if name == b"origin"):
                if find_hostname(origin) not in {host, *(self.hosts or ())}:
                    raise Refused(403, f"Origin: given {origin}; pages of other sites may not use this server")
        path, method = scope["path"], scope["method"]
        if path not in METHODS:
            raise Refused(404, f"given {path}, allowed: {', '.join(METHODS)}")
        if self.allows_origins and method == "OPTIONS":
            return
        tokens = [value.encode("latin-1") for name, value in headers if name == b"authorization"]
        if self.key is not None and path != HEALTH and not (len(tokens) == 1 and is_bearer(tokens[0], self.key)):
            raise Refused(401, "the header Authorization: Bearer KEY has another key or is missing", "invalid_api_key")
        if method != METHODS[path]:
            raise Refused(405, f"given {method} {path}, allowed: {METHODS[path]}")


def is_bearer(given: bytes, key: str) -> bool:
    """Whether a header has the key, compared in constant time."""
    scheme, _, token = given.partition(b" ")
    return scheme.lower() == b"bearer" and compare_digest(token.strip(), key.encode())


def choose_hosts(address: str, allowed: Sequence[str]) -> tuple[str, ...] | None:
    """The names that a request's Host may have, for a server that listens on `address`; None for any. On a loopback
    address, other names are refused: a site can make its own name resolve to this address, for its pages to reach the
    server (DNS rebinding)."""
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


def run_behind_front(words: list[str], **front: Any) -> None:
    """Runs `transformers` with these words in this process, until it ends; its server has a front."""
    from transformers.cli.serving import server

    build = server.build_server  # which `serve` imports when it runs

    def build_with_front(*args: Any, **kwargs: Any) -> Front:
        return Front(build(*args, **kwargs), **front)

    server.build_server = build_with_front  # pyrefly: ignore[bad-assignment]
    from transformers.cli.transformers import app

    app(args=words, prog_name="transformers")
