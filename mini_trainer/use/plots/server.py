"""Serves pages about runs to browsers on this machine."""

import json
import math
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from mini_trainer.distributed.messages import say
from mini_trainer.use.plots.curves_page import describe_page, make_curves_page, make_version
from mini_trainer.use.plots.run_files import Run

HOST = "127.0.0.1"
DEFAULT_PORT = 8765
SECONDS_TO_ASK = 10.0  # for a client to send its whole request
SECONDS_TO_TAKE = 60.0  # for a client to receive the answer
MOST_CONNECTIONS = 64  # each has a thread


@dataclass(frozen=True)
class Answer:
    """The answer to a request."""

    text: str
    kind: str = "text/plain"
    status: HTTPStatus = HTTPStatus.OK


UNCHANGED = Answer("", "application/json", HTTPStatus.NO_CONTENT)


class LocalServer(ThreadingHTTPServer):
    """Answers GET requests of browsers on this machine, one at a time; subclasses say what with, in `respond`."""

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS
    allow_reuse_address = True  # so that an open page does not block the port for the next start

    def __init__(self, port: int):
        """Raises ValueError if the port is not available; 0 is any that is."""
        self.lock = threading.Lock()  # one request at a time reads the runs
        self.connections: dict[socket.socket, float] = {}  # the time by which each must have sent its request
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            given = f"--port {port}: not available ({error.strerror})"
            raise ValueError(f"{given}: choose another one, or 0 for any that is free") from None

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def respond(self, path: str, query: dict[str, list[str]]) -> Answer | None:
        """The answer to a request; None if there is nothing at `path`. ValueError or OSError if a run is gone."""
        raise NotImplementedError

    def verify_request(self, request: socket.socket, client_address: object) -> bool:
        """Whether to answer a connection. Of too many the one is closed that has been silent for longest."""
        if len(self.connections) >= MOST_CONNECTIONS:
            longest = min(self.connections, key=self.connections.__getitem__)
            if self.connections[longest] == math.inf:
                return False
            del self.connections[longest]
            close(longest)
        self.connections[request] = time.monotonic() + SECONDS_TO_ASK
        return True

    def service_actions(self) -> None:
        """Closes connections whose request takes too long, as when a client connects and sends nothing."""
        for connection, deadline in list(self.connections.items()):
            if deadline < time.monotonic():
                close(connection)

    def shutdown_request(self, request: socket.socket) -> None:
        self.connections.pop(request, None)
        super().shutdown_request(request)

    def serve(self, what: str) -> None:
        """Serves until Ctrl-C."""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # even if this was started with Ctrl-C ignored
        say(f"{what}: {self.address} (Ctrl-C stops it)")
        try:
            self.serve_forever()
        except KeyboardInterrupt:
            print(flush=True)


def close(connection: socket.socket) -> None:
    """Ends a connection, whose thread is waiting for it, and then ends too."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class CurvesServer(LocalServer):
    """Serves the page of curves, and its data if changed since the page's version."""

    def __init__(self, runs: list[Run], *, port: int, smoothing: int | None):
        """Raises ValueError if the port is not available."""
        super().__init__(port)
        self.runs, self.smoothing = runs, smoothing

    def respond(self, path: str, query: dict[str, list[str]]) -> Answer | None:
        if path not in ("/", "/data"):
            return None
        for run in self.runs:
            run.read()
        if path == "/":
            return Answer(make_curves_page(self.runs, smoothing=self.smoothing, is_live=True), "text/html")
        return respond_with_curves(self.runs, query, smoothing=self.smoothing)


def respond_with_curves(
    runs: list[Run], query: dict[str, list[str]], *, smoothing: int | None, has_board: bool = False
) -> Answer:
    """The data of the page of curves; nothing if it is unchanged since the query's version."""
    if query.get("version") == [make_version(runs)]:
        return UNCHANGED
    page = describe_page(runs, smoothing=smoothing, is_live=True, has_board=has_board)
    return Answer(json.dumps(page, separators=(",", ":")), "application/json")


class Handler(BaseHTTPRequestHandler):
    """Handles one request."""

    server: LocalServer
    timeout = SECONDS_TO_TAKE

    def do_GET(self) -> None:
        self.server.connections[self.connection] = math.inf
        # Prevent DNS rebinding: another site whose name resolves to this address sends its own host name. The port may
        # be a tunnel's, and is left out where it is 80.
        if self.headers.get("Host", "").partition(":")[0].lower() not in (HOST, "localhost"):
            self.send(Answer(f"open {self.server.address}", status=HTTPStatus.FORBIDDEN))
            return
        try:
            url = urlsplit(self.path)
            with self.server.lock:
                answer = self.server.respond(url.path, parse_qs(url.query))
        except (ValueError, OSError) as error:  # the run's directory is gone or unreadable
            answer = Answer(str(error), status=HTTPStatus.INTERNAL_SERVER_ERROR)
        self.send(answer or Answer("there is no such page", status=HTTPStatus.NOT_FOUND))

    def send(self, answer: Answer) -> None:
        body = answer.text.encode(errors="replace")  # a path need not be UTF-8
        try:
            self.send_response(answer.status)
            self.send_header("Content-Type", f"{answer.kind}; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            self.send_header("Content-Security-Policy", "frame-ancestors 'none'")  # the rest is in the page
            if answer.status is not HTTPStatus.NO_CONTENT:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:  # the browser has closed the page
            self.close_connection = True

    def log_message(self, form: str, *values: object) -> None:
        """Logs nothing: a line every few seconds would bury the address."""
