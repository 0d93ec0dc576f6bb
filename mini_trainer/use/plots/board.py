"""The board: all runs below a directory in a table, and a server that follows their files."""

import hashlib
import json
import os
import signal
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from mini_trainer.distributed.messages import say
from mini_trainer.options import DEFAULT_BATCH_SIZE
from mini_trainer.options.reading import open_regular
from mini_trainer.run.file_names import METRICS_FILE, NOTES_FILE, SAMPLES_FILE, VALIDATION_FILE
from mini_trainer.use.pages.page import escape_json, make_page
from mini_trainer.use.plots import run_files
from mini_trainer.use.plots.curves import describe_page, make_curves_page, make_version, summarise_finite
from mini_trainer.use.plots.run_files import Run, find_state, is_run, read_run_params

PAGE = Path(__file__).with_name("board.html")
HOST = "127.0.0.1"
MOST_ENTRIES = 200_000  # of directories, to look for runs among
MOST_COMPARED = 24  # runs on a page of curves: all colours with all dashes
MOST_TAIL_ROWS = 50  # last steps of a run, for its speed
TAIL_BYTES = (1 << 16, 2 * run_files.MAX_LINE_BYTES)  # to read for them; more if a line is longer
BYTES_PER_REQUEST = 16 << 20  # of metrics: about half a second of one core
TAIL_COLUMNS = ("step", "epoch", "loss", "tokens_per_second", "time_per_batch", "data_wait_seconds",
                "total_samples_accumulated", "total_tokens_accumulated")  # fmt: skip
MOST_NOTE_BYTES = 4000
CAUSAL_LM = "causal-lm"  # the default objective
# Options that end a run, with the unit that they count.
ENDS = {
    "max_steps": "step",
    "max_epochs": "epoch",
    "max_samples": "total_samples_accumulated",
    "max_tokens": "total_tokens_accumulated",
}


class WatchedRun:
    """A run's directory as a row of the table: only the ends of its metrics are read, and only if they changed. One
    request at a time reads them, and one the curves; a file system that blocks keeps no request for others waiting."""

    def __init__(self, path: Path, name: str):
        self.path, self.name = path, name
        self.id = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
        self.validations = run_files.MetricsReader(path / VALIDATION_FILE, run_files.VALIDATION_COLUMNS)
        self.tail = run_files.Reread(path / METRICS_FILE, read_tail)
        self.row: dict[str, Any] | None = None
        self.row_lock, self.curves_lock = threading.Lock(), threading.Lock()
        self.curves: Run | None = None

    def describe(self) -> dict[str, Any]:
        """The row, as JSON; the last one while another request reads it. OSError if the files cannot be read."""
        if self.row_lock.acquire(blocking=False):
            try:
                self.row = self._read()
            finally:
                self.row_lock.release()
        elif self.row is None:
            raise OSError("is still being read")
        return self.row

    def read_curves(self, most_bytes: int) -> Run:
        """The curves, after reading up to `most_bytes` of new data; the caller holds their lock."""
        run = self.curves = self.curves or Run(self.path, self.name, 0)
        run.read(most_bytes)
        return run

    def _read(self) -> dict[str, Any]:
        params, problem = read_run_params(self.path)
        state = find_state(self.path, params)
        self.tail.read()
        self.validations.read()
        tail, identity = self.tail.rows, self.tail.identity
        last = tail[-1] if tail else {}
        share = find_share(last, params)
        best = run_files.find_best(self.validations)
        return {
            "id": self.id,
            "name": self.name,
            "state": state.kind,
            "how": state.text if state.text != state.kind else "",
            "error": state.message or problem,
            "step": to_json(last.get("step")),
            "share": to_json(share),
            "loss": to_json(last.get("loss")),
            "best": to_json(None if best is None else self.validations["loss"][best]),
            "speed": to_json(summarise_finite(np.array([row["tokens_per_second"] for row in tail]))),
            "left": to_json(estimate_seconds_left(tail, params)) if state.kind == "running" else None,
            "written": None if identity is None else identity[0] / 1e9,  # seconds since 1970
            "notes": read_notes(self.path),
            "has_samples": (self.path / SAMPLES_FILE).is_file(),
            **describe_settings(params),
        }


