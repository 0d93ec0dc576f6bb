"""What rank 0 holds in CPU memory while a model is exported; the output is kept in results/export_memory.txt.

    OMP_NUM_THREADS=1 nice python benchmarks/export_memory.py --work-dir /tmp/export

writes a random model of Qwen2.5-1.5B's shape with fewer layers in bf16, loads it on the CPU as train.py does, in one
process and with weights in fp32, and exports it in bf16.

above: the peak of RssAnon, memory of the process's own, sampled every 10 ms, less what it was before the export, which
is the model that trains.
"""

import argparse
import hashlib
import shutil
import sys
import time
from pathlib import Path

import torch
from transformers import GenerationConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "quickstart")]
from harness import build, describe_versions, make_options, read_status, watch_memory
from loading import write_model
from make_tiny_model import train_tokenizer

from families.text import TextFamily
from lifecycle.export import ExportParts, export_model
from methods.full import Full
from model.config import ModelSource, load_config
from objectives.next_tokens import CausalLM
from ranks.world import init_world


def measure(work_dir: Path) -> str:
    """Loads and exports the model in `work_dir`; a line of numbers."""
    world, objective, model_dir = init_world(), CausalLM(), str(work_dir / "model")
    options = make_options(activation_checkpointing="none", compute_dtype="float32")
    model = build(model_dir, options, world)
    source = ModelSource(model_dir, load_config(model_dir, TextFamily()))
    tokenizer = train_tokenizer([], vocab_size=288)
    parts = ExportParts(objective.family, Full(), GenerationConfig(), tokenizer, torch.bfloat16, source)
    at_start, cpu, wall = read_status("RssAnon"), time.process_time(), time.monotonic()
    with watch_memory() as peak:
        export_model(model, work_dir / "export", parts, world=world)
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    files = sorted((work_dir / "export").glob("*.safetensors"))
    sizes = ", ".join(f"{file.stat().st_size / 1e9:.2f}" for file in files)
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    largest = max(param.numel() for param in model.parameters()) * 2
    return (
        f"anon before {at_start:.2f} GB, peak {peak[0]:.2f} GB: {peak[0] - at_start:.2f} GB above; {cpu:.0f} CPU s,"
        f" {wall:.0f} s\nlargest tensor {largest / 1e9:.2f} GB; files of {sizes} GB, SHA-256 {digest.hexdigest()[:16]}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--num-layers", type=int, default=16)
    args = parser.parse_args()
    torch.manual_seed(0)
    num_bytes, num_params = write_model(args.work_dir / "model", num_layers=args.num_layers)
    print(describe_versions("torch", "transformers", "safetensors"))
    print(f"{num_params / 1e9:.2f} billion parameters, {num_bytes / 1e9:.2f} GB in bf16", flush=True)
    print(measure(args.work_dir))
    shutil.rmtree(args.work_dir)


if __name__ == "__main__":
    main()
