"""One global batch gives one gradient: 1, 2 and 4 ranks, one node or two, one micro-batch or many."""

import json
from pathlib import Path

import pytest
import torch
from forked import ForkedTorchrun, succeed
from plain_loop import train_plainly
from processes import ROOT, flags, free_port, name_node
from safetensors.torch import load_file
from small_runs import read_rows
from tiny_data import make_samples, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer
from transformers import AutoModelForCausalLM

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData

pytestmark = pytest.mark.slow

NUM_SAMPLES, BATCH_SIZE, STEPS, LEARNING_RATE, SEED = 40, 9, 10, 1e-2, 5
EPS = 1e-6  # with AdamW's 1e-8, gradients that are zero but for their rounding decide on the sign of whole steps
# How the same run can be laid out: processes (0: one, without torchrun's environment), the cap that makes
# 1 to 6 micro-batches of a batch, and options.
LAYOUTS = {
    "1 rank": (1, 1000, {}),
    "1 rank, small cap": (0, 41, {}),
    "2 ranks": (2, 60, dict(checkpoint_every_steps=4, keep_checkpoints=9, reshard_after_forward="never")),
    "4 ranks": (4, 41, dict(micro_batch_grad_sync="last", prefetch_blocks=2, cpu_offload=True)),
}
HYBRID = dict(sharding="hybrid", shard_size=2, checkpoint_every_steps=4, reshard_after_forward="always")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict:
    root = tmp_path_factory.mktemp("inputs")
    samples = make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE)
    model = save_tokenizer(save_model(FAMILIES["qwen3"], root / "model"))  # tied embeddings
    return dict(root=root, samples=samples, model=model, data=write_samples(root / "data.arrow", samples))


def train_command(inputs: dict, output_dir: Path, max_tokens_per_gpu: int, **options: object) -> list[str]:
    return ["train.py", *flags(
        model_name_or_path=inputs["model"], data_path=inputs["data"], output_dir=output_dir, batch_size=BATCH_SIZE,
        max_tokens_per_gpu=max_tokens_per_gpu, max_steps=STEPS, learning_rate=LEARNING_RATE, seed=SEED,
        max_grad_norm=1.0, weight_decay=0.1, adam_eps=EPS, export_dtype="float32", **options,
    )]  # fmt: skip


@pytest.fixture(scope="module")
def runs(inputs) -> dict[str, Path]:
    """The same training in every layout, and on two nodes of one process each, under torchrun."""
    output_dirs = {}
    for layout, (num_ranks, cap, options) in LAYOUTS.items():
        output_dirs[layout] = inputs["root"] / layout.replace(" ", "_").replace(",", "")
        succeed(num_ranks, *train_command(inputs, output_dirs[layout], cap, **options))
    output_dirs["2 nodes"] = inputs["root"] / "two_nodes"
    argv = train_command(inputs, output_dirs["2 nodes"], 60)
    port, logs = free_port(), [inputs["root"] / f"node_{i}.log" for i in range(2)]
    agents = [ForkedTorchrun(name_node(2, port), argv, log) for log in logs]
    for agent, log in zip(agents, logs, strict=True):
        assert agent.wait() == 0, log.read_text()
    return output_dirs


def train_with_transformers(inputs: dict) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """What the run computes, written with transformers, padding and AdamW alone: losses, norms, weights."""
    model = AutoModelForCausalLM.from_pretrained(inputs["model"], attn_implementation="eager").train()

    def backward(rows: list[int], start: int) -> float:
        batch = [inputs["samples"][row] for row in rows]
        longest = max(len(ids) for ids, _ in batch)
        input_ids, labels, mask = (torch.full((BATCH_SIZE, longest), value) for value in (0, -100, 0))
        for i, (ids, row_labels) in enumerate(batch):
            input_ids[i, : len(ids)], labels[i, : len(ids)] = torch.tensor(ids), torch.tensor(row_labels)
            mask[i, : len(ids)] = 1
        logits = model(input_ids=input_ids, attention_mask=mask, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        return loss.item()

    data, sizes = Mixture([TokenizedData(inputs["data"])]), dict(num_steps=STEPS, batch_size=BATCH_SIZE, seed=SEED)
    losses, norms = train_plainly(model, data, backward, **sizes, learning_rate=LEARNING_RATE, eps=EPS)
    return losses, norms, {name: param.detach() for name, param in model.named_parameters()}


def test_the_run_is_that_of_a_plain_transformers_loop(inputs, runs):
    losses, norms, weights = train_with_transformers(inputs)
    rows = read_rows(runs["1 rank"])
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-4)
    exported = load_file(runs["1 rank"] / "hf_format" / f"samples_{STEPS * BATCH_SIZE}" / "model.safetensors")
    start = load_file(inputs["model"] / "model.safetensors")
    assert exported.keys() == weights.keys()
    for name, weight in weights.items():
        moved = (weight - start[name]).norm()
        assert moved > 0, f"{name} was not trained"
        assert (exported[name] - weight).norm() <= 1e-3 * moved, name