def read_tail(path: Path) -> list[dict[str, float]]:
    """The numbers of the last steps in a metrics file; damaged lines and a torn last one are left out."""
    lines: list[bytes] = []
    with open_regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        for num_bytes in TAIL_BYTES:
            start = file.seek(max(0, size - num_bytes))
            lines = file.read(size - start).split(b"\n")[1 if start else 0 : -1]  # the first may be cut
            if lines or start == 0:
                break
    rows = [run_files.parse_row(line) for line in lines[-MOST_TAIL_ROWS:]]
    return [{name: run_files.to_float(row.get(name)) for name in TAIL_COLUMNS} for row in rows if row is not None]


def find_share(numbers: dict[str, float], params: run_files.MetricsLine) -> float:
    """Share of the run that is done, by the end that comes first; NaN if it has no end, or has not begun."""
    options, identity = (value if isinstance(value, dict) else {} for value in map(params.get, ("options", "identity")))
    ends = [(column, run_files.to_float(options.get(option))) for option, column in ENDS.items()]
    ends.append(("step", run_files.to_float(identity.get("number of steps"))))
    shares = [min(1.0, numbers[column] / end) for column, end in ends if column in numbers and end > 0]
    return max(filter(np.isfinite, shares), default=np.nan)


def estimate_seconds_left(tail: list[dict[str, float]], params: run_files.MetricsLine) -> float:
    """Time left at the speed of the last steps, without checkpoints, validations and exports; NaN if it is unknown."""
    if len(tail) < 2:
        return np.nan
    seconds = sum(row["time_per_batch"] + row["data_wait_seconds"] for row in tail[1:])
    share = find_share(tail[-1], params)
    gained = share - find_share(tail[0], params)
    return (1 - share) / gained * seconds if gained > 0 else np.nan


def describe_settings(params: run_files.MetricsLine) -> dict[str, Any]:
    """The method, the learning rate and the size of a step, as JSON; "" or null if the options are not known."""
    options = params.get("options")
    if not isinstance(options, dict):
        return {"method": "", "lr": None, "batch": None, "is_batch_of_tokens": False}
    tokens = options.get("batch_tokens")
    batch = tokens if tokens is not None else options.get("batch_size") or DEFAULT_BATCH_SIZE
    lora = "qlora" if options.get("base_quantization", "none") != "none" else "lora"
    method = "osft" if options.get("osft") else lora if options.get("lora") else "full"
    objective = str(options.get("objective") or CAUSAL_LM)
    return {
        "method": method if objective == CAUSAL_LM else f"{method}, {objective}",
        "lr": to_json(run_files.to_float(options.get("learning_rate"))),
        "batch": to_json(run_files.to_float(batch)),
        "is_batch_of_tokens": tokens is not None,
    }


def read_notes(path: Path) -> str:
    """The beginning of the run's notes.txt; "" if there is none."""
    try:
        with open_regular(path / NOTES_FILE) as file:
            return file.read(MOST_NOTE_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return ""


def to_json(number: float | None) -> float | None:
    return float(number) if number is not None and np.isfinite(number) else None


def find_runs(folder: Path) -> tuple[list[Path], list[str]]:
    """Directories of runs at or below `folder`, and notes on what could not be searched; hidden directories, links, and
    the insides of runs, are left out."""
    paths, notes, unreadable, num_entries = [], [], [], 0
    for path, folders, files in os.walk(folder, onerror=unreadable.append):
        if num_entries >= MOST_ENTRIES:
            notes.append(f"Not all of {folder} was searched: it has more than {MOST_ENTRIES:,} entries.")
            break
        num_entries += len(folders) + len(files)
        if is_run(Path(path)):
            paths.append(Path(path))
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]
    if unreadable:
        notes.append(f"Directories that cannot be read: {len(unreadable)}.")
    return sorted(paths), notes


class Board:
    """All runs below a directory."""

    def __init__(self, folder: Path):
        """ValueError if it is not a directory."""
        if not folder.is_dir():
            raise ValueError(f"{folder}: {'not a directory' if folder.exists() else 'no such directory'}")
        self.folder = folder.absolute()
        self.runs: dict[str, WatchedRun] = {}  # by id

    def read(self) -> dict[str, Any]:
        """The table's data as JSON, from the files as they are now."""
        (paths, notes), known = find_runs(self.folder), {run.path: run for run in self.runs.values()}
        runs = [known.get(path) or WatchedRun(path, name_run(path, self.folder)) for path in paths]
        self.runs, rows = {run.id: run for run in runs}, []
        for run in runs:
            try:
                rows.append(run.describe())
            except OSError as error:
                notes.append(f"{run.name}: {error}")
        data = {"folder": str(self.folder), "runs": rows, "notes": notes, "most_compared": MOST_COMPARED}
        return data | {"version": hashlib.sha256(escape_json(data).encode()).hexdigest()}


