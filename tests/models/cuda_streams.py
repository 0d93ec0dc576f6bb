"""Stand-ins for CUDA's streams on the CPU, as late as CUDA allows: a copy runs only when something waits for it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recorded import RELEASES, stand_in
from torch import Tensor

NEWEST = RELEASES["torch"][-1]


def count_owners(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def method(name: str, owner: Any, compute: Callable[..., Any]) -> Callable[..., Any]:
    """A method of torch.cuda.Stream, which `compute` stands in for."""
    full = f"torch.cuda.streams.Stream.{name}"
    return stand_in("torch", full, NEWEST, lambda self, **given: compute(**given)).__get__(owner)


class Event(int):
    """Number of copies queued before it."""


class CurrentStream:
    """The stream that computes: all work on it is done at once, except what it must wait for."""

    def __init__(self, side: "SideStream"):
        self.side = side
        self.wait_event = method("wait_event", self, self.wait)

    def wait(self, event: Event) -> None:
        self.side.run_until(event)


class SideStream:
    """Copies are queued. One whose source or target is freed before it runs would meet other data on a GPU."""

    def __init__(self) -> None:
        self.queue: list[tuple[Tensor, Tensor]] = []
        self.num_done = 0
        self.is_ordered = False  # after the work queued so far on the computing stream
        self.wait_stream = method("wait_stream", self, self.order)
        self.record_event = method("record_event", self, self.mark)

    def order(self, stream: CurrentStream) -> None:
        self.is_ordered = True

    def mark(self, event: None) -> Event:
        assert event is None
        return Event(len(self.queue))

    def copy(self, target: Tensor, source: Tensor, *, non_blocking: bool) -> None:
        assert non_blocking and self.is_ordered, "the source may not be computed yet"
        self.is_ordered = False
        self.queue.append((target.detach(), source.detach()))

    def run_until(self, event: Event) -> None:
        for target, source in self.queue[self.num_done : event]:
            owners = [count_owners(each) for each in (target, source)]
            assert min(owners) > count_owners(torch.empty(1)), f"freed before it was copied: {owners}"
            target.copy_(source)
        self.num_done = max(self.num_done, event)


def install_streams(monkeypatch: pytest.MonkeyPatch) -> SideStream:
    """Puts the stand-ins in place of torch.cuda's, and memory full of nan in place of new or pinned memory."""
    side, empty_like, copy = SideStream(), torch.empty_like, Tensor.copy_
    current = CurrentStream(side)

    def make_empty(tensor: Tensor, *, pin_memory: bool = False, **options: Any) -> Tensor:
        return empty_like(tensor, **options).fill_(float("nan"))

    @contextlib.contextmanager
    def run_on(stream: SideStream) -> Iterator[None]:
        Tensor.copy_ = lambda target, source, **options: stream.copy(target, source, **options)
        try:
            yield
        finally:
            Tensor.copy_ = copy

    monkeypatch.setattr(torch, "empty_like", make_empty)
    monkeypatch.setattr(torch.cuda, "stream", stand_in("torch", "torch.cuda.stream", NEWEST, run_on))
    get_current = stand_in("torch", "torch.cuda.current_stream", NEWEST, lambda device: current)
    monkeypatch.setattr(torch.cuda, "current_stream", get_current)
    return side
