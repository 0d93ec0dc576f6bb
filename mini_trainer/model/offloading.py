"""Activation offloading: recomputed blocks' inputs stay in CPU memory until backward, copied while the GPU computes."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mini_trainer.distributed.devices import OFFLOADED, memory_kind


class Waiting:
    """A tensor in CPU memory. `arriving` is its copy on the device, once that has started."""

    def __init__(self, host: Tensor, previous: "Waiting | None"):
        self.host = host
        self.previous = weakref.ref(previous) if previous is not None else lambda: None
        self.arriving: Tensor | None = None
        self.arrived: torch.cuda.Event | None = None


class Offloader:
    """Copies the blocks' inputs between device and CPU on a separate stream.

    Device memory is allocated and freed in the order of the compute stream, which waits for a copy before it frees the
    source or reads the result, so the allocator needs to know about no other stream. At any time one tensor is being
    copied to the CPU while the next block computes, and in backward one is prefetched.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.hidden_storage = 0  # address of the running block's input
        self.leaving: Tensor | None = None  # kept until its copy is complete
        self.left: torch.cuda.Event | None = None
        self.last: Callable[[], Waiting | None] = lambda: None

    def pack(self, tensor: Tensor) -> Waiting | Tensor:
        """Forward: offloads the block's hidden states; tensors shared by all blocks, such as masks, stay."""
        if tensor.untyped_storage()._cdata != self.hidden_storage:
            return tensor
        self.release()
        with memory_kind(OFFLOADED):
            host = torch.empty_like(tensor, device="cpu", pin_memory=self.stream is not None)
        self.left = self.copy(host, tensor)
        self.leaving = tensor.detach()
        waiting = Waiting(host, self.last())
        self.last = weakref.ref(waiting)
        return waiting

    def unpack(self, kept: Waiting | Tensor) -> Tensor:
        """Backward, last block first: returns the block's input, and starts to fetch that of the block before it."""
        if isinstance(kept, Tensor):
            return kept
        self.release()
        for waiting in (kept, kept.previous()):
            if waiting is not None and waiting.arriving is None:
                waiting.arriving = torch.empty_like(waiting.host, device=self.device)
                waiting.arrived = self.copy(waiting.arriving, waiting.host)
        if kept.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(kept.arrived)
        arrived, kept.arriving = kept.arriving, None
        return arrived

    def copy(self, target: Tensor, source: Tensor) -> "torch.cuda.Event | None":
        """Starts a copy once all work queued so far is computed; returns the event that marks its completion."""
        if self.stream is None:
            target.copy_(source.detach())
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source.detach(), non_blocking=True)
        return self.stream.record_event()

    def release(self) -> None:
        """Releases the tensor that was being offloaded."""
        if self.left is not None:
            torch.cuda.current_stream(self.device).wait_event(self.left)
        self.leaving = self.left = None


def check_offloading(device: torch.device) -> None:
    """ValueError on the CPU, where there is nothing to offload from."""
    if device.type == "cpu":
        raise ValueError(
            "--offload-activations moves activations from GPU to CPU memory, but this run is on the CPU: remove the"
            " option"
        )


def apply_offloading(blocks: nn.ModuleList, device: torch.device) -> None:
    """Offloads the inputs of checkpointed blocks; the blocks' hooks, including FSDP's, stay outside."""
    offloader = Offloader(device)
    for block in blocks:
        block.forward = functools.partial(run_offloaded, offloader, block.forward)


def run_offloaded(offloader: Offloader, forward: Callable, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
    offloader.hidden_storage = hidden_states.untyped_storage()._cdata
    with saved_tensors_hooks(offloader.pack, offloader.unpack):
        return forward(hidden_states, *args, **kwargs)
