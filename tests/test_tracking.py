"""Trackers: the real packages have every step once, also after a kill; their troubles cost training nothing."""

import importlib.util
import json
import os
import re
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from heavy import need
from in_process import train_here
from small_runs import OPTIONS, TIMES, forget_since, make_inputs
from tiny_data import make_samples, read_lines, write_samples
from tiny_models import VOCAB_SIZE

from mini_trainer.options import doors
from mini_trainer.run import trackers
from mini_trainer.run.trackers import StartedRun, TrackedRun, Trackers, clean_name, name_step_metrics

STEPS, KILLED_AFTER, RESUMED_FROM = 6, 4, 2
TRACKERS = tuple(doors.TRACKERS)
DATA = ("num_samples", "num_loss_counted_tokens", "num_total_tokens", "total_samples_accumulated",
        "total_tokens_accumulated", "packing_efficiency")  # fmt: skip
PERFORMANCE = ("tokens_per_second", "samples_per_second", "time_per_batch", "data_wait_seconds",
               "peak_memory_usage_GB", "rank_balance", "grad_accum")  # fmt: skip
SECRET = "hf_aSecretThatNobodyMaySee"


def need_trackers() -> None:
    """Skips without the packages, which are not imported yet: some read the environment when they are."""
    for name in (*TRACKERS, "sqlalchemy", "alembic"):  # mlflow keeps its runs in a database here
        if importlib.util.find_spec(name) is None:
            need(name)


@pytest.fixture(scope="module")
def tracked(world, tmp_path_factory) -> SimpleNamespace:
    """A run with all trackers, ended after step 4 as if by a kill, and resumed from step 2 to its end."""
    need_trackers()
    root = tmp_path_factory.mktemp("tracked")
    environment = dict(WANDB_PROJECT="a project", MLFLOW_EXPERIMENT_NAME="a project", WANDB_NAME="a name",
                       MLFLOW_RUN_NAME="a name", WANDB_MODE="offline", HF_TOKEN=SECRET,
                       MLFLOW_TRACKING_URI=f"sqlite:///{root}/mlflow.db")  # fmt: skip
    more = [write_samples(root / f"{i}.arrow", make_samples(5, vocab_size=VOCAB_SIZE, seed=i)) for i in range(2)]
    options = make_inputs(root, "llama_tied_bias") | OPTIONS
    options |= dict(validation_data_path=tuple(map(str, more)), validate_every_steps=2, export_best=False)
    model = Path(options["model_name_or_path"]).rename(root / f"model {SECRET}")  # an option that holds the value
    options |= dict(output_dir=str(root / "run"), track=TRACKERS, model_name_or_path=str(model))
    run = root / "run"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        train_here(world, **options, max_steps=KILLED_AFTER)
        ids = json.loads((run / "trackers.json").read_text())
        forget_since(run, RESUMED_FROM)
        train_here(world, **options, max_steps=STEPS)
    expected: dict[int, dict[str, float]] = {step: {} for step in range(STEPS + 1)}  # 0: before the first step
    for row in read_lines(run / "training_metrics_0.jsonl"):
        expected[row["step"]] |= name_numbers("train", row)
    for row in read_lines(run / "validation_metrics_0.jsonl"):
        expected[row["step"]] |= name_numbers("validation", row)
        for name, values in row["sets"].items():
            expected[row["step"]] |= name_numbers(f"validation/{name}", values)
    return SimpleNamespace(root=root, run=run, ids=ids, expected=expected, options=options)


def name_numbers(group: str, row: dict) -> dict[str, float]:
    """The numbers of a line by their names in docs/tasks/tracking.md."""
    groups = dict.fromkeys(DATA, "data") | dict.fromkeys(PERFORMANCE, "performance") if group == "train" else {}
    numbers = {name: value for name, value in row.items() if name != "step" and isinstance(value, (int, float))}
    return {f"{groups.get(name, group)}/{name}": float(value) for name, value in numbers.items()}


