"""From a model directory to a sharded model that trains: load, then `apply_*` in a fixed order, then self-checks.

T tokens in a packed row, N trained tokens among them, L tokens of one sequence, H hidden size, V vocabulary size.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from tqdm import tqdm
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from chat.masking import fingerprint_tokenizer
from chat.templates import load_tokenizer
from lifecycle.training_log import describe_device
from model import attention as packed_attention
from model.attention import check_layer_types, choose_backend, find_features, register_backends, registered_name
from model.files import check_model_dir
from model.weights import Reader, read_weights
from objectives.token_loss import sum_token_loss
from osft import OSFTLinear, OSFTSettings, apply_osft, fill_layer, find_targets
from ranks.ending import log
from ranks.world import World, call_on_rank0

# What --activation-checkpointing selective keeps the outputs of. Not bmm: written-out attention has its scores from it.
GROUPED_PRODUCTS = frozenset({"aten::_grouped_mm"})  # of experts
MATRIX_PRODUCTS = frozenset({"aten::mm", "aten::addmm", "aten::_scaled_mm"}) | GROUPED_PRODUCTS
ATTENTION = frozenset({
    "aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn", "flash_attn::_flash_attn_varlen_forward",
})  # fmt: skip

MIN_FLOAT8_SIZE = 256  # of a layer's input and output: below, casting costs more than fp8 saves


class PackedCausalLM(nn.Module):
    """A causal language model that maps a packed micro-batch to its summed loss, without ever holding all logits."""

    def __init__(self, model: PreTrainedModel, *, backend: str, compute_dtype: torch.dtype, compile: bool = False):
        super().__init__()
        self.model = model
        self.backend = backend  # of model.attention
        self.compute_dtype = compute_dtype
        config = model.config
        self.softcap = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies the logits, Granite divides them; both are linear, so the hidden states take the factor.
        self.logit_scale = getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
        self.fuses_loss = compile

    def encode(self, micro_batch: Any) -> Tensor:  # (1, T, H)
        """The packed row's final hidden states."""
        outputs = self.model.base_model(
            input_ids=micro_batch.input_ids,
            position_ids=micro_batch.position_ids,
            use_cache=False,
            cu_seq_lens_q=micro_batch.cu_seqlens,
            cu_seq_lens_k=micro_batch.cu_seqlens,
            max_length_q=micro_batch.max_seqlen,
            max_length_k=micro_batch.max_seqlen,
            micro_batch=micro_batch,  # for the functions of model.attention
        )
        return outputs.last_hidden_state

    def forward(self, micro_batch: Any) -> Tensor:
        """Sum of the (weighted) cross-entropy over the micro-batch's trained tokens: fp32 scalar."""
        hidden = self.encode(micro_batch)[0, micro_batch.trained_index]  # (N, H)
        if self.logit_scale != 1.0:
            hidden = hidden * self.logit_scale
        head = self.model.get_output_embeddings()
        targets = micro_batch.targets[micro_batch.trained_index]
        weights = micro_batch.target_weights
        if weights is not None:
            weights = weights[micro_batch.trained_index]
        return sum_token_loss(
            hidden,
            head.weight,
            targets,
            bias=head.bias,
            token_weights=weights,
            softcap=self.softcap,
            compiled=self.fuses_loss,
        )

    def hidden_states(self, micro_batch: Any) -> Tensor:  # (1, T, H)
        """`encode` for the self-checks: an entry point of its own, which FSDP knows about."""
        return self.encode(micro_batch).clone()  # FSDP's hooks want no view

    def reference(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """The model's own answer for one sequence (1, L) alone: hidden states (1, L, H) and logits (1, L, V)."""
        hidden = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        return hidden, self.model(input_ids=input_ids, use_cache=False).logits


def load_generation_config(model_dir: str, config: PreTrainedConfig) -> GenerationConfig:
    """How the model is to generate, which every export carries on; from the config where there is no such file."""
    try:
        return GenerationConfig.from_pretrained(model_dir)
    except OSError:
        return GenerationConfig.from_model_config(config)


def load_config(model_dir: str, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The model's config; ValueError if there is none or it is no causal language model."""
    try:
        config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model-name-or-path {model_dir}: no usable config: {error}") from None
    if not trust_remote_code:
        vars(config).pop("auto_map", None)  # exports would ask for code that they do not have
    is_custom = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if type(config) not in AutoModelForCausalLM._model_mapping and not is_custom:
        raise ValueError(
            f"--model-name-or-path {model_dir}: model type {config.model_type!r} has no causal language model"
        )
    if getattr(config, "vocab_size", None) is None:
        raise ValueError(
            f"--model-name-or-path {model_dir}: model type {config.model_type!r} is more than a language model"
            " (it has several configs in one); give its text model alone"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"--model-name-or-path {model_dir}: the weights are quantized, and cannot be trained as they are:"
            " give the model before quantization"
        )
    check_layer_types(config)
    return config


def choose_tokenizer(
    model_dir: str,
    data_path: str,
    sidecar: dict[str, Any] | None,
    *,
    vocab_size: int,
    trust_remote_code: bool,
) -> tuple[PreTrainedTokenizerBase, int]:
    """The tokenizer that made the data, and how many embeddings the model needs for it.

    It is the model's, or one saved beside the data that extends the model's; ValueError if it is any other. Every
    export carries it.
    """
    model_tokenizer = tokenizer = load_tokenizer(model_dir, trust_remote_code=trust_remote_code)
    if sidecar is None:
        log.warning(f"warning: no {data_path}.meta.json: cannot tell whether the data fits this tokenizer")
        return tokenizer, vocab_size
    if sidecar.get("tokenizer_dir") is not None:
        tokenizer_dir = Path(data_path).parent / sidecar["tokenizer_dir"]
        if not tokenizer_dir.is_dir():
            raise ValueError(
                f"--data-path {data_path}: the directory {tokenizer_dir} with its tokenizer is missing: copy it"
                " beside the data, or tokenize the data again with process_data.py"
            )
        check_model_dir(tokenizer_dir, trust_remote_code=trust_remote_code)
        tokenizer = load_tokenizer(str(tokenizer_dir), trust_remote_code=trust_remote_code)
        if len(tokenizer) > vocab_size:
            grown = -(-len(tokenizer) // 64) * 64
            log.info(
                f"vocabulary: {vocab_size} rows grow to {grown} for {len(tokenizer)} tokens, each new one the mean"
            )
            vocab_size = grown
    extends = model_tokenizer.get_vocab().items() <= tokenizer.get_vocab().items()
    if not extends or sidecar["tokenizer_fingerprint"] != fingerprint_tokenizer(tokenizer):
        raise ValueError(
            f"--data-path {data_path} was made with another tokenizer than --model-name-or-path's:"
            " tokenize the data again with process_data.py and this model"
        )
    if sidecar["max_token_id"] >= vocab_size:
        raise ValueError(
            f"--data-path {data_path} holds token id {sidecar['max_token_id']}, beyond the {vocab_size} rows of"
            " the model's embedding"
        )
    return tokenizer, vocab_size


def build_model(
    model_dir: str,
    config: PreTrainedConfig,
    *,
    trust_remote_code: bool = False,
    world: World,
    compute_dtype: torch.dtype,
    weights_dtype: torch.dtype = torch.float32,
    attention: str,
    activation_checkpointing: str,
    compile: bool,
    use_liger_kernels: bool,
    reshard_after_forward: str = "auto",
    prefetch_blocks: int = 1,
    cpu_offload: bool = False,
    float8: bool = False,
    osft: OSFTSettings | None = None,
    progress: Callable[[str], None] = lambda where: None,
) -> PackedCausalLM:
    """The model in `model_dir` (see model_files), sharded over `world.mesh`, in train mode; with `osft`, constrained.

    Only rank 0 reads the weights, block by block, and sends them to the other ranks. `progress` is told where a long
    start is.
    """
    model, blocks, backend = shape_model(
        config,
        trust_remote_code=trust_remote_code,
        device=world.device,
        compute_dtype=compute_dtype,
        attention=attention,
        activation_checkpointing=activation_checkpointing,
        compile=compile,
        use_liger_kernels=use_liger_kernels,
        float8=float8,
        has_osft=osft is not None,
    )
    osft_targets = {} if osft is None else find_targets(model, blocks, osft.target_patterns)
    weights: dict[str, Reader] = {}  # stays empty on the other ranks
    call_on_rank0(
        world,
        lambda: weights.update(
            read_weights(model_dir, vocab_size=config.vocab_size, trust_remote_code=trust_remote_code)
        ),
    )
    subspaces: dict[str, Path] = {}
    if osft is not None:
        subspaces = apply_osft(
            model,
            osft_targets,
            osft,
            weights=weights,
            compute_dtype=compute_dtype,
            world=world,
            progress=progress,
        )
    packed_model = PackedCausalLM(model, backend=backend, compute_dtype=compute_dtype, compile=compile)
    apply_fsdp(
        packed_model,
        blocks,
        weights=weights,
        weights_dtype=weights_dtype,
        subspaces=subspaces,
        world=world,
        reshard_after_forward=reshard_after_forward,
        prefetch_blocks=prefetch_blocks,
        cpu_offload=cpu_offload,
    )
    return packed_model.train()


def shape_model(
    config: PreTrainedConfig,
    *,
    trust_remote_code: bool,
    device: torch.device,
    compute_dtype: torch.dtype,
    attention: str,
    activation_checkpointing: str,
    compile: bool,
    use_liger_kernels: bool,
    float8: bool = False,
    has_osft: bool = False,
) -> tuple[PreTrainedModel, nn.ModuleList, str]:
    """The model without memory (on the meta device) and with all that changes its code; its blocks, its backend."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust_remote_code)
    backend = apply_attention(model, attention, device=device, dtype=compute_dtype)
    if use_liger_kernels:
        apply_liger_kernels(model, device, keeps_products=activation_checkpointing in ("selective", "auto"))
    blocks = find_blocks(model)
    if float8:
        apply_float8(blocks, device)
    if activation_checkpointing == "selective":
        kept = choose_kept_operations(model, backend=backend, compile=compile, has_osft=has_osft)
        apply_activation_checkpointing(blocks, kept)  # inside of what is compiled, whose operations nobody else sees
    if compile:
        apply_compile(blocks)
    if activation_checkpointing == "full":
        apply_activation_checkpointing(blocks)
    return model, blocks, backend


def apply_attention(model: PreTrainedModel, requested: str, *, device: torch.device, dtype: torch.dtype) -> str:
    """Routes the model's attention to a backend of model.attention, and says to which."""
    register_backends()
    backend = choose_backend(requested, model=model, config=model.config, device=device, dtype=dtype)
    model.set_attn_implementation(registered_name(backend))
    if model.config._attn_implementation != registered_name(backend):
        raise ValueError(f"model type {model.config.model_type!r}: its attention cannot be replaced by a packed one")
    return backend


def apply_liger_kernels(model: PreTrainedModel, device: torch.device, *, keeps_products: bool) -> None:
    """Replaces norms, rotary embeddings and MLPs by liger-kernel's.

    Not the loss, whose kernel waits for the GPU and cannot weight tokens. With `keeps_products` no rotary embeddings:
    liger-kernel's turn what they are given in place, and outputs of products that are kept would be turned twice.
    """
    if device.type != "cuda" or importlib.util.find_spec("liger_kernel") is None:
        raise ValueError(
            "--use-liger-kernels needs a CUDA device and the package liger-kernel (pip install 'mini-trainer[cuda]');"
            f" this is {device.type}, liger-kernel is"
            f" {'not ' if importlib.util.find_spec('liger_kernel') is None else ''}installed"
        )
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise ValueError(f"--use-liger-kernels: liger-kernel has none for model type {model.config.model_type!r}")
    if getattr(model.config, "mlp_bias", False):
        raise ValueError("--use-liger-kernels: liger-kernel's MLPs have no biases, and this model's do (mlp_bias)")
    _apply_liger_kernel_to_instance(
        model, rope=not keeps_products, cross_entropy=False, fused_linear_cross_entropy=False
    )


def apply_float8(blocks: nn.ModuleList, device: torch.device) -> None:
    """Replaces the blocks' large linear layers by torchao's in fp8.

    With one scale for each row of activations, so that no token's numbers depend on another's, and the weights'
    gradients in bf16, which any number of tokens allows.
    """
    is_installed = importlib.util.find_spec("torchao") is not None
    is_able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    if not is_able or not is_installed:
        raise ValueError(
            "--float8 needs a Hopper GPU or newer and the package torchao (pip install 'mini-trainer[float8]'); this is"
            f" {describe_device(device)}, torchao is {'' if is_installed else 'not '}installed"
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def is_suited(module: nn.Module, name: str) -> bool:
        return all(size % 16 == 0 and size >= MIN_FLOAT8_SIZE for size in module.weight.shape)

    num_suited = sum(isinstance(module, nn.Linear) and is_suited(module, "") for module in blocks.modules())
    if num_suited == 0:
        raise ValueError(
            "--float8 has no effect on this model: no linear layer of its blocks has sizes of at least"
            f" {MIN_FLOAT8_SIZE} that are multiples of 16"
        )
    log.info(f"float8: {num_suited} linear layers")
    config = Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp")
    convert_to_float8_training(blocks, module_filter_fn=is_suited, config=config)


def find_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """The transformer blocks: the module list as long as the model is deep."""
    num_blocks = model.config.num_hidden_layers
    for module in model.base_model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_blocks:
            return module
    raise ValueError(f"model type {model.config.model_type!r}: no list of {num_blocks} blocks found to shard")


def apply_compile(blocks: nn.ModuleList, *, backend: Any = "inductor") -> None:
    """Compiles each block by itself, for any number of tokens and sequences; `backend` is torch.compile's.

    All blocks of a kind share one compiled code, and no micro-batch compiles again, since none has a dimension or a
    longest sequence of 1 (see pack_samples), which would be taken for constants.
    """
    for block in blocks:
        block.forward = torch.compile(block.forward, dynamic=True, backend=backend)


def choose_kept_operations(
    model: PreTrainedModel, *, backend: str, compile: bool, has_osft: bool = False
) -> frozenset[str]:
    """The operations whose outputs --activation-checkpointing selective keeps for backward."""
    if compile and backend in packed_attention.UNCOMPILED:
        raise ValueError(
            f"--compile with --activation-checkpointing selective needs --attention flash_attn or varlen, this is"
            f" {backend}: it cannot be compiled, and blocks that keep some of their operations only as a whole;"
            " use --activation-checkpointing none or full"
        )
    kept = MATRIX_PRODUCTS | ATTENTION
    if has_osft:
        kept -= {"aten::mm"}  # of an OSFT layer's products the last and largest is an addmm; other layers' are repeated
    if "dropout" in find_features(model, model.config):
        kept -= ATTENTION  # what is not repeated draws no random numbers, and later dropout would draw other ones
    if any(param.ndim == 2 and name.endswith("bias") for name, param in model.named_parameters()):
        kept -= GROUPED_PRODUCTS  # transformers adds the experts' biases in place, and what is kept must not change
    return kept


def apply_activation_checkpointing(blocks: nn.ModuleList, kept: frozenset[str] = frozenset()) -> None:
    """Keeps each block's input and the outputs of the operations `kept` for backward, and recomputes the rest.

    Wraps `forward` and not the module, so that parameters keep their names and FSDP's hooks stay outside.
    """

    def decide(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = operation.name() in kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = {"context_fn": functools.partial(create_selective_checkpoint_contexts, decide)} if kept else {}
    for block in blocks:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **contexts)


def set_activation_checkpointing(packed_model: PackedCausalLM, mode: str) -> None:
    """Changes what the blocks of a built model keep for backward; none of them may be compiled."""
    model = packed_model.model
    blocks = find_blocks(model)
    for block in blocks:
        forward = block.forward
        if isinstance(forward, functools.partial) and forward.func is checkpoint:
            (block.forward,) = forward.args
    if mode == "selective":
        has_osft = any(isinstance(module, OSFTLinear) for module in blocks.modules())
        kept = choose_kept_operations(model, backend=packed_model.backend, compile=False, has_osft=has_osft)
        apply_activation_checkpointing(blocks, kept)
    elif mode == "full":
        apply_activation_checkpointing(blocks)


def apply_fsdp(
    packed_model: PackedCausalLM,
    blocks: nn.ModuleList,
    *,
    weights: dict[str, Reader],
    weights_dtype: torch.dtype,
    subspaces: dict[str, Path],
    world: World,
    reshard_after_forward: str,
    prefetch_blocks: int,
    cpu_offload: bool,
) -> None:
    """Fills the meta model from rank 0's `weights` and shards it: each block, an untied embedding, and all the rest.

    One after the other, so that no rank ever holds more than one of them unsharded. Master weights are in
    `weights_dtype`, compute is in the model's `compute_dtype`, gradients are reduced in fp32 and then have the
    weights' type.
    """
    reshard = {"auto": None, "always": True, "never": False}[reshard_after_forward]
    offload = CPUOffloadPolicy(pin_memory=world.device.type == "cuda") if cpu_offload else OffloadPolicy()
    policy = MixedPrecisionPolicy(param_dtype=packed_model.compute_dtype, reduce_dtype=torch.float32)
    root_policy = replace(policy, cast_forward_inputs=False)  # a micro-batch's weights of tokens stay in fp32
    names = {module: name for name, module in packed_model.model.named_modules()}
    embedding, head = packed_model.model.get_input_embeddings(), packed_model.model.get_output_embeddings()
    is_tied = embedding.weight is head.weight
    tied = packed_model.model.all_tied_weights_keys.keys()
    units = (*blocks, *([] if is_tied else [embedding]), packed_model)
    is_shown = world.rank == 0 and sys.stderr.isatty()
    for unit in tqdm(units, desc="loading", unit="block", disable=not is_shown):
        for module in unit.modules():
            name = names.get(module, "")
            if isinstance(module, OSFTLinear) and module.base.is_meta:
                fill_layer(module, name, weights=weights, file=subspaces.get(name), world=world)
            fill_module(module, name, weights=weights, tied=tied, dtype=weights_dtype, device=world.device)
        if unit is packed_model:
            packed_model.model.tie_weights()
        fully_shard(
            unit,
            mesh=world.mesh,
            reshard_after_forward=reshard,
            shard_placement_fn=choose_dim(world.num_shards),
            mp_policy=root_policy if unit is packed_model else policy,
            offload_policy=offload,
        )
    assert not weights, f"the model has no place for {', '.join(weights)}"
    for module in packed_model.modules():
        if isinstance(module, FSDPModule):
            # Gradients are summed over ranks, not averaged: the loss is divided by the global number of tokens.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if prefetch_blocks > 1:  # one ahead is what FSDP2 does by itself
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(list(blocks[i + 1 : i + 1 + prefetch_blocks]))
            block.set_modules_to_backward_prefetch(list(reversed(blocks[max(0, i - prefetch_blocks) : i])))
    register_fsdp_forward_method(packed_model, "hidden_states")
    register_fsdp_forward_method(packed_model, "reference")


def set_gradient_sync(packed_model: PackedCausalLM, when: str, *, is_last: bool) -> None:
    """Says whether the next backward sums gradients over ranks: `when` is every or last micro-batch of a step.

    Over the copies of a model that is sharded in each node, once a step in any case: until then their sums wait as
    shards, which takes no memory.
    """
    if when == "last":
        packed_model.set_requires_gradient_sync(is_last)
    else:
        packed_model.set_requires_all_reduce(is_last)


def choose_dim(num_shards: int) -> Callable[[nn.Parameter], Shard | None]:
    """Shards the experts of a layer, stored as (experts, rows, columns), by rows if there are too few of them."""

    def placement(param: nn.Parameter) -> Shard | None:
        by_rows = param.ndim == 3 and param.shape[0] % num_shards != 0 and param.shape[1] % num_shards == 0
        return Shard(1) if by_rows else None

    return placement


def fill_module(
    module: nn.Module,
    name: str,
    *,
    weights: dict[str, Reader],
    tied: Container[str],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Gives the meta parameters, as `dtype`, and buffers that `module` itself holds rank 0's values, on `device`.

    Those named in `tied` are left to `tie_weights`.
    """
    tensors = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    for key, meta in tensors.items():
        if not meta.is_meta or f"{name}.{key}" in tied:
            continue
        value = torch.empty(meta.shape, dtype=dtype if isinstance(meta, nn.Parameter) else meta.dtype, device=device)
        if dist.get_rank() == 0:
            value.copy_(weights.pop(f"{name}.{key}")())
        dist.broadcast(value, src=0)
        setattr(module, key, nn.Parameter(value, meta.requires_grad) if isinstance(meta, nn.Parameter) else value)


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # blocks compiled for all that is tried here would not compile again
def check_model(packed_model: PackedCausalLM, pack_samples: Callable[..., Any], *, device: torch.device) -> None:
    """Refuses a model whose packed sequences see each other or whose loss is not the model's own.

    Compares, on three short random sequences: each one's hidden states before and after the others change; packed
    hidden states and loss with the model's own forward pass over one sequence at a time; and the sliding windows
    that reach the attention backend with those that the config declares.
    """
    model, config = packed_model.model, packed_model.model.config
    # Other kernels round otherwise. In bf16 that adds up over layers (4 % was seen after 80) and sends some tokens to
    # another expert, so there the middle token tells: wrong attention or positions move nearly all.
    exact = packed_model.compute_dtype == torch.float32
    tolerance, rounding = (1e-4, 1e-4) if exact else (3e-2, 1e-1)
    random = np.random.default_rng(0)
    sequences = [random.integers(0, config.vocab_size, length) for length in (11, 16, 9)]
    others = [random.integers(0, config.vocab_size, len(sequence)) for sequence in sequences]
    backend = config._attn_implementation
    refused = f"model type {config.model_type!r} cannot be trained here: "
    packed_model.eval()

    def pack(token_ids: list[np.ndarray]) -> Any:
        return pack_samples([(ids, ids, None) for ids in token_ids]).to(device)

    hidden = split_rows(packed_model.hidden_states(pack(sequences)), sequences)
    for i in range(len(sequences)):
        changed = [s if j == i else other for j, (s, other) in enumerate(zip(sequences, others, strict=True))]
        leak = token_errors(split_rows(packed_model.hidden_states(pack(changed)), sequences)[i], hidden[i]).max().item()
        if not leak <= tolerance:
            raise ValueError(
                f"{refused}packed sequences see each other; changing the others of a row moved one by {leak:.1e}"
                f" (allowed: {tolerance:.0e})"
            )
    loss = packed_model(pack(sequences)).item()
    check_windows(packed_model, pack(sequences))

    model.set_attn_implementation("eager")
    own_loss, errors = 0.0, []
    for sequence, packed_hidden in zip(sequences, hidden, strict=True):
        own_hidden, logits = packed_model.reference(torch.from_numpy(sequence)[None].to(device))
        errors.append(token_errors(packed_hidden, own_hidden[0]))
        own_loss += torch.nn.functional.cross_entropy(
            logits[0, :-1].float(), torch.from_numpy(sequence[1:]).to(device), reduction="sum"
        ).item()
    model.set_attn_implementation(backend)
    error = (torch.cat(errors).max() if exact else torch.cat(errors).median()).item()
    if not error <= rounding:
        raise ValueError(
            f"{refused}packed hidden states differ from the model's own forward pass by {error:.1e}"
            f" (allowed: {rounding:.0e})"
        )
    if not abs(loss - own_loss) <= tolerance * abs(own_loss):
        raise ValueError(
            f"{refused}its head does something to the logits that is not known here; our loss over {len(sequences)}"
            f" sequences is {loss:.6f}, the model's own {own_loss:.6f}"
        )
    for module in packed_model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # without a backward, FSDP leaves parameters gathered: the root's, or all
    packed_model.train()


def split_rows(hidden: Tensor, sequences: list[np.ndarray]) -> tuple[Tensor, ...]:
    """Each sequence's part of a packed row's hidden states (1, T, H)."""
    return hidden[0].float().split([len(sequence) for sequence in sequences])


def token_errors(value: Tensor, expected: Tensor) -> Tensor:  # (L,)
    """How far each token's hidden state (L, H) is from the expected one, relative to it."""
    return (value.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)


def check_windows(packed_model: PackedCausalLM, micro_batch: Any) -> None:
    """Refuses a model whose config declares sliding windows that its layers do not hand to the attention backend."""
    model, config = packed_model.model, packed_model.model.config
    backend = config._attn_implementation
    attend, windows = AttentionInterface()[backend], []

    def record_window(*args, sliding_window: int | None = None, **kwargs):
        windows.append(sliding_window)
        return attend(*args, sliding_window=sliding_window, **kwargs)

    AttentionInterface.register("packed_recording", record_window)
    model.set_attn_implementation("packed_recording")
    packed_model.hidden_states(micro_batch)
    model.set_attn_implementation(backend)
    num_seen = sum(window is not None for window in windows)
    if getattr(config, "layer_types", None) is not None:
        num_declared = config.layer_types.count("sliding_attention")
    else:
        num_declared = len(windows) if getattr(config, "sliding_window", None) else 0
    if num_declared != num_seen:
        raise ValueError(
            f"model type {config.model_type!r} declares {num_declared} layers with a sliding window, but {num_seen} use"
            " one here; it cannot be trained here"
        )
