"""Messages and seconds of what ranks exchange beside training, by the number of ranks: 16, 128, 1,024.

    python benchmarks/side_channels.py --ranks 16 128 1024

Each rank is a thread that runs the program's own functions, with an environment and a default process group of its own.
The groups are gloo's and the lifeline's connections TCP's, all on this machine; only the store of addresses, which
torchrun holds, is one in memory that counts requests, and a process's end is its thread's, which closes its sockets.

Messages are gloo's writes to its sockets (its own small ones that announce others included), the lifeline's lines and
the store's requests. Rank 0's CPU seconds are those of all its threads. Seconds are until the last rank is done: they
say little, since all ranks share this machine's cores and one interpreter.
"""

import argparse
import contextlib
import json
import os
import queue
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import paths  # noqa: F401

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # as init_world sets it, for ranks that are processes

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg

from mini_trainer.distributed import ending, lifeline, meeting
from mini_trainer.distributed.agreement import compare_ranks
from mini_trainer.distributed.ending import ExitCode, RanksDiffer
from mini_trainer.distributed.lifeline import Address, Connection
from mini_trainer.distributed.watch import RunControl
from mini_trainer.distributed.world import World, init_world, make_mesh
from mini_trainer.model.method import Full
from mini_trainer.model.optim.optimizers import reduce_step
from mini_trainer.objectives.objective import LossSums
from mini_trainer.run.checkpointing import Checkpointer
from mini_trainer.run.step import TrainState

RANKS_PER_NODE = 8
LONG, SECONDS_PER_RANK = 3600.0, 1 / 32  # the last rank's lifeline is connected later than the first one's
SECONDS_TO_CONNECT = 600.0  # for threads of one interpreter
STACK_BYTES = 512 << 10
MOST_RANKS_IN_RING = 128  # N² messages take minutes here beyond

here = threading.local()  # its `rank` is the rank to which this thread belongs; absent in the simulation's own


def own_rank() -> int | None:
    return getattr(here, "rank", None)


class Environment(MutableMapping):
    """os.environ with a rank's variables in its threads."""

    def __init__(self, real: MutableMapping[str, str], num_ranks: int):
        self.real, self.num_ranks = real, num_ranks

    def own(self) -> dict[str, str]:
        rank = own_rank()
        if rank is None:
            return {}
        return dict(
            RANK=str(rank), WORLD_SIZE=str(self.num_ranks), LOCAL_RANK=str(rank % RANKS_PER_NODE),
            LOCAL_WORLD_SIZE=str(RANKS_PER_NODE), MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
        )  # fmt: skip

    def __getitem__(self, name: str) -> str:
        own = self.own()
        return own[name] if name in own else self.real[name]

    def __setitem__(self, name: str, value: str) -> None:
        self.real[name] = value

    def __delitem__(self, name: str) -> None:
        del self.real[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self.real, **self.own()})

    def __len__(self) -> int:
        return len({**self.real, **self.own()})


