"""What loading a quantized release costs each rank: memory at its peak; written to results/quantized_loading.txt.

    python benchmarks/quantized_loading.py --work-dir /tmp/loading

writes random releases of about a billion parameters, one in MXFP4 (gpt-oss' shape, narrower) and one in fp8 by blocks
(Qwen3's shape); loads and shards each on 2 ranks on the CPU, as train.py does, and once more in one process by
transformers, which dequantizes the whole model in memory. Removes them.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, GptOssConfig, Mxfp4Config, Qwen3Config

sys.path.insert(0, str(Path(__file__).parent.parent))
from harness import build, describe_versions, make_options, read_status, watch_memory
from loading import NUM_FILES, drop_from_cache, write_weights

from ranks.world import init_world

COMMON = dict(vocab_size=64_000, max_position_embeddings=4096, dtype="bfloat16", tie_word_embeddings=True)
CONFIGS = {
    "mxfp4": GptOssConfig(
        **COMMON, hidden_size=1024, intermediate_size=1024, num_hidden_layers=17, num_attention_heads=16, head_dim=64,
        num_key_value_heads=4, num_local_experts=16, num_experts_per_tok=4,
    ),
    "fp8": Qwen3Config(
        **COMMON, hidden_size=2048, intermediate_size=6144, num_hidden_layers=18, num_attention_heads=16, head_dim=128,
        num_key_value_heads=8,
    ),
}  # fmt: skip
SETTINGS = {
    "mxfp4": {"quant_method": "mxfp4"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
DEQUANTIZE = {"mxfp4": Mxfp4Config(dequantize=True), "fp8": FineGrainedFP8Config(dequantize=True)}
BLOCK = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--num-layers", type=int, default=None, help="fewer for a quick look, which writes nothing")
    parser.add_argument("--machine", default="unnamed", help="what this machine is, for the report")
    args = parser.parse_args()
    lines = [
        "Loading quantized releases: as train.py does it on 2 gloo ranks, fp32 master weights, and by transformers",
        f"$ python {shlex.join(sys.argv)}",
        f"{args.machine}; {describe_versions('torch', 'transformers', 'safetensors')}",
    ]
    for kind in CONFIGS:
        lines += ["", *measure_kind(kind, args.work_dir / kind, num_layers=args.num_layers)]
    lines += [
        "",
        "GB of 10^9 bytes. anon: RssAnon, memory of the process's own, its peak sampled every 10 ms, and what is left",
        "when the model is there. above what stays: the peak less what is left, what reading costs for a while.",
    ]
    report = "\n".join(lines) + "\n"
    print(report)
    if args.num_layers is None:
        (Path(__file__).parent / "results" / "quantized_loading.txt").write_text(report)


def measure_kind(kind: str, path: Path, *, num_layers: int | None) -> list[str]:
    """Lines of the report; the release is written first, and removed."""
    num_bytes, num_params = write_release(kind, path, num_layers=num_layers)
    lines = [
        f"{kind}: {num_params:,} parameters, {num_bytes / 1e9:.2f} GB in {NUM_FILES} files;"
        f" in bf16 {2 * num_params / 1e9:.2f} GB, in fp32 {4 * num_params / 1e9:.2f} GB",
        f"{'':28}{'rank':>5}{'anon peak':>11}{'anon after':>12}{'above what stays':>18}{'CPU s':>8}{'wall s':>8}",
    ]
    root = Path(__file__).parent.parent
    env = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    for mode, num_ranks in (("train.py, 2 ranks", 2), ("transformers, whole, bf16", 1)):
        for name in path.glob("*.safetensors"):
            drop_from_cache(name)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}",
                   __file__, "--worker", kind, str(path), mode]  # fmt: skip
        subprocess.run(command, check=True, cwd=root, env=env)
        for rank in range(num_ranks):
            row = json.loads((path / f"rank_{rank}.json").read_text())
            lines.append(
                f"{mode if rank == 0 else '':28}{rank:>5}{row['peak']:>11.2f}{row['after']:>12.2f}"
                f"{row['peak'] - row['after']:>18.2f}{row['cpu']:>8.1f}{row['wall']:>8.1f}"
            )
    shutil.rmtree(path)
    return lines


def write_release(kind: str, path: Path, *, num_layers: int | None) -> tuple[int, int]:
    """Random numbers in the form of the kind, a file at a time; bytes and parameters."""
    config = CONFIGS[kind]
    if num_layers is not None:
        config.num_hidden_layers = num_layers
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    path.mkdir(parents=True, exist_ok=True)
    written = json.loads(config.to_json_string()) | {"quantization_config": SETTINGS[kind]}
    (path / "config.json").write_text(json.dumps(written))
    params = list(model.named_parameters())
    num_bytes = write_weights(path, params, lambda name, shape: quantize_random(kind, name, shape))
    return num_bytes, sum(param.numel() for _, param in params)


def quantize_random(kind: str, name: str, shape: torch.Size) -> dict[str, torch.Tensor]:
    """The tensors that stand for one random weight."""
    if kind == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
        num_experts, num_inputs, num_outputs = shape
        groups = (num_experts, num_outputs, num_inputs // 32)
        return {
            f"{name}_blocks": torch.randint(0, 256, (*groups, 16), dtype=torch.uint8),
            f"{name}_scales": torch.randint(116, 120, groups, dtype=torch.uint8),
        }
    if kind == "fp8" and name.endswith("proj.weight"):
        grid = [-(-length // BLOCK) for length in shape]
        return {name: torch.randn(shape).to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.rand(grid) * 0.02}
    return {name: torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02)}


def run_worker(kind: str, path: str, mode: str) -> None:
    """One rank: loads the model, and writes what it took."""
    world = init_world()
    options = make_options(activation_checkpointing="none", compute_dtype="float32")
    cpu, wall = time.process_time(), time.monotonic()
    with watch_memory() as peak:
        if mode.startswith("train.py"):
            model = build(path, options, world)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.bfloat16, quantization_config=DEQUANTIZE[kind], device_map="cpu"
            )
    assert all(param.device.type == "cpu" for param in model.parameters())
    row = dict(peak=peak[0], after=read_status("RssAnon"), cpu=time.process_time() - cpu, wall=time.monotonic() - wall)
    (Path(path) / f"rank_{world.rank}.json").write_text(json.dumps(row))
    torch.distributed.barrier()
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        run_worker(*sys.argv[2:])
    else:
        main()