def drop_timings(steps: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """Without numbers that are others when their step is taken again."""
    return {step: {name: value for name, value in row.items() if name.rpartition("/")[2] not in (*TIMES, "seconds")}
            for step, row in steps.items()}  # fmt: skip


def check_has_every_step_once(points: list[tuple[str, int, float]], expected: dict[int, dict[str, float]]) -> None:
    """`points`: all that a tracker has, (name, step, value)."""
    assert len(points) == len({point[:2] for point in points}), "a step is there twice"
    found: dict[int, dict[str, float]] = {}
    for name, step, value in points:
        found.setdefault(step, {})[name] = value
    assert {step: set(row) for step, row in found.items()} == {step: set(row) for step, row in expected.items()}
    wanted = drop_timings(expected)
    for step, row in drop_timings(found).items():
        assert row == pytest.approx(wanted[step], rel=1e-6)


@pytest.mark.slow
def test_tensorboard_has_every_step_once(tracked):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tracked.run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    points = [(tag, event.step, event.value) for tag in events.Tags()["scalars"] for event in events.Scalars(tag)]
    check_has_every_step_once(points, tracked.expected)
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("options/text_summary")]
    assert "| batch_size | `8` |" in texts[0]


@pytest.mark.slow
def test_mlflow_has_every_step_once(tracked):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tracked.root}/mlflow.db")
    run = client.get_run(tracked.ids["mlflow"]["run_id"])
    history = [metric for name in run.data.metrics for metric in client.get_metric_history(run.info.run_id, name)]
    check_has_every_step_once([(metric.key, metric.step, metric.value) for metric in history], tracked.expected)
    assert run.data.params["batch_size"] == "8" and run.info.run_name == "a name" and run.info.status == "FINISHED"
    assert run.data.tags["output_dir"] == str(tracked.run) and "torch" in run.data.tags["versions"]
    assert client.get_experiment(run.info.experiment_id).name == "a project"
    assert len(client.search_runs([run.info.experiment_id])) == 1, "the resumed run is another one"


@pytest.mark.slow
def test_wandb_has_every_step_in_one_run(tracked):
    """Offline, each start has a directory of its own: the first one's steps, and those since the checkpoint."""
    directories = sorted((tracked.run / "wandb").glob("offline-run-*"))
    assert [path.name.rpartition("-")[2] for path in directories] == [tracked.ids["wandb"]["id"]] * 2
    starts = [read_wandb(next(path.glob("*.wandb"))) for path in directories]
    for (points, config), steps in zip(starts, [(0, KILLED_AFTER), (RESUMED_FROM + 1, STEPS)], strict=True):
        expected = {step: row for step, row in tracked.expected.items() if steps[0] <= step <= steps[1]}
        check_has_every_step_once(points, expected)
        assert config["batch_size"] == 8 and config["run"]["output_dir"] == str(tracked.run)


