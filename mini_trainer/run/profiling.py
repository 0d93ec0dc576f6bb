"""Traces of selected steps by torch.profiler."""

from collections.abc import Iterator
from pathlib import Path

import torch

from mini_trainer.data.stores.disk import write_text
from mini_trainer.distributed.ending import log
from mini_trainer.options import parse_steps
from mini_trainer.sampler import Batch

NUM_ROWS = 40  # rows of the table of slowest operations


def profile_steps(batches: Iterator[Batch], steps: str, directory: Path, *, rank: int) -> Iterator[Batch]:
    """Yields `batches`, profiling the training in between during `steps`. Writes rank_N.json, a trace for
    chrome://tracing and ui.perfetto.dev, and rank_N.txt, the slowest operations, after the last of these steps, or at
    the end of the run."""
    (first, last), profiler = parse_steps(steps), None
    try:
        for batch in batches:
            if batch.step + 1 == first:
                profiler = torch.profiler.profile(record_shapes=True)
                profiler.start()
            yield batch
            if profiler is not None and batch.step + 1 == last:
                write_profile(profiler, directory, rank=rank)
                profiler = None
    finally:
        if profiler is not None:
            write_profile(profiler, directory, rank=rank)


def write_profile(profiler: torch.profiler.profile, directory: Path, *, rank: int) -> None:
    """Stops the profiler and writes its results."""
    profiler.stop()
    directory.mkdir(exist_ok=True)
    trace = directory / f"rank_{rank}.json"
    trace.unlink(missing_ok=True)  # it may be a link
    profiler.export_chrome_trace(str(trace))
    on_gpu = torch.cuda.is_available()
    table = profiler.key_averages().table(
        sort_by=f"self_{'device' if on_gpu else 'cpu'}_time_total", row_limit=NUM_ROWS, max_name_column_width=80
    )
    write_text(trace.with_suffix(".txt"), table + "\n")
    log.info(f"profile: {trace} (for ui.perfetto.dev), and its slowest operations in {trace.with_suffix('.txt').name}")
