"""Web servers that fall silent, redirect, or lead into the network of this machine."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import pytest
from data_runs import chat, write_rows
from heavy import need
from local_server import QuietHandler, serving
from range_server import RangeServer

from mini_trainer.data.rows.files import find_sources, iterate_rows, read_chunks
from mini_trainer.data.stores import remote
from mini_trainer.data.tokenized import fetched
from mini_trainer.data.tokenized.fetched import fetch_sets, find_sets
from mini_trainer.distributed.ending import describe_error
from mini_trainer.options.urls import RefusedRedirect, check_redirect, remove_query

ELSEWHERE = {
    "this machine": ("http://localhost:1/a.jsonl", "127.0.0.1: "),
    "this machine by another number": ("http://127.0.0.2/a.jsonl", "127.0.0.2: "),
    "IPv6": ("http://[::1]/a.jsonl", "::1: "),
    "IPv4 within IPv6": ("http://[::ffff:10.0.0.1]/a.jsonl", "10.0.0.1: "),
    "a hexadecimal number": ("http://0x0a000001/a.jsonl", "10.0.0.1: "),
    "a private network": ("https://192.168.1.1/a.jsonl", "192.168.1.1: "),
    "a cloud's metadata": ("http://169.254.169.254/latest?token=abc", "169.254.169.254: "),
    "a file": ("file:///etc/passwd", "file:///etc/passwd: "),
    "FTP": ("ftp://example.org/a.jsonl", "ftp://example.org/a.jsonl: "),
}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(remote, "SECONDS_TO_WAIT", (0, 0, 0))
    monkeypatch.setattr(remote, "SECONDS_WITHOUT_BYTES", 0.3)


@pytest.fixture
def files(tmp_path) -> Iterator[RangeServer]:
    server = RangeServer()
    server.files["a.jsonl"] = write_rows(tmp_path / "a.jsonl", [chat(i) for i in range(20)]).read_bytes()
    yield server
    server.close()


@pytest.fixture
def redirecting() -> Iterator["Redirecting"]:
    need("aiohttp")  # by which URLs are read
    with serving(Redirecting()) as server:
        yield server


class Redirecting(ThreadingHTTPServer):
    """Answers every request with `location`."""

    location = ""

    def __init__(self) -> None:
        class Handler(QuietHandler):
            def do_GET(self) -> None:
                self.send_response(302)
                self.send_header("Location", self.server.location)
                self.end_headers()

            do_HEAD = do_GET

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/a.jsonl"


@pytest.fixture
def silent() -> Iterator[tuple[str, list]]:
    """The URL of a server that accepts connections and never answers, and its connections."""
    need("aiohttp")  # by which URLs are read
    connections, listener = [], socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                connections.append(listener.accept()[0])
            except OSError:
                return

    threading.Thread(target=accept, daemon=True).start()
    yield f"http://127.0.0.1:{listener.getsockname()[1]}/a.jsonl", connections
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    for connection in connections:
        connection.close()


def test_a_silent_server_is_asked_a_few_times(silent):
    url, connections = silent
    with pytest.raises(ValueError, match=r"--input-file .*a\.jsonl: .*imeout"):
        find_sources([url])
    assert len(connections) == 2 * 3  # by HEAD and by GET


def test_a_file_of_a_server_that_does_not_answer_may_be_there(files, silent):
    assert remote.look_up_remote(f"{files.url}/none.jsonl") is None
    with pytest.raises(FileNotFoundError):
        remote.look_up_remote(silent[0])


def test_a_server_that_falls_silent_within_a_file_is_asked_again(files):
    (source,) = find_sources([f"{files.url}/a.jsonl"])
    files.faults = ["silent", None]
    assert sum(1 for chunk in read_chunks(source) for _ in iterate_rows(chunk)) == 20
    files.faults = ["silent"] * 9
    with pytest.raises(ValueError, match=r"a\.jsonl: .*byte 0 of"):
        list(read_chunks(source))


@pytest.mark.parametrize(
    ("status", "at_start", "later"),
    [(404, 2, 2), (401, 2, 8), (403, 2, 8), (408, 8, 8), (429, 8, 8), (500, 8, 8), (503, 8, 8), (0, 8, 8)],
)
def test_an_outage_is_told_from_a_users_mistake_by_the_exit_code(status, at_start, later, files, tmp_path):
    url, name = f"{files.url}/a.jsonl", "a.jsonl"
    (source,), found = find_sources([url]), find_sets({"data_path": [url]})
    files.statuses = {name: status}

    def end(work: Callable[[], Any]) -> int:
        with pytest.raises(ValueError, match=url) as error:
            work()
        return describe_error(error.value)[0]

    assert [end(lambda: find_sources([url])), end(lambda: find_sets({"data_path": [url]}))] == [at_start] * 2
    assert [end(lambda: list(read_chunks(source))), end(lambda: fetch_sets(found, str(tmp_path)))] == [later] * 2
    assert end(source.remote.check_unchanged) == later
    files.statuses = {f"{name}.meta.json": status}  # of the data set: in an outage nobody knows if there is one
    if at_start == 2:
        assert find_sets({"data_path": [url]}) == found
    else:
        assert end(lambda: find_sets({"data_path": [url]})) == 8


@pytest.mark.parametrize("case", ELSEWHERE)
def test_redirects_into_the_own_network_are_refused(case, redirecting):
    redirecting.location, why = ELSEWHERE[case]
    with pytest.raises(ValueError) as error:
        find_sources([redirecting.url])
    assert str(error.value).startswith(f"--input-file {redirecting.url}: ")
    assert "redirected" in str(error.value) and why in str(error.value)
    assert "abc" not in str(error.value)
    with pytest.raises(ValueError, match=f"--data-path {redirecting.url}: .*redirected"):
        find_sets({"data_path": [redirecting.url]})


def test_public_addresses_and_the_same_host_are_allowed():
    for target in ("https://8.8.8.8/x", "http://10.0.0.1:8000/y", "http://[2606:4700::1111]/z"):
        check_redirect("http://10.0.0.1/a", target)
    with pytest.raises(RefusedRedirect):
        check_redirect("http://8.8.8.8/a", "http://10.0.0.1/a")
    assert remove_query("https://me:secret@host:1/a/b?sig=x#y") == "https://host:1/a/b"


def test_a_copied_set_records_its_url_and_says_how_far_it_is(files, redirecting, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(fetched, "SECONDS_BETWEEN_LINES", -1)
    monkeypatch.setattr(fetched.log, "propagate", True)
    redirecting.location = f"{files.url}/a.jsonl"
    monkeypatch.setattr(fetched, "look_up_remote", lambda url: None)
    found = find_sets({"data_path": [redirecting.url]})
    with caplog.at_level("INFO"):
        fetch_sets(found, str(tmp_path / "cache"))
    (recorded,) = (tmp_path / "cache").glob("fetched/*/source.json")
    assert json.loads(recorded.read_text()) == {"url": redirecting.url}
    size = len(files.files["a.jsonl"])
    assert f"data: {size:,} of {size:,} bytes of {redirecting.url}" in caplog.text
