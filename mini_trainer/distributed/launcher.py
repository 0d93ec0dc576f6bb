"""torchrun, as `mini-trainer` starts it: it says what it waits for, and what it raises is one line."""

import logging
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from mini_trainer.distributed.ending import ExitCode
from mini_trainer.distributed.messages import say_note
from mini_trainer.distributed.process import NO_AGENT_STORE, SECONDS_PER_NOTICE, SECONDS_UNTIL_TOLD, list_children

SECONDS_PER_LOOK, SECONDS_TO_LEAVE = 1.0, 10.0
CPP_LEVEL = "TORCH_CPP_LOG_LEVEL"  # read when torch is imported
# torchrun's reports of signals, of ranks that have failed, and of other machines that have ended, below what the ranks
# print; the imports set these loggers' levels.
LOGGERS = ("agent.server.api", "multiprocessing.api", "rendezvous.dynamic_rendezvous")


def launch(
    given: Mapping[str, str], words: Sequence[str], *, find_end: Callable[[], object] = lambda: None
) -> tuple[int, str]:
    """Runs the words in several processes, with torchrun's options by name; returns an exit code, the first failed
    rank's if there is one, and a message, empty if the ranks have said everything. `find_end`: what they
    have written about the end, on any machine, or None: those that are still here a while after it are killed."""
    meeting, options = Meeting(given), dict(given)
    is_elastic = ":" in read_option(given, "nnodes", "")
    if read_option(given, "max-restarts", "0") == "0" and not is_elastic:  # else the next ranks would be killed
        threading.Thread(target=end_ranks, args=(find_end,), name="end", daemon=True).start()
    import_quiet_torch()
    if meeting.num_machines == 1:
        options.setdefault("local-addr", "127.0.0.1")  # the machine's own name need not resolve
    else:
        threading.Thread(target=meeting.tell, name="meeting", daemon=True).start()
    if is_elastic:
        os.environ[NO_AGENT_STORE] = "1"  # with it a machine could not join later
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import main as torchrun

    for name in LOGGERS:
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    try:
        torchrun([*(f"--{name}={value}" for name, value in options.items()), "--no-python", *words])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode > 0:
            return failure.exitcode, ""
        return 128 - failure.exitcode, f"rank {rank} was ended by {failure.signal_name()}"
    except SignalException as error:
        return 128 + int(error.sigval), ""
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED, ""
    except (RendezvousError, DistError) as error:
        return ExitCode.PEER_DIED, meeting.describe_failure(error)
    except (ValueError, AssertionError) as error:  # of an option's value
        return ExitCode.BAD_INPUT, f"torchrun: {error}"
    except OSError as error:
        return ExitCode.IO, f"torchrun: {error}"
    except Exception as error:
        traceback.print_exc()
        return ExitCode.FAILED, f"torchrun: {type(error).__name__}: {error}"
    return ExitCode.DONE, ""


def count_machines(options: Mapping[str, str]) -> int:
    """The most machines of --nnodes, by option or environment; 1 for a value that torchrun refuses."""
    numbers = read_option(options, "nnodes", "1").split(":")
    return max(map(int, numbers)) if all(number.isdecimal() for number in numbers) else 1


def read_option(options: Mapping[str, str], name: str, default: str) -> str:
    """The value of an option of torchrun, which also reads the environment."""
    return options.get(name) or os.environ.get(f"PET_{name.upper().replace('-', '_')}") or default


