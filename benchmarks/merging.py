"""Peak memory of tools/merge_models.py on two random models in bf16 (Qwen2.5-1.5B's shape), files of 4 parts each.

    OMP_NUM_THREADS=1 nice python benchmarks/merging.py --work-dir /tmp/merging

anon: RssAnon, memory of the process's own, its peak sampled every 10 ms; RSS: VmHWM, which counts pages of the mapped
files too: they are the page cache's, and the kernel takes them back when it needs them.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen2Config

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "quickstart")]
from harness import describe_versions, read_status, watch_memory
from loading import SHAPE, write_weights
from make_tiny_model import train_tokenizer

from options import MergeModelsOptions
from tools.merge_models import merge_models

BLOCK = 1 << 22  # random numbers that are repeated: what they are changes nothing here


def write_model(path: Path, *, num_layers: int, seed: int) -> tuple[int, int]:
    """A random model; its bytes and parameters."""
    config = Qwen2Config(**SHAPE | dict(num_hidden_layers=num_layers), dtype="bfloat16")
    with torch.device("meta"):
        params = list(AutoModelForCausalLM.from_config(config).named_parameters())
    config.save_pretrained(path)
    train_tokenizer([], vocab_size=288).save_pretrained(path)
    block = torch.empty(BLOCK, dtype=torch.bfloat16).normal_(0, 0.02, generator=torch.Generator().manual_seed(seed))

    def make(name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
        return {name: block.repeat(-(-shape.numel() // BLOCK))[: shape.numel()].view(shape).clone()}

    return write_weights(path, params, make), sum(param.numel() for _, param in params)


def merge(work_dir: Path) -> None:
    """In a process that has done nothing else."""
    options = MergeModelsOptions(
        model=(str(work_dir / "first"), str(work_dir / "second")), weights=(0.25, 0.75),
        output_dir=str(work_dir / "mixed"),
    )  # fmt: skip
    at_start, start = read_status("RssAnon"), time.process_time()
    with watch_memory() as peak:
        merge_models(options)
    sizes = [f"{file.stat().st_size / 1e9:.2f}" for file in sorted((work_dir / "mixed").glob("*.safetensors"))]
    print(
        f"anon at start {at_start:.2f} GB, peak {peak[0]:.2f} GB; RSS peak {read_status('VmHWM'):.2f} GB;"
        f" {time.process_time() - start:.0f} CPU s; files written: {', '.join(sizes)} GB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--num-layers", type=int, nargs="+", default=[8, 28])
    parser.add_argument("--merge", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.merge:
        merge(args.work_dir)
        return
    print(describe_versions("torch", "safetensors"))
    for num_layers in args.num_layers:
        for seed, name in enumerate(("first", "second")):
            num_bytes, num_params = write_model(args.work_dir / name, num_layers=num_layers, seed=seed)
        print(f"{num_params / 1e9:.2f} billion parameters, {num_bytes / 1e9:.2f} GB each of 2:", flush=True)
        subprocess.run([sys.executable, __file__, "--work-dir", str(args.work_dir), "--merge"], check=True)
        shutil.rmtree(args.work_dir)


if __name__ == "__main__":
    main()
