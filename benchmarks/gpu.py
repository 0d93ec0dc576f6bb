"""One command that uses a borrowed GPU's minutes well: stages, what is most worth knowing first.

    python benchmarks/gpu.py --minutes 9    # as often as needed: the next call continues where the last one ended
    python benchmarks/gpu.py --tiny         # all of it in small, also on a CPU
    python benchmarks/gpu.py --again trace  # some stages once more

Each stage is a process with its own time limit, at most what is left of the call. A stage that fails or hangs is
reported and skipped, and what it had found by then is kept. Results are written as soon as a stage ends: a line of
stages.jsonl, and all of summary.txt anew, beside log.txt and the trace, in --results; where the environment names a
folder OUT, copies go there, too. A stage that the end of a call cut off starts over in the next call, once.

Packages that the machine's Python lacks are installed for the stages from --wheels, without network.
docs/performance.md lists what to carry to a machine that reaches nothing outside.
"""

import argparse
import contextlib
import gzip
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "quickstart"), str(ROOT / "tests")]

STAGES_FILE, SUMMARY, LOG = "stages.jsonl", "summary.txt", "log.txt"
MOST_STARTS = 2  # of a stage that ends with its call
MIN_SECONDS = 30  # left of a call for a stage to be worth starting
TAIL = 2000  # characters of a failed stage's output in its line
MAX_TRACE_BYTES = 15 << 20
TINY_LIMIT = 6  # times a stage's limit, on a CPU that has other work
SMALL, LARGE = "qwen2.5-1.5b", "qwen2.5-7b"
IN_TINY = {SMALL: "nano", LARGE: "tiny"}  # shapes of train_step.py


@dataclass(frozen=True)
class Setup:
    """What every stage is given."""

    work_dir: Path  # models and data, kept from stage to stage
    results: Path
    tiny: bool

    def shape(self, name: str) -> str:
        return IN_TINY[name] if self.tiny else name

    def tokens(self, number: int) -> int:
        return min(number, 512) if self.tiny else number


Report = Callable[[dict[str, Any]], None]  # what a stage has found so far; it stays if the stage is killed


@dataclass(frozen=True)
class Stage:
    name: str
    seconds: int  # limit
    run: Callable[[Setup, Report], None]
    needs: tuple[str, ...] = ("tyro",)  # modules


# --- What is run, and what it says --------------------------------------------------------------------------


