"""Muon for matrices between hidden states, AdamW for all else, over FSDP2's shards.

Each matrix's momentum is gathered on one rank, its owner, which computes the nearest orthogonal matrix and sends every
rank its rows. Ranks own matrices of about equal work, one in each round.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

from mini_trainer.distributed.ending import log
from mini_trainer.model.optim.compact_adamw import CompactAdamW, Rounding
from mini_trainer.model.optim.optimizers import AdamW, choose_settings, find_decayed, name_of_file
from mini_trainer.objectives.families.text_tower import text_config
from mini_trainer.options import OptimizationOptions


@dataclass(frozen=True)
class Layout:
    """How the outputs of several matrices lie in one weight: in `num_groups` runs of `sizes` after one another.
    Queries, keys and values in one weight are one run of three sizes; interleaved by heads, a run for each head."""

    sizes: tuple[int, ...] = ()  # outputs of each matrix in a run; none: the weight is one matrix
    num_groups: int = 1
    is_transposed: bool = False  # stored as (inputs, outputs)

    def cut(self, weight: Tensor) -> list[Tensor]:
        """The matrices of `weight` (..., rows, columns), each as (..., outputs, inputs)."""
        weight = weight.mT if self.is_transposed else weight
        if not self.sizes:
            return [weight]
        parts = weight.unflatten(-2, (self.num_groups, sum(self.sizes))).split(self.sizes, dim=-2)
        return [part.flatten(-3, -2) for part in parts]

    def list_shapes(self, weight: Tensor) -> list[torch.Size]:
        """Shapes of its matrices, one expert's if there are several: (outputs, inputs)."""
        return [part.shape for part in self.cut(torch.empty(weight.shape[-2:], device="meta"))]

    def join(self, matrices: list[Tensor]) -> Tensor:
        """The weight that `cut` cuts into these."""
        weight = matrices[0]
        if self.sizes:
            parts = [matrix.unflatten(-2, (self.num_groups, -1)) for matrix in matrices]
            weight = torch.cat(parts, dim=-2).flatten(-3, -2)
        return weight.mT if self.is_transposed else weight


# From the language model's config and the number of the weight's rows.
Maker = Callable[[PreTrainedConfig, int], Layout]


def has_queries_keys_values(config: PreTrainedConfig, num_rows: int) -> Layout:
    num_keys = config.num_key_value_heads * num_rows // (config.num_attention_heads + 2 * config.num_key_value_heads)
    return Layout((num_rows - 2 * num_keys, num_keys, num_keys))


