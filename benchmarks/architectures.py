"""Which kinds of models train exactly: every causal type of transformers, tiny; written to results/architectures.txt.

    OMP_NUM_THREADS=1 nice python benchmarks/architectures.py
    OMP_NUM_THREADS=1 nice python benchmarks/architectures.py --types llama jetmoe --activation-checkpointing full

makes a random model of each type (few layers, small sizes, by the names in its config), builds it as train.py does,
runs the start-up check, and compares a packed row of 45, 1, 70 and 7 tokens with transformers' own forward and
backward over one sequence at a time, in fp32: the loss, and every parameter's gradient. A type that is refused, fails
or hangs costs nothing but its own line, since each has a process of its own. With `--types` nothing is written.
"""

import argparse
import collections
import functools
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import paths
import torch
from harness import build, describe_versions, make_options, pack_sequences
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from mini_trainer.distributed.world import World, init_world
from mini_trainer.model.check import check_model
from mini_trainer.model.config import check_rope
from mini_trainer.model.flops import count_flops
from mini_trainer.objectives.families.text import choose_auto_class
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.objectives.objective import PackedModel

LENGTHS = (45, 1, 70, 7)
LOSS_TOLERANCE = 1e-5  # relative
GRADIENT_TOLERANCE = 3e-4  # of a parameter's gradient, relative to its norm; Gemma 4's own are 1.2e-4 off fp64's
NEGLIGIBLE = 1e-6  # of the norm of all gradients: below, a parameter's gradient is rounding (biases of keys)
INITIALIZER_RANGE = 0.1  # attention that matters, so that a wrong one shows
SPREAD = 0.2  # added to norms and biases, which would start as ones and zeros

