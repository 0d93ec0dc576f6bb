"""LoRA's layers: which get adapters, peft's layers in a model on meta, and their product.

x (W + s B A)^T in four products without other passes over the activations: equal to peft's layers, but faster. T
tokens, r the rank, s alpha / r. W (out, in) is frozen, A (r, in) and B (out, r) train.
"""

import copy
import functools
import hashlib
import math
import warnings
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import _get_current_dispatch_mode
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mini_trainer.model.blocks import find_linear_layers, iterate_owners
from mini_trainer.model.method import MetaModel
from mini_trainer.model.methods.adapter_files import ADAPTER_CONFIG, PREFIX, check_patterns, list_names, match_names
from mini_trainer.model.methods.nf4 import NF4Linear
from mini_trainer.model.precision import choose_types
from mini_trainer.model.weights import Readers, WeightGroup
from mini_trainer.options import LoRAOptions

if TYPE_CHECKING:
    from peft import LoraConfig


def speed_up(layers: Iterable[nn.Module], *, adapter: str, kept: Container[nn.Parameter] = ()) -> None:
    """Gives peft's layers a faster forward if they are plain linear layers with an adapter. Layers of experts, DoRA and
    dropout keep peft's forward, and so do weights in `kept`, of another type than adapters."""
    from peft.tuners.lora import Linear

    for layer in layers:
        if type(layer) is not Linear or layer.lora_variant or getattr(layer.base_layer, "weight", None) in kept:
            continue
        if isinstance(layer.lora_dropout[adapter], nn.Identity):
            layer.forward = functools.partial(multiply, layer, adapter)


