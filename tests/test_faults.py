"""What can befall the real program: every rank is gone soon, and exit.json says what it was."""

import os
import resource
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from forked import ForkedJob, ForkedTorchrunJob
from processes import Job, flags
from tiny_data import make_samples, write_samples
from tiny_models import SHAPE, VOCAB_SIZE, save_model, save_tokenizer
from transformers import LlamaConfig

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.ending import ExitCode
from mini_trainer.sampler import draw_samples

pytestmark = [pytest.mark.slow, pytest.mark.long]

PROMISE = 10.0  # seconds within which all ranks are gone
NUM_SAMPLES, BATCH_SIZE, SEED = 4000, 8, 5
LONG_STEP, LONGEST = 60, 8192  # the step, from 1, that draws the one long sample; its tokens


@dataclass
class Result:
    job: Job
    seconds: float  # from the fault until no rank was left
    log: str


def limit_memory(job: Job) -> None:
    """Lets every rank have little more than it has: an activation of the long sample is 256 MiB."""
    for pid in job.ranks.values():
        size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize() + 400 * 2**20
        resource.prlimit(pid, resource.RLIMIT_AS, (size, size))


# Name: processes, the step to wait for, the fault, options.
FAULTS: dict[str, tuple[int, int, Callable[[Job], None], dict]] = {
    "killed_torchrun": (2, 3, lambda job: job.process.kill(), {}),
    "out_of_memory": (2, 3, limit_memory, {}),
    "terminated": (2, 3, lambda job: os.kill(job.process.pid, signal.SIGTERM), {}),
}
UNDER_TORCHRUN = ("killed_torchrun", "terminated")  # which torchrun has a part in


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Result]:
    """Every fault, in a run that would never end; a few at a time, since those under torchrun mostly import."""
    root = tmp_path_factory.mktemp("faults")
    model = save_tokenizer(save_model(LlamaConfig(**SHAPE | dict(intermediate_size=8192)), root / "model"))
    samples = make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE, max_len=10)
    data = write_samples(root / "data.arrow", samples)
    drawn = draw_samples(Mixture([TokenizedData(data)]), seed=SEED, start=(LONG_STEP - 1) * BATCH_SIZE, count=1)[0]
    samples[drawn] = ([7] * LONGEST, [-100] + [7] * (LONGEST - 1))
    write_samples(data, samples)

    def suffer(name: str) -> Result:
        num_processes, step, fault, options = FAULTS[name]
        argv = ["train.py", *flags(
            model_name_or_path=model, data_path=data, output_dir=root / name, batch_size=BATCH_SIZE, seed=SEED,
            max_tokens_per_gpu=LONGEST, max_steps=1_000_000, activation_checkpointing="none", **options,
        )]  # fmt: skip
        job = (ForkedTorchrunJob if name in UNDER_TORCHRUN else ForkedJob)(num_processes, argv, root / name)
        try:
            job.wait_for_step(step)
            start = time.monotonic()
            fault(job)
            job.wait_until_gone()
            seconds = time.monotonic() - start
            job.process.wait(timeout=60)
        finally:
            job.kill()
        return Result(job, seconds, job.log.read_text())

    with ThreadPoolExecutor(max_workers=3) as pool:
        return dict(zip(FAULTS, pool.map(suffer, FAULTS), strict=True))


def check(result: Result, code: ExitCode, rank: int | None, words: str) -> None:
    outcome = result.job.outcome()
    assert (outcome["code"], outcome["name"]) == (code, code.name.lower()), result.log
    assert rank in (None, outcome["rank"])
    assert words in outcome["message"]
    assert result.log.count(outcome["message"]) == 1, result.log
    assert result.log.count("error: ") == (code not in (ExitCode.SAVED_AND_REQUEUE, ExitCode.STOPPED_BY_USER))
    assert result.job.process.returncode != 0


def test_a_killed_torchrun(results):
    result = results["killed_torchrun"]
    check(result, ExitCode.PEER_DIED, None, f"torchrun (pid {result.job.process.pid} on ")
    assert result.seconds < PROMISE


def test_out_of_memory_on_one_rank(results):
    result = results["out_of_memory"]
    check(result, ExitCode.OUT_OF_MEMORY, None, f"out of memory in step {LONG_STEP}, micro-batch 1 of 1 (")
    assert f"the longest {LONGEST:,}): lower --max-tokens-per-gpu" in result.job.outcome()["message"]
    assert result.job.outcome()["step"] == LONG_STEP - 1


def test_a_request_to_stop(results):
    result = results["terminated"]
    check(result, ExitCode.SAVED_AND_REQUEUE, 0, ": SIGTERM")
    metrics = (result.job.output_dir / "training_metrics_0.jsonl").read_text().splitlines()
    assert result.job.outcome()["step"] == len(metrics)
    assert not (result.job.output_dir / ".lock").exists()
