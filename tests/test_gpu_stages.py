"""benchmarks/gpu.py: stages that fail or hang are skipped, the next call continues, and every stage works in small."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gpu
import gpu_settings
import gpu_stages
import pytest
from breadth import long
from gpu_cases import DECIDING, train_on_cpu
from processes import ENV, ROOT, is_alive, wait_until

pytestmark = pytest.mark.slow

# What a stage's process does, in the place of gpu.py: `found` is the file that a stage reports to.
PROGRAMS = {
    "good": 'found.write_text(\'{"speed": 1.25, "table": ["a", "b"]}\')',
    "failing": "found.write_text('{\"half\": 1}'); print('on the way'); raise RuntimeError('a bug')",
    "hanging": "found.write_text('{\"half\": 2}'); print(subprocess.Popen(['sleep', '100']).pid, flush=True);"
    " time.sleep(100)",
    "last": "pass",
}


@pytest.fixture
def stages(monkeypatch, tmp_path):
    """The stages of `PROGRAMS`, and a function that calls the command with them and gives the lines and their order."""
    seconds = {"good": 60, "failing": 60, "foreign": 60, "hanging": 2, "last": 60}
    needed = {"foreign": ("no_such_package",)}
    made = [gpu_stages.Stage(name, limit, None, needed.get(name, ())) for name, limit in seconds.items()]
    started = []

    def make_command(stage: gpu_stages.Stage, args) -> list[str]:
        started.append(stage.name)
        program = f"import pathlib, subprocess, time; found = pathlib.Path({str(tmp_path / 'found.json')!r})\n"
        return [sys.executable, "-S", "-c", program + PROGRAMS[stage.name]]

    monkeypatch.setattr(gpu, "STAGES", made)
    monkeypatch.setattr(gpu, "make_command", make_command)

    def call(*, minutes: float = 60, only: tuple[str, ...] = ()) -> tuple[dict[str, dict], list[str]]:
        started.clear()
        places = dict(results=tmp_path, work_dir=tmp_path, wheels=tmp_path / "wheels")
        gpu.run_stages(SimpleNamespace(**places, minutes=minutes, only=only, tiny=False))
        return {row["stage"]: row for row in gpu.read_results(tmp_path)}, list(started)

    return call


def test_what_fails_or_hangs_is_told_and_passed_over_and_the_next_call_goes_on(stages, tmp_path):
    rows, started = stages()
    assert started == ["good", "failing", "hanging", "last"]
    statuses = {name: row["status"] for name, row in rows.items()}
    assert statuses == {"good": "done", "failing": "failed", "foreign": "left out", "hanging": "timed out",
                        "last": "done"}  # fmt: skip
    assert rows["good"]["found"] == {"speed": 1.25, "table": ["a", "b"]} and "found" not in rows["last"]
    assert rows["failing"]["found"] == {"half": 1} and "a bug" in rows["failing"]["tail"]
    assert rows["hanging"]["found"] == {"half": 2} and 2 <= rows["hanging"]["seconds"] < 30
    child = int(rows["hanging"]["tail"].split()[0])
    wait_until(lambda: not is_alive(child), seconds=10, said=lambda: "what a stage has started outlives it")
    summary = (tmp_path / "summary.txt").read_text()
    assert "good: done" in summary and "  speed: 1.25" in summary and "no_such_package" in summary
    assert "on the way" in (tmp_path / "log.txt").read_text()
    assert stages() == (rows, [])
    assert stages(only=("failing",))[1] == ["failing"]


def test_a_call_starts_no_stage_in_its_last_seconds(stages, capsys):
    rows, started = stages(minutes=0.25)
    assert started == ["hanging"] and set(rows) == {"foreign", "hanging"}
    assert "next one" in capsys.readouterr().out
    assert stages()[1] == ["good", "failing", "last"]


@pytest.mark.parametrize("name", ["full", *(long(name) for name in DECIDING if name != "full")])
def test_the_expected_losses_are_those_of_today(name, tmp_path):
    expected = gpu_settings.read_expected()["losses"]
    assert expected.keys() == DECIDING.keys()
    rows = train_on_cpu(DECIDING[name], tmp_path)
    for row, known in zip(rows, expected[name], strict=True):
        assert row == pytest.approx(known, rel=1e-4)


@pytest.mark.wide
@pytest.mark.parametrize("name", gpu_settings.SETTINGS)
def test_the_expected_plans_are_those_of_today(name, tmp_path):
    assert gpu_settings.read_expected()["plans"].keys() == gpu_settings.SETTINGS.keys()
    setup = gpu_settings.Setup(tmp_path, tmp_path, tiny=False)
    assert gpu_settings.plan(setup, name) == pytest.approx(gpu_settings.read_expected()["plans"][name], rel=0.01)


def test_a_trace_is_read_for_the_devices_busy_time_and_its_gaps():
    events = [
        dict(cat="kernel", name=name, ts=ts, dur=dur)
        for name, ts, dur in (("a", 100, 50), ("b", 120, 10), ("a", 200, 100), ("c", 290, 60))
    ]
    found = gpu_stages.read_trace([dict(cat="cpu_op", name="aten::mm", ts=0, dur=1000), *events])
    assert found["step_ms"] == pytest.approx(0.25) and found["busy_share"] == pytest.approx(200 / 250)
    assert (found["num_kernels"], found["num_gaps"]) == (4, 1)
    assert found["slowest"][0].split() == ["0.15", "ms", "2", "a"] and found["gaps"][0].split() == [
        "0.050", "ms", "b", "->", "a"]  # fmt: skip


@pytest.mark.wide
def test_the_whole_command_runs_in_small(tmp_path: Path):
    command = [sys.executable, "benchmarks/gpu.py", "--tiny", "--results", tmp_path, "--work-dir", tmp_path / "work"]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["stage"]: row for row in gpu.read_results(tmp_path)}
    assert list(rows) == [stage.name for stage in gpu.STAGES]
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(rows, "done"), done.stdout
    assert rows["kill and resume"]["found"]["bit_for_bit"] and rows["correctness"]["found"]["counts"]["passed"] > 10
    assert any(line.startswith("| trl |") for line in rows["against others"]["found"]["table"])
    assert (tmp_path / "trace.json.gz").stat().st_size > 1000
