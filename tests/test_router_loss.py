"""The experts' auxiliary loss: transformers' own of each sequence or of the global batch, however it is divided."""

from pathlib import Path

import pytest
import torch
from breadth import long, thin, wide
from forked import run_forked
from hand_made import read_triple
from in_process import train_here, train_on
from plain_loop import train_plainly
from processes import flags
from small_runs import OPTIONS, read_rows
from tiny_data import make_samples, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, build, compile_by, save_model, save_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Glm4vMoeConfig,
    JetMoeConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
    Qwen3VLMoeConfig,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData

pytestmark = pytest.mark.slow

COEFFICIENT, STEPS = 0.1, 4
SHAPE = dict(vocab_size=VOCAB_SIZE, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=256)  # fmt: skip
MODELS = {
    "mixtral": FAMILIES["mixtral"],
    "gpt_oss": FAMILIES["gpt_oss_sinks"],
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, head_dim=8, intermediate_size=64, moe_intermediate_size=16, num_experts=6,
                                num_experts_per_tok=3, mlp_only_layers=[0]),
    "olmoe": OlmoeConfig(**SHAPE, intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    "jetmoe": JetMoeConfig(**{name: value for name, value in SHAPE.items() if name != "num_attention_heads"},
                           kv_channels=8, intermediate_size=16, num_local_experts=4, num_experts_per_tok=2,
                           initializer_range=0.2),
}  # fmt: skip
MROPE = dict(rope_type="default", mrope_section=[2, 1, 1], rope_theta=10000.0)
TOWER = dict(depth=1, hidden_size=32, intermediate_size=32, num_heads=2, patch_size=4, out_hidden_size=32)
OUTSIDE = {"image_token_id": 285, "video_token_id": 286}  # beyond what the data has
# Classes of these ask the config of their text tower, and have no attributes of their own.
VISION_MODELS = {
    "qwen3_vl_moe": Qwen3VLMoeConfig(
        text_config=SHAPE | dict(head_dim=8, intermediate_size=64, moe_intermediate_size=16, num_experts=4,
                                 num_experts_per_tok=2, rope_parameters=MROPE, initializer_range=0.2),
        vision_config=TOWER | dict(deepstack_visual_indexes=[0]), **OUTSIDE,
    ),
    "glm4v_moe": Glm4vMoeConfig(
        text_config=SHAPE | dict(head_dim=8, intermediate_size=64, moe_intermediate_size=16, n_routed_experts=4,
                                 num_experts_per_tok=2, first_k_dense_replace=0, initializer_range=0.2,
                                 rope_parameters=MROPE | dict(partial_rotary_factor=1.0)),
        vision_config=TOWER | dict(image_size=16), **OUTSIDE,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def data_path(tmp_path_factory) -> str:
    """One of the samples has no target: it does not count."""
    samples = make_samples(20, vocab_size=min(OUTSIDE.values()))
    samples[3] = (samples[3][0], [-100] * len(samples[3][0]))
    return str(write_samples(tmp_path_factory.mktemp("data") / "data.arrow", samples))


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    found = {name: str(save_tokenizer(save_model(config, root / name))) for name, config in MODELS.items()}
    for name, config in VISION_MODELS.items():
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(root / name)
        found[name] = str(save_tokenizer(root / name))
    return found


def options_of(model: str, data_path: str) -> dict:
    options = OPTIONS | dict(
        model_name_or_path=model, data_path=data_path, max_steps=STEPS, save_final_checkpoint=False
    )
    return options | dict(router_aux_loss=COEFFICIENT, min_samples_per_checkpoint=10**6, adam_eps=1e-6)


def train_with_transformers(
    model_dir: str, data_path: str, *, over: str = "sequence"
) -> tuple[list[float], list[float], list[float]]:
    """By transformers alone, a sequence at a time: losses, auxiliary losses, gradient norms."""
    data, router_losses = Mixture([TokenizedData(data_path)]), []
    has_vision = Path(model_dir).name in VISION_MODELS
    auto_class = AutoModelForImageTextToText if has_vision else AutoModelForCausalLM
    model = auto_class.from_pretrained(model_dir, attn_implementation="eager").train()

    def backward(rows: list[int], start: int) -> float:
        batch = [[torch.tensor(array.astype(int)) for array in read_triple(data, row)[:2]] for row in rows]
        counted = [(ids, labels) for ids, labels in batch if (labels[1:] != -100).any()]
        num_targets = sum(int((labels[1:] != -100).sum()) for _, labels in counted)
        num_tokens, total = sum(len(ids) for ids, _ in counted), 0.0
        router_losses.append(0.0)
        if over == "global-batch":
            router_loss = balance_together(model, [ids for ids, _ in counted])
            (COEFFICIENT * router_loss).backward()
            router_losses[-1] = router_loss.item()
        for ids, labels in counted:
            outputs = model(input_ids=ids[None], use_cache=False, output_router_logits=True)
            loss = torch.nn.functional.cross_entropy(outputs.logits[0, :-1], labels[1:], reduction="sum") / num_targets
            total += loss.item()
            if over == "sequence":
                router_loss = outputs.aux_loss * len(ids) / num_tokens
                router_losses[-1] += router_loss.item()
                loss = loss + COEFFICIENT * router_loss
            loss.backward()
        return total

    sizes = dict(num_steps=STEPS, batch_size=OPTIONS["batch_size"])
    losses, norms = train_plainly(model, data, backward, **sizes, learning_rate=OPTIONS["learning_rate"], eps=1e-6)
    return losses, router_losses, norms


def balance_together(model: torch.nn.Module, sequences: list[torch.Tensor]) -> torch.Tensor:
    """transformers' loss of these sequences as if they were one."""
    logits = [model(input_ids=ids[None], use_cache=False, output_router_logits=True).router_logits for ids in sequences]
    together = tuple(map(torch.cat, zip(*logits, strict=True)))  # (tokens, experts) of each layer
    num_chosen = model.config.get_text_config().num_experts_per_tok
    return load_balancing_loss_func(together, together[0].shape[-1], num_chosen)


@pytest.mark.parametrize("name", ["mixtral", wide("qwen3_moe"), wide("jetmoe"), wide("qwen3_vl_moe")])
def test_the_loss_of_a_global_batch_is_that_of_a_plain_loop(name, paths, data_path, world, tmp_path):
    options = options_of(paths[name], data_path) | dict(max_tokens_per_gpu=41, router_loss_over="global-batch")
    train_here(world, **options, output_dir=str(tmp_path / "run"))
    rows = read_rows(tmp_path / "run")
    losses, router_losses, norms = train_with_transformers(paths[name], data_path, over="global-batch")
    assert max(row["grad_accum"] for row in rows) > 1
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    assert [row["router_aux_loss"] for row in rows] == pytest.approx(router_losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-4)
    assert router_losses[0] != pytest.approx(train_with_transformers(paths[name], data_path)[1][0], rel=1e-3)


@pytest.mark.parametrize("name", [*thin(MODELS, step=2), *map(long, VISION_MODELS)])
def test_the_run_is_that_of_a_plain_loop(name, paths, data_path, world, tmp_path):
    train_here(world, **options_of(paths[name], data_path), output_dir=str(tmp_path / "run"))
    rows, (losses, router_losses, norms) = read_rows(tmp_path / "run"), train_with_transformers(paths[name], data_path)
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    assert [row["router_aux_loss"] for row in rows] == pytest.approx(router_losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-4)
    assert all(0.2 < row["expert_balance"] <= 1 for row in rows)


@pytest.mark.parametrize(("num_ranks", "changes"), [(1, {}), long(2, {}), wide(2, dict(context_parallel=2))])
def test_neither_ranks_nor_caps_change_the_loss_of_a_global_batch(
    num_ranks, changes, paths, data_path, world, tmp_path
):
    options = options_of(paths["mixtral"], data_path) | dict(router_loss_over="global-batch")
    train_here(world, **options, output_dir=str(tmp_path / "one"))
    train_on(num_ranks, world, **options | dict(max_tokens_per_gpu=50) | changes, output_dir=tmp_path / "other")
    for row, expected in zip(*(read_rows(tmp_path / name) for name in ("other", "one")), strict=True):
        for key in ("loss", "router_aux_loss", "grad_norm", "expert_balance"):
            assert row[key] == pytest.approx(expected[key], rel=1e-4), key


@pytest.mark.wide
@pytest.mark.parametrize("over", ["sequence", "global-batch"])
def test_neither_ranks_nor_caps_nor_how_it_is_computed_change_it(over, paths, data_path, world, tmp_path, monkeypatch):
    """The last layout has ranks with nothing to do."""
    layouts = {
        "one": (1, {}),
        "small": (1, dict(max_tokens_per_gpu=41, activation_checkpointing="none")),
        "two": (2, dict(max_tokens_per_gpu=50, activation_checkpointing="selective")),
        "four": (4, dict(max_tokens_per_gpu=300, sharding="hybrid", shard_size=2)),
    }
    rows = {}
    for layout, (num_ranks, changes) in layouts.items():
        options = options_of(paths["mixtral"], data_path) | dict(router_loss_over=over)
        train_on(num_ranks, world, **options | changes, output_dir=tmp_path / layout)
        rows[layout] = read_rows(tmp_path / layout)
    compile_by("eager", monkeypatch)
    train_here(world, **options, compile=True, output_dir=str(tmp_path / "compiled"))
    rows["compiled"] = read_rows(tmp_path / "compiled")
    for layout in rows:
        for row, expected in zip(rows[layout], rows["one"], strict=True):
            for key in ("loss", "router_aux_loss", "grad_norm", "expert_balance"):
                assert row[key] == pytest.approx(expected[key], rel=1e-4), (layout, key)


def test_the_models_config_decides_where_the_option_does_not(data_path, world, tmp_path):
    config = MODELS["olmoe"].__class__(**MODELS["olmoe"].to_dict() | dict(output_router_logits=True))
    path = save_tokenizer(save_model(config, tmp_path / "model"))
    options = options_of(str(path), data_path) | dict(max_steps=1)
    for name, asked in (("config", None), ("none", 0.0)):
        train_here(world, **options | dict(router_aux_loss=asked), output_dir=str(tmp_path / name))
    assert "router_aux_loss" in read_rows(tmp_path / "config")[0]
    assert "router_aux_loss" not in read_rows(tmp_path / "none")[0]
    assert build(path, world).row_model.router_aux_loss == config.router_aux_loss_coef


def test_a_loss_over_the_global_batch_needs_a_loss(paths, data_path, world, tmp_path):
    options = options_of(paths["mixtral"], data_path) | dict(router_aux_loss=0.0, router_loss_over="global-batch")
    with pytest.raises(ValueError, match=r"--router-loss-over global-batch .*--router-aux-loss"):
        train_here(world, **options, output_dir=str(tmp_path / "run"))


def test_models_without_experts_are_refused_by_name(data_path, tmp_path):
    path = save_tokenizer(save_model(FAMILIES["qwen3"], tmp_path / "model"))
    result = run_forked(0, "train.py", *flags(**options_of(str(path), data_path), output_dir=tmp_path / "run"))
    assert result.returncode == 2 and "auxiliary loss" in result.stderr and "'qwen3'" in result.stderr
