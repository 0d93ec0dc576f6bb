"""The lifeline: a TCP connection from every other rank to rank 0, carrying JSON lines in both directions.

All knowledge of the other ranks' processes comes from here: which are connected, what they report, and which are gone.
A connection that closes before the run ends means that its process has exited: this is certain and immediate, on any
number of nodes, while a collective with a dead rank can block until its timeout. distributed/monitor.py decides what
follows.

A rank introduces itself with a token that only the run's own processes know, and rank 0 introduces itself in reply;
all later messages are passed to the monitor unchanged.
"""

import contextlib
import hmac
import json
import os
import queue
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mini_trainer.distributed.ending import ExitCode, RunError
from mini_trainer.distributed.messages import describe_ranks

SECONDS_TO_CONNECT = 60.0
SECONDS_TO_SAY_HELLO = 10.0
LARGEST_MESSAGE = 200_000  # bytes of one JSON line

Message = dict[str, Any]  # one JSON line; its "kind" determines the other keys


@dataclass(eq=False)
class Connection:
    """A socket that carries one JSON object per line."""

    socket: socket.socket
    opened: float  # by `Lifeline.clock`
    rank: int | None = None  # None for a stranger, which has not shown the token
    received: bytes = b""  # an incomplete line
    unsent: bytes = b""
    open: bool = True

    def send(self, line: bytes) -> None:
        """Sends an encoded message. Never blocks: unsent bytes are kept for the next `flush`."""
        self.unsent += line
        self.flush()

    def flush(self) -> None:
        # The send buffer may be full, or the connection gone, which `receive` will notice.
        with contextlib.suppress(OSError):
            self.unsent = self.unsent[self.socket.send(self.unsent) :]

    def receive(self) -> list[Message]:
        """Returns the complete messages received; sets `open` to False at end of file. ValueError for invalid data."""
        try:
            data = self.socket.recv(65536)
            self.open = bool(data)
        except BlockingIOError:
            return []
        except OSError:
            data, self.open = b"", False
        *lines, self.received = (self.received + data).split(b"\n")
        if len(self.received) > LARGEST_MESSAGE:
            raise ValueError("a line without end")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) and isinstance(message.get("kind"), str) for message in messages):
            raise ValueError("not an object with a kind")
        return messages


