"""Ranks meet, hear whole messages in order, and notice that another one is gone; strangers change nothing."""

import os
import socket
import time
from collections.abc import Callable

import pytest

from mini_trainer.distributed.lifeline import Connection, Lifeline


class Ears:
    """A rank's lifeline, and what it has reported so far."""

    def __init__(self, rank: int, world_size: int):
        self.met, self.messages, self.lost = [], [], []
        self.lifeline = Lifeline(
            rank,
            world_size,
            on_met=lambda *who: self.met.append(who),
            on_message=lambda rank, message: self.messages.append((rank, message)),
            on_lost=self.lost.append,
        )


@pytest.fixture(params=[2, 1], ids=["one_node", "two_nodes"])
def ranks(request, monkeypatch) -> list[Ears]:
    """Two ranks in this process that have met, by the environment's word on one node or on two."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(request.param))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    ranks = [Ears(rank, 2) for rank in range(2)]
    port, token = ranks[0].lifeline.listen()
    ranks[1].lifeline.connect(port, token)
    poll_until(ranks, lambda: len(ranks[0].met) == 1 and len(ranks[1].met) == 2)
    ranks[0].lifeline.connect(port, token)  # It returns, since nobody is missing.
    return ranks


def poll_until(ranks: list[Ears], is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not is_so():
        assert time.monotonic() < deadline
        for rank in ranks:
            rank.lifeline.poll(0.01)


def test_ranks_meet_talk_and_notice_an_end(ranks):
    zero, one = ranks
    here = (socket.gethostname(), os.getpid())
    assert zero.met == [(1, *here)]
    assert one.met == [(0, "127.0.0.1", 0), (0, *here)]
    for number in range(3):
        one.lifeline.send(0, {"kind": "count", "number": number})
    zero.lifeline.send_to_all({"kind": "answer"})
    poll_until(ranks, lambda: len(zero.messages) == 3 and len(one.messages) == 1)
    assert zero.messages == [(1, {"kind": "count", "number": number}) for number in range(3)]
    assert one.messages == [(0, {"kind": "answer"})]
    one.lifeline.connections[0].socket.shutdown(socket.SHUT_RDWR)
    poll_until(ranks, lambda: zero.lost == [1] and one.lost == [0])
    zero.lifeline.send(1, {"kind": "too late"})  # It raises nothing.
    zero.lifeline.wait_for_ends(10)


def test_beats_do_not_pile_up_for_a_rank_that_does_not_read(ranks):
    zero, one = ranks
    beat = {"kind": "beat", "where": "x" * 100_000}
    connection = zero.lifeline.connections[1]
    for _ in range(200):
        zero.lifeline.send_beat(beat)
    assert 0 < len(connection.unsent) < 100_100  # one beat at most
    poll_until([one], lambda: len(one.messages) > 0)
    while connection.unsent:
        zero.lifeline.send_beat(beat)
        one.lifeline.poll(0.01)
    poll_until([one], lambda: not one.lifeline.connections[0].received)
    assert all(told == (0, beat) for told in one.messages)


def test_a_stranger_who_says_nothing_is_shown_out(ranks, monkeypatch):
    monkeypatch.setattr("mini_trainer.distributed.lifeline.SECONDS_TO_SAY_HELLO", 0.1)
    zero = ranks[0]
    port, _ = zero.lifeline.listen()
    with socket.create_connection(("127.0.0.1", port)):
        poll_until([zero], lambda: len(zero.lifeline.strangers) == 1)
        poll_until([zero], lambda: len(zero.lifeline.strangers) == 0)
    assert len(zero.met) == 1 and zero.lost == []


def test_calls_of_other_threads_are_made_in_their_order_where_it_polls(ranks):
    called = []
    for number in range(3):
        ranks[1].lifeline.call(lambda number=number: called.append(number))
    assert called == []
    poll_until(ranks, lambda: len(called) == 3)
    assert called == [0, 1, 2]


def test_messages_arrive_whole_and_in_order():
    left, right = socket.socketpair()
    right.setblocking(False)
    connection = Connection(right, opened=0.0)
    assert connection.receive() == [] and connection.open
    left.send(b'{"kind": "a"}\n{"kind"')
    assert connection.receive() == [{"kind": "a"}]
    left.send(b': "b", "text": "two\\nlines"}\n')
    assert connection.receive() == [{"kind": "b", "text": "two\nlines"}]
    for bad in (b"no json\n", b'{"a": 1}\n', b"[]\n"):
        left.send(bad)
        with pytest.raises(ValueError):
            connection.receive()
    left.close()
    assert connection.receive() == [] and not connection.open
