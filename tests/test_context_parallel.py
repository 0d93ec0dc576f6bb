"""Ranks that share a packed row (--context-parallel) compute what ranks with rows of their own do, to 1e-6 in fp32."""

import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from breadth import long
from fork_server import start_server
from forked import succeed
from in_process import train_forked, train_here
from safetensors.torch import load_file
from small_runs import BATCH_SIZE, LENGTHS, OPTIONS, make_inputs, make_samples_of, read_rows
from tiny_data import read_lines
from tiny_models import FAMILIES, HYBRIDS, SHAPE, load_source, save_model
from transformers import GptOssConfig, PreTrainedConfig, Qwen3Config, RobertaConfig

from mini_trainer.distributed.world import RowGroup, check_sharing
from mini_trainer.model.build import check_divisible, make_meta_model
from mini_trainer.model.config import ModelSource
from mini_trainer.model.context_parallel import describe_heads
from mini_trainer.model.method import Full
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.options import TrainOptions, group_options
from mini_trainer.run.inputs import RunInputs
from mini_trainer.run.plan.planner import choose_step_options
from mini_trainer.run.plan.simulation import Load, Ranks, lay_out_model, simulate_step
from mini_trainer.run.start import choose_method

pytestmark = pytest.mark.slow

HEADS = dict(num_attention_heads=6, num_key_value_heads=3, head_dim=8)  # 3 do not divide by 2, and 6 not by 4
MODELS: dict[str, PreTrainedConfig] = {
    "heads that do not": Qwen3Config(**SHAPE | HEADS),
    "sinks, windows": GptOssConfig(
        **SHAPE | HEADS, sliding_window=5, num_local_experts=4, num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "fewer heads than ranks": Qwen3Config(**SHAPE | dict(num_attention_heads=3, num_key_value_heads=1, head_dim=8)),
    "soft caps, windows, tiled": FAMILIES["gemma2_softcaps"],
    "experts": FAMILIES["mixtral"],  # with their auxiliary loss; heads that divide
    "LoRA": FAMILIES["qwen2"],
    "OSFT": FAMILIES["qwen2"],
}  # fmt: skip
NARROW = ("heads that do not", "experts")


@pytest.fixture(scope="module")
def results(tmp_path_factory, request) -> dict[tuple[str, int], dict]:
    """By model and number of ranks that share a row: what 4 ranks found of the same global batch."""
    root, test = tmp_path_factory.mktemp("models"), test_shared_rows_give_the_gradient_of_whole_ones
    names = {item.callspec.params["name"] for item in request.session.items if item.function is test}
    models = [f"{name}={save_model(MODELS[name], root / name)}" for name in MODELS if name in names]
    succeed(4, "tests/workers/shared_rows.py", root / "results", *models, timeout=480)
    return torch.load(root / "results", weights_only=False)


@pytest.mark.parametrize("num_sharing", [2, 4])
@pytest.mark.parametrize("name", [name if name in NARROW else long(name) for name in MODELS])
def test_shared_rows_give_the_gradient_of_whole_ones(name, num_sharing, results):
    whole, shared = results[name, 1], results[name, num_sharing]
    assert shared["loss"] == pytest.approx(whole["loss"], rel=1e-6)
    assert shared["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-6)
    assert shared["gradients"].keys() == whole["gradients"].keys()
    for param, gradient in shared["gradients"].items():
        expected = whole["gradients"][param]
        assert (gradient - expected).norm() <= 1e-6 * expected.norm(), param
    assert shared["reports"].keys() == whole["reports"].keys()
    for report, value in shared["reports"].items():
        assert value == pytest.approx(whole["reports"][report], rel=1e-6), report


@pytest.mark.parametrize("num_sharing", [2, 3, 4])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_the_parts_of_a_row_are_the_row(lengths, num_sharing):
    samples, objective = make_samples_of(lengths, seed=0), CausalLM()
    given = dict(sources=np.arange(len(samples)), num_sources=len(samples))
    samples = [sample | {"loss_weights": np.random.default_rng(0).random(len(sample["labels"]))} for sample in samples]
    whole = objective.pack(samples, **given)
    groups = [RowGroup(None, rank, num_sharing) for rank in range(num_sharing)]
    parts = [objective.pack(samples, row_group=group, **given) for group in groups]
    num_tokens = whole.row.input_ids.shape[1]
    assert len({part.row.input_ids.shape for part in parts}) == 1 and parts[0].row.input_ids.shape[1] >= 2
    for kind, name, dim in (("row", "input_ids", 1), ("row", "position_ids", 1), ("targets", "labels", 0),
                            ("targets", "weights", 0)):  # fmt: skip
        joined = torch.cat([getattr(getattr(part, kind), name) for part in parts], dim)
        assert torch.equal(joined.narrow(dim, 0, num_tokens), getattr(getattr(whole, kind), name)), name
    starts = [rank * len(part.targets.labels) for rank, part in enumerate(parts)]
    trained = [part.targets.index + start for part, start in zip(parts, starts, strict=True)]
    assert torch.equal(torch.cat(trained), whole.targets.index)
    assert torch.equal(torch.cat([part.targets.sources for part in parts]), whole.targets.sources)
    sequences = [part.targets.find_sequences(part.row) for part in parts]
    assert torch.equal(torch.cat(sequences), whole.targets.find_sequences(whole.row))
    for part in parts:
        assert part.row.seq_lengths[: len(whole.row.seq_lengths)] == whole.row.seq_lengths
        assert sum(part.row.seq_lengths) == num_sharing * len(part.targets.labels) == part.row.cu_seqlens[-1]
        assert part.row.max_seqlen == max(part.row.seq_lengths)


@pytest.mark.wide
def test_a_run_can_share_rows_from_a_checkpoint_on(world, tmp_path):
    """On 2 ranks, then on 4 in another layout, validated on the way: one process gives the same."""
    inputs = make_inputs(tmp_path, "qwen3")
    given = OPTIONS | inputs | dict(validate_every_steps=2, max_steps=4)
    paths = dict(validation_data_path=(inputs["data_path"],), output_dir=str(tmp_path / "alone"))
    train_here(world, **given | paths | dict(data_path=(inputs["data_path"],)))
    shared = given | dict(validation_data_path=inputs["data_path"], output_dir=tmp_path / "shared")
    train_forked(2, **shared | dict(max_steps=2, max_tokens_per_gpu=32, activation_checkpointing="selective"),
                 context_parallel=2)  # fmt: skip
    layout = dict(sharding="hybrid", shard_size=2, cpu_offload=True, micro_batch_grad_sync="last",
                  max_tokens_per_gpu="auto")  # fmt: skip
    text = train_forked(4, **shared | layout, context_parallel=4)
    assert "auto: --max-tokens-per-gpu" in text
    rows, expected_rows = (read_rows(tmp_path / name) for name in ("shared", "alone"))
    for row, expected in zip(rows, expected_rows, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-6)
        for name in ("num_total_tokens", "num_loss_counted_tokens", "total_tokens_accumulated"):
            assert row[name] == expected[name], name
    assert max(row["packing_efficiency"] for row in rows) <= 1
    losses, expected_losses = (
        [row["loss"] for row in read_lines(tmp_path / name / "validation_metrics_0.jsonl")]
        for name in ("shared", "alone")
    )
    assert losses == pytest.approx(expected_losses, rel=1e-6) and len(losses) == 3
    weights, expected = (
        load_file(tmp_path / name / "hf_format" / f"samples_{4 * BATCH_SIZE}" / "model.safetensors")
        for name in ("shared", "alone")
    )
    start = load_file(Path(inputs["model_name_or_path"]) / "model.safetensors")
    for name, weight in expected.items():
        assert (weights[name] - weight).norm() <= 1e-4 * (weight - start[name]).norm(), name


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("mamba", HYBRIDS["mamba 2, attention, experts"], "recurrent state"),
        ("convolution", HYBRIDS["short convolution"], "recurrent state"),
        ("choosing", HYBRIDS["attention that chooses keys"], "own attention"),
        ("roberta", RobertaConfig(**SHAPE, is_decoder=True), "positions"),
    ],
)
def test_a_model_whose_rows_cannot_be_divided_is_refused(name, config, reason):
    source = ModelSource("", config)
    compute = group_options(TrainOptions, model_name_or_path="", output_dir="").compute
    meta = make_meta_model(source, compute, family=TextFamily(), method=Full(), device=torch.device("cpu"))
    with pytest.raises(ValueError, match=f"--context-parallel 5: .*{reason}"):
        check_divisible(meta, 5)


