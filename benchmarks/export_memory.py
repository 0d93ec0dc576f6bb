"""What an export costs rank 0: seconds, and CPU memory beside the model; kept in results/export_memory.txt.

    OMP_NUM_THREADS=1 nice python benchmarks/export_memory.py --work-dir /tmp/export --against OTHER_CHECKOUT

writes a random model of Qwen2.5-1.5B's shape with fewer layers in bf16, loads it on the CPU as train.py does, in one
process and with weights in fp32, and exports it in bf16, --repeats times by this code and by the other checkout's in
turn, each in a process of its own.

above: the peak of RssAnon, memory of the process's own, sampled every 10 ms, less what it was before the export, which
is the model that trains.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import GenerationConfig

MEASURED = "MEASURED_CHECKOUT"  # an environment variable: the directory whose code is measured, in a process of its own
ROOT = Path(os.environ.get(MEASURED, Path(__file__).resolve().parent.parent))
sys.path[:0] = [str(ROOT), str(ROOT / "quickstart"), str(ROOT / "benchmarks")]
from harness import build, describe_versions, make_options, read_status, watch_memory
from loading import write_model
from make_tiny_model import train_tokenizer

from families.text import TextFamily
from lifecycle import export
from methods.full import Full
from model.config import ModelSource, load_config
from objectives.next_tokens import CausalLM
from ranks.world import init_world


def measure(work_dir: Path, file_bytes: int) -> dict[str, float | str]:
    """Loads and exports the model in `work_dir`: seconds, GB, and a digest of all files of weights and their hashes."""
    export.MAX_SHARD_BYTES = file_bytes
    world, objective, model_dir = init_world(), CausalLM(), str(work_dir / "model")
    options = make_options(activation_checkpointing="none", compute_dtype="float32")
    model = build(model_dir, options, world)
    source = ModelSource(model_dir, load_config(model_dir, TextFamily()))
    tokenizer = train_tokenizer([], vocab_size=288)
    parts = export.ExportParts(objective.family, Full(), GenerationConfig(), tokenizer, torch.bfloat16, source)
    at_start, cpu, wall = read_status("RssAnon"), time.process_time(), time.monotonic()
    with watch_memory() as peak:
        export.export_model(model, work_dir / "export", parts, world=world)
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    files = json.loads((work_dir / "export" / "manifest.json").read_text())["files"]
    digest = hashlib.sha256()
    for file in sorted((work_dir / "export").glob("*.safetensors")):
        with file.open("rb") as opened:
            own = hashlib.file_digest(opened, "sha256")
        assert own.hexdigest() == files[file.name]["sha256"], f"{file.name} has another hash in the manifest"
        digest.update(own.digest())
    shutil.rmtree(work_dir / "export")
    return {
        "wall": wall,
        "cpu": cpu,
        "above": peak[0] - at_start,
        "before": at_start,
        "digest": digest.hexdigest()[:16],
    }


def measure_apart(checkout: Path, args: argparse.Namespace) -> dict[str, float | str]:
    """Measures a checkout's code in a new process."""
    argv = [sys.executable, __file__, "--work-dir", args.work_dir, "--file-gb", args.file_gb]
    env = os.environ | {MEASURED: str(checkout)}
    result = subprocess.run([*map(str, argv)], env=env, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def describe(name: str, runs: list[dict[str, float | str]]) -> str:
    medians = {key: statistics.median(run[key] for run in runs) for key in ("wall", "cpu", "above", "before")}
    (digest,) = {run["digest"] for run in runs}
    walls = ", ".join(f"{run['wall']:.1f}" for run in runs)
    return (
        f"{name:8} {medians['wall']:6.1f} s ({walls}); {medians['cpu']:5.1f} CPU s; {medians['above']:.2f} GB above"
        f" {medians['before']:.2f} GB; SHA-256 {digest}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--num-layers", type=int, default=16)
    parser.add_argument("--file-gb", type=float, default=5.0, help="size of a file of weights")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--against", type=Path, help="another checkout, to export by its code too")
    args = parser.parse_args()
    if MEASURED in os.environ:
        print(json.dumps(measure(args.work_dir, int(args.file_gb * 1e9))))
        return
    torch.manual_seed(0)
    num_bytes, num_params = write_model(args.work_dir / "model", num_layers=args.num_layers)
    print(describe_versions("torch", "transformers", "safetensors"))
    print(f"{num_params / 1e9:.2f} billion parameters, {num_bytes / 1e9:.2f} GB in bf16, in files of {args.file_gb} GB")
    checkouts = {"this": ROOT} if args.against is None else {"against": args.against.resolve(), "this": ROOT}
    runs: dict[str, list[dict[str, float | str]]] = {name: [] for name in checkouts}
    for _ in range(args.repeats):
        for name, checkout in checkouts.items():
            runs[name].append(measure_apart(checkout, args))
    for name, measured in runs.items():
        print(describe(name, measured))
    if args.against is not None:
        ratios = [statistics.median(a[key] / b[key] for a, b in zip(runs["this"], runs["against"], strict=True))
                  for key in ("wall", "cpu")]  # fmt: skip
        print("this / against, median of the pairs: {:.2f} x the seconds, {:.2f} x the CPU seconds".format(*ratios))
    shutil.rmtree(args.work_dir)


if __name__ == "__main__":
    main()
