"""Servers on a thread of the test's own process, and their answers."""

import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from threading import Thread


class QuietHandler(BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


class OpenServer:
    """A server that answers on a thread until it is closed."""

    def open(self, handler: type[QuietHandler]) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def serving(server: HTTPServer) -> Iterator[HTTPServer]:
    """The server, which answers until the block ends."""
    with server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def fetch(server: HTTPServer, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    """Status and text of the answer."""
    try:
        request = urllib.request.Request(server.address + path, headers=headers, method=method)
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