def read_wandb(path: Path) -> tuple[list[tuple[str, int, float]], dict]:
    """The history and the config of a .wandb file: wandb's records in LevelDB's log format, after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, payload, points, config = path.read_bytes(), 7, b"", [], {}
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # the rest of a block is padding
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        payload += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            record, payload = Record.FromString(payload), b""
            items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            step = items.get("_step")
            points += [(name, step, value) for name, value in items.items() if not name.startswith("_")]
            for item in [*record.run.config.update, *record.config.update]:
                config[item.key or item.nested_key[0]] = json.loads(item.value_json)
    return points, config


@pytest.mark.slow
def test_no_tracker_was_given_a_secret(tracked):
    found = [path for path in tracked.root.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert found == []


def test_a_source_is_one_level_with_signs_that_every_tracker_takes():
    sources = {"a/b": dict(loss=1.0, num_samples=2), "a_b": dict(loss=None, num_samples=3), "..": dict(loss=4.0)}
    named = name_step_metrics(dict(step=1, loss=2.0, mfu=None, osft_leak=0.5, sources=sources))
    assert named == {  # with the first digits of the SHA-256 of "a/b" and ".."
        "train/loss": 2.0, "train/osft_leak": 0.5, "source/a_b_c14cdd/loss": 1.0, "source/a_b_c14cdd/num_samples": 2.0,
        "source/a_b/num_samples": 3.0, "source/5ec1f7/loss": 4.0,
    }  # fmt: skip


def test_mlflow_takes_these_names():
    validation = need("mlflow.utils.validation")
    for name in name_step_metrics(dict(step=1, sources={source: dict(loss=1.0) for source in ("a/b", "..", "ü")})):
        validation._validate_metric_name(name)


def test_names_are_never_empty_paths_or_equal():
    names = ["", ".", "..", "a/b", "a_b", "ü", "a b", "x" * 300, "x" * 301, "a\nb", "a:b?c", " "]
    clean = [clean_name(name) for name in names]
    assert len(set(clean)) == len(names) and {"a_b", "a b"} <= set(clean)
    for name in clean:
        assert name not in ("", ".", "..") and len(name) <= trackers.MAX_NAME + 7 and "/" not in name


class Standin:
    """A tracker that fails, hangs or is slow where the test says so."""

    def __init__(self, first_lacking: dict[str, int] | None = None, **troubles: object):
        self.troubles, self.logged, self.calls, self.first_lacking = troubles, [], 0, first_lacking or {}

    def meet(self, where: str) -> None:
        trouble = self.troubles.get(where)
        if trouble == "hangs":
            threading.Event().wait()
        elif isinstance(trouble, float):
            time.sleep(trouble)
        elif trouble is not None:
            raise trouble

    def start(self, run: TrackedRun, ids: dict, keep: object) -> StartedRun:
        self.meet("start")
        return StartedRun("here", self.log, self.finish, self.first_lacking)

    def log(self, entries: list) -> None:
        self.calls += 1
        self.meet("log" if self.calls > 1 else "first log")
        self.logged += entries

    def finish(self) -> None:
        self.meet("finish")


@pytest.fixture
def follow(tmp_path, monkeypatch, caplog):
    """Reports steps to stand-ins; returns the warnings, and the seconds that reporting and the end took."""
    monkeypatch.setattr(trackers, "SECONDS_TO_COLLECT", 0.01)
    monkeypatch.setattr(trackers, "SECONDS_TO_FINISH", 0.5)
    run = TrackedRun("name", tmp_path, 0, options={}, facts={})

    def follow(*standins: Standin, num_steps: int) -> tuple[list[str], float, float]:
        caplog.clear()
        with caplog.at_level("INFO", logger="mini_trainer"):
            sink = Trackers({f"t{i}": standin.start for i, standin in enumerate(standins)}, run)
            start = time.monotonic()
            for step in range(1, num_steps + 1):
                sink.write(dict(step=step, loss=1.0))
                sink.flush_to_disk()
            told = time.monotonic()
            time.sleep(0.1)
            sink.write(dict(step=num_steps + 1, loss=2.0))
            before = time.monotonic()
            sink.close()
        messages = [record.message for record in caplog.records]
        return messages, told - start, time.monotonic() - before

    return follow


@pytest.mark.parametrize(
    ("troubles", "said"),
    [
        (dict(start=OSError("no network")), "OSError: no network"),
        (dict(start=SystemExit(1)), "SystemExit: 1"),
        (dict(start="hangs"), "not finished 0 s"),
        (dict(log=ValueError("first\nsecond")), "ValueError: first;"),
        (dict(log="hangs"), "not finished 0 s"),
        (dict(log=RuntimeError()), "RuntimeError: ;"),
        (dict(finish=RuntimeError("x")), "RuntimeError: x"),
        (dict(finish="hangs"), "not finished 0 s"),
    ],
)
def test_a_tracker_in_trouble_is_told_once_and_holds_up_nothing(troubles, said, follow):
    good, bad = Standin(), Standin(**troubles)
    messages, seconds, seconds_to_end = follow(bad, good, num_steps=200)
    warnings = [message for message in messages if message.startswith("warning")]
    assert len(warnings) == 1 and warnings[0].startswith("warning: --track t0: ") and said in warnings[0], messages
    assert seconds < 0.5 and seconds_to_end < 1.0
    assert [step for step, _ in good.logged] == list(range(1, 202)), "another tracker has suffered"


def test_what_a_tracker_lacks_is_counted_and_it_may_recover(follow):
    bad = Standin(**{"first log": ConnectionError("gone")})
    messages, _, _ = follow(bad, num_steps=20)
    assert bad.logged[-1] == (21, {"train/loss": 2.0})
    assert any(re.fullmatch(rf"tracking: t0 .* {21 - len(bad.logged)} entries", message) for message in messages)


def test_a_queue_that_is_full_leaves_out_what_comes_and_says_so_once(follow, monkeypatch):
    monkeypatch.setattr(trackers, "QUEUE_LENGTH", 10)
    slow = Standin(log=0.2)
    messages, seconds, _ = follow(slow, num_steps=500)
    warnings = [message for message in messages if message.startswith("warning")]
    assert len(warnings) == 1 and " 10 entries " in warnings[0]
    assert seconds < 0.5 and 0 < len(slow.logged) < 100


@pytest.mark.parametrize(
    ("first_lacking", "expected"),
    [
        ({}, [(4, "train"), (4, "validation")]),
        ({trackers.STEP: 4, trackers.VALIDATION: 2}, [(4, "train"), (4, "validation")]),
        ({trackers.STEP: 5, trackers.VALIDATION: 4}, [(4, "validation")]),
    ],
)  # fmt: skip
def test_a_resumed_tracker_has_each_step_and_validation_once(first_lacking, expected, tmp_path, monkeypatch):
    """Resumed after step 3."""
    monkeypatch.setattr(trackers, "SECONDS_TO_COLLECT", 0.01)
    tracker = Standin(first_lacking)
    sink = Trackers({"t": tracker.start}, TrackedRun("name", tmp_path, 3, options={}, facts={}))
    sink.write(dict(step=4, loss=1.0))
    sink.write_validation(dict(step=4, loss=1.0))
    sink.close()
    found = [(step, name.partition("/")[0]) for step, values in tracker.logged for name in values]
    assert sorted(found) == sorted(expected)


@pytest.mark.slow
def test_a_run_with_a_tracker_that_hangs_ends_as_it_would_without(world, tracked, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trackers, "SECONDS_TO_FINISH", 0.2)
    troubles = dict(wandb=dict(start="hangs"), tensorboard={"first log": "hangs"}, mlflow=dict(start=OSError()))
    standins = {name: Standin(**trouble).start for name, trouble in troubles.items()}
    monkeypatch.setattr("mini_trainer.run.trackers.TRACKERS", standins)
    options = tracked.options | dict(output_dir=str(tmp_path / "run"), track=tuple(troubles), max_steps=2)
    train_here(world, **options)
    assert json.loads((tmp_path / "run" / "training_params.json").read_text())["finished"]
    assert len([message for message in caplog.messages if message.startswith("warning: --track")]) == 3


def test_the_file_of_runs_may_be_damaged(tmp_path, caplog):
    path = tmp_path / trackers.TRACKERS_FILE
    path.write_text("{")
    known = trackers.KnownRuns(tmp_path)
    assert known.runs == {} and str(path) in caplog.text
    known.keep("wandb", {"id": "1"})
    known.keep("mlflow", {"run_id": "2"})
    assert trackers.KnownRuns(tmp_path).runs == {"wandb": {"id": "1"}, "mlflow": {"run_id": "2"}}
    assert os.listdir(tmp_path) == [trackers.TRACKERS_FILE]