def encode(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Lifeline:
    """This rank's end of the lifeline: rank 0 has a connection to every other rank, the others have one to rank 0.

    One thread calls `poll` in a loop. Other threads may call `listen` and `connect`, once each, and `call`; all other
    methods belong to the polling thread.

    `poll` reports three events through callbacks, which may send:
    - `on_met(rank, host, pid)`: a rank is connected. Rank 0 gets this with each rank's introduction; another rank gets
      it twice for rank 0, first with its address and process id 0, then with its introduction;
    - `on_message(rank, message)`: if it raises ValueError, KeyError or TypeError, the message is not one of ours, and
      the connection is closed;
    - `on_lost(rank)`: the connection has closed, so that rank's process has exited.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        on_met: Callable[[int, str, int], None],
        on_message: Callable[[int, Message], None],
        on_lost: Callable[[int], None],
    ):
        self.rank, self.world_size, self.host = rank, world_size, socket.gethostname()
        self.on_met, self.on_message, self.on_lost = on_met, on_message, on_lost
        self.clock = 0.0  # seconds during which this process was listening
        self.last_poll = time.monotonic()
        self.token = ""
        self.connections: dict[int, Connection] = {}  # by rank; closed ones too, since no rank may connect twice
        self.strangers: dict[Connection, None] = {}  # in the order in which they came
        self.calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.selector = selectors.DefaultSelector()
        self.woken, self.waker = make_socket_pair()
        self.watch(self.woken, self._make_calls)

    # Methods for any thread.

    def listen(self) -> tuple[int, str]:
        """Rank 0: opens a port for the other ranks; returns it with the token that they must send."""
        self.token = secrets.token_hex(16)
        everywhere = ("::", socket.AF_INET6) if socket.has_dualstack_ipv6() else ("", socket.AF_INET)
        address, family = ("127.0.0.1", socket.AF_INET) if is_one_node() else everywhere
        listener = socket.create_server(
            (address, 0), family=family, backlog=self.world_size, dualstack_ipv6=family == socket.AF_INET6
        )
        listener.setblocking(False)
        self.call(lambda: self.watch(listener, lambda: self._accept(listener)))
        return listener.getsockname()[1], self.token

    def connect(self, port: int, token: str) -> None:
        """Connects this rank to rank 0; on rank 0, waits for all others. RunError on failure."""
        if self.rank == 0:
            self._wait_for_all(port)
            return
        host = "127.0.0.1" if is_one_node() else os.environ["MASTER_ADDR"]
        try:
            connection = Connection(socket.create_connection((host, port), SECONDS_TO_CONNECT), self.clock)
        except OSError as error:
            reason = f"cannot reach rank 0 at {host}, port {port} (any free port): {error}"
            raise RunError(ExitCode.IO, reason) from None
        hello = {"kind": "hello", "token": token, "rank": self.rank, "host": self.host, "pid": os.getpid()}
        connection.send(encode(hello))
        connection.socket.setblocking(False)
        self.call(lambda: self._add_rank0(connection, host))

    def call(self, function: Callable[[], None]) -> None:
        """Runs `function` in the polling thread, so that only one thread touches its state."""
        self.calls.put(function)
        # If the socket is already full of wake-up bytes, another one is not needed.
        with contextlib.suppress(BlockingIOError):
            self.waker.send(b"\0")

    # Methods for the polling thread.

    def poll(self, seconds: float) -> None:
        """Waits at most this long for data, then dispatches what has arrived."""
        for key, _ in self.selector.select(seconds):
            key.data()
        now = time.monotonic()
        # If more time has passed, this process was suspended, perhaps with the whole job: no peer counts as silent.
        self.clock += min(now - self.last_poll, 4 * seconds)
        self.last_poll = now
        self._drop_silent_strangers()

    def watch(self, source: socket.socket, on_readable: Callable[[], None]) -> None:
        """Adds `source` to those that `poll` waits for; calls `on_readable` when it has data."""
        self.selector.register(source, selectors.EVENT_READ, on_readable)

    def send(self, rank: int, message: Message) -> None:
        """Sends to a rank that has been met. Never blocks; nothing is sent to a rank that is gone."""
        self.connections[rank].send(encode(message))

    def send_to_all(self, message: Message) -> None:
        """Sends to every rank met so far."""
        line = encode(message)
        for connection in self.connections.values():
            connection.send(line)

    def send_beat(self, message: Message) -> None:
        """Sends to every rank without unsent messages; for the others, heartbeats would only pile up."""
        line = encode(message)
        for connection in self.connections.values():
            if connection.unsent:
                connection.flush()
            else:
                connection.send(line)

    def wait_for_ends(self, seconds: float) -> None:
        """Waits at most this long for the other ranks to close their connections.

        A process that exits with unread data resets its connections, and its peers would miss its last message.
        """
        deadline = time.monotonic() + seconds
        connections = self.connections.values()
        while any(connection.open for connection in connections) and time.monotonic() < deadline:
            for connection in connections:
                connection.flush()
                with contextlib.suppress(ValueError):
                    connection.receive()
            time.sleep(0.01)

    # Connections.

    def _wait_for_all(self, port: int) -> None:
        deadline = time.monotonic() + SECONDS_TO_CONNECT
        while len(self.connections) < self.world_size - 1:
            if time.monotonic() > deadline:
                missing = [rank for rank in range(1, self.world_size) if rank not in self.connections]
                reason = f"{describe_ranks(missing)} did not connect to rank 0 on {self.host}, port {port}"
                raise RunError(ExitCode.IO, reason)
            time.sleep(0.01)

    def _add_rank0(self, connection: Connection, host: str) -> None:
        connection.rank = 0
        self.on_met(0, host, 0)
        self.connections[0] = connection
        self._watch_connection(connection)

    def _accept(self, listener: socket.socket) -> None:
        """Accepts all connections that wait: from strangers, which may turn out to be ranks."""
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = listener.accept()
                accepted.setblocking(False)
                connection = Connection(accepted, self.clock)
                self.strangers[connection] = None
                self._watch_connection(connection)

    def _welcome(self, connection: Connection, hello: Message) -> None:
        """Turns a stranger into a rank by its first message; ValueError if it is not one."""
        rank = int(hello["rank"])
        if (
            not hmac.compare_digest(str(hello["token"]), self.token)
            or not 0 < rank < self.world_size
            or rank in self.connections
        ):
            raise ValueError("a stranger")
        host, pid = str(hello["host"]), int(hello["pid"])
        connection.rank = rank
        del self.strangers[connection]
        self.on_met(rank, host, pid)
        self.connections[rank] = connection
        connection.send(encode({"kind": "welcome", "host": self.host, "pid": os.getpid()}))

    def _drop_silent_strangers(self) -> None:
        while self.strangers:
            oldest = next(iter(self.strangers))
            if self.clock - oldest.opened <= SECONDS_TO_SAY_HELLO:
                break
            self._drop(oldest)

    def _drop(self, connection: Connection) -> None:
        self.selector.unregister(connection.socket)
        connection.socket.close()
        connection.open = False
        self.strangers.pop(connection, None)

    # Incoming data.

    def _watch_connection(self, connection: Connection) -> None:
        self.watch(connection.socket, lambda: self._on_readable(connection))

    def _on_readable(self, connection: Connection) -> None:
        try:
            for message in connection.receive():
                self._hand_on(connection, message)
        except (ValueError, KeyError, TypeError):
            # Not a message that our ranks send.
            connection.open = False
        if not connection.open:
            self._drop(connection)
            if connection.rank is not None:
                self.on_lost(connection.rank)

    def _hand_on(self, connection: Connection, message: Message) -> None:
        if connection.rank is None:
            self._welcome(connection, message)
        elif message["kind"] == "welcome":
            self.on_met(connection.rank, message["host"], message["pid"])
        else:
            self.on_message(connection.rank, message)

    def _make_calls(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.woken.recv(4096)
        with contextlib.suppress(queue.Empty):
            while True:
                self.calls.get_nowait()()


def is_one_node() -> bool:
    """Whether all ranks are on this machine, according to torchrun's environment."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def make_socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected non-blocking sockets: a write to the second wakes a `poll` that watches the first."""
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return ends