MAKERS: dict[str, Maker] = {
    "single": lambda config, num_rows: Layout(),
    "transposed": lambda config, num_rows: Layout(is_transposed=True),
    "halves": lambda config, num_rows: Layout((num_rows // 2,) * 2),
    "queries, keys, values": has_queries_keys_values,
    "thirds, transposed": lambda config, num_rows: Layout((num_rows,) * 3, is_transposed=True),
    "thirds by heads": lambda config, num_rows: Layout(
        (num_rows // config.num_attention_heads // 3,) * 3, config.num_attention_heads
    ),
    "pairs, transposed": lambda config, num_rows: Layout((1, 1), config.intermediate_size, is_transposed=True),
    "latent and position": lambda config, num_rows: Layout((config.kv_lora_rank, config.qk_rope_head_dim)),
    "keys and values by heads": lambda config, num_rows: Layout(
        (config.qk_nope_head_dim, config.v_head_dim), config.num_attention_heads
    ),
}


def list_single(names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), "single")


ATTENTION, MLP = list_single("q_proj k_proj v_proj o_proj"), list_single("gate_proj up_proj down_proj")
LLAMA = ATTENTION | MLP
EXPERTS = {"gate": "single", "experts.gate_up_proj": "halves", "experts.down_proj": "single"}
LLAMA_LIKE = (
    "llama", "mistral", "ministral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite", "olmo", "olmo2",
    "olmo3", "cohere", "cohere2", "smollm3", "seed_oss",
)  # fmt: skip
# Keys of MAKERS by model type and by the last part of a weight's name.
FAMILIES: dict[str, dict[str, str]] = (
    dict.fromkeys(LLAMA_LIKE, LLAMA)
    | dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"), LLAMA | EXPERTS)
    | dict.fromkeys(("glm", "glm4"), ATTENTION | {"gate_up_proj": "halves", "down_proj": "single"})
)
FAMILIES["phi3"] = FAMILIES["glm"] | {"qkv_proj": "queries, keys, values"}
FAMILIES["phi"] = list_single("q_proj k_proj v_proj dense fc1 fc2")
FAMILIES["starcoder2"] = ATTENTION | list_single("c_fc c_proj")
FAMILIES["gpt2"] = {"c_attn": "thirds, transposed", "c_proj": "transposed", "c_fc": "transposed"}
FAMILIES["gpt_neox"] = list_single("dense dense_h_to_4h dense_4h_to_h") | {"query_key_value": "thirds by heads"}
FAMILIES["gpt_oss"] = (
    ATTENTION | list_single("router") | {"experts.gate_up_proj": "pairs, transposed", "experts.down_proj": "transposed"}
)
FAMILIES["deepseek_v3"] = (
    LLAMA
    | EXPERTS
    | list_single("q_a_proj q_b_proj")
    | {"kv_a_proj_with_mqa": "latent and position", "kv_b_proj": "keys and values by heads"}
)
# Weights with a row for each token, position or class, and single rows: AdamW's.
OTHERS = {"embed_tokens", "lm_head", "wte", "wpe", "embed_in", "embed_out", "score", "classifier", "shared_expert_gate"}


def find_family(config: PreTrainedConfig) -> dict[str, str]:
    """The layouts of the language model's weights; ValueError if they are not known."""
    if (model_type := text_config(config).model_type) not in FAMILIES:
        raise ValueError(
            f"--optimizer muon: of which matrices the weights of model type {model_type!r} are made is only known of"
            f" {', '.join(sorted(FAMILIES))}: use adamw"
        )
    return FAMILIES[model_type]


def find_matrices(model: nn.Module) -> dict[str, Layout]:
    """Layouts of the trained matrices between hidden states, by their names in `model`.
    ValueError if the model's family, or a weight with two dimensions or more, is in no table."""
    config = next(module.config for module in model.modules() if isinstance(module, PreTrainedModel))
    kinds, decayed, found = find_family(config), find_decayed(model), {}
    for name, param in model.named_parameters():
        last = name.removesuffix(".weight").split(".")
        kind = ".".join(last[-2:] if last[-2:-1] == ["experts"] else last[-1:])
        if not param.requires_grad or kind in OTHERS or name not in decayed:  # norms, biases
            continue
        if kind not in kinds:
            raise ValueError(
                f"--optimizer muon: {name} is not known to be a matrix between hidden states ({', '.join(kinds)}) or"
                f" something else ({', '.join(sorted(OTHERS))}): use adamw"
            )
        found[name] = MAKERS[kinds[kind]](text_config(config), param.shape[-2])
    return found


COEFFICIENTS, NUM_ITERATIONS, EPS, MOMENTUM = (3.4445, -4.775, 2.0315), 5, 1e-7, 0.95  # torch.optim.Muon's


def orthogonalize(matrix: Tensor) -> Tensor:
    """About U V^T of the singular value decomposition U S V^T of `matrix` (..., m, n), by five steps of Newton-Schulz.
    Singular values end between 0.7 and 1.2 (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/)."""
    a, b, c = COEFFICIENTS
    add = torch.addmm if matrix.ndim == 2 else torch.baddbmm
    is_tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if is_tall else matrix
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.mT
        x = add(x, add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def count_flops(shape: torch.Size) -> int:
    """FLOPs of `orthogonalize` for one matrix: two products with a square one, and that one's square."""
    return NUM_ITERATIONS * (4 * math.prod(shape) * min(shape) + 2 * min(shape) ** 3)


def scale_of(outputs: int, inputs: int) -> float:
    """Factor of a matrix's learning rate. AdamW's updates have a root mean square of about 0.2 (Moonlight, arXiv
    2502.16982, section 2.2), so its learning rates carry over."""
    return 0.2 * math.sqrt(max(outputs, inputs))


@dataclass(frozen=True)
class Unit:
    """A matrix that one rank orthogonalizes at a time: a weight (rows, columns), or an expert's part of one."""

    param: DTensor
    layout: Layout
    shapes: list[torch.Size]  # of its matrices
    expert: int | None = None

    def local(self, tensor: DTensor) -> Tensor:
        """This rank's rows of the parameter, or of a tensor sharded like it."""
        own = tensor.to_local()
        return own if self.expert is None else own[self.expert]

    def count_flops(self) -> int:
        return sum(map(count_flops, self.shapes))

    def list_sizes(self, num_shards: int) -> list[int]:
        """Numbers in each rank's rows, as torch.chunk and FSDP2 divide them."""
        rows, columns = self.param.shape[-2:]
        most = -(-rows // num_shards)
        return [columns * max(0, min(most, rows - rank * most)) for rank in range(num_shards)]


Round = list[Unit | None]  # by owner


class Muon(CompactAdamW):
    """AdamW (`CompactAdamW` in fp32) that updates the weights of `layouts` by Muon, as torch.optim.Muon does.

    The caller sets each group's "lr" and "step" (0-based) before every step. Gradients have to be the same on all
    replicas of a shard; a matrix without one counts as having zeros. Matrices are orthogonalized in `compute_dtype`, by
    default bf16 on CUDA, else fp32.
    """

    def __init__(
        self,
        groups: list[dict],
        layouts: dict[DTensor, Layout],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        compute_dtype: torch.dtype | None = None,
    ):
        super().__init__(groups, lr=lr, betas=betas, eps=eps, is_8bit=False, seed=0)
        self.layouts = layouts
        self.groups = {param: group for group in self.param_groups for param in group["params"]}
        param = next(iter(layouts))
        self.compute_dtype = compute_dtype or (torch.bfloat16 if param.is_cuda else torch.float32)
        (dim,) = [i for i, placement in enumerate(param.placements) if placement.is_shard()]
        mesh = param.device_mesh
        self.shards, self.num_shards, self.rank = mesh.get_group(dim), mesh.size(dim), mesh.get_local_rank(dim)
        self.unsharded, sharded = [], []
        for param, layout in layouts.items():
            shapes = layout.list_shapes(param)
            if self.num_shards == 1 or (param.ndim == 3 and param.placements[dim].is_shard(0)):
                self.unsharded.append(Unit(param, layout, shapes))
            else:
                experts = range(len(param)) if param.ndim == 3 else [None]
                sharded += [Unit(param, layout, shapes, expert) for expert in experts]
        self.rounds = share_out(sharded, self.num_shards)

    def state_keys(self, param: DTensor) -> set[str]:
        return {"momentum_buffer"} if param in self.layouts else super().state_keys(param)

    @torch.no_grad()
    def step(self) -> None:
        super().step()  # AdamW's
        for unit in self.unsharded:
            self.apply(unit, self.orthogonalize(unit, self.find_direction(unit)))
        for units in self.rounds:
            for unit, update in self.exchange(units):
                self.apply(unit, update)

    def update(self, param: DTensor, group: dict, rounding: Rounding) -> None:
        if param not in self.layouts:
            super().update(param, group, rounding)

    def find_direction(self, unit: Unit) -> Tensor:
        """This rank's rows of the momentum, one step ahead (Nesterov's), after the gradient has entered it."""
        param = unit.param
        if not self.state[param]:
            self.init_state(param)
        gradient = unit.local(torch.zeros_like(param) if param.grad is None else param.grad)
        average = unit.local(self.state[param]["momentum_buffer"])
        average.lerp_(gradient, 1 - MOMENTUM)
        return gradient.lerp(average, MOMENTUM).to(self.compute_dtype)

    def orthogonalize(self, unit: Unit, direction: Tensor) -> Tensor:
        """The update of the unit's matrices, divided by the first one's scale."""
        scales = [scale_of(*shape) for shape in unit.shapes]
        parts = [orthogonalize(part) for part in unit.layout.cut(direction)]
        ratios = [scale / scales[0] for scale in scales]
        parts = [part if ratio == 1 else part * ratio for part, ratio in zip(parts, ratios, strict=True)]
        return unit.layout.join(parts)

    def apply(self, unit: Unit, update: Tensor) -> None:
        group, weight = self.groups[unit.param], unit.local(unit.param)
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update, alpha=-group["lr"] * scale_of(*unit.shapes[0]))

    def exchange(self, units: Round) -> Iterator[tuple[Unit, Tensor]]:
        """Gathers each unit's momentum on its owner; yields each with this rank's rows of its update."""
        sizes = [[0] * self.num_shards if unit is None else unit.list_sizes(self.num_shards) for unit in units]
        # Numbers in this rank's rows of each owner's unit, and in each rank's rows of this one's own.
        of_owners, of_own = [of_unit[self.rank] for of_unit in sizes], sizes[self.rank]
        rows = [self.find_direction(unit).flatten() for unit in units if unit is not None]
        direction = self.swap(torch.cat(rows), of_owners, of_own)
        own = units[self.rank]
        if own is not None:
            direction = self.orthogonalize(own, direction.view(own.param.shape[-2:])).flatten()
        update = self.swap(direction, of_own, of_owners)
        for unit, part in zip(units, update.split(of_owners), strict=True):
            if unit is not None:
                yield unit, part.view(-1, unit.param.shape[-1])

    def swap(self, sent: Tensor, sizes_to: list[int], sizes_from: list[int]) -> Tensor:
        received = sent.new_empty(sum(sizes_from))
        dist.all_to_all_single(received, sent, sizes_from, sizes_to, group=self.shards)
        return received


def share_out(units: list[Unit], num_owners: int) -> list[Round]:
    """Rounds of one unit for each owner: the largest first, each to the owner with the least work so far."""
    owned: list[list[Unit]] = [[] for _ in range(num_owners)]
    work = [0] * num_owners
    for unit in sorted(units, key=Unit.count_flops, reverse=True):
        owner = work.index(min(work))
        owned[owner].append(unit)
        work[owner] += unit.count_flops()
    return [[units[i] if i < len(units) else None for units in owned] for i in range(max(map(len, owned)))]


class MuonForMatrices(AdamW):
    """--optimizer muon."""

    def check(self, config: PreTrainedConfig) -> None:
        find_family(config)

    def find_matrices(self, model: nn.Module) -> dict[str, Layout]:
        """With their layouts; ValueError if none trains."""
        layouts = find_matrices(model)
        if not layouts:
            raise ValueError("--optimizer muon: no matrix between hidden states trains: use adamw")
        return layouts

    def build(self, model: nn.Module, groups: list[dict], options: OptimizationOptions, *, seed: int) -> Muon:
        params = {name: param for name, param in model.named_parameters() if param.requires_grad}
        layouts = self.find_matrices(model)
        log.info(describe_muon(params, layouts))
        own = {params[name]: layout for name, layout in layouts.items()}
        return Muon(groups, own, **choose_settings(options))

    def count_bytes(self, param: Tensor, *, is_matrix: bool) -> int:
        return 4 * param.numel() if is_matrix else super().count_bytes(param, is_matrix=is_matrix)

    def count_flops(self, model: nn.Module) -> int:
        params = dict(model.named_parameters())
        return sum(
            params[name].shape[:-2].numel() * sum(map(count_flops, layout.list_shapes(params[name])))
            for name, layout in self.find_matrices(model).items()
        )


def describe_muon(params: Mapping[str, Tensor], layouts: Mapping[str, Layout]) -> str:
    """Which weights Muon updates, and which AdamW, by their names without the blocks' numbers."""
    kinds = {name: re.sub(r"\.\d+\.", ".*.", name_of_file(name)) for name in params}
    counts = Counter(kinds[name] for name in layouts)
    large = dict.fromkeys(kinds[name] for name, param in params.items() if name not in layouts and param.ndim >= 2)
    num_small = sum(param.ndim < 2 for param in params.values())
    return (
        f"optimizer: Muon for {', '.join(f'{kind} ({count})' for kind, count in counts.items())}; AdamW for"
        f" {', '.join([*large, f'{num_small} norms and biases'])}"
    )
