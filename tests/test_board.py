"""The board of all runs: what it says of their files, what its server refuses, and how a browser shows it."""

import contextlib
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, needs_browser
from forked import ForkedJob
from in_process import train_here
from local_server import fetch, serving
from processes import ENV, check_serving, flags
from run_directories import make_validation, write_run
from small_runs import OPTIONS, make_inputs
from tiny_data import read_lines, write_jsonl

from mini_trainer.options.reading import open_regular
from mini_trainer.use.plots import board, run_files
from mini_trainer.use.plots.board import MOST_COMPARED, Board, BoardServer, find_runs, read_tail
from mini_trainer.use.plots.run_files import MAX_LINE_BYTES, MetricsReader, open_runs

METRICS, VALIDATIONS, PARAMS = "training_metrics_0.jsonl", "validation_metrics_0.jsonl", "training_params.json"
HOSTILE = "<img src=x onerror=alert(1)> 'quote' %2e%2e"


def read_board(folder: Path) -> dict[str, dict]:
    """The rows by name."""
    return {row["name"]: row for row in Board(folder).read()["runs"]}


# ---- what the table says


def test_of_a_long_file_only_the_end_is_read(tmp_path):
    path = tmp_path / METRICS
    write_jsonl(path, ({"step": step, "loss": step / 2} for step in range(1, 60_001)))
    with path.open("a") as file:
        file.write('{"step": 60001')
    tail = read_tail(path)
    assert [row["step"] for row in tail] == list(range(59_951, 60_001)) and tail[-1]["loss"] == 30_000
    assert math.isnan(tail[-1]["tokens_per_second"])
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n{"st')
    assert [row["step"] for row in read_tail(path)] == [1, 2]
    path.write_text('{"step": 7, "text": "' + "x" * 100_000 + '"}\n')  # longer than what is read at first
    assert [row["step"] for row in read_tail(path)] == [7]
    path.write_text("")
    assert read_tail(path) == []


def test_the_share_that_is_done_is_that_of_the_first_end_and_the_time_left_is_what_the_last_steps_need():
    row = {"step": 10.0, "epoch": 1.0, "total_samples_accumulated": 80.0, "total_tokens_accumulated": 800.0}
    shares = {0.25: dict(max_steps=40), 0.5: dict(max_epochs=2), 0.8: dict(max_steps=40, max_tokens=1000),
              1.0: dict(max_samples=10)}  # fmt: skip
    for share, options in shares.items():
        assert board.find_share(row, {"options": options, "identity": {}}) == share
    assert board.find_share(row, {"options": {}, "identity": {"number of steps": 20}}) == 0.5
    for options, identity in ({"max_steps": None}, {"number of steps": None}), ({"max_steps": "40"}, []):
        assert math.isnan(board.find_share(row, {"options": options, "identity": identity}))
    params = {"options": {"max_steps": 100}}
    assert math.isnan(board.find_share({}, params))
    tail = [{"step": float(step), "time_per_batch": 2.0, "data_wait_seconds": 0.5} for step in range(11, 21)]
    assert board.estimate_seconds_left(tail, params) == pytest.approx(80 * 2.5)
    assert math.isnan(board.estimate_seconds_left(tail[:1], params))
    assert math.isnan(board.estimate_seconds_left(tail, {}))


def test_the_settings_of_a_run_and_what_somebody_wrote_about_it(tmp_path):
    given = {
        "plain": {},
        "tokens": dict(learning_rate=2.5e-4, batch_tokens=65536, batch_size=None, osft=True),
        "default": dict(batch_size=None, lora=True, base_quantization="none", objective="causal-lm"),
        "odd": dict(learning_rate="x", batch_size="y", lora=True, base_quantization="nf4", objective="preference"),
    }
    for name, options in given.items():
        path = write_run(tmp_path / name, num_steps=2)
        params = json.loads((path / PARAMS).read_text())
        (path / PARAMS).write_text(json.dumps(params | dict(options=params["options"] | options)))
    (tmp_path / "plain" / "notes.txt").write_bytes(b"\n  a second try \xff\nmore \n" + b"x" * 10_000)
    (tmp_path / "odd" / "notes.txt").mkdir()
    (tmp_path / "tokens" / "samples_0.jsonl").touch()
    (write_run(tmp_path / "torn", num_steps=2) / PARAMS).write_text("{")
    rows = read_board(tmp_path)
    found = {name: [row[key] for key in ("method", "lr", "batch", "is_batch_of_tokens")] for name, row in rows.items()}
    assert found == {
        "plain": ["full", 1e-3, 32, False], "tokens": ["osft", 2.5e-4, 65536, True], "torn": ["", None, None, False],
        "default": ["lora", 1e-3, 128, False], "odd": ["qlora, preference", None, None, False],
    }  # fmt: skip
    notes = {name: row["notes"] for name, row in rows.items() if row["notes"]}
    assert notes == {"plain": notes["plain"]} and notes["plain"].startswith("a second try \ufffd\nmore")
    assert len(notes["plain"]) < 4000
    assert [name for name, row in rows.items() if row["has_samples"]] == ["tokens"]


def test_notes_may_be_there_before_the_run(world, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes.txt").write_text("planned")
    train_here(world, **make_inputs(tmp_path, "llama"), **OPTIONS, max_steps=1, output_dir=str(run))
    row = read_board(run)["run"]
    assert [row[key] for key in ("notes", "state", "step", "share")] == ["planned", "finished", 1, 1]


def test_runs_are_found_at_any_depth_but_not_in_runs_or_behind_links(tmp_path):
    folder = tmp_path / "runs"
    for name in ("a", "sweep/1", "sweep/2/b", ".hidden/run", "a/hf_format/inner", "../outside"):
        write_run(folder / name, num_steps=1)
    (folder / "link").symlink_to(tmp_path / "outside")
    (folder / "empty").mkdir()
    assert [path.relative_to(folder).as_posix() for path in find_runs(folder)[0]] == ["a", "sweep/1", "sweep/2/b"]
    assert list(read_board(folder / "a")) == ["a"]  # a run's own directory
    assert read_board(folder / "empty") == {}


def test_every_state_by_the_files_alone(tmp_path):
    ends = {"oom": ("crashed", "out of memory", 9), "time": ("stopped", "saved and requeue", 3),
            "user": ("stopped", "stopped by user", 10), "early": ("stopped", "interrupted", 130),
            "refused": ("stopped", "bad input", 2)}  # fmt: skip
    for name, (_, how, code) in ends.items():
        end = {"code": code, "name": how.replace(" ", "_"), "message": f"why {name}"}
        (write_run(tmp_path / name, num_steps=3, finished=False) / "exit.json").write_text(json.dumps(end))
    write_run(tmp_path / "finished", num_steps=3)
    write_run(tmp_path / "copied", num_steps=3, finished=False)
    for name, age in (("running", 0), ("killed", 3600)):  # the latter's exit.json is torn
        lock = write_run(tmp_path / name, num_steps=3, finished=False, options={"max_steps": 6}) / ".lock"
        lock.touch()
        os.utime(lock, (time.time() - age,) * 2)
    (tmp_path / "killed" / "exit.json").write_text("torn")
    (write_run(tmp_path / "torn", num_steps=3, finished=False) / PARAMS).write_text("{")
    rows = read_board(tmp_path)
    found = {name: (row["state"], row["how"], row["error"]) for name, row in rows.items()}
    assert found.pop("killed")[:2] == ("crashed", "no heartbeat")
    state, how, error = found.pop("torn")
    assert (state, how) == ("unknown", "end not recorded") and PARAMS in error
    ended = {name: (state, f"{how} ({code})", f"why {name}") for name, (state, how, code) in ends.items()}
    rest = dict(finished=("finished", "", ""), copied=("unknown", "end not recorded", ""), running=("running", "", ""))
    assert found == ended | rest
    left = {name: row["left"] for name, row in rows.items() if row["left"] is not None}
    assert left == {"running": pytest.approx(3 * 0.51)}


def test_a_row_has_the_numbers_of_the_last_lines(tmp_path):
    path = write_run(tmp_path / "run", num_steps=80, sets=("held_out",), options={"max_steps": 160})
    rows = read_lines(path / METRICS)
    losses = [row["loss"] for row in read_lines(path / VALIDATIONS)]
    board = Board(tmp_path)
    (row,) = board.read()["runs"]
    assert (row["step"], row["share"], row["loss"], row["best"]) == (80, 0.5, rows[-1]["loss"], min(losses))
    assert row["speed"] == pytest.approx(16000, rel=0.05) and row["left"] is None
    version = board.read()["version"]
    assert board.read()["version"] == version
    with (path / METRICS).open("a") as file:
        file.write(json.dumps(rows[-1] | {"step": 81, "loss": 0.5}) + '\n{"step": 82, "lo')
    write_jsonl(path / VALIDATIONS, [make_validation(80, 80) | {"loss": 0.25, "is_best": True}])
    data = board.read()
    assert data["version"] != version and [data["runs"][0][key] for key in ("step", "loss", "best")] == [81, 0.5, 0.25]
    shutil.rmtree(path)
    assert board.read()["runs"] == []


# ---- the server


@pytest.fixture
def server(tmp_path):
    for name in ("first", "second"):
        write_run(tmp_path / "runs" / name, num_steps=20, finished=False)
    write_run(tmp_path / "secret", num_steps=5)
    with serving(BoardServer(tmp_path / "runs", port=0)) as server:
        yield server


def find_ids(server: BoardServer) -> dict[str, str]:
    return {row["name"]: row["id"] for row in json.loads(fetch(server, "runs")[1])["runs"]}


def test_the_page_allows_only_its_own_parts(server):
    with urllib.request.urlopen(server.address) as answer:
        page, headers = answer.read().decode(), answer.headers
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-" in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin" and headers["X-Content-Type-Options"] == "nosniff"
    assert server.server_address[0] == "127.0.0.1"


def test_another_hosts_name_is_refused_but_a_tunnel_may_have_another_port(server):
    port = server.server_port
    for host in ("evil.example", f"evil.example:{port}", f"0.0.0.0:{port}", "localhost.evil.example", "localhost@evil"):
        for path in ("", "runs", "curves?run=x", "data?run=x"):
            assert fetch(server, path, Host=host)[0] == 403
    for host in ("127.0.0.1", "localhost", "localhost:80", "LOCALHOST:9000"):
        assert fetch(server, "runs", Host=host)[0] == 200


def test_no_path_of_a_request_leads_to_a_file(server):
    outside = server.board.folder.parent / "secret"
    names = ["../secret", "..%2fsecret", "%2e%2e/secret", str(outside), "first/../../secret", "first", "", "\0"]
    for name in names:
        for page in ("curves", "data"):
            status, text = fetch(server, f"{page}?{urllib.parse.urlencode({'run': name})}")
            assert status in (400, 404) and "secret" not in text, name
    for path in ("../secret/" + METRICS, "runs/../../secret", "first/" + METRICS, "/etc/passwd", "%2e%2e/secret"):
        assert fetch(server, path)[0] == 404, path


def test_a_choice_that_cannot_be_shown_is_refused(server):
    ids = find_ids(server)
    assert fetch(server, "curves")[0] == 400
    status, text = fetch(server, "curves?" + "&".join(f"run={i}" for i in range(MOST_COMPARED + 1)))
    assert status == 400 and f"from 1 to {MOST_COMPARED}" in text
    shutil.rmtree(server.board.folder / "first")
    status, text = fetch(server, f"curves?run={ids['first']}")
    assert status == 500 and f"{server.board.folder / 'first'}: " in text and "Traceback" not in text
    fetch(server, "runs")
    assert fetch(server, f"curves?run={ids['first']}")[0] == 404


def test_curves_follow_the_chosen_runs_while_they_grow(server):
    ids = find_ids(server)
    query = "&".join(f"run={ids[name]}" for name in ("second", "first"))
    status, page = fetch(server, f"curves?{query}")
    assert status == 200 and '"is_live":true' in page and "connect-src 'self'" in page
    data = json.loads(fetch(server, f"data?{query}")[1])
    assert [(shown["name"], len(shown["x"]["step"])) for shown in data["runs"]] == [("second", 20), ("first", 20)]
    version = urllib.parse.quote(data["version"])
    assert fetch(server, f"data?{query}&version={version}") == (204, "")
    path = server.board.folder / "first" / METRICS
    row = read_lines(path)[-1]
    with path.open("a") as file:
        file.write(json.dumps(row | {"step": 21}) + "\n" + json.dumps(row | {"step": 22})[:40])
    data = json.loads(fetch(server, f"data?{query}&version={version}")[1])
    assert [shown["x"]["step"][-1] for shown in data["runs"]] == [20, 21]


def test_a_long_run_is_read_in_portions_that_are_shown_and_keep_their_spikes(server, monkeypatch):
    ids, path = find_ids(server), server.board.folder / "first" / METRICS
    losses = [77.0 if step == 23_456 else 1.0 for step in range(1, 60_000)]
    write_jsonl(path, [{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)])
    monkeypatch.setattr("mini_trainer.use.plots.board.BYTES_PER_REQUEST", 400_000)
    counts, data = [], {"is_behind": True}
    while data["is_behind"]:
        data = json.loads(fetch(server, f"data?run={ids['first']}&run={ids['second']}")[1])
        counts.append(data["runs"][0]["x"]["step"][-1])
    assert counts == sorted(set(counts)) and len(counts) > 3 and counts[-1] == 59_999
    thinned, whole = data["runs"]
    assert len(thinned["x"]["step"]) <= 10_000 and sum(thinned["sizes"]) == 59_999
    assert max(thinned["curves"]["loss"]["high"]) == 77.0 and any("thinned to" in note for note in data["notes"])
    assert whole["sizes"] is None and list(whole["curves"]["loss"]) == ["mean"]


def test_a_run_whose_files_block_keeps_no_request_for_another_run_waiting(server, monkeypatch):
    """A file system may not answer. Until it does, the table shows the last row of that run."""
    ids, before = find_ids(server), fetch(server, "runs")[1]
    blocking, goes_on = threading.Semaphore(0), threading.Event()

    def open_late(path: Path) -> Any:
        if path.parent.name == "first":
            blocking.release()
            assert goes_on.wait(60)
        return open_regular(path)

    monkeypatch.setattr(run_files, "open_regular", open_late)
    monkeypatch.setattr(board, "open_regular", open_late)
    with (server.board.folder / "first" / METRICS).open("a") as file:
        file.write('{"step": 21}\n')
    with ThreadPoolExecutor() as pool:
        late = [pool.submit(fetch, server, path) for path in (f"data?run={ids['first']}", "runs")]
        try:
            for _ in late:
                assert blocking.acquire(timeout=60)
            status, data = pool.submit(fetch, server, f"data?run={ids['second']}").result(timeout=60)
            assert status == 200 and len(json.loads(data)["runs"][0]["x"]["step"]) == 20
            assert pool.submit(fetch, server, "runs").result(timeout=60) == (200, before)
        finally:
            goes_on.set()
        data, table = (json.loads(each.result()[1]) for each in late)
    assert data["runs"][0]["x"]["step"][-1] == 21
    assert {row["name"]: row["step"] for row in table["runs"]} == {"first": 21, "second": 20}


def test_what_cannot_be_served_gets_one_message_and_exit_code_2(tmp_path):
    (tmp_path / "setup.txt").touch()
    messages = {"setup.txt": "error: setup.txt: ", ". --port 65536": "--port 65536", "a b": "2 directories"}
    for words, message in messages.items():
        command = [sys.executable, "-m", "mini_trainer", "board", *words.split()]
        done = subprocess.run(command, cwd=tmp_path, env=ENV, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr.lower() and "Traceback" not in done.stderr


def test_a_port_in_use_is_told_and_ctrl_c_ends_quietly(tmp_path):
    check_serving([sys.executable, "-m", "mini_trainer", "board", str(tmp_path)], "board")


# ---- runs of the trainer


@pytest.mark.long
@pytest.mark.slow
def test_a_run_of_the_trainer_is_followed_to_its_end(tmp_path):
    run = tmp_path / "run"
    options = make_inputs(tmp_path, "llama") | OPTIONS | dict(max_steps=100_000, checkpoint_every_steps=100_000)
    job = ForkedJob(0, ["train.py", *flags(**options, save_final_checkpoint=False, output_dir=str(run))], run)
    board = Board(tmp_path)
    try:
        job.wait_for_step(2)
        (before,) = board.read()["runs"]
        job.wait_for_step(int(before["step"]) + 2)
        (grown,) = board.read()["runs"]
        assert before["state"] == grown["state"] == "running"
        assert grown["step"] > before["step"] and grown["left"] > 0 and grown["speed"] > 0
        (run / "stop").touch()
        job.process.wait(timeout=100)
    finally:
        job.kill()
    (row,) = board.read()["runs"]
    message = json.loads((run / "exit.json").read_text())["message"]
    assert [row[key] for key in ("state", "how", "error")] == ["stopped", "stopped by user (10)", message]


# ---- in a browser


def list_names(browser: Browser) -> list[str]:
    return browser.ask("[...document.querySelectorAll('tbody .name > a')].map(link => link.textContent)")


def search(browser: Browser, text: str) -> None:
    browser.ask(f"byId('search').value = '{text}', byId('search').dispatchEvent(new Event('input'))")


@pytest.mark.long
@needs_browser
@pytest.mark.slow
def test_a_browser_sorts_filters_and_compares(browser, server):
    folder = server.board.folder
    odd = write_run(folder / HOSTILE, num_steps=7, finished=False, options=dict(learning_rate=1e-5, batch_tokens=2048))
    (odd / "exit.json").write_text('{"code": 9, "name": "out_of_memory", "message": "<b>no room</b>"}')
    (odd / "notes.txt").write_text("<b>a try</b>\nmore of it")
    write_jsonl(odd / "samples_0.jsonl", [dict(step=0, prompt="What?", answer="That.", finish_reason="stop")])
    browser.open(server.address)
    assert sorted(list_names(browser)) == sorted(["first", "second", HOSTILE])
    assert browser.ask("document.querySelectorAll('tbody img, tbody .error b').length") == 0
    keys = "['error', 'notes', 'method', 'lr', 'batch']"
    cells = browser.ask(f"{keys}.map(key => document.querySelector(`.crashed`).cells[COLUMNS.findIndex("
                        "([, own]) => own === key) + 1].textContent)")  # fmt: skip
    assert cells == ["<b>no room</b>", "<b>a try</b> …", "full", "1e-5", "2,048 tokens"]
    browser.ask("document.querySelector('th[data-key=lr] button').click()")
    assert list_names(browser)[0] == HOSTILE
    search(browser, "OF it")
    assert list_names(browser) == [HOSTILE]
    search(browser, "")

    browser.ask("document.querySelector('th[data-key=step] button').click()")
    assert list_names(browser)[-1] == HOSTILE
    browser.ask("document.querySelector('th[data-key=step] button').click()")
    assert list_names(browser)[0] == HOSTILE
    assert browser.ask("document.querySelector('th[data-key=step]').ariaSort") == "ascending"
    states = browser.ask("[...byId('states').children].map(button => button.textContent)")
    assert states == ["all 3", "crashed 1", "unknown 2"]
    browser.ask("byId('states').children[1].click()")
    assert list_names(browser) == [HOSTILE]
    browser.ask("byId('states').children[0].click()")
    search(browser, "no ROOM")
    assert list_names(browser) == [HOSTILE]
    search(browser, "")

    # Numbers that change leave a row, its focus and its choice where they are.
    browser.ask("document.querySelectorAll('tbody input').forEach(box => box.click())")
    browser.ask("document.querySelector('tbody tr:last-child input').focus()")
    path = folder / "first" / METRICS
    with path.open("a") as file:
        file.write(json.dumps(read_lines(path)[-1] | {"step": 20, "loss": 0.1234}) + "\n")
    browser.wait_until("document.body.textContent.includes('0.1234')")
    assert browser.ask("document.activeElement === document.querySelector('tbody tr:last-child input')")
    assert browser.ask("byId('compare').textContent") == "show curves of 3"
    assert browser.list_complaints() == []
    assert all(url.startswith(server.address) for url in browser.list_requests())

    browser.ask("byId('compare').click()")
    browser.wait_until("location.pathname === '/curves' && document.readyState === 'complete'")
    assert sorted(browser.ask("data.runs.map(run => run.name)")) == sorted(["first", "second", HOSTILE])
    browser.ask("document.querySelector('.kicker a').click()")
    browser.wait_until("location.pathname === '/' && document.readyState === 'complete'")
    browser.ask("document.querySelector('.name small a').click()")
    browser.wait_until("location.pathname === '/curves' && document.readyState === 'complete'")
    assert browser.ask("[location.hash, document.querySelector('#samples td').textContent]") == ["#samples", "That."]


# ---- what must not hold it up


@pytest.mark.parametrize("how", ["pipe", "device"])
@pytest.mark.parametrize("name", [METRICS, VALIDATIONS, PARAMS, "exit.json", ".lock"])
def test_only_regular_files_of_a_run_are_read(name, how, tmp_path):
    write_run(tmp_path / "good", num_steps=3)
    path = write_run(tmp_path / "bad", num_steps=3) / name
    path.unlink(missing_ok=True)
    if how == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    board = Board(tmp_path).read()
    assert "good" in {row["name"] for row in board["runs"]}
    if name in (METRICS, VALIDATIONS):
        (note,) = board["notes"]
        assert note.startswith(f"bad: {path}: ")
        with pytest.raises(ValueError, match=f"{path}: .*regular file"):
            open_runs([tmp_path / "bad"])
    else:
        assert {row["name"] for row in board["runs"]} == {"good", "bad"} and not board["notes"]


def test_a_line_without_end_is_one_damaged_line(tmp_path):
    path = write_run(tmp_path / "run", num_steps=3) / METRICS
    with path.open("ab") as file:
        file.write(b'{"step": 4, "text": "' + b"x" * (5 << 20))
    reader = MetricsReader(path, ("loss",))
    reader.read()
    assert (len(reader), reader.num_damaged) == (3, 1) and len(reader.last_line) <= MAX_LINE_BYTES + 1
    assert read_tail(path) == []
    with path.open("ab") as file:
        file.write(b'"}\n{"step": 5, "loss": 1.0}\n')
    reader.read()
    assert (len(reader), reader.num_damaged) == (4, 1) and reader["step"].tolist() == [1, 2, 3, 5]
    assert [row["step"] for row in read_tail(path)] == [5]


def test_silent_and_slow_clients_hold_up_nobody_and_are_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(board.Handler, "timeout", 1.0)
    write_run(tmp_path / "run", num_steps=3)
    with serving(BoardServer(tmp_path, port=0)) as server:
        clients = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(30)]
        for client in clients[::2]:
            with contextlib.suppress(OSError):  # closed by now
                client.sendall(b"GET / HTTP/1.1\r\nHost: ")
        with urllib.request.urlopen(server.address, timeout=10) as answer:
            assert answer.status == 200
        for client in clients:
            client.settimeout(10)
            with contextlib.suppress(ConnectionError):
                while client.recv(1000):
                    pass
            client.close()
