"""Bytes and launches of a training step by part, with and without what GPUs add to the eager code; no GPU is needed.

    OMP_NUM_THREADS=1 python benchmarks/step_bytes.py > benchmarks/results/step_bytes.txt

Runs a block, an update and the loss on tensors without content, counts what every operation that computes reads and
writes, and multiplies. Kernels read their inputs and write their outputs once. Milliseconds are a H100's: products at
756 TFLOP/s, all else at 83 % of 2.94 TB/s, as measured; attention at 300 TFLOP/s, which is assumed.
"""

import functools
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import paths  # noqa: F401
import torch
from harness import describe_versions
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, LlamaConfig, LlamaModel, PreTrainedConfig, Qwen2Config, Qwen2Model

from mini_trainer.model.kernels import layers
from mini_trainer.model.kernels.remade import Remaking
from mini_trainer.model.methods import lora_layers
from mini_trainer.model.optim import compact_adamw
from mini_trainer.model.whole_weights import multiply
from mini_trainer.objectives import next_tokens
from mini_trainer.objectives.objective import KernelSwitch

FLOPS, ATTENTION_FLOPS, BYTES = 756e12, 300e12, 0.83 * 2.94e12  # a second
PRODUCTS = ("mm", "addmm", "addmm_", "bmm")
FREE = ("device", "empty", "empty_like", "new_empty", "empty_strided", "detach", "alias", "lift_fresh", "_unsafe_view")
RANK = 16


@dataclass(frozen=True)
class Step:
    """A step on one GPU: micro-batches of `tokens`, in sequences of `length`, of which `trained` have a loss."""

    name: str
    config: PreTrainedConfig
    tokens: int
    micro_batches: int
    length: int
    trained: int
    lora: bool = False
    recomputes: bool = False  # selectively
    is_8bit: bool = False  # moments; then masters are bf16

    @property
    def masters(self) -> torch.dtype:
        return torch.bfloat16 if self.is_8bit else torch.float32


