"""Ranks meet, hear whole messages in order, and notice that another one is gone; strangers change nothing."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from processes import wait_until

from mini_trainer.distributed.lifeline import Address, Lifeline


class Ears:
    """A rank's lifeline, whose loop runs in a thread, and what it has reported so far."""

    def __init__(self, rank: int, world_size: int):
        self.met, self.messages, self.lost = [], [], []
        self.loop = asyncio.new_event_loop()
        heard = dict(on_met=lambda *who: self.met.append(who), on_lost=self.lost.append)
        heard |= dict(on_message=lambda rank, message: self.messages.append((rank, message)))
        self.lifeline = Lifeline(rank, world_size, self.loop, **heard)
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def call(self, function: Callable, *args: object) -> object:
        """Calls a method of the loop's thread; its result."""

        async def call() -> object:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(10)

    def close(self) -> None:
        self.call(lambda: [one.transport.abort() for one in self.lifeline.connections.values()])
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


@pytest.fixture(params=[2, 1], ids=["one_node", "two_nodes"])
def address_and_ranks(request, monkeypatch) -> Iterator[tuple[Address, list[Ears]]]:
    """Two ranks in this process that have met, by the environment's word on one node or on two."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(request.param))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    ranks = [Ears(rank, 2) for rank in range(2)]
    address = ranks[0].lifeline.listen()
    for rank in reversed(ranks):
        rank.lifeline.connect(address)
    yield address, ranks
    for rank in ranks:
        rank.close()


@pytest.fixture
def ranks(address_and_ranks) -> list[Ears]:
    return address_and_ranks[1]


wait = partial(wait_until, seconds=10)


def test_ranks_meet_talk_and_notice_an_end(ranks):
    zero, one = ranks
    here = (socket.gethostname(), os.getpid())
    assert zero.met == [(1, *here)]
    assert one.met == [(0, *here)]
    for number in range(3):
        one.call(one.lifeline.send, 0, {"kind": "count", "number": number})
    zero.call(zero.lifeline.send_to_all, {"kind": "answer"})
    wait(lambda: len(zero.messages) == 3 and len(one.messages) == 1)
    assert zero.messages == [(1, {"kind": "count", "number": number}) for number in range(3)]
    assert one.messages == [(0, {"kind": "answer"})]
    assert asyncio.run_coroutine_threadsafe(zero.lifeline.wait_for_ends(0), zero.loop).result(1) == [1]
    one.lifeline.connections[0].transport.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    wait(lambda: zero.lost == [1] and one.lost == [0])
    zero.call(zero.lifeline.send, 1, {"kind": "too late"})  # It raises nothing.
    asyncio.run_coroutine_threadsafe(zero.lifeline.wait_for_ends(10), zero.loop).result(1)


def test_beats_do_not_pile_up_for_a_rank_that_does_not_read(ranks):
    zero, one = ranks
    beat = {"kind": "beat", "where": "x" * 100_000}
    unsent = zero.lifeline.connections[1].transport.get_write_buffer_size
    reading = one.lifeline.connections[0].transport
    one.call(reading.pause_reading)
    for _ in range(200):
        zero.call(partial(zero.lifeline.send_to_all, is_beat=True), beat)
    assert 0 < unsent() < 100_100  # one beat at most
    one.call(reading.resume_reading)
    wait(lambda: unsent() == 0)
    zero.call(zero.lifeline.send, 1, {"kind": "last"})
    wait(lambda: one.messages[-1:] == [(0, {"kind": "last"})])
    assert len(one.messages) > 1 and all(told == (0, beat) for told in one.messages[:-1])


def test_a_stranger_who_says_nothing_or_has_no_token_is_a_rank(address_and_ranks, monkeypatch):
    monkeypatch.setattr("mini_trainer.distributed.lifeline.SECONDS_TO_SAY_HELLO", 0.1)
    address, (zero, _) = address_and_ranks
    zero.lifeline.world_size = 3  # one is missing
    for said in (b"", b'{"token": "0", "rank": 2, "host": "h", "pid": 1}\n'):
        with socket.create_connection(("127.0.0.1", address.port), timeout=10) as stranger:
            stranger.sendall(said)
            assert stranger.recv(1) == b""
    assert len(zero.met) == 1 and zero.lost == []


def test_messages_arrive_whole_and_in_order(ranks):
    zero, one = ranks
    connected = one.lifeline.connections[0]
    for line in (b'{"kind": "a"}\n{"kind"', b': "b", "text": "two\\nlines"}\n'):
        one.call(connected.send, line)
        wait(lambda: zero.messages)
    wait(lambda: len(zero.messages) == 2)
    assert zero.messages == [(1, {"kind": "a"}), (1, {"kind": "b", "text": "two\nlines"})]


@pytest.mark.parametrize("text", [b"no json\n", b"[]\n", b"[" * 150_000 + b"\n", b"x" * 300_000])
def test_a_rank_that_sends_no_messages_is_lost(text, ranks):
    zero, one = ranks
    zero.lifeline.on_message = lambda rank, message: message["kind"]
    one.call(one.lifeline.connections[0].send, text)
    wait(lambda: zero.lost == [1] and one.lost == [0])
