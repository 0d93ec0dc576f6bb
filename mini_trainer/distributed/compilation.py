"""torch.compile for any sizes, and a warning if anything is recompiled."""

import os
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.fx.experimental import _config as tracing

from mini_trainer.distributed import devices
from mini_trainer.distributed.ending import log
from mini_trainer.options.places import COMPILED


class Compiled:
    """A function compiled when it is first called, for any sizes from 2; `function` is the original. The first call in
    each mode compiles: with or without gradients, and in each state that `mode` returns. A later call in the same mode
    that compiles again is reported once, with torch's reason. `name` is for messages."""

    warned: set[str] = set()  # noqa: RUF012  names reported in this process

    def __init__(
        self,
        function: Callable,
        name: str,
        *,
        mode: Callable[[], Hashable] = lambda: None,
        backend: str | Callable = "inductor",
        dynamic: bool = True,
    ):
        # Sizes that are equal by chance in the first call, such as tokens and hidden size, would be taken for the same.
        tracing.use_duck_shape = False
        self.function, self.name, self.mode = function, name, mode
        self.compiled = torch.compile(function, dynamic=dynamic, backend=backend)
        self.modes: set[Hashable] = set()  # of earlier calls
        self.replacement: Callable | None = None  # is called instead

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if devices.is_eager:
            return self.function(*args, **kwargs)
        return (self.replacement or self.run)(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        mode, last = (torch.is_grad_enabled(), self.mode()), find_last_compilation()
        outputs = self.compiled(*args, **kwargs)
        if mode in self.modes and find_last_compilation() is not last and self.name not in self.warned:
            self.warned.add(self.name)
            last = find_last_compilation()
            reason = str(last.recompile_reason).splitlines()[0]
            log.warning(
                f"warning: torch.compile: {self.name} was compiled again after its first micro-batch, which took"
                f" {last.entire_frame_compile_time_s or 0:.1f} s: {reason}; only the first time is reported,"
                " TORCH_LOGS=recompiles_verbose prints all"
            )
        self.modes.add(mode)
        return outputs


def find_last_compilation() -> Any:
    """torch's record of the last function that it has compiled in this process; None before the first."""
    records = torch._dynamo.utils._compilation_metrics
    return records[-1] if records else None


def count_graphs() -> int:
    """Graphs that torch has traced in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def describe_cache() -> str:
    """How many graphs were compiled in this process, and how many of them came from the cache."""
    counters = torch._dynamo.utils.counters
    found, missed = (counters["inductor"][f"fxgraph_cache_{kind}"] for kind in ("hit", "miss"))
    return f"{found + missed} graphs compiled, {found} of them from {os.environ[COMPILED]}"
