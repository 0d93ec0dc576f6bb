"""Open files of a rank by the number of ranks, and whether ranks start under a small limit.

    python benchmarks/open_files.py --ranks 4 8 16 32 64
    ... --before CHECKOUT    # another checkout of this project, too

Forks the ranks, which join a process group on gloo and connect the lifeline as train.py does, and counts what each then
has open in /proc/self/fd beyond what it had before. Rank 0 has the most; the store of addresses, which torchrun holds,
belongs to a process of its own here, too. The limit under which ranks start is 32 files over what each has open.
"""

import argparse
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 30  # for all ranks to start
ROOM = 32  # files of the small limit above those that a process has open


def count_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def start_rank(rank: int, num_ranks: int, port: int, is_limited: bool, answer: Connection) -> None:
    """Starts this process as a rank; sends the number of files that it opened, or the error's last line."""
    from ranks.monitor import RunControl
    from ranks.world import connect_lifeline, init_world

    os.environ |= dict(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    before = count_files()
    if is_limited:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + ROOM, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what others say when the end of this one is seen
    try:
        control = RunControl(hang_timeout=60, max_seconds=None)
        control.start()
        connect_lifeline(init_world(), control)
        answer.send(count_files() - before)
    except Exception as error:
        answer.send(str(error).strip().splitlines()[0])
    answer.poll(None)  # the others count while this one's connections are there


def start_ranks(num_ranks: int, *, is_limited: bool) -> list[int | str]:
    """What each rank answered."""
    from torch.distributed import TCPStore

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def hold_store() -> None:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        theirs.send(store.port)
        theirs.poll(None)

    processes = [context.Process(target=hold_store, daemon=True)]
    processes[0].start()
    port, pipes = ours.recv(), [context.Pipe() for _ in range(num_ranks)]
    for rank, (_, answer) in enumerate(pipes):
        words = (rank, num_ranks, port, is_limited, answer)
        processes.append(context.Process(target=start_rank, args=words, daemon=True))
        processes[-1].start()
    deadline = time.monotonic() + SECONDS
    answers = [
        pipe.recv() if pipe.poll(max(0, deadline - time.monotonic())) else "ended, or does not answer"
        for pipe, _ in pipes
    ]
    for process in processes:
        process.kill()
    return answers


def measure(ranks: list[int]) -> None:
    """Prints a table's row for each number of ranks, by the code of the checkout in which this process runs."""
    sys.path.insert(0, os.getcwd())
    for num_ranks in ranks:
        answers = start_ranks(num_ranks, is_limited=False)
        num_failed = sum(isinstance(answer, str) for answer in start_ranks(num_ranks, is_limited=True))
        started = f"{num_failed} fail" if num_failed else "start"
        print(f"| {num_ranks} | {answers[0]} | {max(answers[1:])} | {started} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--before", type=Path, help="another checkout of this project")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.ranks)
        return
    for name, checkout in (("before", args.before), ("now", ROOT)):
        if checkout is not None:
            print(f"\n{name}\n\n| ranks | files of rank 0 | of another | under a limit of {ROOM} more |")
            print("| --- | --- | --- | --- |", flush=True)
            words = [sys.executable, __file__, "--measure", "--ranks", *map(str, args.ranks)]
            subprocess.run(words, cwd=checkout, check=True)


if __name__ == "__main__":
    main()