class CountedStore(dist.Store):
    """A store in memory that counts its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.num_requests, self.num_bytes = dist.HashStore(), 0, 0
        self.held.set_timeout(timedelta(seconds=600))

    def count(self, *texts: str | bytes) -> None:
        self.num_requests += 1
        self.num_bytes += sum(map(len, texts))

    def set(self, key: str, value: str) -> None:
        self.count(key, value)
        self.held.set(key, value)

    def get(self, key: str) -> bytes:
        value = self.held.get(key)
        self.count(key, value)
        return value

    def append(self, key: str, value: str) -> None:
        self.count(key, value)
        self.held.append(key, value)

    def add(self, key: str, number: int) -> int:
        self.count(key)
        return self.held.add(key, number)

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self.count(*keys)
        self.held.wait(keys, *timeout)

    def check(self, keys: list[str]) -> bool:
        self.count(*keys)
        return self.held.check(keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """The store in memory keeps its own."""

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=600)


class CountingStream:
    """A stream that keeps what ranks print, and passes on what others do."""

    def __init__(self, real: object):
        self.real, self.texts = real, []

    def write(self, text: str) -> int:
        if threading.current_thread() is threading.main_thread():
            return self.real.write(text)
        self.texts += [text] if text else []
        return len(text)

    def isatty(self) -> bool:
        return False

    def flush(self) -> None:
        self.real.flush()


class Simulation:
    """All ranks, as threads of this process."""

    def __init__(self, num_ranks: int):
        self.num_ranks, self.store = num_ranks, CountedStore()
        self.stream = sys.stderr = CountingStream(sys.stderr)
        self.num_lines = self.num_line_bytes = self.num_stacks = 0
        self.num_removed: Counter[int | None] = Counter()  # files, by the rank that removes them
        self.counts_beats = False  # in one channel alone: in others their number depends on the time
        self.controls: dict[int, RunControl] = {}
        self.left: dict[int, threading.Event] = {}
        self.threads_of_rank0: set[int] = set()
        self.ended_cpu = 0.0  # CPU seconds of rank 0's watches that have ended
        self.python_threads: set[int] = set(map(int, os.listdir("/proc/self/task")))  # and torch's, before gloo's
        self.replace_transport()
        self.commands = [queue.SimpleQueue() for _ in range(num_ranks)]
        self.answers: queue.SimpleQueue[tuple[int, object]] = queue.SimpleQueue()
        for rank in range(num_ranks):
            threading.Thread(target=self.work, args=(rank,), daemon=True).start()
        self.run(lambda rank: None)

    def replace_transport(self) -> None:
        """Lets threads be ranks: environment, process group, store, the end of a process."""
        os.environ = Environment(os.environ, self.num_ranks)  # noqa: B003
        _install_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        lifeline.SECONDS_TO_CONNECT = SECONDS_TO_CONNECT
        meeting.open_store = lambda *args, **others: self.store
        ending.exit_process, ending.wait_forever = self.leave, lambda: self.left[own_rank()].wait()
        ending.dump_stacks = self.count_stacks
        traceback.print_exc = lambda: None  # of the SystemExit that ends a watch here
        init_group, start, run, send = (
            dist.init_process_group,
            threading.Thread.start,
            threading.Thread.run,
            Connection.send,
        )
        creating = threading.Lock()

        def init_one_group(*args: object, **others: object) -> None:
            with creating:  # one by one, so that rank 0's threads are known
                before = os.listdir("/proc/self/task") if own_rank() == 0 else ()
                init_group(*args, **others)
                if own_rank() == 0:
                    self.threads_of_rank0 |= set(map(int, os.listdir("/proc/self/task"))) - set(map(int, before))

        def start_thread(thread: threading.Thread) -> None:
            thread.rank = own_rank()
            start(thread)

        def run_thread(thread: threading.Thread) -> None:
            if thread.rank is not None:
                self.enter(thread.rank)
            run(thread)

        def send_counted(connection: Connection, line: bytes) -> None:
            if self.counts_beats or b'"beat"' not in line:
                self.num_lines += 1
                self.num_line_bytes += len(line)
            send(connection, line)

        unlink = os.unlink

        def unlink_counted(*args: Any, **others: Any) -> None:
            self.num_removed[own_rank()] += 1
            unlink(*args, **others)

        dist.init_process_group, Connection.send, os.unlink = init_one_group, send_counted, unlink_counted
        threading.Thread.start, threading.Thread.run = start_thread, run_thread

    def enter(self, rank: int) -> None:
        """Makes this thread one of `rank`."""
        here.rank = rank
        self.python_threads.add(threading.get_native_id())
        if rank == 0:
            self.threads_of_rank0.add(threading.get_native_id())

    def count_stacks(self, head: str, path: Path | None) -> None:
        self.num_stacks += 1

    def leave(self, code: int) -> None:
        """Ends a watch's thread instead of its process."""
        if own_rank() == 0 and not self.left[0].is_set():
            self.threads_of_rank0.remove(threading.get_native_id())
            self.ended_cpu += time.thread_time()
        self.close(own_rank())
        raise SystemExit

    def close(self, rank: int) -> None:
        """Closes a rank's sockets, as the end of its process does."""
        if not self.left[rank].is_set():
            control = self.controls[rank]
            control.watch.call(sys.exit)  # before it notices that its connections are closed
            for connection in control.lifeline.connections.values():
                with contextlib.suppress(OSError):  # The other end is closed.
                    connection.transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
            self.left[rank].set()

    def work(self, rank: int) -> None:
        self.enter(rank)
        while True:
            command = self.commands[rank].get()
            try:
                self.answers.put((rank, command(rank)))
            except Exception as error:
                self.answers.put((rank, error))

    def run(self, command: Callable[[int], object]) -> list[object]:
        """Runs `command` on all ranks; returns what each returned, or the error that it raised."""
        for commands in self.commands:
            commands.put(command)
        return [answer for _, answer in sorted((self.answers.get() for _ in self.commands), key=lambda one: one[0])]

    def look(self) -> SimpleNamespace:
        """Counters so far."""
        messages, size, seconds = (
            self.store.num_requests + self.num_lines,
            self.store.num_bytes + self.num_line_bytes,
            self.ended_cpu,
        )
        for name in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):
                if int(name) not in self.python_threads:
                    io = dict(line.split(": ") for line in Path(f"/proc/self/task/{name}/io").read_text().splitlines())
                    messages, size = messages + int(io["syscw"]), size + int(io["wchar"])
                if int(name) in self.threads_of_rank0:
                    seconds += int(Path(f"/proc/self/task/{name}/schedstat").read_text().split()[0]) / 1e9
        return SimpleNamespace(
            messages=messages,
            bytes=size,
            cpu=seconds,
            printed=len(self.stream.texts),
            removed=self.num_removed[0],
            all_removed=self.num_removed.total(),
            time=time.monotonic(),
        )

    def measure(self, what: str, command: Callable[[int], object], *, times: float = 1, note: str = "") -> list[object]:
        """Runs `command` on all ranks, and prints a row of the table: its costs divided by `times`."""
        before = self.look()
        answers = self.run(command)
        seconds, after = time.monotonic() - before.time, self.look()
        row = dict(
            ranks=self.num_ranks,
            channel=what,
            messages=round((after.messages - before.messages) / times),
            bytes=round((after.bytes - before.bytes) / times),
            cpu=(after.cpu - before.cpu) / times,
            seconds=seconds / times,
            removed=after.removed - before.removed,
        )
        texts = self.stream.texts[before.printed :]
        if texts:
            note = f"{note}; " * bool(note) + f"{len(texts)} printed, {len(max(texts, key=len)):,} characters"
        if row["removed"]:
            note = f"rank 0 removes {row['removed']} of {after.all_removed - before.all_removed:,} files"
        print(json.dumps(row | {"note": note}), flush=True)
        return answers


