"""A model of 128 experts a layer: seconds to plan and read it, and of a step; written to results/experts.txt.

    OMP_NUM_THREADS=1 python benchmarks/experts.py --work-dir /tmp/experts

writes a random Qwen3-MoE of many layers and tiny widths, whose experts are stored apart as in its releases; reads it as
train.py does and with a file opened for each tensor; trains it with transformers' grouped products, which train.py
uses, and with its loop over experts ("eager"), and compares losses and gradients. CPU seconds of one process.
"""

import argparse
import contextlib
import shlex
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).parent.parent))
from harness import build_state, describe_versions, make_batch, make_options

from families.text import TextFamily
from lifecycle.step import TrainState, train_step
from model.config import ModelSource, load_config
from model.weights import read_weights
from pretrained.stored import StoredFiles
from ranks.world import init_world

NUM_EXPERTS, NUM_STEPS = 128, 4
SHAPE = dict(
    vocab_size=1024, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_experts=NUM_EXPERTS, num_experts_per_tok=8, tie_word_embeddings=False,
    max_position_embeddings=4096, dtype="bfloat16",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--num-tokens", type=int, default=2048, help="of a step")
    parser.add_argument("--machine", default="unnamed", help="what this machine is, for the report")
    args = parser.parse_args()
    num_tensors = write_model(args.work_dir, num_layers=args.num_layers)
    lines = [
        f"{NUM_EXPERTS} experts a layer, {args.num_layers} layers, {num_tensors:,} stored tensors in one file",
        f"$ python {shlex.join(sys.argv)}",
        f"{args.machine}; {describe_versions('torch', 'transformers', 'safetensors')}; CPU seconds of one process",
        "",
        *measure_reading(args.work_dir),
        "",
        *measure_steps(args.work_dir, num_tokens=args.num_tokens),
    ]
    shutil.rmtree(args.work_dir)
    report = "\n".join(lines) + "\n"
    print(report)
    (Path(__file__).parent / "results" / "experts.txt").write_text(report)


def write_model(path: Path, *, num_layers: int) -> int:
    """Writes the random model as its releases are; the number of tensors."""
    config = Qwen3MoeConfig(**SHAPE, num_hidden_layers=num_layers)
    config.save_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    width, hidden = SHAPE["moe_intermediate_size"], SHAPE["hidden_size"]
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters() if "experts" not in name}
    for layer in range(num_layers):
        for expert in range(NUM_EXPERTS):
            name = f"model.layers.{layer}.mlp.experts.{expert}"
            shapes |= {f"{name}.{part}_proj.weight": (width, hidden) for part in ("gate", "up")}
            shapes[f"{name}.down_proj.weight"] = (hidden, width)
    tensors = {name: (torch.randn(shape) * 0.1).to(torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return len(tensors)


def measure_reading(path: Path) -> list[str]:
    """Lines on the plan of the reading and on the reading of every tensor."""
    source = ModelSource(str(path), load_config(str(path), TextFamily()))
    seconds = {}
    kept_open = StoredFiles.kept_open
    for mode in ("a file opened once a tensor of experts", "a file opened for each stored tensor"):
        if mode.endswith("stored tensor"):
            StoredFiles.kept_open = lambda self: contextlib.nullcontext()
        start = time.process_time()
        readers = read_weights(source, TextFamily())
        planned = time.process_time()
        for read in readers.values():
            read()
        seconds[mode] = (planned - start, time.process_time() - planned)
    StoredFiles.kept_open = kept_open
    return [
        f"{'':44}{'plan':>8}{'read':>8}",
        *(f"{mode:44}{plan:>8.1f}{read:>8.1f}" for mode, (plan, read) in seconds.items()),
    ]


def measure_steps(path: Path, *, num_tokens: int) -> list[str]:
    """Lines on whole steps with each way to multiply experts; their first losses and gradients are compared."""
    world = init_world()
    options = make_options(activation_checkpointing="none", compute_dtype="float32", learning_rate=1e-4)
    random = np.random.default_rng(0)
    rows = [[random.integers(3, SHAPE["vocab_size"], num_tokens // 8) for _ in range(8)]]
    lines, first = [f"{'':44}{'step':>8}{'loss':>12}{'gradients off by':>18}"], None
    for mode in ("eager", "grouped_mm"):
        state = build_state(path, options, world)
        assert state.model.model.config._experts_implementation == "grouped_mm", "what train.py trains with"
        state.model.model.set_experts_implementation(mode)
        loss, gradients = find_gradients(state, rows)
        first = first or (loss, gradients)
        off = (gradients - first[1]).norm() / first[1].norm()
        seconds = []
        for step in range(NUM_STEPS):
            batch, start = make_batch(rows, step=step, world=world), time.process_time()
            train_step(state, batch, options, lr=1e-4)
            seconds.append(time.process_time() - start)
        lines.append(f"{mode:44}{np.median(seconds):>8.2f}{loss:>12.6f}{off:>18.1e}")
    return [*lines, f"step: median of {NUM_STEPS}, {num_tokens} tokens in 8 sequences, fp32"]


def find_gradients(state: TrainState, rows: list[list[np.ndarray]]) -> tuple[float, torch.Tensor]:
    """The mean loss of a row and all gradients as one vector, which are dropped again."""
    micro_batch = make_batch(rows, world=state.world).micro_batches[0]
    loss_sum = state.model(micro_batch)
    loss_sum.backward()
    gradients = torch.cat([param.grad.full_tensor().flatten() for param in state.model.parameters()])
    state.optimizer.zero_grad()
    return float(loss_sum.detach()) / len(micro_batch.targets.index), gradients


if __name__ == "__main__":
    main()
