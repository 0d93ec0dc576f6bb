"""The stages of benchmarks/gpu.py: what each runs, and what it reports.

Runs of train.py share the stage's process, one after the other: starting Python takes longer than their steps.
"""

import gc
import gzip
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_settings import GOALS_MFU, ROOT, SETTINGS, SMALL, Setup, make_run, prepare, read_expected

TAIL = 2000  # characters of a failed script's output in its message
MAX_TRACE_BYTES = 15 << 20
NUM_SLOWEST = 15  # kernels and gaps that a trace's stage lists
TEST_WORKERS = 8
GPU_TESTS = ("test_gpu.py", "test_long_rows.py", "test_synchronisation.py")
MAX_TOKENS_OF_OTHERS = 8192  # TRL computes all logits of its rows: with 16,384 they fill 80 GB

Report = Callable[[dict[str, Any]], None]  # takes everything found so far; it stays if the stage is killed


@dataclass(frozen=True)
class Stage:
    name: str
    seconds: int  # limit
    run: Callable[[Setup, Report], None]
    needs: tuple[str, ...] = ("tyro",)  # modules


# --- Running things -----------------------------------------------------------------------------------------


def run_script(*argv: object, see: Callable[[str], None] = lambda line: None) -> str:
    """Runs a Python script, or a module by -m, and passes each line it prints to `see`; returns all of them.

    RuntimeError with the end of the output if it fails.
    """
    words = [sys.executable, *map(str, argv)]
    print(f"$ {' '.join(words)}", flush=True)
    lines = []
    with subprocess.Popen(
        words, cwd=ROOT, env=make_env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout:  # at once, so that the log shows where a stage hung
            print(line, end="", flush=True)
            lines.append(line)
            see(line)
    text = "".join(lines)
    if process.returncode != 0:
        raise RuntimeError(f"{argv[0]} ended with {process.returncode}:\n{text[-TAIL:]}")
    return text


def make_env() -> dict[str, str]:
    """The stages' environment; the caller's PYTHONPATH comes after the checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    allocator = os.environ.get("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as train.py sets it
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTORCH_ALLOC_CONF": allocator}


def train(setup: Setup, name: str, **changes: object) -> dict[str, Any]:
    """Runs a setting in this process; medians of its steps but the first, in which kernels are chosen and compiled."""
    import torch
    from in_process import train_here

    options = make_run(setup, name, **changes)
    output_dir = Path(options["output_dir"])
    shutil.rmtree(output_dir, ignore_errors=True)
    gc.unfreeze()  # of the run before
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start, cpu_start = time.monotonic(), time.process_time()
    train_here(open_world(), **options)
    seconds, cpu_seconds = time.monotonic() - start, time.process_time() - cpu_start
    rows = [json.loads(line) for line in (output_dir / "training_metrics_0.jsonl").read_text().splitlines()]
    steady = rows[1:] or rows
    found = {key: statistics.median(row[key] for row in steady) for key in ("tokens_per_second", "time_per_batch")}
    found |= {"mfu": None if rows[-1]["mfu"] is None else statistics.median(row["mfu"] for row in steady)}
    found |= {"micro_batches": statistics.median(row["grad_accum"] for row in steady)}
    found |= {"peak_gb": rows[-1]["peak_memory_usage_GB"]}
    found |= {} if setup.tiny else {"plan_gb": read_expected()["plans"][name]}
    found |= {"goal_mfu": GOALS_MFU[name]} if name in GOALS_MFU else {}
    auto = json.loads((output_dir / "training_params.json").read_text()).get("auto_settings")
    found |= {"auto": auto} if auto else {}
    start_up = seconds - sum(row["time_per_batch"] for row in rows)
    found |= {"first_step": rows[0]["time_per_batch"], "seconds_beside_steps": start_up, "cpu_seconds": cpu_seconds}
    return found | {"losses": [row["loss"] for row in rows]}


def open_world() -> Any:
    import torch.distributed as dist

    from mini_trainer.distributed.world import init_world, setup_logging

    if not dist.is_initialized():
        setup_logging("INFO")
        open_world.world = init_world()
    return open_world.world


# --- The stages ---------------------------------------------------------------------------------------------


def show_device(setup: Setup, report: Report) -> None:
    """Versions, the most that the device does in bf16 products and copies; makes the small model."""
    import torch
    from harness import find_version, time_call

    names = ("torch", "transformers", "flash-attn", "liger-kernel", "torchao", "bitsandbytes", "peft", "trl", "triton")
    found = {"python": sys.version.split()[0], "versions": {name: find_version(name) for name in names}}
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"device": properties.name, "memory_gb": properties.total_memory / 1e9, "cuda": torch.version.cuda}
    report(found)
    size, repeats = (256, 2) if setup.tiny else (8192, 20)
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.zeros((1 << 20) if setup.tiny else (1 << 32), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    for name, function, amount in (
        ("bf16_tflops", lambda: a @ b, 2 * size**3 / 1e12),
        ("copy_tb_per_second", lambda: target.copy_(source), 2 * source.nbytes / 1e12),
    ):
        for _ in range(3):
            function()
        seconds = statistics.median(time_call(function, device) for _ in range(repeats))
        found[name] = amount / max(seconds, 1e-9)
        report(found)
    start = time.monotonic()
    prepare(setup, SMALL)
    report(found | {"seconds_to_make_the_model": time.monotonic() - start})


def run_tests(chosen: str) -> Callable[[Setup, Report], None]:
    """`pytest -m gpu -k CHOSEN` in several processes, reporting each test as it ends."""

    def run(setup: Setup, report: Report) -> None:
        os.environ["GPU_TESTS_ON_CPU"] = "1"
        counts: Counter[str] = Counter()
        failed: list[str] = []

        def see(line: str) -> None:
            if match := re.search(r"\b(PASSED|FAILED|SKIPPED|ERROR)\b tests/(\S.*)", line):
                counts[match[1].lower()] += 1
                failed.extend([match[2]] if match[1] in ("FAILED", "ERROR") else [])
                report({"counts": dict(counts), "failed": failed})

        options = ["-m", "gpu", "-k", chosen, "-v", "-rs", "--tb=short", "-p", "no:cacheprovider", "-p", "at_once"]
        options += ["-n", 2 if setup.tiny else TEST_WORKERS, "--dist", "load"]
        run_script("-m", "pytest", *options, *(ROOT / "tests" / name for name in GPU_TESTS), see=see)

    return run


def needs_gpu(options: dict[str, Any]) -> bool:
    return options.get("kernels") == "fused" or options.get("attention") == "varlen_fa3" or "float8" in options


def measure(*names: str) -> Callable[[Setup, Report], None]:
    """Settings one after the other; one that fails, for lack of memory, say, does not end the others."""

    def run(setup: Setup, report: Report) -> None:
        import torch

        found: dict[str, Any] = {}
        for name in names:
            if not torch.cuda.is_available() and needs_gpu(SETTINGS[name][1]):
                found[name] = {"left out": "needs a CUDA device"}
                continue
            try:
                found[name] = train(setup, name)
            except Exception as error:
                found[name] = {"failed": f"{type(error).__name__}: {error}"[:TAIL]}
            report(found)
        failed = [name for name, result in found.items() if "failed" in result]
        if failed:
            raise RuntimeError(f"{', '.join(failed)}: {found[failed[0]]['failed']}")

    return run


def record_trace(setup: Setup, report: Report) -> None:
    """Traces one step: the share of time in which the device works, its slowest kernels, its longest gaps."""
    import torch

    name = "1.5B, fused" if torch.cuda.is_available() else "1.5B, eager"
    found = train(setup, name, profile_steps="3:3" if not setup.tiny else "2:2")
    trace = setup.work_dir / "runs" / "run" / "profile" / "rank_0.json"
    report(found := found | read_trace(json.loads(trace.read_text())["traceEvents"]))
    packed = setup.results / "trace.json.gz"
    with trace.open("rb") as file, gzip.open(packed, "wb", compresslevel=6) as out:
        shutil.copyfileobj(file, out)
    if packed.stat().st_size > MAX_TRACE_BYTES:
        packed.unlink()


def read_trace(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Summary of a trace's device events: of all operations on a CPU, where there are none."""
    on_device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    kernels = sorted(
        on_device or [event for event in events if event.get("cat") == "cpu_op"], key=lambda event: event["ts"]
    )
    busy, end, gaps = 0.0, kernels[0]["ts"], []
    for before, kernel in zip([None, *kernels], kernels, strict=False):
        stop = kernel["ts"] + kernel["dur"]
        if kernel["ts"] > end:
            gaps.append((kernel["ts"] - end, f"{before['name'][:60]} -> {kernel['name'][:60]}"))
        busy += max(0.0, stop - max(end, kernel["ts"]))
        end = max(end, stop)
    times: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for kernel in kernels:
        times[kernel["name"]] += kernel["dur"]
        counts[kernel["name"]] += 1
    total = end - kernels[0]["ts"]
    return {
        "step_ms": total / 1e3, "busy_share": busy / total, "num_kernels": len(kernels), "num_gaps": len(gaps),
        "slowest": [
            f"{us / 1e3:9.2f} ms {counts[name]:6}  {name[:110]}" for name, us in times.most_common(NUM_SLOWEST)
        ],
        "gaps": [f"{us / 1e3:9.3f} ms  {between}" for us, between in sorted(gaps, reverse=True)[:NUM_SLOWEST]],
    }  # fmt: skip


def kill_and_resume(setup: Setup, report: Report) -> None:
    """A run that is killed and started again, against one that nobody disturbed."""
    from processes import Job, flags

    settings = dict(
        max_steps=8, checkpoint_every_steps=4, keep_checkpoints=1, activation_checkpointing="full",
        batch_size=8 if setup.tiny else 64, optimizer="adamw8bit",
    )  # fmt: skip
    commands, outputs = {}, {name: setup.work_dir / "runs" / name for name in ("whole", "killed")}
    for name, output_dir in outputs.items():
        shutil.rmtree(output_dir, ignore_errors=True)
        run = make_run(setup, "1.5B, fused, 8k tokens", **settings | dict(kernels="eager"), output_dir=output_dir)
        commands[name] = flags(**run)
    start = time.monotonic()
    run_script("train.py", *commands["whole"])
    report(found := {"seconds_of_whole_run": time.monotonic() - start})
    job = Job([sys.executable, "train.py", *commands["killed"]], outputs["killed"], env=make_env())
    try:
        job.wait_for_step(6)  # the checkpoint of step 4 is there
    finally:
        job.kill()
    print(job.log.read_text())
    start = time.monotonic()
    text = run_script("train.py", *commands["killed"])
    losses = {}
    for name, output_dir in outputs.items():
        lines = (output_dir / "training_metrics_0.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in lines]
        shutil.rmtree(output_dir)  # makes room for other stages
    differences = [abs(a - b) / abs(b) for a, b in zip(losses["killed"], losses["whole"], strict=True)]
    found |= {"resumed": "resuming from" in text, "seconds_of_resumed_run": time.monotonic() - start,
              "bit_for_bit": losses["killed"] == losses["whole"], "largest_difference": max(differences)}  # fmt: skip
    report(found)
    if "resuming from" not in text or max(differences) > 1e-2:
        raise RuntimeError(f"the resumed run has other losses: {losses}")


def compare_with_others(setup: Setup, report: Report) -> None:
    """benchmarks/train_step.py: ours with attention by `auto`, a plain loop, and TRL where it is installed."""
    methods = ["ours", "plain", *(["trl"] if importlib.util.find_spec("trl") is not None else [])]
    sizes = (8, 4, 1) if setup.tiny else (256, 16, 3)  # logits of 64 padded samples fill 80 GB
    text = run_script(
        "benchmarks/train_step.py", "--shape", setup.shape(SMALL), "--methods", *methods,
        "--batch-size", sizes[0], "--micro-batch-size", sizes[1], "--num-steps", sizes[2], "--num-rounds", 1,
        "--max-tokens-per-gpu", setup.tokens(MAX_TOKENS_OF_OTHERS), "--attention", "auto",
    )  # fmt: skip
    table = [line for line in text.splitlines() if line.startswith("| ")]
    report({"table": table, "failed": [line for line in text.splitlines() if " failed: " in line]})
    if not any(line.startswith("| ours ") for line in table):
        raise RuntimeError("ours was not measured")


def measure_two_gpus(setup: Setup, report: Report) -> None:
    """The default on one GPU and on two: the share of twice the speed."""
    import torch
    from processes import flags

    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        report({"left out": "there is one GPU"})
        return
    found = {}
    for count in (1, 2):
        run = make_run(setup, "1.5B, default") | dict(output_dir=setup.work_dir / "runs" / "ranks")
        shutil.rmtree(run["output_dir"], ignore_errors=True)
        run_script("-m", "torch.distributed.run", f"--nproc-per-node={count}", "train.py", *flags(**run))
        lines = (run["output_dir"] / "training_metrics_0.jsonl").read_text().splitlines()
        found[count] = statistics.median(json.loads(line)["tokens_per_second"] for line in lines[1:])
        report({"tokens_per_second": found})
    report({"tokens_per_second": found, "share_of_twice": found[2] / found[1] / 2})


# In the order of what is most worth knowing.
STAGES = [
    Stage("device", 45, show_device, needs=()),
    Stage("trace", 60, record_trace),
    Stage("default against best", 90, measure("1.5B, default", "1.5B, fused")),
    Stage("8B", 120, measure("8B, fused, selective recomputation", "8B, default")),
    Stage("8B, LoRA", 80, measure("8B, LoRA, fused", "8B, LoRA, default")),
    Stage("correctness", 170, run_tests("not two_that_share")),
    Stage("8B, float8", 150, measure("8B, compiled, float8", "8B, compiled")),
    Stage("1.5B, bf16 masters", 45, measure("1.5B, fused, bf16 masters")),
    Stage("1.5B, FlashAttention 3", 45, measure("1.5B, fused, FlashAttention 3")),
    Stage("two GPUs", 90, measure_two_gpus),
    Stage("1.5B, without kernels", 60, measure("1.5B, eager", "1.5B, fused, 4k tokens")),
    Stage("1.5B, compiled", 80, measure("1.5B, compiled")),
    Stage("1.5B, FSDP2", 60, measure("1.5B, fused, FSDP2")),
    Stage("kill and resume", 170, kill_and_resume),
    Stage("against others", 120, compare_with_others),
    Stage("OSFT", 100, measure("1.5B, OSFT")),
]  # fmt: skip
