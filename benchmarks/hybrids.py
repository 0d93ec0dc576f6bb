"""A step of models whose layers have a state: mixers once a sequence in packed rows, against transformers with padding.

    OMP_NUM_THREADS=1 python benchmarks/hybrids.py --num-samples 32

makes a random model of each kind, and one batch of samples whose lengths are log-normal as those of chats. Forward and
backward of the batch, in fp32: packed into rows as train.py does; by transformers in micro-batches as drawn; and by
transformers in micro-batches of samples of like length, which a trainer that draws at random cannot have. Each is
measured `--num-rounds` times, in turns; the number is the least of the process's own seconds (CPU), the loss is to
agree.
"""

import argparse
import tempfile

import numpy as np
import paths  # noqa: F401
import torch
import torch.distributed as dist
from harness import build, describe_versions, make_options, pack_sequences, pad_samples, time_call
from transformers import AutoModelForCausalLM, Lfm2Config, NemotronHConfig, PreTrainedConfig, Qwen3_5TextConfig
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from mini_trainer.batch_packer import pack_batch
from mini_trainer.distributed.world import init_world, setup_logging

SHAPE = dict(vocab_size=8000, hidden_size=256, intermediate_size=768, num_attention_heads=4, num_key_value_heads=2)
KINDS: dict[str, PreTrainedConfig] = {
    "gated delta net (Qwen3.5)": Qwen3_5TextConfig(
        **SHAPE, head_dim=64, num_hidden_layers=4, layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
    ),
    "Mamba 2 (Nemotron-H)": NemotronHConfig(
        **SHAPE, head_dim=64, layers_block_type=["mamba", "mlp", "mamba", "mlp", "attention", "mlp"],
        mamba_num_heads=8, mamba_head_dim=64, ssm_state_size=64, n_groups=1, chunk_size=64,
    ),
    "short convolution (LFM2)": Lfm2Config(
        **SHAPE, num_hidden_layers=6, layer_types=["conv", "conv", "full_attention"] * 2,
        block_auto_adjust_ff_dim=False,
    ),
}  # fmt: skip


def draw_samples(num_samples: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(5, 0.6, num_samples), 8, 800).astype(int)
    return [random.integers(3, SHAPE["vocab_size"], length) for length in lengths]


def step_packed(model, samples: list[np.ndarray], *, max_tokens: int) -> float:
    """The summed loss of the batch, whose gradients it leaves."""
    lengths, total = np.array([len(ids) for ids in samples]), 0.0
    for (row,) in pack_batch(lengths, max_tokens, 1, 0.0):
        loss = model(pack_sequences([samples[i] for i in row])).loss
        loss.backward()
        total += loss.item()
    model.zero_grad()
    return total


def step_padded(model, samples: list[np.ndarray], *, size: int) -> float:
    total = 0.0
    for start in range(0, len(samples), size):
        group = [{"input_ids": ids, "labels": ids} for ids in samples[start : start + size]]
        padded = pad_samples(group, model.device)
        targets = padded.pop("labels")[:, 1:]
        logits = model(**padded, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()
        total += loss.item()
    model.zero_grad()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--micro-batch-size", type=int, default=8, help="samples of a padded micro-batch")
    parser.add_argument("--max-tokens", type=int, default=2048, help="tokens of a packed row")
    parser.add_argument("--num-rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    args = parser.parse_args()
    setup_logging("ERROR")
    set_verbosity_error()
    disable_progress_bar()
    world, samples = init_world(), draw_samples(args.num_samples)
    num_tokens, size = sum(map(len, samples)), args.micro_batch_size
    alike = sorted(samples, key=len)
    print(
        f"{describe_versions('torch', 'transformers')}, {world.device.type}, fp32; {len(samples)} samples,"
        f" {num_tokens:,} tokens; packed rows of at most {args.max_tokens}, padded micro-batches of {size}\n\n"
        "| kind | packed, s | padded, s | padded by length, s | packed / padded | packed / by length |\n"
        "|---|---|---|---|---|---|"
    )
    for kind in args.kinds:
        with tempfile.TemporaryDirectory() as directory:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(KINDS[kind], dtype=torch.float32).save_pretrained(directory)
            ours = build(directory, make_options(activation_checkpointing="none"), world)
            theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train().to(world.device)
        steps = {
            "packed": lambda ours=ours: step_packed(ours, samples, max_tokens=args.max_tokens),
            "padded": lambda theirs=theirs: step_padded(theirs, samples, size=size),
            "by length": lambda theirs=theirs: step_padded(theirs, alike, size=size),
        }
        losses = {name: step() / num_tokens for name, step in steps.items()}
        assert max(losses.values()) - min(losses.values()) <= 1e-4 * losses["padded"], losses
        rounds = [{name: time_call(step, world.device) for name, step in steps.items()} for _ in range(args.num_rounds)]
        packed, padded, by_length = (min(times[name] for times in rounds) for name in steps)
        print(
            f"| {kind} | {packed:.2f} | {padded:.2f} | {by_length:.2f} | {packed / padded:.2f}"
            f" | {packed / by_length:.2f} |",
            flush=True,
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