class Meeting:
    """The rendezvous of the torchruns of several machines, before there are ranks."""

    def __init__(self, options: Mapping[str, str]):
        self.num_machines, self.started = count_machines(options), time.monotonic()
        self.is_reached, self.machines = False, list[str]()
        self.store: Any = None  # torch's, at the rendezvous
        is_static = read_option(options, "rdzv-backend", "static") == "static"  # which asks for no name
        self.has_address = is_static or bool(read_option(options, "local-addr", ""))
        main = [read_option(options, f"master-{part}", default) for part, default in
                (("addr", "127.0.0.1"), ("port", "29500"))]  # fmt: skip
        host, _, port = read_option(options, "rdzv-endpoint", ":".join(main)).rpartition(":")
        host = host.strip("[]")  # of an IPv6 address
        self.host, self.port = (host, int(port)) if host and port.isdecimal() else (host or port, 29400)
        self.key = f"mini_trainer machines of {read_option(options, 'rdzv-id', 'none')}"

    @property
    def place(self) -> str:
        return f"the rendezvous at {self.host}, port {self.port}"

    def tell(self) -> None:
        """Says that the rendezvous does not answer, or which machines it waits for, until the ranks start: torch's own
        warnings of these come with stacks, and are hidden."""
        own = socket.getfqdn()
        if not self.has_address and (problem := describe_problem(lambda: socket.getaddrinfo(own, None))):
            say_note(f"this machine's own name, {own}, leads nowhere ({problem}): pass --local-addr")
        due = self.started + SECONDS_UNTIL_TOLD
        while not list_children():
            if problem := "" if self.is_reached else self.find_problem():
                pass
            elif not self.is_reached:
                self.is_reached, due = True, self.started + SECONDS_PER_NOTICE
            else:
                self.machines = self.list_machines() or self.machines
            if time.monotonic() >= due:
                say_note(f"waiting for {self.place}: {problem or self.describe_machines()}")
                due = time.monotonic() + SECONDS_PER_NOTICE
            time.sleep(SECONDS_PER_LOOK)

    def find_problem(self) -> str:
        """Why nothing can be reached there; empty if something can."""
        return describe_problem(lambda: socket.create_connection((self.host, self.port), SECONDS_UNTIL_TOLD).close())

    def describe_machines(self) -> str:
        """The machines that have come; those where torchrun itself was started are not known."""
        came = f"{len(self.machines) or 'not all'} of {self.num_machines} machines came"
        return f"{came} ({', '.join(self.machines)})" if self.machines else came

    def list_machines(self) -> list[str]:
        """Adds this machine to those that `mini-trainer` has started on, and lists them."""
        from torch.distributed import DistError, TCPStore

        with suppress(DistError):  # what answers is no store, or is gone
            if self.store is None:
                limit = timedelta(seconds=SECONDS_UNTIL_TOLD)
                self.store = TCPStore(self.host, self.port, is_master=False, timeout=limit, wait_for_workers=False)
                self.store.append(self.key, f"{socket.gethostname()}\n")
            return sorted(self.store.get(self.key).decode().splitlines())
        return []

    def describe_failure(self, error: BaseException) -> str:
        """The message for what torch raises."""
        root = error.__cause__ or error
        reason = (str(root).strip().splitlines() or [""])[0]
        what = f": {self.describe_machines()}"
        if not self.is_reached and (problem := self.find_problem()):
            what = f" cannot be reached: {problem}"
        seconds = time.monotonic() - self.started
        return f"{self.place}{what}, in {seconds:.0f} s{f' ({reason})' if reason else ''}"


def describe_problem(connect: Callable[[], object]) -> str:
    """What the call raises for an address, in short; empty if nothing."""
    try:
        connect()
    except (OSError, ValueError, OverflowError) as error:  # names and ports that there cannot be
        return getattr(error, "strerror", None) or str(error)
    return ""


def end_ranks(find_end: Callable[[], object]) -> None:
    """Kills the ranks of this machine that are left when the run is over: they are stopped, or stuck."""
    while (found := find_end()) is None:
        time.sleep(SECONDS_PER_LOOK)
    time.sleep(SECONDS_TO_LEAVE)
    if find_end() != found:
        return  # of an earlier start
    for pid in list_children():
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def import_quiet_torch() -> None:
    """Imports torch without this process's warnings of connections: at the end of a run they would come, with stacks,
    below what the ranks have said. The ranks keep theirs."""
    if CPP_LEVEL in os.environ:
        return
    os.environ[CPP_LEVEL] = "FATAL"
    import torch  # noqa: F401

    del os.environ[CPP_LEVEL]