def test_the_start_says_how_heads_are_divided():
    for num_heads, num_ranks, numbers in ((32, 4, [4, 8, 32]), (28, 8, [8, 4, 28, 32]), (3, 8, [8, 1, 3, 8])):
        assert list(map(int, re.findall(r"\d+", describe_heads(num_heads, num_ranks)))) == numbers


def test_ranks_that_cannot_be_divided_are_refused():
    check_sharing(3, None)
    check_sharing(6, 3)
    with pytest.raises(ValueError, match=r"--context-parallel 4: .*6 ranks"):
        check_sharing(6, 4)


def simulate(path: Path, num_sharing: int | None) -> Counter[str]:
    """What a rank of 4 needs for a row of 512 tokens."""
    options = group_options(TrainOptions, model_name_or_path=str(path), output_dir="", compute_dtype="float32",
                            activation_checkpointing="none", context_parallel=num_sharing)  # fmt: skip
    inputs = RunInputs(TextFamily(), choose_method(options), options.data, options, torch.float32, objective=CausalLM())
    inputs.model_dir, inputs.config = str(path), load_source(path).config
    planned = lay_out_model(choose_step_options(options), inputs, options.compute, choose_method(options))
    return simulate_step(
        choose_step_options(options), planned, Load(512, 512, 128, True), Ranks(4, 4, num_sharing)
    ).peak


@pytest.mark.wide
def test_a_plan_divides_what_a_row_needs(tmp_path):
    path = save_model(FAMILIES["llama"], tmp_path)
    with ProcessPoolExecutor(1, mp_context=start_server()) as pool:  # without the process group of this one
        whole, halves, quarters = pool.map(simulate, [path] * 3, [None, 2, 4])
    assert whole["weights"] == halves["weights"] == quarters["weights"]
    assert halves["activations"] == pytest.approx(whole["activations"] / 2, rel=0.1)
    assert quarters["activations"] == pytest.approx(whole["activations"] / 4, rel=0.2)  # key heads are repeated
