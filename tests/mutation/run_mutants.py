"""Whether the tests notice the mutants: each is put into a copy of the tree, where the tests nearest to it run until
one fails; mutants that survive them meet all of `make test`.

    python tests/mutation/run_mutants.py                          # all: `make mutants`
    python tests/mutation/run_mutants.py step osft/no-alarm       # rooms, or single ones
    python tests/mutation/run_mutants.py step --all-failures      # which tests fail, not only the first
    python tests/mutation/run_mutants.py --output tests/mutation/results.txt

The packages are imported once, in the process that each mutant is forked from; the project never is there.
"""

import argparse
import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from mutants import Mutant, read_mutants

ROOT = Path(__file__).parents[2]
# What most tests import beside the project.
PACKAGES = (
    "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.optim", "transformers", "numba", "datasets",
    "hypothesis", "safetensors.torch", "transformers.models.llama.modeling_llama",
)  # fmt: skip
MOST_SECONDS = 400  # a mutant that never ends


@dataclass
class Result:
    """What one mutant met."""

    mutant: Mutant
    verdict: str  # killed, equivalent, SURVIVED, HANGS (no answer), BROKEN (its tests fail without it, too)
    seconds: float
    num_passed: int = 0
    killers: list[str] = field(default_factory=list)


class Recorder:
    """A plug-in of pytest that notes which tests pass and fail."""

    def __init__(self) -> None:
        self.num_passed, self.failed = 0, []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid.removeprefix("tests/"))
        self.num_passed += report.passed and report.when == "call"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="rooms, or room/name; default: all")
    parser.add_argument("--all-failures", action="store_true", help="go on after the first test that fails")
    parser.add_argument("--nearest-only", action="store_true", help="leave out the whole suite for survivors")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path, help="also write the table there")
    args = parser.parse_args()
    every = read_mutants()
    if unknown := {*args.names} - {mutant.room for mutant in every} - set(map(str, every)):
        parser.error(f"no room or mutant is called {' or '.join(sorted(unknown))}")
    mutants = [mutant for mutant in every if not args.names or {mutant.room, str(mutant)} & {*args.names}]
    for mutant in mutants:
        mutant.mutate((ROOT / mutant.file).read_text())  # says what is not found before anything runs
    commit = subprocess.run(["git", "log", "-1", "--format=%h of %cs"], cwd=ROOT, capture_output=True, text=True).stdout
    os.environ |= dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")  # read at the import
    for name in PACKAGES:
        importlib.import_module(name)
    with contextlib.ExitStack() as stack:
        trees, context = multiprocessing.SimpleQueue(), multiprocessing.get_context("fork")
        for _ in range(args.workers):
            trees.put(stack.enter_context(copy_tree()))
        measure = functools.partial(measure_mutant, all_failures=args.all_failures, nearest_only=args.nearest_only)
        with ProcessPoolExecutor(args.workers, mp_context=context, initializer=take_tree, initargs=(trees,)) as pool:
            results = list(pool.map(measure, mutants))
            results = pool.submit(refuse_false_kills, results).result()
    report = summarize(results, commit=commit.strip())
    print(f"\n{report}")
    if args.output:
        args.output.write_text(f"{report}\n\n" + "".join(f"{describe(result)}\n" for result in results))
    sys.exit(any(result.verdict not in ("killed", "equivalent") for result in results))


def take_tree(trees: multiprocessing.SimpleQueue) -> None:
    """Gives this process, in which nothing but such calls runs, a tree of its own."""
    global TREE
    TREE = trees.get()


def measure_mutant(mutant: Mutant, *, all_failures: bool, nearest_only: bool) -> Result:
    """Lets it meet the nearest tests, then all if it survives them."""
    result = meet(mutant, TREE, all_failures=all_failures)
    if result.verdict == "SURVIVED" and not nearest_only:
        result = meet(mutant, TREE, everything=True)
    print(describe(result), flush=True)
    return result


def refuse_false_kills(results: list[Result]) -> list[Result]:
    """The results; a test that also fails without any mutant has killed none."""
    killers = sorted({name for result in results for name in result.killers})
    if not killers:
        return results
    status, _, failing = run_tests([f"tests/{name}" for name in killers], TREE, 10 * MOST_SECONDS)
    if status != 0 and not failing:
        failing = killers  # they have not all been run
    for result in results:
        if result.verdict == "killed" and {*failing} & {*result.killers}:
            result.verdict = "BROKEN"
            print(f"fails without a mutant: {describe(result)}", flush=True)
    return results


