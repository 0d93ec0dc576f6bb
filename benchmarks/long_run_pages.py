"""A run of a million steps: how large its page of curves is, how soon it opens, and how the board copes with it.

    OMP_NUM_THREADS=1 python benchmarks/long_run_pages.py --work-dir /tmp/long_run

Needs plotly, and Chromium for the opening. The metrics are those of a run, by formula. Writing the page and the board's
requests are measured by their process's CPU seconds and its peak memory; opening is wall time in the browser, from the
request to the last visible chart drawn, the best of five: other work on the machine only adds to it.
"""

import argparse
import json
import platform
import random
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from browser import CHROMIUM, Browser
from run_directories import make_step, write_run

METRICS = "training_metrics_0.jsonl"
NUM_OPENINGS = 5
NUM_RUNS = 500  # others on the board
BOARD = """
import json, resource, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from plots.board import BoardServer
from plots.columns import MOST_ROWS
server = BoardServer(Path(sys.argv[2]), port=8767)
def respond(path, **query):
    start = time.process_time()
    answer = server.respond(path, {name: [value] for name, value in query.items()})
    return answer, time.process_time() - start
page, first = respond("/")
data, again = respond("/runs")
data = json.loads(data.text)
long = next(run["id"] for run in data["runs"] if run["name"] == "long")
_, unchanged = respond("/runs", version=data["version"])
pieces, is_behind = [], True
while is_behind:
    answer, seconds = respond("/data", run=long)
    is_behind = json.loads(answer.text)["is_behind"]
    pieces.append(seconds)
print(json.dumps(dict(first=first, again=again, unchanged=unchanged, pieces=len(pieces), longest=max(pieces),
    total=sum(pieces), peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)))
"""


def write_long_run(path: Path, num_steps: int) -> None:
    """A run's directory with `num_steps` lines of metrics."""
    write_run(path, num_steps=2)
    noise = random.Random(0)
    with (path / METRICS).open("w") as file:
        for step in range(1, num_steps + 1):
            file.write(json.dumps(make_step(step, noise=noise, num_steps=num_steps)) + "\n")


def measure_child(command: list[str]) -> tuple[str, float]:
    """What a process prints, and its CPU seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done.stdout, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure_openings(page: Path, profile: Path) -> list[float]:
    """Wall seconds from the request of the page to the last visible chart."""
    browser, seconds = Browser(profile), []
    try:
        for _ in range(NUM_OPENINGS):
            browser.open("about:blank#")
            start = time.perf_counter()
            browser.open(page.as_uri())
            browser.wait_until("isDrawn()")
            seconds.append(time.perf_counter() - start)
        assert browser.list_complaints() == []
    finally:
        browser.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    args = parser.parse_args()
    runs = args.work_dir / "runs"
    write_long_run(runs / "long", args.steps)
    for i in range(NUM_RUNS):
        write_run(runs / f"short_{i}", num_steps=60, seed=i)
    megabytes = (runs / "long" / METRICS).stat().st_size / 1e6
    page = args.work_dir / "curves.html"
    machine = f"{platform.platform()}, Python {platform.python_version()}"
    print(f"{machine}, {args.steps:,} steps, {megabytes:.0f} MB of metrics")
    _, seconds = measure_child(
        [sys.executable, "tools/plot_metrics.py", str(runs / "long"), "--output", str(page)]
    )  # fmt: skip
    print(f"page of curves: {page.stat().st_size / 1e6:.1f} MB, written in {seconds:.1f} CPU seconds")
    if CHROMIUM is None:
        print("opening was not measured: there is no Chromium")
    else:
        openings = measure_openings(page, args.work_dir / "profile")
        print(f"opened in {min(openings):.2f} s (of {', '.join(f'{one:.2f}' for one in openings)})")
    text, _ = measure_child([sys.executable, "-c", BOARD, str(ROOT), str(runs)])
    board = json.loads(text)
    print(
        f"board of {NUM_RUNS + 1} runs, CPU seconds: first table {board['first']:.2f}, again {board['again']:.2f},"
        f" unchanged {board['unchanged']:.2f}\ncurves of the long run: {board['pieces']} requests, the longest"
        f" {board['longest']:.2f}, together {board['total']:.1f}; peak memory of the process {board['peak']:.0f} MB"
    )


if __name__ == "__main__":
    main()