QWEN = Qwen2Config(
    hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2,
    vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip
LLAMA = LlamaConfig(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256,
)  # fmt: skip
STEPS = (
    Step("1.5B, AdamW", QWEN, 16384, 3, 180, 7100),
    Step("8B, adamw8bit, bf16 masters, selective recomputation", LLAMA, 4096, 8, 4096, 4055, recomputes=True,
         is_8bit=True),
    Step("8B, LoRA", LLAMA, 8192, 4, 4096, 8110, lora=True),
)  # fmt: skip


class Counts(TorchDispatchMode):
    """Counts bytes, launches and seconds by part: matrix products, attention, and `rest`."""

    current: "Counts"

    def __init__(self, rest: str = "the rest of the blocks") -> None:
        super().__init__()
        self.rest, self.rows = rest, defaultdict(lambda: np.zeros(3))

    def __enter__(self) -> "Counts":
        Counts.current = self
        return super().__enter__()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if function.is_view or name in FREE:
            return out
        given, made = find_tensors((args, kwargs)), find_tensors(out)
        if name in PRODUCTS:
            left, right = given[-2:]
            copied = 2 * count_bytes(made) if name == "addmm" and given[0].ndim == 2 else 0  # into the output, first
            self.add("products", [*given, *made], flops=2 * left.numel() * right.shape[-1], extra=copied)
        else:
            self.add(self.rest, [*given, *made])
        return out

    def add(
        self, part: str, tensors: list[Tensor], *, flops: float = 0.0, extra: float = 0.0, rate: float = FLOPS
    ) -> None:
        size = count_bytes(tensors) + extra
        self.rows[part] += (size, 1, max(size / BYTES, flops / rate))


def find_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def count_bytes(tensors: list[Tensor]) -> int:
    """Bytes of the memory behind tensors: an expanded dimension counts once."""
    sizes = [
        each.itemsize * functools.reduce(lambda n, i: n * each.shape[i] if each.stride(i) else n, range(each.ndim), 1)
        for each in tensors
    ]
    return sum(sizes)


class Attention(torch.autograd.Function):
    """FlashAttention's bytes and FLOPs, of the causal half, 3.5 times as many in both directions together."""

    @staticmethod
    def forward(ctx: Any, length: int, *inputs: Tensor) -> Tensor:
        query = inputs[0]  # (1, H, T, D)
        ctx.flops = 2 * query.numel() * length
        ctx.save_for_backward(*inputs)
        out = torch.empty_like(query.transpose(1, 2))
        Counts.current.add("attention", [*inputs, out], flops=ctx.flops, rate=ATTENTION_FLOPS)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        made = [torch.empty_like(each) for each in ctx.saved_tensors]
        moved = [*ctx.saved_tensors, d_out, d_out, *made]
        Counts.current.add("attention", moved, flops=2.5 * ctx.flops, rate=ATTENTION_FLOPS)
        return None, *made


Simulated = layers.Simulated


class Kernel(Simulated):
    """A kernel's bytes: it reads its inputs and writes its outputs."""

    @staticmethod
    def forward(ctx: Any, kernel: str, *inputs: Tensor) -> Any:
        outputs = Simulated.forward(ctx, kernel, *inputs)
        Counts.current.add(Counts.current.rest, [*inputs, *find_tensors(outputs)])
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        made = Simulated.backward(ctx, *gradients)
        Counts.current.add(Counts.current.rest, [*ctx.saved_tensors, *gradients, *find_tensors(made)])
        return made


class Adapted(nn.Module):
    """What `lora_layers` reads of peft's layers."""

    disable_adapters = False

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.scaling = base.requires_grad_(False), {lora_layers.ADAPTER: 2.0}
        shape = dict(bias=False, dtype=base.weight.dtype)
        self.lora_A = nn.ModuleDict({lora_layers.ADAPTER: nn.Linear(base.in_features, RANK, **shape)})
        self.lora_B = nn.ModuleDict({lora_layers.ADAPTER: nn.Linear(RANK, base.out_features, **shape)})
        self.forward = functools.partial(lora_layers.multiply, self, lora_layers.ADAPTER)


Rows = dict[str, np.ndarray]  # bytes, launches and seconds by part


def run_block(step: Step, *, is_fused: bool) -> Rows:
    """A block's forward and backward in one micro-batch, with its gradients added to those so far."""
    config = type(step.config)(**step.config.to_dict() | dict(num_hidden_layers=1, vocab_size=64, layer_types=None))
    config._attn_implementation = "counted"
    AttentionInterface.register(
        "counted", lambda module, q, k, v, mask, **kwargs: (Attention.apply(step.length, q, k, v), None)
    )
    model = (Qwen2Model if isinstance(config, Qwen2Config) else LlamaModel)._from_config(config, dtype=torch.bfloat16)
    block = model.layers[0]
    hidden = torch.empty(1, step.tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    angles = model.rotary_emb(hidden, torch.arange(step.tokens)[None])
    if is_fused:
        with unset_fake_temporarily():
            layers.apply_kernels(model, model.layers)
    if step.lora:
        block.requires_grad_(False)
        for parent in (block.self_attn, block.mlp):
            for name, layer in list(parent.named_children()):
                if isinstance(layer, nn.Linear):
                    setattr(parent, name, Adapted(layer))
        if is_fused:
            lora_layers.share_inputs(block.modules(), adapter=lora_layers.ADAPTER)
    elif is_fused:
        for layer in [module for module in block.modules() if isinstance(module, nn.Linear)]:
            total = torch.empty_like(layer.weight, dtype=step.masters)
            layer.forward = functools.partial(multiply, layer, functools.partial(add_by_product, total))
    if is_fused and step.recomputes:
        block.forward = Remaking(functools.partial(checkpoint, block.forward), KernelSwitch(), lambda dtype: True)
    with Counts() as forward:
        out = block(hidden, position_embeddings=angles)
    with Counts() as backward:
        out.backward(torch.empty_like(out))
    with Counts("gradients added") as added:
        for param in block.parameters():
            if param.grad is not None:
                torch.empty_like(param, dtype=step.masters).add_(param.grad)
    again = {forward.rest: forward.rows[forward.rest]} if step.recomputes and not is_fused else {}
    return add_up(forward.rows, again, backward.rows, added.rows)


def add_by_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    flops = 2 * left.numel() * right.shape[-1]
    Counts.current.add("products", [left, right, total, total], flops=flops)


def run_loss(step: Step, *, is_fused: bool) -> Rows:
    """The loss of a micro-batch, chunk by chunk. Fused, logits are read twice and their gradients written once."""
    hidden = torch.empty(step.trained, step.config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    head = torch.empty(step.config.vocab_size, hidden.shape[1], dtype=torch.bfloat16, requires_grad=not step.lora)
    targets = torch.zeros(step.trained, dtype=torch.int64)
    with Counts("loss") as counts:
        next_tokens.sum_token_loss(next_tokens.TrainedTokens(hidden, head, targets=targets)).sum().backward()
    if is_fused:
        chunks = next_tokens.iterate_chunks(step.trained, step.config.vocab_size)
        size = 3 * 2 * step.trained * step.config.vocab_size
        counts.rows["loss"] = np.array([size, 2 * len(chunks), size / BYTES])
    return counts.rows


def run_update(step: Step, *, is_fused: bool) -> Rows:
    """The update of one matrix, a weight."""
    shape = (4096, 14336)
    weight, gradient = (torch.empty(shape, dtype=step.masters) for _ in range(2))
    codes, scales = torch.empty(2, *shape, dtype=torch.uint8), torch.empty(2, shape[0], shape[1] // 256)
    state = dict(exp_avg_codes=codes[0], exp_avg_root_codes=codes[1], exp_avg_scales=scales[0],
                 exp_avg_root_scales=scales[1])  # fmt: skip
    if not step.is_8bit:
        state = dict(exp_avg=torch.empty(shape), exp_avg_sq=torch.empty(shape))
    with Counts("update") as counts:
        if is_fused or not step.is_8bit:  # one launch; torch's fused AdamW takes all of fp32 at once
            counts.add("update", [gradient, *[weight, *state.values()] * 2])
        else:
            group = dict(betas=(0.9, 0.95), step=3, eps=1e-8, lr=1e-4, weight_decay=0.1)
            rounding = compact_adamw.Rounding(torch.Generator())
            compact_adamw.update_rows(weight, gradient.float(), state, group, rounding)
    size, launches, seconds = counts.rows["update"] / weight.numel()
    return {"update": np.array([size, launches, seconds])}


def add_up(*all_rows: Rows) -> Rows:
    total: Rows = defaultdict(lambda: np.zeros(3))
    for rows in all_rows:
        for part, row in rows.items():
            total[part] = total[part] + row
    return total


def scale(rows: Rows, times: float) -> Rows:
    return {part: row * times for part, row in rows.items()}


def run_step(step: Step, *, is_fused: bool) -> Rows:
    config, parts = step.config, []
    parts.append(scale(run_block(step, is_fused=is_fused), config.num_hidden_layers * step.micro_batches))
    parts.append(scale(run_loss(step, is_fused=is_fused), step.micro_batches))
    if not step.lora:
        size, launches, seconds = run_update(step, is_fused=is_fused)["update"]
        heads = config.num_attention_heads + config.num_key_value_heads
        head_size = config.hidden_size // config.num_attention_heads
        matrices = [config.hidden_size * head_size * 2 * heads, 3 * config.hidden_size * config.intermediate_size]
        embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
        num_weights = config.num_hidden_layers * sum(matrices) + embeddings
        num_tensors = 9 * config.num_hidden_layers + 3
        per_tensor = launches * 4096 * 14336 if step.is_8bit else 1 / num_tensors
        parts.append({"update": np.array([size * num_weights, per_tensor * num_tensors, seconds * num_weights])})
    return add_up(*parts)


def main() -> None:
    print(describe_versions("torch", "transformers"))
    layers.Simulated = Kernel
    for step in STEPS:
        results = []
        for is_fused in (False, True):
            # Before, LoRA's last product was out of place.
            lora_layers._get_current_dispatch_mode = lambda is_fused=is_fused: None if is_fused else Counts.current
            with FakeTensorMode(), torch.autograd.set_multithreading_enabled(False):
                results.append(run_step(step, is_fused=is_fused))
        before, after = results
        print(f"\n{step.name}: {step.micro_batches} micro-batches of {step.tokens:,} tokens")
        print(f"{'':24}{'GB':>10}{'launches':>12}{'ms':>10}{'GB':>12}{'launches':>12}{'ms':>10}")
        rows = {part: (before[part], after.get(part, np.zeros(3))) for part in before}
        rows["together"] = tuple(sum(each) for each in zip(*rows.values(), strict=True))
        for part, (old, new) in rows.items():
            cells = [f"{each[0] / 1e9:>{width}.1f}{each[1]:>12,.0f}{each[2] * 1e3:>10.1f}"
                     for each, width in ((old, 10), (new, 12))]  # fmt: skip
            print(f"{part:24}{''.join(cells)}")


if __name__ == "__main__":
    main()
