"""A stand-in for a server that speaks OpenAI's protocol."""

import json
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from http.server import ThreadingHTTPServer
from typing import Any

from hub_standin import send_json
from local_server import QuietHandler, serving


def repeat(body: dict[str, Any]) -> dict[str, Any]:
    """The response that repeats what it is asked, in capitals."""
    is_chat = "messages" in body
    said = (body["messages"][-1]["content"] if is_chat else body["prompt"]).upper()
    content = {"message": {"role": "assistant", "content": said}} if is_chat else {"text": said}
    usage = {"prompt_tokens": 3, "completion_tokens": len(said), "total_tokens": 3 + len(said)}
    choice = content | {"index": 0, "finish_reason": "stop"}
    kind = "chat.completion" if is_chat else "text_completion"
    return dict(id="1", object=kind, created=1, model="m", choices=[choice], usage=usage)


class Refusal(Exception):
    """Raised by `complete` to refuse a request with this status and error, or with a body in FastAPI's form."""

    def __init__(self, status: int, **error: object) -> None:
        self.status, self.body = status, error if "detail" in error else {"error": error}


class Server(ThreadingHTTPServer):
    """Answers each request with `complete` of its body; what it was asked, and how it fails."""

    daemon_threads = True

    def __init__(self, complete: Callable[[dict[str, Any]], dict[str, Any]] = repeat) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.complete = complete
        self.asked: list[tuple[str, dict]] = []
        self.num_running = self.most_running = 0
        self.failures = 0  # requests that still fail with 503
        self.refuses: str | None = None
        self.redirects: str | None = None  # to this URL
        self.says: tuple[str, str] | None = None  # a content type and a body, instead of an answer
        self.breaks_off = False  # after that body, of which it has announced more
        self.models: list[dict] = []  # its list of models
        self.deltas: list[dict] = []  # of a streamed answer, instead of what it is asked
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(QuietHandler):
    server: Server

    def do_GET(self) -> None:
        send_json(self, 200, {"object": "list", "data": self.server.models})

    def do_POST(self) -> None:
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.asked.append((self.path, body | {"key": self.headers["Authorization"]}))
            server.num_running += 1
            server.most_running = max(server.most_running, server.num_running)
            fails, server.failures = server.failures > 0, max(0, server.failures - 1)
        time.sleep(0.05)
        with server.lock:
            server.num_running -= 1
        if fails or server.refuses is not None:
            send_json(self, 503 if fails else 400, {"error": {"message": server.refuses or "busy"}})
        elif server.redirects is not None:
            self.send_response(307)
            self.send_header("Location", server.redirects)
            self.end_headers()
        elif server.says is not None:
            kind, text = server.says
            self.send_response(200)
            self.send_header("Content-Type", kind)
            if server.breaks_off:
                self.send_header("Content-Length", str(len(text.encode()) + 1))
            self.end_headers()
            self.wfile.write(text.encode())
        elif body.get("stream"):
            self.stream(body["messages"][-1]["content"].upper())
        else:
            try:
                send_json(self, 200, server.complete(body))
            except Refusal as refusal:
                send_json(self, refusal.status, refusal.body)

    def stream(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for delta in self.server.deltas or [dict(content=word + " ") for word in text.split(" ")]:
            choice = dict(index=0, delta=delta, finish_reason=None)
            chunk = dict(id="1", object="chat.completion.chunk", created=1, model="m", choices=[choice])
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")


def serve(complete: Callable[[dict[str, Any]], dict[str, Any]] = repeat) -> AbstractContextManager[Server]:
    """A running server, which ends with the block."""
    return serving(Server(complete))
