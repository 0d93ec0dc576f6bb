"""The lifeline: a TCP connection from every other rank to rank 0, carrying JSON lines in both directions.

All knowledge of the other ranks' processes comes from here: which are connected, what they report, and which are gone.
A connection that closes before the run ends means that its process has exited: this is certain and immediate, on any
number of nodes, while a collective with a dead rank can block until its timeout. distributed/watch.py decides what
follows.

A rank introduces itself with a token that only the run's own processes know; later messages are passed on unchanged.
"""

import asyncio
import hmac
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mini_trainer.distributed.ending import ExitCode, RunError
from mini_trainer.distributed.messages import describe_ranks

SECONDS_TO_CONNECT = 60.0
SECONDS_TO_SAY_HELLO = 10.0
LARGEST_MESSAGE = 200_000  # bytes of one JSON line

Notice = dict[str, Any]  # one JSON line; its "kind" determines the other keys


@dataclass(frozen=True)
class Address:
    """Rank 0's address and identity."""

    port: int
    token: str  # the other ranks must send it
    host: str
    pid: int


class Connection(asyncio.Protocol):
    """A socket that carries one JSON object per line."""

    transport: asyncio.Transport

    def __init__(self, lifeline: "Lifeline", *, rank: int | None = None):
        self.lifeline = lifeline
        self.rank = rank  # None for a stranger, which has not shown the token
        self.received = b""  # an incomplete line

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.lifeline.loop.call_later(SECONDS_TO_SAY_HELLO, self._drop_stranger)

    def data_received(self, data: bytes) -> None:
        *lines, self.received = (self.received + data).split(b"\n")
        try:
            if len(self.received) > LARGEST_MESSAGE:
                raise ValueError("a line without end")
            for line in lines:
                self.lifeline.receive(self, json.loads(line))
        except (ValueError, KeyError, TypeError, RecursionError):
            self.transport.abort()  # It is not a message that our ranks send.

    def eof_received(self) -> None:
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        if self.rank is not None:
            self.lifeline.on_lost(self.rank)

    def send(self, line: bytes) -> None:
        """Sends an encoded message. Never blocks; nothing is sent to a process that is gone."""
        if not self.transport.is_closing():
            self.transport.write(line)

    def _drop_stranger(self) -> None:
        if self.rank is None:
            self.transport.abort()


def encode(message: Notice) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Lifeline:
    """This rank's end of the lifeline: rank 0 has a connection to every other rank, the others have one to rank 0.

    One thread runs `loop`, and calls all methods except `listen` and `connect`, which another thread calls once each.

    The loop reports three events through callbacks, which may send:
    - `on_met(rank, host, pid)`: a rank is connected;
    - `on_message(rank, message)`: if it raises ValueError, KeyError or TypeError, the message is not one of ours, and
      the connection is closed;
    - `on_lost(rank)`: the connection has closed, so that rank's process has exited.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        loop: asyncio.AbstractEventLoop,
        *,
        on_met: Callable[[int, str, int], None],
        on_message: Callable[[int, Notice], None],
        on_lost: Callable[[int], None],
    ):
        self.rank, self.world_size, self.loop = rank, world_size, loop
        self.on_met, self.on_message, self.on_lost = on_met, on_message, on_lost
        self.token = ""
        self.connections: dict[int, Connection] = {}  # by rank; closed ones too, since no rank may connect twice
        self.has_met_all = threading.Event()

    # Methods for another thread.

    def listen(self) -> Address:
        """Rank 0: opens a port for the other ranks; returns what they need to connect."""
        self.token = secrets.token_hex(16)
        everywhere = ("::", socket.AF_INET6) if socket.has_dualstack_ipv6() else ("", socket.AF_INET)
        address, family = ("127.0.0.1", socket.AF_INET) if is_one_node() else everywhere
        listener = socket.create_server((address, 0), family=family, dualstack_ipv6=family == socket.AF_INET6)
        serving = self.loop.create_server(lambda: Connection(self), sock=listener, backlog=self.world_size)
        asyncio.run_coroutine_threadsafe(serving, self.loop).result()
        return Address(listener.getsockname()[1], self.token, socket.gethostname(), os.getpid())

    def connect(self, address: Address) -> None:
        """Connects this rank to rank 0; on rank 0, waits for all others. RunError on failure."""
        if self.rank == 0:
            if not self.has_met_all.wait(SECONDS_TO_CONNECT):
                missing = [rank for rank in range(1, self.world_size) if rank not in self.connections]
                reason = f"{describe_ranks(missing)} did not connect to rank 0 on {address.host}, port {address.port}"
                raise RunError(ExitCode.IO, reason)
            return
        host = "127.0.0.1" if is_one_node() else os.environ["MASTER_ADDR"]
        try:
            connected = socket.create_connection((host, address.port), SECONDS_TO_CONNECT)
        except OSError as error:
            reason = f"cannot reach rank 0 at {host}, port {address.port} (any free port): {error}"
            raise RunError(ExitCode.IO, reason) from None
        asyncio.run_coroutine_threadsafe(self._introduce(connected, address), self.loop).result()

    # Methods for the loop's thread.

    async def _introduce(self, connected: socket.socket, address: Address) -> None:
        """Takes over a connection to rank 0, which sends nothing before the hello."""
        _, connection = await self.loop.create_connection(lambda: Connection(self, rank=0), sock=connected)
        hello = {"kind": "hello", "token": address.token, "rank": self.rank, "host": socket.gethostname()}
        connection.send(encode(hello | {"pid": os.getpid()}))
        self._meet(0, connection, address.host, address.pid)

    def receive(self, connection: Connection, message: Notice) -> None:
        """Passes a rank's message on. A stranger's turns it into a rank, or is a ValueError, KeyError or TypeError."""
        if connection.rank is not None:
            self.on_message(connection.rank, message)
            return
        rank = message["rank"]
        if not hmac.compare_digest(message["token"], self.token):
            raise ValueError("a stranger")
        if rank not in range(1, self.world_size) or rank in self.connections:
            raise ValueError("a rank that does not exist or is connected already")
        self._meet(rank, connection, message["host"], message["pid"])

    def _meet(self, rank: int, connection: Connection, host: str, pid: int) -> None:
        self.on_met(rank, host, pid)
        connection.rank, self.connections[rank] = rank, connection
        if len(self.connections) == self.world_size - 1:
            self.has_met_all.set()

    def send(self, rank: int, message: Notice) -> None:
        """Sends to a rank that has been met."""
        self.connections[rank].send(encode(message))

    def send_to_all(self, message: Notice, *, is_beat: bool = False) -> None:
        """Sends to every rank met so far; a heartbeat only to those without unsent messages, where it would pile up."""
        line = encode(message)
        for connection in self.connections.values():
            if not is_beat or connection.transport.get_write_buffer_size() == 0:
                connection.send(line)

    async def wait_for_ends(self, seconds: float) -> list[int]:
        """Waits at most this long for the other ranks to close their connections; returns those that have not.

        A process that exits with unread data resets its connections, and its peers would miss its last message.
        """
        deadline = self.loop.time() + seconds
        while True:
            left = [rank for rank, one in self.connections.items() if not one.transport.is_closing()]
            if not left or self.loop.time() >= deadline:
                return left
            await asyncio.sleep(0.01)


def is_one_node() -> bool:
    """Whether all ranks are on this machine, according to torchrun's environment."""
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