@contextlib.contextmanager
def copy_tree() -> Iterator[Path]:
    """A copy of the tracked and new files, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, check=True)
    tree = Path(tempfile.mkdtemp(prefix="mutants_")) / "tree"
    for name in listed.stdout.decode().splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    subprocess.run(["git", "add", "."], cwd=tree, check=True)
    yield tree
    shutil.rmtree(tree.parent)


def meet(mutant: Mutant, tree: Path, *, all_failures: bool = False, everything: bool = False) -> Result:
    """Puts the mutant into the tree, runs its tests, and takes it out again."""
    path, start = tree / mutant.file, time.monotonic()
    source, stamp = path.read_text(), path.stat().st_mtime
    path.write_text(mutant.mutate(source))
    # A time of its own: what Python and numba have compiled of another mutant is not this one's.
    os.utime(path, (stamp, stamp + 2 + int.from_bytes(str(mutant).encode(), "big") % 10**6))
    chosen = ["tests"] if everything else [f"tests/{name}" for name in mutant.tests]
    flags = [] if all_failures else ["-x"]
    try:
        status, num_passed, failed = run_tests([*chosen, *flags], tree, MOST_SECONDS * (10 if everything else 1))
    finally:
        path.write_text(source)
        os.utime(path, (stamp, stamp))
    if status is None:
        verdict = "HANGS"
    elif failed:
        verdict = "killed"
    elif status != 0:
        verdict = "BROKEN"
    else:
        verdict = "equivalent" if mutant.equivalent else "SURVIVED"
    return Result(mutant, verdict, time.monotonic() - start, num_passed, failed)


def run_tests(arguments: list[str], tree: Path, seconds: float) -> tuple[int | None, int, list[str]]:
    """pytest's exit status, None after so many seconds, the number of tests that passed, and those that failed; from a
    process forked here."""
    answer = tree.parent / "answer.json"
    answer.write_text("[0, []]")  # of a process that ends before it answers
    pid = os.fork()
    if pid == 0:
        os.setsid()
        run_forked(arguments, tree, answer)
    deadline = time.monotonic() + seconds
    while not (done := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < deadline:
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # also what the tests have left behind
    if not done[0]:
        os.waitpid(pid, 0)
        return None, 0, []
    return os.waitstatus_to_exitcode(done[1]), *json.loads(answer.read_text())


def run_forked(arguments: list[str], tree: Path, answer: Path) -> None:
    """Runs pytest in the copy of the tree, and ends the process."""
    status = 1
    try:
        log = os.open(tree.parent / "log.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(tree)
        caches = tree.parent / "caches"
        shutil.rmtree(caches, ignore_errors=True)  # what one mutant has made is not for the next
        caches.mkdir()
        os.environ |= dict(PYTHONPATH=str(tree), MINI_TRAINER_CACHE=str(caches))
        sys.path[:] = [str(tree), *(path for path in sys.path if not path.startswith(str(ROOT / "tests")))]
        del sys.modules["mutants"]
        sys.modules["__main__"] = types.ModuleType("__main__")  # else processes that tests start would import this file
        recorder = Recorder()
        options = ["-q", "-p", "no:cacheprovider", f"--basetemp={tree.parent / 'tmp'}", "--tb=short"]
        status = int(pytest.main([*arguments, *options], plugins=[recorder]))
        answer.write_text(json.dumps([recorder.num_passed, recorder.failed]))
    finally:
        sys.stdout.flush()
        os._exit(status)


def describe(result: Result) -> str:
    """One line."""
    mutant = result.mutant
    what = ", ".join(result.killers) or mutant.equivalent or f"by {result.num_passed} tests: {mutant.reason}"
    return f"{result.verdict:10} {result.seconds:5.0f} s  {mutant!s:40} {what}"


def summarize(results: list[Result], *, commit: str) -> str:
    """The table by room. `commit`: when the run began."""
    rows = [
        f"Commit {commit}, run on {time.strftime('%Y-%m-%d')}.\n",
        "| room | mutants | killed | equivalent | survived | seconds a mutant |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for room in [*dict.fromkeys(result.mutant.room for result in results), "all"]:
        inside = [result for result in results if room in (result.mutant.room, "all")]
        counts = Counter(result.verdict for result in inside)
        killed, equivalent = counts["killed"], counts["equivalent"]
        seconds = sum(result.seconds for result in inside) / len(inside)
        survived = len(inside) - killed - equivalent
        rows.append(f"| {room} | {len(inside)} | {killed} | {equivalent} | {survived} | {seconds:.1f} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