def must_succeed(answers: list[object]) -> list[object]:
    errors = [answer for answer in answers if isinstance(answer, Exception)]
    if errors:
        raise errors[0]
    return answers


class Exchanges:
    """What ranks exchange in a run, in its order."""

    def __init__(self, simulation: Simulation, directory: Path):
        self.simulation, self.directory = simulation, directory
        self.num_ranks = simulation.num_ranks
        self.worlds: list[World] = []

    def start(self) -> None:
        measure = self.simulation.measure
        self.worlds = must_succeed(measure("meeting, process group", lambda rank: init_world()))
        must_succeed(measure("equal options", lambda rank: compare_ranks(self.worlds[rank], lambda: describe(0))))

    def differ(self) -> None:
        for what, value in (("one rank differs", lambda rank: int(rank == 1)), ("all ranks differ", lambda rank: rank)):
            answers = self.simulation.measure(
                what, lambda rank, value=value: compare_ranks(self.worlds[rank], lambda: describe(value(rank)))
            )
            assert all(isinstance(answer, RanksDiffer) for answer in answers) and len(set(map(str, answers))) == 1

    def connect(self, what: str = "", *, hang_timeout: float = LONG) -> None:
        """Connects a lifeline among new watches, which have its address in memory, not by a broadcast."""
        address: Future[Address] = Future()

        def connect(rank: int) -> None:
            control = self.simulation.controls[rank] = RunControl(hang_timeout=hang_timeout, max_seconds=None)
            self.simulation.left[rank] = threading.Event()
            control.files.output_dir = self.directory
            threading.Thread(target=control.watch.run, daemon=True).start()
            if rank == 0:
                address.set_result(control.lifeline.listen())
            control.lifeline.connect(address.result())
            control.start_loop()
            control.step_done(1)

        must_succeed(self.simulation.measure(what, connect) if what else self.simulation.run(connect))

    def beat(self, seconds: float) -> None:
        wait = lambda rank: time.sleep(seconds) if rank == 0 else None  # noqa: E731
        self.simulation.counts_beats = True
        self.simulation.measure("heartbeats, a second", wait, times=seconds)
        self.simulation.counts_beats = False

    def end(self, what: str, command: Callable[[int], object]) -> None:
        """Ends all ranks of a lifeline by `command`; measures until the last one has ended."""

        def end(rank: int) -> None:
            command(rank)
            assert self.simulation.left[rank].wait(120), f"rank {rank} has not ended: {what}"

        self.simulation.num_stacks = 0
        must_succeed(self.simulation.measure(what, end))
        (self.directory / "exit.json").unlink(missing_ok=True)

    def end_in_all_ways(self, hang_timeout: float) -> None:
        controls, last = self.simulation.controls, self.num_ranks - 1
        self.end("the end of a run", lambda rank: controls[rank].finish(ExitCode.DONE, "done"))
        self.connect()
        self.end("a rank dies", lambda rank: self.simulation.close(rank) if rank == last else None)
        self.connect()
        self.end("all ranks raise", lambda rank: controls[rank].fail(RuntimeError("connection closed by peer")))
        if hang_timeout > 0:
            self.connect(hang_timeout=hang_timeout + self.num_ranks * SECONDS_PER_RANK)
            self.end("a hang, after the timeout", lambda rank: None)

    def step(self) -> None:
        sums, gradients = [LossSums(torch.ones(()))], [torch.ones(4)]

        def step(rank: int) -> None:
            world = self.worlds[rank]
            reduce_step(sums, gradients, device=world.device, num_shards=world.num_shards, data_wait_seconds=0.0)

        must_succeed(self.simulation.measure("a step's row of results", step))

    def save_and_load(self) -> None:
        states = [make_state(world) for world in self.worlds]
        savers = must_succeed(self.simulation.run(lambda rank: Checkpointer(
            self.directory / "checkpoints", world=self.worlds[rank], num_kept=1, is_async=False
        )))  # fmt: skip
        for step, what in ((1, "a checkpoint"), (2, "a checkpoint, and the older one's removal")):
            position = dict(step=step, num_samples=0, num_tokens=0, num_in_step=0)
            content = {"position": position, "identity": {}}
            save = lambda rank, step=step, content=content: savers[rank].save(states[rank], step=step, state=content)  # noqa: E731
            must_succeed(self.simulation.measure(what, save))
        found = must_succeed(
            self.simulation.measure("a checkpoint's verification", lambda rank: savers[rank].choose("auto"))
        )
        load = lambda rank: savers[rank].load(found[rank], states[rank])  # noqa: E731
        must_succeed(self.simulation.measure("loading", load, note=f"{len(os.listdir(found[0].path)):,} files"))

    def divide(self) -> None:
        """Process groups of hybrid sharding over nodes."""
        num_shards = min(RANKS_PER_NODE, self.num_ranks // 2)
        make = lambda rank: make_mesh("cpu", self.num_ranks, num_shards)  # noqa: E731
        must_succeed(self.simulation.measure("groups of hybrid sharding", make))


def describe(value: int) -> dict[str, dict[str, str]]:
    """Stand-ins for the options that train.py compares, of the same number."""
    return {
        "options": {f"--option-{i}": "value" for i in range(200)} | {"--seed": str(value)},
        "code": {"program": "x"},
    }


def make_state(world: World) -> TrainState:
    """A model of one parameter, with a row on each rank, and its optimizer."""
    local = torch.ones(1, 4)
    model = torch.nn.Module()
    weight = DTensor.from_local(
        local, world.mesh, [Shard(0)], run_check=False, shape=torch.Size((world.world_size, 4)), stride=(4, 1)
    )
    model.register_parameter("weight", torch.nn.Parameter(weight))
    return TrainState(model, Full(), torch.optim.SGD(model.parameters(), lr=0.1), world)


def simulate(num_ranks: int, *, heartbeats: float, hang_timeout: float) -> None:
    """Prints a JSON line per channel."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    threading.stack_size(STACK_BYTES)
    with tempfile.TemporaryDirectory() as directory:
        exchanges = Exchanges(Simulation(num_ranks), Path(directory))
        exchanges.connect("the lifeline's connections")
        exchanges.beat(heartbeats)
        exchanges.end_in_all_ways(hang_timeout)
        exchanges.start()  # last: gloo has a thread a rank that wakes a hundred times a second
        exchanges.save_and_load()
        exchanges.differ()
        exchanges.divide()
        if num_ranks <= MOST_RANKS_IN_RING:
            exchanges.step()
    os._exit(0)  # with all threads as they are


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints a line per channel, whose cells have a number for each number of ranks."""
    channels: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        channels.setdefault(row["channel"], []).append(row)
    print("| channel | messages | bytes | rank 0's CPU seconds | seconds | |\n| --- | --- | --- | --- | --- | --- |")
    for channel, found in channels.items():
        counts = [" / ".join(f"{row[key]:,}" for row in found) for key in ("messages", "bytes")]
        seconds = [
            " / ".join(f"{row[key]:.{digits}f}" for row in found) for key, digits in (("cpu", 3), ("seconds", 1))
        ]
        print(f"| {' | '.join((channel, *counts, *seconds, found[-1]['note']))} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 128, 1024])
    parser.add_argument("--heartbeats", type=float, default=10.0, help="seconds to count heartbeats")
    parser.add_argument("--hang-timeout", type=float, default=10.0, help="seconds before a hang; 0 leaves it out")
    parser.add_argument("--json", action="store_true", help="print lines of JSON, for one number of ranks")
    args = parser.parse_args()
    if args.json:
        simulate(args.ranks[0], heartbeats=args.heartbeats, hang_timeout=args.hang_timeout)
    rows = []
    for num_ranks in args.ranks:
        words = ("--heartbeats", args.heartbeats, "--hang-timeout", args.hang_timeout)
        command = [sys.executable, __file__, "--json", "--ranks", str(num_ranks), *map(str, words)]
        lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        rows += map(json.loads, lines)
    print_table(rows)


if __name__ == "__main__":
    main()