def name_run(path: Path, folder: Path) -> str:
    return path.name if path == folder else path.relative_to(folder).as_posix()


@dataclass(frozen=True)
class Response:
    """The answer to a request."""

    text: str
    kind: str = "text/plain"
    status: HTTPStatus = HTTPStatus.OK


UNCHANGED = Response("", "application/json", HTTPStatus.NO_CONTENT)


class BoardServer(ThreadingHTTPServer):
    """Serves the table of all runs, and the curves of some of them, to browsers on this machine. A request names runs
    by ids that the table has given out, never by paths."""

    daemon_threads = True
    request_queue_size = 64
    allow_reuse_address = True  # so that an open page does not block the port for the next start

    def __init__(self, folder: Path, *, port: int):
        """ValueError if the port is not available (0 is any that is), or `folder` not a directory."""
        self.board = Board(folder)
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            given = f"--port {port}: not available ({error.strerror})"
            raise ValueError(f"{given}: choose another one, or 0 for any that is free") from None

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def serve(self) -> None:
        """Serves until Ctrl-C."""
        signal.signal(signal.SIGINT, signal.default_int_handler)  # even if this was started with Ctrl-C ignored
        say(f"board: {self.address} (Ctrl-C stops it)")
        try:
            self.serve_forever()
        except KeyboardInterrupt:
            print(flush=True)

    def respond(self, path: str, query: dict[str, list[str]]) -> Response | None:
        """The answer to a request; None if there is nothing at `path`. ValueError or OSError if a run is gone."""
        if path not in ("/", "/runs", "/curves", "/data"):
            return None
        if path in ("/curves", "/data"):
            return self.respond_with_curves(path, query)
        data = self.board.read()
        if path == "/":
            parts = {"DATA": escape_json(data)}
            page = make_page(PAGE, parts, title=self.board.folder.name or "/", policy="; connect-src 'self'")
            return Response(page, "text/html")
        is_known = query.get("version") == [data["version"]]
        return UNCHANGED if is_known else Response(json.dumps(data), "application/json")

    def respond_with_curves(self, path: str, query: dict[str, list[str]]) -> Response:
        ids = list(dict.fromkeys(query.get("run", [])))
        if not 1 <= len(ids) <= MOST_COMPARED:
            text = f"curves of {len(ids)} runs: choose from 1 to {MOST_COMPARED}"
            return Response(text, status=HTTPStatus.BAD_REQUEST)
        if not self.board.runs.keys() >= set(ids):  # this server may have been started again
            self.board.read()
        known = self.board.runs
        if not known.keys() >= set(ids):
            return Response("no such run: it was moved or removed", status=HTTPStatus.NOT_FOUND)
        others = [run for run in known.values() if run.curves is not None and run.id not in ids]
        for run in others[MOST_COMPARED - len(ids) :]:
            run.curves = None  # to bound the memory
        with ExitStack() as locks:
            for name in sorted(ids):  # in one order, so that no two requests wait for each other
                locks.enter_context(known[name].curves_lock)
            runs = [known[name].read_curves(BYTES_PER_REQUEST // len(ids)) for name in ids]
            if path == "/curves":
                return Response(make_curves_page(runs, is_live=True), "text/html")
            if query.get("version") == [make_version(runs)]:
                return UNCHANGED
            page = describe_page(runs, is_live=True)
        return Response(json.dumps(page, separators=(",", ":")), "application/json")


class Handler(BaseHTTPRequestHandler):
    """Handles one request."""

    server: "BoardServer"
    timeout = 60.0  # seconds for a client to send its request, or to receive the answer

    def do_GET(self) -> None:
        # Prevent DNS rebinding: another site whose name resolves to this address sends its own host name. The port may
        # be a tunnel's, and is left out where it is 80.
        if self.headers.get("Host", "").partition(":")[0].lower() not in (HOST, "localhost"):
            self.send(Response(f"open {self.server.address}", status=HTTPStatus.FORBIDDEN))
            return
        try:
            url = urlsplit(self.path)
            answer = self.server.respond(url.path, parse_qs(url.query))
        except (ValueError, OSError) as error:  # the run's directory is gone or unreadable
            answer = Response(str(error), status=HTTPStatus.INTERNAL_SERVER_ERROR)
        self.send(answer or Response("there is no such page", status=HTTPStatus.NOT_FOUND))

    def send(self, answer: Response) -> None:
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
