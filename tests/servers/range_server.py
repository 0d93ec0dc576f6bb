"""A web server for files, with the faults that a test asks for."""

import hashlib
import time
from http.server import BaseHTTPRequestHandler

from heavy import need
from local_server import OpenServer, QuietHandler


class RangeServer(OpenServer):
    """Files by name, and how the next requests for their content are answered, each once.

    None: well; "break": half of the answer, then the end of the connection; "500"; "whole": the file, for any range;
    "silent": nothing, for two seconds.
    """

    def __init__(self):
        need("aiohttp")  # by which files are read from it
        self.files: dict[str, bytes] = {}
        self.faults: list[str | None] = []
        self.says_length = True
        self.statuses: dict[str, int] = {}  # that all requests for a file are answered with; 0: the connection ends
        self.asked: list[str] = []  # ranges
        self.names: list[str] = []  # of the files whose content was asked for
        server = self

        class Handler(QuietHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                if server.refuses(self):
                    return
                content = server.files.get(self.path.strip("/"))
                self.send_response(404 if content is None else 200)
                if content is not None and server.says_length:
                    self.send_header("Content-Length", str(len(content)))
                    self.send_header("ETag", hashlib.sha256(content).hexdigest())
                self.send_header("Connection", "close")
                self.end_headers()

            def do_GET(self) -> None:
                server.answer(self)

        self.open(Handler)

    def refuses(self, request: BaseHTTPRequestHandler) -> bool:
        """Whether the file has a status, with which this answers."""
        name = request.path.strip("/")
        status = self.statuses.get(name, 200 if name in self.files else 404)
        if status == 0:
            request.close_connection = True
        elif status != 200:
            request.send_error(status)
        return status != 200

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        if self.refuses(request):
            return None
        asked = request.headers.get("Range", "")
        self.asked.append(asked)
        self.names.append(request.path.strip("/"))
        content = self.files[request.path.strip("/")]
        fault = self.faults.pop(0) if self.faults else None
        if fault == "silent":
            time.sleep(2)
            return None
        if fault == "500":
            return request.send_error(500)
        start, _, end = asked.removeprefix("bytes=").partition("-")
        part = content if fault == "whole" or not start else content[int(start) : int(end) + 1]
        request.send_response(200 if part is content else 206)
        if part is not content:
            request.send_header("Content-Range", f"bytes {start}-{int(start) + len(part) - 1}/{len(content)}")
        if self.says_length:
            request.send_header("Content-Length", str(len(part)))
        request.send_header("Connection", "close")
        request.end_headers()
        request.wfile.write(part[: len(part) // 2] if fault == "break" else part)
        request.close_connection = True
