"""What loading a model costs each rank: memory at its peak, bytes read, seconds; written to results/loading.txt.

    python benchmarks/loading.py --work-dir /tmp/loading

writes a random model of the shape of Qwen2.5-1.5B in bf16 (3.1 GB, in four files), loads and shards it on 2 ranks on
the CPU, as train.py does, and once more with the whole model read on rank 0 first; removes the model.
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen2Config

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from harness import build, describe_versions, make_options, read_status, watch_memory
from op_recording import CollectiveCounter

from model import weights
from ranks.world import init_world

NUM_FILES = 4
SHAPE = dict(
    vocab_size=151_936,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    max_position_embeddings=32_768,
    tie_word_embeddings=True,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--num-ranks", type=int, default=2)
    parser.add_argument("--num-layers", type=int, default=SHAPE["num_hidden_layers"], help="fewer for a quick look")
    parser.add_argument("--machine", default="unnamed", help="what this machine is, for the report")
    args = parser.parse_args()
    model_dir = args.work_dir / "model"
    torch.manual_seed(0)
    num_bytes, num_params = write_model(model_dir, num_layers=args.num_layers)
    lines = [
        f"Loading {num_params:,} parameters, {num_bytes:,} bytes in {NUM_FILES} files, on {args.num_ranks} gloo ranks",
        f"$ python {shlex.join(sys.argv)}",
        f"{args.machine}; {describe_versions('torch', 'transformers', 'safetensors')}",
        f"fp32 state of a rank once sharded: {4 * num_params / args.num_ranks / 1e9:.2f} GB",
        "",
        f"{'':18}{'tensors':>18}{'rank':>5}{'at start':>10}{'anon peak':>11}{'RSS peak':>10}{'anon after':>12}"
        f"{'read':>8}{'sent':>8}{'CPU s':>8}{'wall s':>8}",
    ]  # fmt: skip
    for mode in ("tensor by tensor", "whole on rank 0"):
        for name in sorted(model_dir.glob("*.safetensors")):
            drop_from_cache(name)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.num_ranks}",
                   __file__, "--worker", str(model_dir), mode]  # fmt: skip
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, cwd=ROOT, env=env)
        for rank in range(args.num_ranks):
            row = json.loads((model_dir / f"rank_{rank}.json").read_text())
            lines.append(
                f"{mode if rank == 0 else '':18}{row['tensors']:>18}{rank:>5}{row['start']:>10.2f}"
                f"{row['anon_peak']:>11.2f}{row['rss_peak']:>10.2f}{row['anon_after']:>12.2f}{row['read']:>8.2f}{row['sent']:>8.2f}"
                f"{row['cpu']:>8.1f}{row['wall']:>8.1f}"
            )
    shutil.rmtree(model_dir)
    lines += [
        "",
        "GB of 10^9 bytes. at start: resident before loading (libraries); anon: RssAnon, memory of the process's own,",
        "its peak sampled every 10 ms; RSS peak: VmHWM, which counts pages of the mapped files too: they are the page",
        "cache's, and the kernel takes them back when it needs them; read: bytes that came from the disk; sent: bytes",
        "that rank 0 broadcasts. tensors: SHA-256 of a rank's shards, the same however they were loaded.",
    ]
    report = "\n".join(lines) + "\n"
    print(report)
    (Path(__file__).parent / "results" / "loading.txt").write_text(report)


def write_model(path: Path, *, num_layers: int) -> tuple[int, int]:
    """Writes the random model, a file at a time; its bytes and number of parameters."""
    config = Qwen2Config(**SHAPE | dict(num_hidden_layers=num_layers), dtype="bfloat16")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    path.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(path)
    params = list(model.named_parameters())
    num_bytes = write_weights(
        path, params, lambda name, shape: {name: torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02)}
    )
    return num_bytes, sum(p.numel() for _, p in params)


def write_weights(
    path: Path, params: list[tuple[str, torch.Tensor]], make: Callable[[str, torch.Size], dict[str, torch.Tensor]]
) -> int:
    """Writes what `make` gives for each parameter, a file at a time, all on the disk; its bytes."""
    weight_map = {}
    for i in range(NUM_FILES):
        file = f"model-{i + 1:05}-of-{NUM_FILES:05}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for name, param in params[i::NUM_FILES]:
            tensors |= make(name, param.shape)
        save_file(tensors, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        with (path / file).open("rb") as written:
            os.fsync(written.fileno())
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def drop_from_cache(file: Path) -> None:
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_from_disk() -> float:
    text = Path("/proc/self/io").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("read_bytes:")) / 1e9


def hash_shards(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.to_local().detach().numpy())
    return digest.hexdigest()[:16]


def run_worker(model_dir: str, mode: str) -> None:
    """One rank: loads and shards the model, and writes what it took."""
    world = init_world()
    if mode == "whole on rank 0":

        def refuse(*args: object, **kwargs: object) -> None:
            raise NotImplementedError

        weights.plan_reading = refuse
    options = make_options(activation_checkpointing="none", compute_dtype="float32")
    start, read, cpu, wall = read_status("VmRSS"), read_from_disk(), time.process_time(), time.monotonic()
    with watch_memory() as peak, CollectiveCounter() as counted:
        model = build(model_dir, options, world)
    row = dict(
        start=start, anon_peak=peak[0], rss_peak=read_status("VmHWM"), anon_after=read_status("RssAnon"),
        read=read_from_disk() - read, cpu=time.process_time() - cpu, wall=time.monotonic() - wall,
        sent=counted.collective_bytes["broadcast"] / 1e9, tensors=hash_shards(model),
    )  # fmt: skip
    assert all(param.device.type == "cpu" for param in model.parameters())
    (Path(model_dir) / f"rank_{world.rank}.json").write_text(json.dumps(row))
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        run_worker(*sys.argv[2:])
    else:
        main()
