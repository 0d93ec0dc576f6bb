"""One command that uses a borrowed GPU's minutes well: what is most worth knowing first.

    python benchmarks/gpu.py --minutes 8    # as often as needed: the next call continues where the last one ended
    python benchmarks/gpu.py --tiny         # all of it in small, also on a CPU
    python benchmarks/gpu.py --only trace   # some stages alone, also once more

Each stage (gpu_stages.py) is a process with its own time limit, at most what is left of the call. A stage that fails or
hangs is reported and skipped, and what it had found by then is kept. Results are written as soon as a stage ends: a
line of stages.jsonl, and all of summary.txt anew, beside log.txt and the trace, in --results; where the environment
names a folder OUT, copies go there, too. A stage that the end of a call cut off starts over in the next call, once.

Packages that the machine's Python lacks are installed for the stages from --wheels, without network: gpu_wheels.py
fetches them beforehand. gpu_settings.py has the runs, and what is expected of each.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_settings import ROOT, Setup
from gpu_stages import STAGES, TAIL, Stage, make_env

STAGES_FILE, SUMMARY, LOG = "stages.jsonl", "summary.txt", "log.txt"
MOST_STARTS = 2  # of a stage that ends with its call
MIN_SECONDS = 30  # left of a call for a stage to be worth starting
TINY_LIMIT = 6  # times a stage's limit, on a CPU that has other work


def install_wheels(wheels: Path, site: Path) -> None:
    """Installs into `site`, for this process and the stages, those wheels whose packages this Python does not have."""
    missing = [wheel for wheel in sorted(wheels.glob("*.whl")) if not is_installed(wheel.name.split("-")[0])]
    if missing:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--upgrade",
        ]
        subprocess.run([*pip, "--target", str(site), *map(str, missing)], check=True)
    if site.exists():
        sys.path.append(str(site))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(site)]))
        importlib.invalidate_caches()


def is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


# --- One after the other ------------------------------------------------------------------------------------


def read_results(results: Path) -> list[dict[str, Any]]:
    """All lines so far; the last one may have been cut off."""
    file, rows = results / STAGES_FILE, []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def is_due(name: str, rows: list[dict[str, Any]], only: list[str]) -> bool:
    """Whether a stage is asked for, or has yet to end and was not cut off by the ends of MOST_STARTS calls."""
    if only:
        return name in only
    own = [row["status"] for row in rows if row["stage"] == name]
    return (not own or own[-1] in ("begun", "cut off")) and own.count("begun") < MOST_STARTS


def run_stages(args: argparse.Namespace) -> None:
    """Runs the stages that are due until the minutes of this call are over."""
    deadline = time.monotonic() + 60 * args.minutes
    args.results.mkdir(parents=True, exist_ok=True)
    install_wheels(args.wheels, args.work_dir / "site")
    for stage in STAGES:
        if args.tiny:
            stage = replace(stage, seconds=TINY_LIMIT * stage.seconds)
        if not is_due(stage.name, read_results(args.results), args.only):
            continue
        missing = [package for package in stage.needs if importlib.util.find_spec(package) is None]
        if missing:
            reason = f"{missing[0]} is not installed, and {args.wheels} has no wheel of it"
            write_row(args.results, stage.name, "left out", reason=reason)
            continue
        left = deadline - time.monotonic()
        if left < min(MIN_SECONDS, stage.seconds):
            print(f"{stage.name}: {max(left, 0):.0f} s are left of this call: for the next one", flush=True)
            continue
        write_row(args.results, stage.name, "begun")
        run_stage(stage, args, seconds=min(left, stage.seconds))
    write_summary(args.results)
    print((args.results / SUMMARY).read_text())


def run_stage(stage: Stage, args: argparse.Namespace, *, seconds: float) -> None:
    """Runs a stage in a process of its own, which ends with all that it has started after `seconds` at the latest."""
    found = args.results / "found.json"
    found.unlink(missing_ok=True)
    start = time.monotonic()
    with (args.results / LOG).open("a") as log:
        print(f"=== {stage.name}", file=log, flush=True)
        begin = log.tell()
        process = subprocess.Popen(
            make_command(stage, args), cwd=ROOT, env=make_env(), stdout=log, stderr=log, process_group=0
        )
        try:
            process.wait(timeout=seconds)
            status = "done" if process.returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timed out" if seconds == stage.seconds else "cut off"
        finally:
            kill_group(process)
    details: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1)}
    if status != "done":
        details["tail"] = (args.results / LOG).read_bytes()[begin:].decode(errors="replace")[-TAIL:]
    if found.exists():
        details["found"] = json.loads(found.read_text())
        found.unlink()
    write_row(args.results, stage.name, status, **details)


def make_command(stage: Stage, args: argparse.Namespace) -> list[str]:
    words = ["--stage", stage.name, "--results", args.results, "--work-dir", args.work_dir]
    return [sys.executable, __file__, *map(str, words), *(["--tiny"] if args.tiny else [])]


def kill_group(process: subprocess.Popen) -> None:
    """The stage and whatever it has left; it leads a group of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def write_row(results: Path, name: str, status: str, **details: object) -> None:
    """A line for the stage, the summary anew, and copies of both in $OUT."""
    with (results / STAGES_FILE).open("a") as file:
        file.write(json.dumps({"stage": name, "status": status, **details}) + "\n")
        file.flush()
        os.fsync(file.fileno())
    if status != "begun":
        write_summary(results)
        print(f"{name}: {status}", flush=True)