# What a size by one of these names becomes, in a config and in the configs that it holds.
SIZES: dict[int, str] = {
    1: "first_k_dense_replace num_dense_layers n_shared_experts num_shared_experts n_group topk_group moe_k"
    " num_expert_group moe_num_shared_experts num_nextn_predict_layers moe_layer_start_index type_vocab_size"
    " n_layers_per_attn_res_block num_mem_blocks interleave_moe_layer_step attn_layer_offset expand"
    " mamba_expand num_kv_shared_layers indexer_kv_heads",
    2: "num_key_value_heads swa_num_key_value_heads kv_n_heads num_kv_heads num_experts_per_tok moe_topk"
    " moe_top_k index_n_heads linear_num_key_heads layer_group_size global_attn_every_n_layers"
    " sliding_window_pattern _sliding_window_pattern attn_layer_period num_layers_per_stack encoder_layers"
    " num_encoder_layers L_cycles H_cycles mamba_n_groups n_groups linear_conv_kernel_dim zero_expert_num"
    " heads_per_ngram split_ngram_parts indexer_n_heads",
    4: "num_attention_heads swa_num_attention_heads attention_heads decoder_attention_heads"
    " encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads n_head n_heads num_heads"
    " num_hidden_layers num_layers n_layer n_layers decoder_layers num_decoder_layers num_experts"
    " num_local_experts n_routed_experts moe_num_experts linear_num_heads linear_num_value_heads mamba_n_heads"
    " mamba_num_heads n_mamba_heads o_groups num_query_groups laurel_rank hc_lowrank index_topk_blocks"
    " index_topk depth num_blocks moe_layer_end_index indexer_compress_ratio",
    8: "rotary_dim state_size mamba_d_state ssm_state_size mamba_dt_rank gated_norm_rank time_step_rank d_rel"
    " local_attention_window_len sliding_window_size num_mel_bins adapter_rank block_size attention_chunk_size"
    " floor_scale kda_chunk_size hidden_size_per_layer_input",
    16: "head_dim index_head_dim qk_rope_head_dim v_head_dim qk_nope_head_dim kv_lora_rank q_lora_rank o_lora_rank"
    " dim_head kv_channels d_head d_kv linear_key_head_dim linear_value_head_dim"
    " linear_head_dim swa_head_dim mamba_d_head mamba_head_dim sliding_window local_attention window_size"
    " attention_window_size chunk_size mamba_chunk_size index_block_size global_head_dim dim_model_base"
    " swa_v_head_dim input_embedding_size output_embedding_size adapter_in_dim adapter_out_dim"
    " router_hidden_size indexer_head_dim indexer_budget",
    32: "qk_head_dim embedding_size image_size",
    64: "hidden_size mamba_d_ssm d_model n_embd emb_dim embedding_dim word_embed_proj_dim"
    " lru_width hidden_size_global ple_embed_dim input_size",
    96: "intermediate_size ffn_dim d_ff d_inner dff dim_ff decoder_ffn_dim encoder_ffn_dim ffn_hidden_size"
    " moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size"
    " shared_experts_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size"
    " intermediate_size_mlp dense_intermediate_size mlp_dim",
    128: "vocab_size unpadded_vocab_size decoder_vocab_size ngram_vocab_size_base vocab_size_per_layer_input"
    " encoder_hash_byte_group_vocab",
    256: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions rel_extent context_length",
}  # fmt: skip
SIZE_OF = {name: size for size, names in SIZES.items() for name in names.split()}
# What is given though it is None by default, since some models need it; and what is no size.
NEEDED = (
    "head_dim", "num_key_value_heads", "n_routed_experts", "n_shared_experts", "num_experts_per_tok",
    "indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio",
)  # fmt: skip
OTHERS = {
    "attention_types": [[["global", "local"], 2]],
    "axial_pos_embds_dim": (32, 32),
    "axial_pos_shape": (16, 16),
    "default_language": "en_XX",
    "is_decoder": True,
}
# For configs that do not take the first.
VARIANTS: tuple[dict[str, object], ...] = (
    {},
    {"num_key_value_heads": 4, "num_experts_per_tok": 1},
    {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    {"layer_types": ["conv", "full_attention"] * 2},
    {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_key_value_heads": 4},
)
SPECIAL_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
OUTCOMES = ("exact", "wrong", "refused", "crashed", "not built")


@dataclass(frozen=True)
class Result:
    """What became of a type; `detail` is the reason, or how far loss and gradients are off."""

    outcome: str  # one of OUTCOMES
    detail: str


def shrink_config(config: PreTrainedConfig, variant: dict[str, object]) -> dict[str, object]:
    """The arguments that make a tiny config of the same class: its own names, with small values in them."""
    sizes = SIZE_OF | variant
    if "kv_lora_rank" in vars(config):  # latent attention: each head has a key of its own
        sizes |= {"num_key_value_heads": SIZE_OF["num_attention_heads"]}
    given: dict[str, object] = {}
    # Configs that call a size by a name of their own say what others call it.
    sizes |= {own: sizes[name] for name, own in config.attribute_map.items() if name in sizes and own not in sizes}
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            given[name] = shrink_config(value, variant) | {"model_type": value.model_type}
            if name == "attn_config":
                given[name] |= {"rope_theta": 1e4, "clip_qkv": 8.0}  # which DBRX's has, and its class does not know
        elif name in OTHERS:
            given[name] = OTHERS[name]
        elif name in variant and name not in SIZE_OF:
            given[name] = variant[name]
        elif name in sizes and ((value and type(value) is int) or (value is None and name in NEEDED)):
            given[name] = sizes[name]
        elif name in SPECIAL_TOKENS and isinstance(value, int) and value >= SIZE_OF["vocab_size"]:
            given[name] = SPECIAL_TOKENS[name]
        elif name in ("initializer_range", "init_std", "init_method_std"):
            given[name] = INITIALIZER_RANGE
        elif isinstance(value, float) and any(word in name for word in ("drop", "jitter")):
            given[name] = 0.0
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in rope and "mrope_section" in (getattr(config, "ignore_keys_at_rope_validation", None) or ()):
        given["rope_parameters"] = rope | {"mrope_section": split_rotary(rope.get("partial_rotary_factor", 1.0))}
    return given


def split_rotary(share: float) -> list[int]:
    """How many of a tiny head's frequencies turn with time, height and width; `share` of the head turns at all."""
    total = int(SIZE_OF["head_dim"] * share) // 2
    return [total - 2 * (total // 3), total // 3, total // 3]


def merge_settings(given: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`given` with `changes`, also of the configs in it."""
    nested = {
        name: merge_settings(given[name], value)
        for name, value in changes.items()
        if isinstance(value, dict) and isinstance(given.get(name), dict)
    }
    return given | changes | nested


def make_tiny_model(
    model_type: str,
    auto_class: Any = None,
    *,
    sizes: dict[str, object] | None = None,
    changes: dict[str, Any] | None = None,
) -> tuple[PreTrainedConfig, PreTrainedModel]:
    """`auto_class`: by default the one that a run takes. `sizes` are more names with their values, `changes` arguments
    of this type's config."""
    config_class = CONFIG_MAPPING[model_type]
    for variant in VARIANTS:
        try:
            given = shrink_config(config_class(), (sizes or {}) | variant)
            config = config_class(**merge_settings(given, changes or {}))
            is_encoder_decoder = config.is_encoder_decoder
            torch.manual_seed(0)
            model = (auto_class or choose_auto_class(config)).from_config(config, dtype=torch.float32)
            config.is_encoder_decoder = is_encoder_decoder  # BART's decoder takes it for its own, and says no
            return config, model
        except Exception as error:  # other people's models and configs may raise anything
            reason = error
    raise reason


def save_tiny_model(
    model_type: str,
    path: Path,
    auto_class: Any = None,
    *,
    sizes: dict[str, object] | None = None,
    changes: dict[str, Any] | None = None,
) -> None:
    """Writes a random fp32 model of the type; norms and biases are random, too."""
    config, model = make_tiny_model(model_type, auto_class, sizes=sizes, changes=changes)
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim < 2:
                param.add_(torch.randn_like(param) * SPREAD)
    model.save_pretrained(path)
    config.save_pretrained(path)  # transformers makes a text model of a config that holds several, and saves its part


def make_sequences(vocab_size: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(3, vocab_size, length) for length in LENGTHS]


def run_reference(model: nn.Module, sequences: list[np.ndarray]) -> tuple[Tensor, dict[str, Tensor]]:
    """The model's own summed loss and gradients, over one sequence after the other."""
    loss_sum = torch.zeros(())
    for sequence in sequences:
        logits = model(input_ids=torch.from_numpy(sequence)[None], use_cache=False).logits[0]
        targets = torch.from_numpy(sequence[1:])
        loss_sum = loss_sum + torch.nn.functional.cross_entropy(logits[:-1].float(), targets, reduction="sum")
    loss_sum.backward()
    return loss_sum.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def run_packed(
    path: Path, sequences: list[np.ndarray], world: World, *, activation_checkpointing: str
) -> tuple[PackedModel, Tensor, dict[str, Tensor]]:
    """Our model, which passed all that a start looks at, and its loss and gradients of one packed row."""
    packed_model = build(path, make_options(activation_checkpointing=activation_checkpointing), world)
    check_rope(packed_model.model.config, longest=max(LENGTHS))
    count_flops(packed_model.model)
    check_model(packed_model, CausalLM(), world=world)
    loss_sum = packed_model(pack_sequences(sequences)).loss
    loss_sum.backward()
    params = packed_model.model.named_parameters()
    return packed_model, loss_sum.detach(), {n: p.grad.full_tensor() for n, p in params if p.grad is not None}


def judge(model_type: str, path: Path, *, activation_checkpointing: str) -> Result:
    """Makes the type's model, runs it both ways, and says what became of it."""
    try:
        save_tiny_model(model_type, path)
    except Exception as error:  # other people's models and configs may raise anything
        return Result("not built", describe(error))
    sequences = make_sequences(SIZE_OF["vocab_size"])
    try:
        auto_class = choose_auto_class(AutoConfig.from_pretrained(path))
        own_model = auto_class.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
        expected_loss, expected = run_reference(own_model.train(), sequences)
    except Exception as error:
        return Result("not built", f"fails by itself: {describe(error)}")
    try:
        world = init_world()
        _, loss, gradients = run_packed(path, sequences, world, activation_checkpointing=activation_checkpointing)
    except Exception as error:
        return explain(error, path)
    return compare(loss, expected_loss, gradients, expected)


def explain(error: Exception, path: Path) -> Result:
    """Whether our code refuses the model in `path`, or something crashed."""
    raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    is_ours = raised_in.is_relative_to(paths.ROOT) and "site-packages" not in raised_in.parts
    if isinstance(error, ValueError) and is_ours:
        return Result("refused", " ".join(str(error).replace(f"{path}: ", "").split()))
    return Result("crashed", describe(error))


def compare(loss: Tensor, own_loss: Tensor, gradients: dict[str, Tensor], own: dict[str, Tensor]) -> Result:
    """Whether loss and gradients are transformers' own."""
    loss_error = (abs(loss - own_loss) / abs(own_loss)).item()
    floor = NEGLIGIBLE * torch.stack([gradient.norm() for gradient in own.values()]).norm()
    errors = {}
    for name in gradients.keys() | own.keys():
        ours, theirs = (of.get(name, torch.zeros(())) for of in (gradients, own))
        errors[name] = ((ours - theirs).norm() / max(theirs.norm(), floor / GRADIENT_TOLERANCE)).item()
    worst = max(errors, key=errors.get)
    is_exact = loss_error <= LOSS_TOLERANCE and all(error <= GRADIENT_TOLERANCE for error in errors.values())
    detail = f"loss {loss_error:.1e}, gradients {errors[worst]:.1e}"
    return Result("exact", detail) if is_exact else Result("wrong", f"{detail} ({worst})")


def describe(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]} ({Path(where.filename).name}:{where.lineno})"


def run_child(connection: Connection, judge_type: Callable[[Path], Result]) -> None:
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    with tempfile.TemporaryDirectory() as directory:
        connection.send(judge_type(Path(directory)))


def judge_apart(judge_type: Callable[[Path], Result], *, seconds: float) -> Result:
    """What `judge_type` says, given an empty directory, in a process forked from this one."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_child, args=(sender, judge_type))
    process.start()
    sender.close()
    try:
        if not receiver.poll(seconds):
            return Result("crashed", f"still running after {seconds:.0f} s")
        return receiver.recv()
    except EOFError:
        process.join()
        ended = f"signal {signal.Signals(-process.exitcode).name}" if process.exitcode < 0 else str(process.exitcode)
        return Result("crashed", f"its process ended with {ended}")
    finally:
        process.kill()
        process.join()


def make_parser(doc: str, *, seconds: float) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="model types; by default all, and a table is kept")
    parser.add_argument("--processes", type=int, default=1, help="types at a time")
    parser.add_argument("--seconds", type=float, default=seconds, help="for each type")
    return parser


def choose_types(
    parser: argparse.ArgumentParser, args: argparse.Namespace, known: Iterable[str], auto_class: Any
) -> list[str]:
    """The types that are asked for, or all that are `known`, with their modules imported, so that no child has to.

    A type whose module cannot be imported will say so itself.
    """
    torch.set_num_threads(1)
    set_verbosity_error()
    disable_progress_bar()
    model_types = args.types or sorted(known)
    if unknown := set(model_types) - set(known):
        parser.error(f"--types: {auto_class.__name__} has no model of type {', '.join(sorted(unknown))}")
    for model_type in model_types:
        try:
            auto_class._model_mapping[CONFIG_MAPPING[model_type]]
        except (ImportError, KeyError, ValueError) as error:
            print(f"{model_type}: {error}", file=sys.stderr)
    return model_types


def write_table(results: dict[str, Result], title: str) -> str:
    counts = collections.Counter(result.outcome for result in results.values())
    width = max(map(len, results))
    rows = [f"{name:<{width}}  {result.outcome:<9}  {result.detail}" for name, result in results.items()]
    total = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])
    return "\n".join([title, "", *rows, "", f"{len(results)} types: {total}", ""])


def judge_all(
    model_types: list[str], judge_type: Callable[[str, Path], Result], args: argparse.Namespace, title: str, file: str
) -> None:
    """Judges each type in a process of its own, several at a time; the table of all types is written to results/."""
    results, calls = {}, [functools.partial(judge_type, name) for name in model_types]
    with ThreadPoolExecutor(args.processes) as pool:
        judged = pool.map(functools.partial(judge_apart, seconds=args.seconds), calls)
        for model_type, result in zip(model_types, judged, strict=True):
            results[model_type] = result
            print(f"{model_type}: {result.outcome}: {result.detail}", flush=True)
    table = write_table(results, title)
    if args.types is None:
        (paths.ROOT / "benchmarks/results" / file).write_text(table)
    print(table.splitlines()[-1])


def main() -> None:
    parser = make_parser(__doc__, seconds=120.0)
    parser.add_argument("--activation-checkpointing", default="none", choices=("none", "selective", "full"))
    args = parser.parse_args()
    model_types = choose_types(parser, args, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM)
    judge_type = functools.partial(judge, activation_checkpointing=args.activation_checkpointing)
    title = (
        f"Causal types of transformers, {describe_versions('transformers', 'torch')}, CPU, fp32,"
        f" --activation-checkpointing {args.activation_checkpointing}: a packed row of"
        f" {', '.join(map(str, LENGTHS))} tokens"
    )
    judge_all(model_types, judge_type, args, title, "architectures.txt")


if __name__ == "__main__":
    main()