@pytest.mark.parametrize("layout", [*LAYOUTS, "2 nodes"])
def test_losses_do_not_depend_on_ranks_nodes_and_caps(layout, runs):
    rows, reference = read_rows(runs[layout]), read_rows(runs["1 rank"])
    assert len(rows) == STEPS
    for row, expected in zip(rows, reference, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        for key in ("step", "lr", "num_loss_counted_tokens", "num_total_tokens", "total_samples_accumulated"):
            assert row[key] == expected[key]


def test_the_layouts_are_different_ones(runs):
    accumulated = {layout: sum(row["grad_accum"] for row in read_rows(path)) for layout, path in runs.items()}
    assert accumulated["1 rank"] == STEPS
    assert accumulated["1 rank, small cap"] > accumulated["2 ranks"] > accumulated["4 ranks"]
    for layout, world_size in {"2 ranks": 2, "4 ranks": 4, "2 nodes": 2}.items():
        params = json.loads((runs[layout] / "training_params.json").read_text())
        assert params["world_size"] == world_size


@pytest.mark.long
def test_a_model_sharded_in_each_node_goes_on_from_one_sharded_over_all_and_the_other_way_round(inputs, runs):
    """2 x 2 ranks do what 2 did, and 1 does what they did: losses, norms (counted once), checkpoints, exports."""
    reference = read_rows(runs["1 rank"])
    hybrid, after = inputs["root"] / "hybrid", inputs["root"] / "after_hybrid"
    start = runs["2 ranks"] / "checkpoints" / "step_4"
    succeed(4, *train_command(inputs, hybrid, 41, resume=start, **HYBRID))
    checkpoint = hybrid / "checkpoints" / "step_8"
    assert {path.name for path in checkpoint.glob("*.safetensors")} == {f"rank_0000{i}.safetensors" for i in (0, 1)}
    succeed(0, *train_command(inputs, after, 1000, resume=checkpoint))
    for output_dir, first_step in ((hybrid, 4), (after, 8)):
        for row, expected in zip(read_rows(output_dir, first_step + 1), reference[first_step:], strict=True):
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    export = f"hf_format/samples_{STEPS * BATCH_SIZE}/model.safetensors"
    expected = load_file(runs["1 rank"] / export)
    for name, weight in load_file(hybrid / export).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-4)


def test_the_export_of_several_ranks_is_that_of_one(runs):
    export = f"hf_format/samples_{STEPS * BATCH_SIZE}"
    prompt = torch.arange(3, 23)[None]
    logits = {
        layout: AutoModelForCausalLM.from_pretrained(runs[layout] / export)(prompt).logits
        for layout in ("1 rank", "2 ranks", "4 ranks")
    }
    for layout in ("2 ranks", "4 ranks"):
        difference = (logits[layout] - logits["1 rank"]).norm()
        assert difference <= 1e-3 * logits["1 rank"].norm()


def test_the_first_gradients_do_not_depend_on_ranks_and_caps(inputs):
    batch_sizes, results = (9, 3), {}
    for num_ranks, cap in ((1, 1000), (2, 41), (4, 41)):
        output = inputs["root"] / f"gradients_{num_ranks}.pt"
        argv = [ROOT / "tests" / "workers" / "first_gradients.py", inputs["model"], inputs["data"], cap, output]
        succeed(num_ranks, *argv, *batch_sizes)
        results[num_ranks] = torch.load(output)
    for (i, one), batch_size in zip(enumerate(results[1]), 2 * batch_sizes, strict=True):
        assert (results[4][i]["num_idle"] > 0) == (batch_size == 3)  # fewer samples than ranks: some only take part
        plain = results[1][i % len(batch_sizes)]
        for num_ranks, other in [(1, plain)] + [(num_ranks, results[num_ranks][i]) for num_ranks in (2, 4)]:
            assert other["sample_ids"] == one["sample_ids"]
            assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
            assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
            for name, expected in one["gradients"].items():
                error = (other["gradients"][name] - expected).norm() / expected.norm()
                assert error <= 1e-5, f"{one['kind']}, {name}: relative error {error:.1e} on {num_ranks} ranks"