def write_summary(results: Path) -> None:
    rows = {row["stage"]: row for row in read_results(results)}
    lines = [line for stage in STAGES if stage.name in rows for line in describe(rows[stage.name])]
    (results / SUMMARY).write_text("\n".join(lines) + "\n")
    if out := os.environ.get("OUT"):
        for file in results.iterdir():
            if file.is_file() and file.resolve().parent != Path(out).resolve():
                shutil.copy(file, out)


def describe(row: dict[str, Any]) -> Iterator[str]:
    """A stage in a few lines."""
    seconds = f", {row['seconds']:.0f} s" if "seconds" in row else ""
    yield f"{row['stage']}: {row['status']}{seconds}{', ' + row['reason'] if 'reason' in row else ''}"
    for key, value in row.get("found", {}).items():
        if isinstance(value, list) and value and isinstance(value[0], str):
            yield f"  {key}:"
            yield from (f"    {line}" for line in value)
        else:
            yield f"  {key}: {show(value)}"
    if "tail" in row:
        yield from (f"  ! {line}" for line in row["tail"].splitlines()[-8:])


def show(value: object) -> str:
    """A value of a stage's results, in one line."""
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {show(each)}" for key, each in value.items())
    return " ".join(map(show, value)) if isinstance(value, list) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--minutes", type=float, default=1e9, help="of this call; a stage under way then is cut off")
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "gpu")
    parser.add_argument("--work-dir", type=Path, default=Path(tempfile.gettempdir()) / "mini_trainer_gpu")
    parser.add_argument(
        "--wheels",
        type=Path,
        default=ROOT / "benchmarks" / "wheels",
        help="folder of wheels for packages that Python lacks",
    )
    parser.add_argument("--only", nargs="+", choices=names, default=[], help="stages to run, also if they have ended")
    parser.add_argument("--tiny", action="store_true", help="models and steps of next to no size, also on a CPU")
    parser.add_argument("--stage", choices=names, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage is None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the stage under way ends with it
        return run_stages(args)
    stage = next(stage for stage in STAGES if stage.name == args.stage)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    found = args.results / "found.json"
    stage.run(Setup(args.work_dir, args.results, args.tiny), lambda so_far: found.write_text(json.dumps(so_far)))


if __name__ == "__main__":
    main()
