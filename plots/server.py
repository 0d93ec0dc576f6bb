"""Serves the live page of curves to browsers on this machine."""

import json
import signal
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from plots.page import describe_page, load_library, make_curves_page, make_version
from plots.run_files import Run

HOST = "127.0.0.1"
DEFAULT_PORT = 8765


class CurvesServer(ThreadingHTTPServer):
    """Serves the page, and its data if changed since the page's version."""

    daemon_threads = True
    allow_reuse_address = True  # so that an open page does not block the port for the next start

    def __init__(self, runs: list[Run], *, port: int, smoothing: int | None):
        """Raises ValueError if the port is not available."""
        load_library()  # fails early if it is missing
        self.runs, self.smoothing = runs, smoothing
        self.lock = threading.Lock()  # one request at a time reads the runs
        try:
            super().__init__((HOST, port), CurvesHandler)
        except OSError as error:
            raise ValueError(f"--port {port}: not available ({error.strerror}): choose another one") from None

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def make_page(self) -> str:
        with self.lock:
            self.read_runs()
            return make_curves_page(self.runs, smoothing=self.smoothing, is_live=True)

    def make_data(self, version: str | None) -> str | None:
        """The page's data; None if unchanged since `version`."""
        with self.lock:
            self.read_runs()
            if version == make_version(self.runs):
                return None
            page = describe_page(self.runs, smoothing=self.smoothing, is_live=True)
        return json.dumps(page, separators=(",", ":"))

    def read_runs(self) -> None:
        for run in self.runs:
            run.read()


class CurvesHandler(BaseHTTPRequestHandler):
    """Handles one request."""

    server: CurvesServer

    def do_GET(self) -> None:
        # Prevent DNS rebinding: another site whose name resolves to this address sends its own host name.
        if self.headers.get("Host") not in (f"{name}:{self.server.server_port}" for name in (HOST, "localhost")):
            self.answer(HTTPStatus.FORBIDDEN, "text/plain", f"open {self.server.address}")
            return
        url = urlsplit(self.path)
        try:
            if url.path == "/":
                self.answer(HTTPStatus.OK, "text/html", self.server.make_page())
            elif url.path == "/data":
                data = self.server.make_data(parse_qs(url.query).get("version", [None])[0])
                status = HTTPStatus.NO_CONTENT if data is None else HTTPStatus.OK
                self.answer(status, "application/json", data or "")
            else:
                self.answer(HTTPStatus.NOT_FOUND, "text/plain", "there is only one page")
        except (ValueError, OSError) as error:  # the run's directory is gone or unreadable
            self.answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", str(error))

    def answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            if status is not HTTPStatus.NO_CONTENT:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except ConnectionError:  # the browser has closed the page
            self.close_connection = True

    def log_message(self, form: str, *values: object) -> None:
        """Logs nothing: a line every few seconds would bury the address."""


def serve(runs: list[Run], *, port: int | None, smoothing: int | None) -> None:
    """Serves the page until Ctrl-C."""
    with CurvesServer(runs, port=DEFAULT_PORT if port is None else port, smoothing=smoothing) as server:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # even if this was started with Ctrl-C ignored
        print(f"curves: {server.address} (Ctrl-C stops it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(flush=True)