def run_script(*argv: object) -> str:
    """Runs a Python script, or a module by -m; what it printed. RuntimeError with the end of that if it fails."""
    words = [sys.executable, *map(str, argv)]
    print(f"$ {' '.join(words)}", flush=True)
    lines = []
    with subprocess.Popen(
        words, cwd=ROOT, env=make_env(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout:  # at once, so that the log shows where a stage hung
            print(line, end="", flush=True)
            lines.append(line)
    text = "".join(lines)
    if process.returncode != 0:
        raise RuntimeError(f"{argv[0]} ended with {process.returncode}:\n{text[-TAIL:]}")
    return text


def make_env() -> dict[str, str]:
    """The stages' environment; what the caller's PYTHONPATH has comes after the checkout."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def install_wheels(wheels: Path, site: Path) -> None:
    """Installs into `site`, for this process and the stages, those wheels whose packages this Python does not have."""
    missing = [wheel for wheel in sorted(wheels.glob("*.whl")) if not is_installed(wheel.name.split("-")[0])]
    if missing:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
        subprocess.run([*pip, "--target", str(site), *map(str, missing)], check=True)
    if site.exists():
        sys.path.append(str(site))
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(site)]))
        importlib.invalidate_caches()


def is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def prepare(setup: Setup, shape: str) -> tuple[Path, Path]:
    """A random model with its tokenizer and a data set, made once."""
    from harness import write_random_data
    from make_tiny_model import train_tokenizer
    from packing import draw_lengths
    from train_step import save_random_model

    model, data = setup.work_dir / setup.shape(shape), setup.work_dir / "data.arrow"
    if not (model / "tokenizer_config.json").exists():
        save_random_model(setup.shape(shape), model)
        train_tokenizer([], vocab_size=288).save_pretrained(model)
    if not data.exists():
        write_random_data(data, draw_lengths("gsm8k", 2000)[0])
    return model, data


def make_flags(setup: Setup, shape: str, output_dir: Path, **options: object) -> list[str]:
    """A run of train.py without checkpoints and exports."""
    from processes import flags

    model, data = prepare(setup, shape)
    shutil.rmtree(output_dir, ignore_errors=True)
    common = dict(
        model_name_or_path=model, data_path=data, output_dir=output_dir, batch_size=8 if setup.tiny else 256,
        learning_rate=1e-5, max_steps=2 if setup.tiny else 6, save_final_checkpoint=False,
        checkpoint_every_minutes=None, compute_dtype="bfloat16",
    )  # fmt: skip
    if setup.tiny and "auto" in options.values():  # what it counts with on a CPU
        common["memory_budget_gb"] = 4
    return flags(**common | options)


def train(setup: Setup, shape: str, name: str, **options: object) -> dict[str, Any]:
    """What a run's steps were, but for the first, in which kernels are chosen and compiled."""
    output_dir = setup.work_dir / "runs" / name
    run_script("train.py", *make_flags(setup, shape, output_dir, **options))
    rows = read_rows(output_dir)
    steady = rows[1:] or rows
    found = {key: statistics.median(row[key] for row in steady) for key in ("tokens_per_second", "time_per_batch")}
    found |= {"mfu": None if rows[-1]["mfu"] is None else statistics.median(row["mfu"] for row in steady)}
    found |= {"peak_gb": rows[-1]["peak_memory_usage_GB"], "losses": [row["loss"] for row in rows]}
    auto = json.loads((output_dir / "training_params.json").read_text()).get("auto_settings")
    if auto:
        found["auto"] = {key: auto[key] for key in ("max_tokens_per_gpu", "activation_checkpointing")}
    return found


def read_rows(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "training_metrics_0.jsonl").read_text().splitlines()]


def plan(setup: Setup, shape: str, **options: object) -> dict[str, Any]:
    """What --dry-run says of the same run."""
    text = run_script("train.py", *make_flags(setup, shape, setup.work_dir / "runs" / "plan", **options), "--dry-run")
    memory = re.search(r"together +([\d.]+) GiB", text)
    return {"plan_gb": float(memory[1]) * 2**30 / 1e9 if memory else None, "plan": text.splitlines()}


# --- The stages ---------------------------------------------------------------------------------------------


def show_device(setup: Setup, report: Report) -> None:
    """Versions, and what the device does at most: products in bf16, copies in its memory."""
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


def run_tests(chosen: str, *, of_tiny: str | None = None) -> Callable[[Setup, Report], None]:
    """`pytest -m gpu -k CHOSEN`, on the files that have such tests: the others may need packages that are not there."""

    def run(setup: Setup, report: Report) -> None:
        files = [path for path in sorted((ROOT / "tests").glob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
        expression = of_tiny if setup.tiny and of_tiny else chosen
        os.environ["GPU_TESTS_ON_CPU"] = "1"
        options = ["-m", "gpu", "-k", expression, "-v", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
        try:
            text = run_script("-m", "pytest", *options, *files)
        except RuntimeError as error:
            failed = re.findall(r"^(?:FAILED|ERROR) .*", str(error), flags=re.MULTILINE)
            report({"outcome": str(error).splitlines()[-1], "failed": failed})
            raise
        report({"outcome": text.splitlines()[-1]})

    return run


def measure_step(shape: str, **options: object) -> Callable[[Setup, Report], None]:
    """A real run with fixed settings, and the plan of the same."""

    def measure(setup: Setup, report: Report) -> None:
        settings = options | dict(max_tokens_per_gpu=setup.tokens(16384))
        found = train(setup, shape, "step", **settings)
        report(found)
        found |= plan(setup, shape, **settings)
        if found["plan_gb"]:
            found["plan_error"] = found["plan_gb"] / found["peak_gb"] - 1
        report(found)

    return measure


def measure_auto(shape: str) -> Callable[[Setup, Report], None]:
    """What a run takes for itself, how fast it is with that, and what a plan takes."""

    def measure(setup: Setup, report: Report) -> None:
        settings = dict(max_tokens_per_gpu="auto", activation_checkpointing="auto")
        found = train(setup, shape, "auto", **settings)
        report(found)
        report(found | plan(setup, shape, **settings))

    return measure


def measure_compiled(shape: str, checkpointing: str) -> Callable[[Setup, Report], None]:
    def measure(setup: Setup, report: Report) -> None:
        settings = dict(max_tokens_per_gpu=setup.tokens(16384), activation_checkpointing=checkpointing)
        report(train(setup, shape, "compiled", compile=True, **settings))

    return measure


def compare_with_others(shape: str, checkpointing: str) -> Callable[[Setup, Report], None]:
    """benchmarks/train_step.py: ours with attention by `auto`, a plain loop, and TRL where it is installed."""

    def compare(setup: Setup, report: Report) -> None:
        has_flash = importlib.util.find_spec("flash_attn") is not None and not setup.tiny
        methods = ["ours", "plain", *(["trl"] if importlib.util.find_spec("trl") is not None else [])]
        sizes = (8, 4, 1) if setup.tiny else (256, 16, 3)
        text = run_script(
            "benchmarks/train_step.py", "--shape", setup.shape(shape), "--methods", *methods,
            "--batch-size", sizes[0], "--micro-batch-size", sizes[1], "--num-steps", sizes[2], "--num-rounds", 1,
            "--max-tokens-per-gpu", setup.tokens(8192), "--activation-checkpointing", checkpointing,
            "--attention", "auto", "--trl-attention", "flash_attention_2" if has_flash else "sdpa",
        )  # fmt: skip
        table = [line for line in text.splitlines() if line.startswith("| ")]
        report({"table": table, "failed": [line for line in text.splitlines() if " failed: " in line]})
        if not any(line.startswith("| ours ") for line in table):
            raise RuntimeError("ours was not measured")

    return compare


def record_trace(setup: Setup, report: Report) -> None:
    """A trace of one step, and the ten operations that take longest."""
    run_dir = setup.work_dir / "runs" / "trace"
    settings = dict(activation_checkpointing="none", max_tokens_per_gpu=setup.tokens(16384), batch_size=8)
    run_script("train.py", *make_flags(setup, SMALL, run_dir, profile_steps="2:2", max_steps=2, **settings))
    lines = (run_dir / "profile" / "rank_0.txt").read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if "Name" in line)
    report({"slowest": [lines[first], *lines[first + 2 : first + 12]]})
    packed = setup.results / "trace.json.gz"
    with (run_dir / "profile" / "rank_0.json").open("rb") as trace, gzip.open(packed, "wb") as file:
        shutil.copyfileobj(trace, file)
    if packed.stat().st_size > MAX_TRACE_BYTES:
        packed.unlink()


def kill_and_resume(setup: Setup, report: Report) -> None:
    """A run that is killed and started again, against one that nobody disturbed."""
    from processes import Job

    settings = dict(
        max_steps=8, checkpoint_every_steps=4, keep_checkpoints=1, max_tokens_per_gpu=setup.tokens(8192),
        activation_checkpointing="full", batch_size=8 if setup.tiny else 64, optimizer="adamw8bit",
    )  # fmt: skip
    whole, killed = (setup.work_dir / "runs" / name for name in ("whole", "killed"))
    run_script("train.py", *make_flags(setup, SMALL, whole, **settings))
    words = make_flags(setup, SMALL, killed, **settings)
    job = Job([sys.executable, "train.py", *words], killed)
    try:
        job.wait_for_step(6)  # the checkpoint of step 4 is there
    finally:
        job.kill()
    print(job.log.read_text())
    start = time.monotonic()
    text = run_script("train.py", *words)
    rows, others = ([row["loss"] for row in read_rows(directory)] for directory in (killed, whole))
    differences = [abs(a - b) / abs(b) for a, b in zip(rows, others, strict=True)]
    report({"resumed": "resuming from" in text, "seconds_of_resumed_run": time.monotonic() - start,
            "bit_for_bit": rows == others, "largest_difference": max(differences)})  # fmt: skip
    for directory in (whole, killed):  # room for what follows
        shutil.rmtree(directory)
    if "resuming from" not in text or max(differences) > 1e-2:
        raise RuntimeError(f"the resumed run is another one: losses {rows} and {others}")


STAGES = [
    Stage("device", 90, show_device, needs=()),
    Stage("every backend", 120, run_tests("every_backend")),
    Stage("step of 1.5B", 240, measure_step(SMALL, activation_checkpointing="none")),
    Stage("compiled, 1.5B", 300, measure_compiled(SMALL, "none")),
    Stage("against others, 1.5B", 300, compare_with_others(SMALL, "none")),
    Stage("step of 7B", 480, measure_step(LARGE, activation_checkpointing="full")),
    Stage("trace", 180, record_trace),
    Stage("kill and resume", 300, kill_and_resume),
    Stage("auto, 1.5B", 300, measure_auto(SMALL)),
    Stage("other tests", 480, run_tests("not every_backend", of_tiny="two_that_share")),
    Stage("compiled, 7B", 480, measure_compiled(LARGE, "full")),
    Stage("auto, 7B", 480, measure_auto(LARGE)),
    Stage("against others, 7B", 480, compare_with_others(LARGE, "full")),
]


# --- One after the other ------------------------------------------------------------------------------------


def read_results(results: Path) -> list[dict[str, Any]]:
    """All lines so far; the last one may have been cut off."""
    file, rows = results / STAGES_FILE, []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def is_due(name: str, rows: list[dict[str, Any]], again: list[str]) -> bool:
    """Whether a stage has yet to end, and was not cut off by the ends of MOST_STARTS calls."""
    if name in again:
        return True
    own = [row["status"] for row in rows if row["stage"] == name]
    return (not own or own[-1] in ("begun", "cut off")) and own.count("begun") < MOST_STARTS


def run_stages(args: argparse.Namespace) -> None:
    """Runs the stages that are due until the minutes of this call are over."""
    deadline = time.monotonic() + 60 * args.minutes
    args.results.mkdir(parents=True, exist_ok=True)
    install_wheels(args.wheels, args.work_dir / "site")
    for stage in STAGES:
        if args.tiny:
            stage = replace(stage, seconds=TINY_LIMIT * stage.seconds)
        if not is_due(stage.name, read_results(args.results), args.again):
            continue
        missing = [package for package in stage.needs if importlib.util.find_spec(package) is None]
        if missing:
            reason = f"{missing[0]} is not installed, and {args.wheels} has no wheel of it"
            write_row(args.results, stage.name, "left out", reason=reason)
            continue
        left = deadline - time.monotonic()
        if left < min(MIN_SECONDS, stage.seconds):
            print(f"{stage.name}: {max(left, 0):.0f} s are left of this call: for the next one", flush=True)
            continue
        write_row(args.results, stage.name, "begun")
        run_stage(stage, args, seconds=min(left, stage.seconds))
    write_summary(args.results)
    print((args.results / SUMMARY).read_text())


def run_stage(stage: Stage, args: argparse.Namespace, *, seconds: float) -> None:
    """Runs a stage in a process of its own, which ends with all that it has started after `seconds` at the latest."""
    found = args.results / "found.json"
    found.unlink(missing_ok=True)
    start = time.monotonic()
    with (args.results / LOG).open("a") as log:
        print(f"=== {stage.name}", file=log, flush=True)
        begin = log.tell()
        process = subprocess.Popen(
            make_command(stage, args), cwd=ROOT, env=make_env(), stdout=log, stderr=log, process_group=0
        )
        try:
            process.wait(timeout=seconds)
            status = "done" if process.returncode == 0 else "failed"
        except subprocess.TimeoutExpired:
            status = "timed out" if seconds == stage.seconds else "cut off"
        finally:
            kill_group(process)
    details: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1)}
    if status != "done":
        details["tail"] = (args.results / LOG).read_bytes()[begin:].decode(errors="replace")[-TAIL:]
    if found.exists():
        details["found"] = json.loads(found.read_text())
        found.unlink()
    write_row(args.results, stage.name, status, **details)


def make_command(stage: Stage, args: argparse.Namespace) -> list[str]:
    words = ["--stage", stage.name, "--results", args.results, "--work-dir", args.work_dir]
    return [sys.executable, __file__, *map(str, words), *(["--tiny"] if args.tiny else [])]


def kill_group(process: subprocess.Popen) -> None:
    """The stage and whatever it has left; it leads a group of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def write_row(results: Path, name: str, status: str, **details: object) -> None:
    """A line for the stage, the summary anew, and copies of both in $OUT."""
    with (results / STAGES_FILE).open("a") as file:
        file.write(json.dumps({"stage": name, "status": status, **details}) + "\n")
        file.flush()
        os.fsync(file.fileno())
    if status != "begun":
        write_summary(results)
        print(f"{name}: {status}", flush=True)


def write_summary(results: Path) -> None:
    rows = {row["stage"]: row for row in read_results(results)}
    lines = [line for stage in STAGES if stage.name in rows for line in describe(rows[stage.name])]
    (results / SUMMARY).write_text("\n".join(lines) + "\n")
    if out := os.environ.get("OUT"):
        for file in results.iterdir():
            if file.is_file() and file.resolve().parent != Path(out).resolve():
                shutil.copy(file, out)


def describe(row: dict[str, Any]) -> Iterator[str]:
    """A stage in a few lines."""
    seconds = f", {row['seconds']:.0f} s" if "seconds" in row else ""
    yield f"{row['stage']}: {row['status']}{seconds}{', ' + row['reason'] if 'reason' in row else ''}"
    for key, value in row.get("found", {}).items():
        if isinstance(value, list) and value and isinstance(value[0], str):
            yield f"  {key}:"
            yield from (f"    {line}" for line in value)
        else:
            yield f"  {key}: {f'{value:.5g}' if isinstance(value, float) else value}"
    if "tail" in row:
        yield from (f"  ! {line}" for line in row["tail"].splitlines()[-8:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--minutes", type=float, default=1e9, help="of this call; a stage under way then is cut off")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "gpu")
    parser.add_argument("--work-dir", type=Path, default=Path(tempfile.gettempdir()) / "mini_trainer_gpu")
    parser.add_argument(
        "--wheels",
        type=Path,
        default=ROOT / "benchmarks" / "wheels",
        help="folder of wheels for packages that Python lacks",
    )
    parser.add_argument("--again", nargs="+", choices=names, default=[], help="stages to run although they have ended")
    parser.add_argument("--tiny", action="store_true", help="models and steps of next to no size, also on a CPU")
    parser.add_argument("--stage", choices=names, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage is None:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the stage under way ends with it
        return run_stages(args)
    stage = next(stage for stage in STAGES if stage.name == args.stage)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    found = args.results / "found.json"
    stage.run(Setup(args.work_dir, args.results, args.tiny), lambda so_far: found.write_text(json.dumps(so_far)))


if __name__ == "__main__":
    main()
