"""What can befall the real program: every rank is gone soon, and exit.json says what it was."""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked import ForkedJob, ForkedTorchrunJob, run_forked
from processes import RAISING_RANK, Job, flags, torchrun
from tiny_data import make_samples, write_samples
from tiny_models import SHAPE, VOCAB_SIZE, save_model, save_tokenizer
from transformers import LlamaConfig

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.ending import ExitCode
from mini_trainer.sampler import draw_samples

pytestmark = [pytest.mark.slow, pytest.mark.long]

PROMISE = 10.0  # seconds within which all ranks are gone
NUM_SAMPLES, BATCH_SIZE, SEED, HANG_TIMEOUT = 4000, 8, 5, 10
LONG_STEP, LONGEST = 60, 8192  # the step, from 1, that draws the one long sample; its tokens


@dataclass
class Result:
    job: Job
    seconds: float  # from the fault until no rank was left
    log: str
    other: subprocess.CompletedProcess | None  # a second run that was tried meanwhile


def limit_memory(job: Job) -> None:
    """Lets every rank have little more than it has: an activation of the long sample is 256 MiB."""
    for pid in job.ranks.values():
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize() + 400 * 2**20
        resource.prlimit(pid, resource.RLIMIT_AS, (size, size))


# Name: processes, the step to wait for, the fault, options.
FAULTS: dict[str, tuple[int, int, Callable[[Job], None], dict]] = {
    "frozen": (2, 3, lambda job: os.kill(job.ranks[1], signal.SIGSTOP), dict(hang_timeout=HANG_TIMEOUT)),
    "killed_rank": (3, 3, lambda job: os.kill(job.ranks[2], signal.SIGKILL), {}),
    "killed_torchrun": (2, 3, lambda job: job.process.kill(), {}),
    "raising": (2, 2, lambda job: None, {}),
    "out_of_memory": (2, 3, limit_memory, {}),
    "terminated": (2, 3, lambda job: os.kill(job.process.pid, signal.SIGTERM), {}),
    "max_time": (0, 0, lambda job: None, dict(max_time="0.0001")),
}
UNDER_TORCHRUN = ("killed_rank", "killed_torchrun", "terminated")  # which torchrun has a part in


@pytest.fixture(scope="module")
def results(tmp_path_factory, request) -> dict[str, Result]:
    """Every fault, in a run that would never end; a few at a time, since those under torchrun mostly import."""
    root = tmp_path_factory.mktemp("faults")
    is_wide = any(item.function is test_a_killed_rank for item in request.session.items)
    names = [name for name in FAULTS if is_wide or name != "killed_rank"]
    model = save_tokenizer(save_model(LlamaConfig(**SHAPE | dict(intermediate_size=8192)), root / "model"))
    samples = make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE, max_len=10)
    data = write_samples(root / "data.arrow", samples)
    drawn = draw_samples(Mixture([TokenizedData(data)]), seed=SEED, start=(LONG_STEP - 1) * BATCH_SIZE, count=1)[0]
    samples[drawn] = ([7] * LONGEST, [-100] + [7] * (LONGEST - 1))
    write_samples(data, samples)
    raising = root / "raising.py"
    raising.write_text(RAISING_RANK + "import runpy\nrunpy.run_path('train.py', run_name='__main__')\n")

    def suffer(name: str) -> Result:
        num_processes, step, fault, options = FAULTS[name]
        argv = [raising if name == "raising" else "train.py", *flags(
            model_name_or_path=model, data_path=data, output_dir=root / name, batch_size=BATCH_SIZE, seed=SEED,
            max_tokens_per_gpu=LONGEST, max_steps=1_000_000, activation_checkpointing="none", **options,
        )]  # fmt: skip
        if name == "killed_rank":
            job = Job(torchrun(num_processes, *argv), root / name)
        elif name in UNDER_TORCHRUN:
            job = ForkedTorchrunJob(num_processes, argv, root / name)
        else:
            job = ForkedJob(num_processes, argv, root / name)
        try:
            job.wait_for_step(step)
            other = run_forked(0, *argv) if name == "terminated" else None
            start = time.monotonic()
            fault(job)
            job.wait_until_gone()  # also of the frozen rank, which nothing wakes
            seconds = time.monotonic() - start
            job.process.wait(timeout=60)
        finally:
            job.kill()
        return Result(job, seconds, job.log.read_text(), other)

    with ThreadPoolExecutor(max_workers=3) as pool:
        return dict(zip(names, pool.map(suffer, names), strict=True))


def check(result: Result, code: ExitCode, rank: int | None, words: str) -> None:
    outcome = result.job.outcome()
    assert (outcome["code"], outcome["name"]) == (code, code.name.lower()), result.log
    assert rank in (None, outcome["rank"])
    assert words in outcome["message"]
    assert result.log.count(outcome["message"]) == 1, result.log
    assert result.log.count("error: ") == (code not in (ExitCode.SAVED_AND_REQUEUE, ExitCode.STOPPED_BY_USER))
    assert result.job.process.returncode != 0


@pytest.mark.wide
def test_a_killed_rank(results):
    result = results["killed_rank"]
    check(result, ExitCode.PEER_DIED, 2, f"rank 2 (pid {result.job.ranks[2]} on ")
    assert result.seconds < PROMISE


def test_a_killed_torchrun(results):
    result = results["killed_torchrun"]
    check(result, ExitCode.PEER_DIED, None, f"torchrun (pid {result.job.process.pid} on ")
    assert result.seconds < PROMISE


def test_a_rank_that_raises(results):
    result = results["raising"]
    check(result, ExitCode.FAILED, 1, "RuntimeError: injected: a bug of rank 1")
    assert result.job.outcome()["step"] == 2
    assert result.log.count('train.py", line') == 2  # one traceback: the script and train()
    assert result.seconds < PROMISE


def test_a_frozen_rank(results):
    result = results["frozen"]
    check(result, ExitCode.HANG, 0, f"rank 1 (pid {result.job.ranks[1]} on ")
    stacks = (result.job.output_dir / "errors" / "rank_0.txt").read_text()
    assert 'train.py", line' in stacks and "watch.py" in stacks
    assert result.seconds < HANG_TIMEOUT + PROMISE


def test_out_of_memory_on_one_rank(results):
    result = results["out_of_memory"]
    check(result, ExitCode.OUT_OF_MEMORY, None, f"out of memory in step {LONG_STEP}, micro-batch 1 of 1 (")
    assert f"the longest {LONGEST:,}): lower --max-tokens-per-gpu" in result.job.outcome()["message"]
    assert result.job.outcome()["step"] == LONG_STEP - 1


def test_a_request_to_stop_and_a_second_run(results):
    result = results["terminated"]
    check(result, ExitCode.SAVED_AND_REQUEUE, 0, ": SIGTERM")
    metrics = (result.job.output_dir / "training_metrics_0.jsonl").read_text().splitlines()
    assert result.job.outcome()["step"] == len(metrics)
    assert result.other.returncode == ExitCode.LOCKED
    assert f"is in use by the run with pid {result.job.ranks[0]} on " in result.other.stderr
    assert not (result.job.output_dir / ".lock").exists()


def test_max_time_without_torchrun(results):
    result = results["max_time"]
    check(result, ExitCode.SAVED_AND_REQUEUE, 0, ": --max-time")
    assert result.job.process.returncode == ExitCode.SAVED_AND_REQUEUE
    assert result.job.outcome()["step"] >= 1