def multiply(layer: nn.Module, adapter: str, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
    base = layer.base_layer
    if layer.disable_adapters:
        return base(x)
    weight = base.packed if isinstance(base, NF4Linear) else base.weight
    A, B = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    flat = x.reshape(-1, x.shape[-1])
    out = AdaptedProduct.apply(flat, weight, base.bias, A, B, layer.scaling[adapter], base)
    return out.view(*x.shape[:-1], out.shape[-1])


def read_weight(weight: Tensor, base: nn.Module) -> Tensor:  # (out, in)
    """A frozen layer's weight, from its (possibly packed) parameter."""
    if isinstance(base, NF4Linear):
        return base.read(weight)
    return weight.t() if isinstance(base, Conv1D) else weight


class AdaptedProduct(torch.autograd.Function):
    """x W^T + b + s (x A^T) B^T; keeps x and s x A^T for backward, which reads W again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, A: Tensor, B: Tensor, scaling: float, base: nn.Module
    ) -> Tensor:  # (T, out)
        low = linear(x, A) * scaling  # (T, r)
        ctx.save_for_backward(x, low, weight, A, B)
        ctx.scaling, ctx.base = scaling, base
        return add_frozen_product(low @ B.t(), bias, x, read_weight(weight, base))

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, low, weight, A, B = ctx.saved_tensors
        needs_x, _, _, needs_A, needs_B, *_ = ctx.needs_input_grad
        d_low = (d_out @ B) * ctx.scaling
        d_x = (d_out @ read_weight(weight, ctx.base)).addmm_(d_low, A) if needs_x else None
        d_A = d_low.t() @ x if needs_A else None
        d_B = d_out.t() @ low if needs_B else None
        return d_x, None, None, d_A, d_B, None, None


def add_frozen_product(update: Tensor, bias: Tensor | None, x: Tensor, weight: Tensor) -> Tensor:  # (T, out)
    if bias is not None:
        update += bias
    # Last, and the only addmm: see keep_operations. In place, unless a mode looks on that may keep what it returns, as
    # selective checkpointing does; compilers see to it themselves.
    is_watched = torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None
    return (torch.addmm if is_watched else Tensor.addmm_)(update, x, weight.t())


WITH_ONE_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers of a module


def shares_inputs(device: torch.device) -> bool:
    """CPUs would gain nothing, and keep their bits."""
    return device.type == "cuda"


def share_inputs(modules: Iterable[nn.Module], *, adapter: str) -> None:
    """Layers that get the same input, and `multiply` for a forward, read it once for all their adapters."""
    for module in modules:
        for names in WITH_ONE_INPUT:
            layers = [getattr(module, name, None) for name in names]
            if all(is_sped_up(layer) and type(layer.base_layer) is nn.Linear for layer in layers):
                shared = SharedInput(layers, adapter)
                for layer in layers:
                    layer.forward = functools.partial(shared.multiply, layer)


def is_sped_up(layer: nn.Module | None) -> bool:
    return getattr(getattr(layer, "forward", None), "func", None) is multiply


class SharedInput:
    """Layers with one input: the first that is called computes the products of all, the others take theirs."""

    def __init__(self, layers: list[nn.Module], adapter: str):
        self.layers, self.adapter = layers, adapter
        self.x: Tensor | None = None
        self.outputs: dict[nn.Module, Tensor] = {}  # not yet taken

    def multiply(self, layer: nn.Module, x: Tensor) -> Tensor:  # (..., in) -> (..., out)
        if layer.disable_adapters:
            return layer.base_layer(x)
        if self.x is not x or layer not in self.outputs:
            self.x, self.outputs = x, self.compute(x)
        out = self.outputs.pop(layer)
        if not self.outputs:
            self.x = None
        return out

    def compute(self, x: Tensor) -> dict[nn.Module, Tensor]:
        given = [
            (layer.base_layer.weight, layer.base_layer.bias,
             layer.lora_A[self.adapter].weight, layer.lora_B[self.adapter].weight)
            for layer in self.layers
        ]  # fmt: skip
        scalings = [layer.scaling[self.adapter] for layer in self.layers]
        outs = AdaptedProducts.apply(x.reshape(-1, x.shape[-1]), scalings, *(each for parts in given for each in parts))
        return {layer: out.view(*x.shape[:-1], out.shape[-1]) for layer, out in zip(self.layers, outs, strict=True)}


class AdaptedProducts(torch.autograd.Function):
    """`AdaptedProduct` of several layers with one input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scalings: list[float], *given: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases, As, Bs = (given[part::4] for part in range(4))
        parts = linear(x, torch.cat(As)).split([len(A) for A in As], dim=1)
        lows = [part * scaling for part, scaling in zip(parts, scalings, strict=True)]
        ctx.save_for_backward(x, *lows, *weights, *As, *Bs)
        ctx.scalings = scalings
        rows = zip(lows, weights, biases, Bs, strict=True)
        return tuple(add_frozen_product(low @ B.t(), bias, x, weight) for low, weight, bias, B in rows)

    @staticmethod
    def backward(ctx: Any, *d_outs: Tensor) -> tuple[Tensor | None, ...]:
        (x, *saved), count = ctx.saved_tensors, len(d_outs)
        lows, weights, As, Bs = (saved[start : start + count] for start in range(0, 4 * count, count))
        d_lows = [d_out @ B * scaling for d_out, B, scaling in zip(d_outs, Bs, ctx.scalings, strict=True)]
        d_low, d_x = torch.cat(d_lows, dim=1), None
        if ctx.needs_input_grad[0]:
            d_x = d_low @ torch.cat(As)
            for d_out, weight in zip(d_outs, weights, strict=True):
                d_x.addmm_(d_out, weight)
        d_As = (d_low.t() @ x).split([len(A) for A in As])
        gradients = [(None, None, d_A, d_out.t() @ low) for d_A, d_out, low in zip(d_As, d_outs, lows, strict=True)]
        return d_x, None, *(each for parts in gradients for each in parts)


DEFAULT_RANK = 16
ADAPTER = "default"  # peft's name for the only adapter


@dataclass(frozen=True)
class TrainedModules:
    """Full names of a model's modules and parameters to train."""

    layers: list[str] = field(default_factory=list)  # linear layers that get an adapter
    experts: list[str] = field(default_factory=list)  # parameters of fused experts that get an adapter
    in_full: list[str] = field(default_factory=list)  # modules to train in full
    new: frozenset[str] = frozenset()  # parameters of `in_full` that the adapter to continue from does not hold


def choose_targets(meta: MetaModel, options: LoRAOptions, *, given: "LoraConfig | None") -> TrainedModules:
    """Chooses the layers that get an adapter, from options or from the config of the adapter to continue from.
    ValueError for a name that matches nothing, and for options that adapters of experts do not support."""
    model = meta.model
    in_blocks, in_towers = find_linear_layers(model, meta.blocks), meta.family.find_tower_layers(model)
    layers = [name for name in (*in_blocks, *in_towers) if model.get_submodule(name).weight.requires_grad]
    inside = {id(param) for param in meta.blocks.parameters()}
    experts = [
        name
        for name, param in model.named_parameters()
        if id(param) in inside and param.ndim == 3 and min(param.shape) > 1
    ]
    whole_names, held = list_wholes(meta, options), []
    if given is not None:
        flag = f"adapter {options.lora_adapter}"
        check_patterns(vars(given), list_names(model), where=f"{flag}: {ADAPTER_CONFIG}")
        patterns, chosen = tuple(given.target_parameters or ()), match_layers(model, given, layers, flag)
        ends = tuple(given.modules_to_save or ())  # suffixes: "norm" also matches "input_layernorm"
        held = [name for name, _ in model.named_modules() if ends and name.endswith(ends)]
        whole_names = (*whole_names, *held)
    else:
        patterns, chosen, flag = options.lora_target_modules, [], "--lora-target-modules"
    if len(layers) < len(in_blocks) + len(in_towers):
        flag = f"{flag} (apart from those in --freeze)"
    default = [*(name for name in layers if name in in_blocks), *experts]
    chosen += choose_names(patterns, [*layers, *experts], flag) if patterns or given else default
    others = list_others(model, chosen) if whole_names else []
    in_full = choose_names(whole_names, others, "--lora-modules-to-save") if whole_names else []
    new = frozenset() if given is None else list_params(model, in_full) - list_params(model, held)
    adapted = set(chosen)
    targets = TrainedModules([n for n in layers if n in adapted], [n for n in experts if n in adapted], in_full, new)
    if targets.experts and (options.lora_dropout > 0 or options.lora_use_dora):
        flag = "--lora-use-dora" if options.lora_use_dora else f"--lora-dropout {options.lora_dropout}"
        raise ValueError(
            f"{flag} is not supported for fused experts ({', '.join(list_kinds(targets.experts, 2))}): remove it, or"
            f" set --lora-target-modules without them: {', '.join(list_kinds(layers))}"
        )
    return targets


def match_layers(model: PreTrainedModel, given: "LoraConfig", layers: list[str], flag: str) -> list[str]:
    """The layers that a given adapter applies to, by peft's own rules; ValueError if any is not among `layers`."""
    from peft.tuners.tuners_utils import check_target_module_exists

    rules = copy.copy(given)
    rules.modules_to_save = None  # as when they are inserted: see `inject`
    if not rules.target_modules:
        return []
    found = [name for name, _ in model.named_modules() if name and check_target_module_exists(rules, name)]
    outside = [name for name in found if name not in layers]
    if outside or not found:
        what = f"adapts {outside[0]}, which cannot be adapted here" if outside else "adapts no layer of this model"
        raise ValueError(f"{flag}: {what}; there are {', '.join(list_kinds(layers))}")
    return found


def list_params(model: PreTrainedModel, modules: Iterable[str]) -> frozenset[str]:
    """Names of all parameters of these modules; a tied one has the name under which the model holds it first."""
    held = {id(param) for name in modules for param in model.get_submodule(name).parameters()}
    return frozenset(name for name, param in model.named_parameters() if id(param) in held)


def list_wholes(meta: MetaModel, options: LoRAOptions) -> tuple[str, ...]:
    """Names of the modules to train fully: requested ones, embedding and head if there are new tokens, and modules that
    the objective always trains."""
    by_token = (meta.model.get_input_embeddings(), meta.model.get_output_embeddings())
    names = [name for name, module in meta.model.named_modules() if module in by_token]
    always = meta.family.find_head(meta.model)
    return (*options.lora_modules_to_save, *always, *(names if meta.source.new_tokens else ()))


def list_others(model: PreTrainedModel, chosen: list[str]) -> list[str]:
    """The modules that neither contain one of the `chosen` nor are in one."""
    adapted, holders = set(chosen), {owner for name in chosen for owner in iterate_owners(name)}
    names = (name for name, _ in model.named_modules() if name and name not in holders)
    return [name for name in names if adapted.isdisjoint(iterate_owners(name))]


def choose_names(patterns: Iterable[str], names: list[str], flag: str) -> list[str]:
    """The names that match one of `patterns`, names or regular expressions, as a whole or from a dot to the end.
    ValueError for a pattern that matches none."""
    chosen = set()
    for pattern in patterns:
        found = match_names(pattern, names, where=flag)
        if not found:
            raise ValueError(f"{flag} {pattern}: nothing has this name; there are {', '.join(list_kinds(names))}")
        chosen.update(found)
    return [name for name in names if name in chosen]


def list_kinds(names: Iterable[str], length: int = 1) -> list[str]:
    """The distinct last `length` parts of the names."""
    return list(dict.fromkeys(".".join(name.split(".")[-length:]) for name in names))


def make_config(
    meta: MetaModel, options: LoRAOptions, targets: TrainedModules, *, given: "LoraConfig | None"
) -> "LoraConfig":
    """Makes peft's config of the adapters, as used and saved."""
    from peft import LoraConfig

    source = meta.source.describe()
    names = dict(
        base_model_name_or_path=source["name"],
        revision=source["revision"],
        task_type=meta.family.peft_task,
        inference_mode=False,
        modules_to_save=targets.in_full or None,
        ensure_weight_tying=is_tied(meta.model, targets.in_full),
    )
    if given is not None:
        config = copy.deepcopy(given)
        for name, value in names.items():
            setattr(config, name, value)
        return config
    modules = [*(name for name, _ in meta.model.named_modules()), *meta.left_out.modules]
    params = [name for name, _ in meta.model.named_parameters()]
    rank = options.lora_rank or DEFAULT_RANK
    return LoraConfig(
        **names,
        r=rank,
        lora_alpha=options.lora_alpha or 2 * rank,
        lora_dropout=options.lora_dropout,
        use_dora=options.lora_use_dora,
        target_modules=shorten(targets.layers, modules),
        target_parameters=shorten(targets.experts, params, length=2) or None,
    )


def is_tied(model: PreTrainedModel, in_full: list[str]) -> bool:
    """Whether one of the modules `in_full` shares parameters with another module."""
    held = [id(param) for _, param in model.named_parameters(remove_duplicate=False)]
    return any(held.count(id(param)) > 1 for name in in_full for param in model.get_submodule(name).parameters())


def shorten(chosen: list[str], names: list[str], length: int = 1) -> list[str]:
    """Shortens the chosen names to their endings if these match no other name; else returns them unchanged."""
    kinds = list_kinds(chosen, length)
    meant = [name for name in names if f".{name}".endswith(tuple(f".{kind}" for kind in kinds))]
    return kinds if set(meant) == set(chosen) else chosen


def inject(model: PreTrainedModel, config: "LoraConfig", targets: TrainedModules) -> dict[str, nn.Module]:
    """Inserts peft's layers into a frozen meta model, with trained parameters in fp32. Returns the layers by name."""
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    wholes = dict(modules_to_save=config.modules_to_save, ensure_weight_tying=config.ensure_weight_tying)
    config.modules_to_save, config.ensure_weight_tying = None, False  # these modules train in place, without a copy
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # peft corrects it itself
        inject_adapter_in_model(config, model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
    for key, value in wholes.items():
        setattr(config, key, value)
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer) and not name.endswith("base_layer"):
            layers[name] = module
    trained = [param for name, param in model.named_parameters() if is_adapter(name)]
    trained += [param for name in targets.in_full for param in model.get_submodule(name).parameters()]
    for param in trained:
        param.requires_grad_(True)
        param.data = param.data.float()
    return layers


def is_adapter(name: str) -> bool:
    """Whether a parameter's name is one of peft's own."""
    return ".lora_" in name


def find_saved_names(model: PreTrainedModel) -> dict[str, str]:
    """Maps every name in an adapter's file to the trained parameter that it holds.
    A head that is tied to the embedding is included: a model that the adapter is loaded into has two modules."""
    from peft import get_peft_model_state_dict

    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    by_id = {id(param): name for name, param in trained.items()}
    adapters = {name: param for name, param in trained.items() if is_adapter(name)}
    saved = get_peft_model_state_dict(model, state_dict=adapters, adapter_name=ADAPTER, save_embedding_layers=False)
    wholes = {name: param for name, param in model.named_parameters(remove_duplicate=False) if not is_adapter(name)}
    names = {key: by_id[id(param)] for key, param in (saved | wholes).items() if id(param) in by_id}
    return {f"{PREFIX}{key}": name for key, name in names.items()}


def make_initial(layers: dict[str, nn.Module], read_base: Callable[[str], Tensor], *, seed: int) -> Readers:
    """Returns readers of initial values for all adapter parameters: peft's own initialization, seeded by `seed`. A is
    uniform, B zero, and DoRA's magnitude the norm of the weight's rows, so that the adapters change nothing at first.
    `layers` are peft's, on meta; `read_base` reads a parameter of the base."""

    def make(prefix: str, key: str) -> Tensor:
        value = torch.zeros(layers[prefix].get_parameter(key).shape)
        if "lora_A." in key:
            digest = hashlib.sha256(f"{seed} {prefix} {key}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
        elif "lora_magnitude_vector." in key:
            rows = 0 if layers[prefix].fan_in_fan_out else 1
            value = torch.linalg.norm(read_base(f"{prefix}.base_layer.weight").float(), dim=rows)
        return value

    return {
        f"{prefix}.{key}": functools.partial(make, prefix, key)
        for prefix, layer in layers.items()
        for key, _ in layer.named_parameters()
        if is_adapter(f"{prefix}.{key}")
    }


class Merger:
    """Produces a merged model from the base's stored tensors and peft's layers on meta."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: dict[str, nn.Module],
        renamed: dict[str, str],
        stored: Readers,
        *,
        shapes: dict[str, torch.Size],
    ):
        """`renamed`: base parameters' original names, by their names in `model`; `shapes`: theirs by original name."""
        self.model, self.layers, self.renamed, self.stored, self.shapes = model, layers, renamed, stored, shapes
        saved = model.state_dict().keys()
        self.buffers = [name for name, _ in model.named_buffers() if name in saved]

    def read_base(self, name: str) -> Tensor:
        """Reads a stored base parameter by its name in the model with adapters."""
        return self.stored[self.renamed[name]]()

    def list_groups(self, trained: dict[str, Tensor], dtype: torch.dtype) -> list[WeightGroup]:
        """The merged model of `dtype` as groups of one layer; `trained` holds the values of all trained parameters."""
        types = choose_types(self.model, self.renamed.values(), dtype)

        def group(names: Iterable[str], gather: Callable[[], dict[str, Tensor]]) -> WeightGroup:
            shapes = {name: torch.empty(self.shapes[name], dtype=types[name], device="meta") for name in names}
            return WeightGroup(shapes, gather)

        def merge(prefix: str, layer: nn.Module) -> dict[str, Tensor]:
            return {name: weight.to(types[name]) for name, weight in self.merge_layer(prefix, layer, trained).items()}

        def read(name: str) -> dict[str, Tensor]:
            weight = trained[name] if name in trained else self.stored[name]()
            return {name: weight.to(types[name])}

        groups = [
            group(self.list_inner(prefix, layer)[1], functools.partial(merge, prefix, layer))
            for prefix, layer in self.layers.items()
        ]
        done = {name for merged in groups for name in merged.shapes}
        groups += [group([name], functools.partial(read, name)) for name in self.renamed.values() if name not in done]
        for name in self.buffers:
            buffer = self.stored[name]()
            groups.append(WeightGroup({name: buffer.to("meta")}, functools.partial(dict, {name: buffer})))
        return groups

    @torch.no_grad()
    def merge_layer(self, prefix: str, layer: nn.Module, trained: dict[str, Tensor]) -> dict[str, Tensor]:
        """The merged tensors of one layer, in fp32, by their original names."""
        layer = copy.deepcopy(layer)
        for key in [key for key, _ in layer.named_parameters()]:
            name, (owner, _, attribute) = f"{prefix}.{key}", key.rpartition(".")
            value = trained[name] if name in trained else self.read_base(name)
            setattr(layer.get_submodule(owner), attribute, nn.Parameter(value.float(), requires_grad=False))
        outer = layer
        while hasattr(outer, "base_layer"):
            outer.merge(safe_merge=False)
            outer = outer.base_layer
        inner, names = self.list_inner(prefix, layer)
        return dict(zip(names, (param.data for param in inner.parameters()), strict=True))

    def list_inner(self, prefix: str, layer: nn.Module) -> tuple[nn.Module, list[str]]:
        """The original layer inside one with adapters, and the original names of its parameters."""
        while hasattr(layer, "base_layer"):
            layer, prefix = layer.get_submodule("base_layer"), f"{prefix}.base_layer"
        return layer, [self.renamed[f"{prefix}.{key}"] for key, _ in layer.named_parameters()]
