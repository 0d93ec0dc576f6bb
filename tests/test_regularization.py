"""Smoothed targets, transformers' own however the batch is divided, and dropout."""

from itertools import combinations

import pytest
import torch
from hand_made import read_triple
from in_process import train_here, train_on
from plain_loop import train_plainly
from small_runs import OPTIONS, read_rows
from tiny_data import read_lines, write_samples
from tiny_models import FAMILIES, save_model, save_tokenizer
from transformers import AutoModelForCausalLM, GPT2Config
from transformers.trainer_pt_utils import LabelSmoother

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData

MODEL = "qwen3"
SMOOTHING, STEPS, SEED = 0.1, 3, 42
REGULARIZED = dict(label_smoothing=SMOOTHING)
RUN = OPTIONS | dict(max_steps=STEPS, save_final_checkpoint=False, min_samples_per_checkpoint=10**6, adam_eps=1e-6)


def train_with_transformers(inputs: dict[str, str]) -> tuple[list[float], list[float]]:
    """By transformers alone, a sequence at a time, with its own hook and its own loss: losses, gradient norms."""
    data, smoother = Mixture([TokenizedData(inputs["data_path"])]), LabelSmoother(epsilon=SMOOTHING)
    model = AutoModelForCausalLM.from_pretrained(inputs["model_name_or_path"]).train()

    def backward(rows: list[int], start: int) -> float:
        batch = [[torch.tensor(array.astype(int))[None] for array in read_triple(data, row)[:2]] for row in rows]
        counts, total = [int((labels[:, 1:] != -100).sum()) for _, labels in batch], 0.0
        for (ids, labels), count in zip(batch, counts, strict=True):
            logits = model(input_ids=ids, use_cache=False).logits
            if count:
                loss = smoother({"logits": logits}, labels, shift_labels=True) * count / sum(counts)
                loss.backward()
                total += loss.item()
        return total

    sizes = dict(num_steps=STEPS, batch_size=OPTIONS["batch_size"], seed=SEED)
    return train_plainly(model, data, backward, **sizes, learning_rate=OPTIONS["learning_rate"], eps=1e-6)


@pytest.mark.slow
def test_a_run_is_transformers_own_on_any_ranks_and_however_it_is_divided(inputs, world, tmp_path):
    losses, norms = train_with_transformers(inputs)
    layouts = {
        "small": (1, dict(max_tokens_per_gpu=41, activation_checkpointing="full")),
        "two": (2, dict(max_tokens_per_gpu=50, activation_checkpointing="selective")),
    }
    for name, (num_ranks, changes) in layouts.items():
        train_on(num_ranks, world, **inputs | RUN | REGULARIZED | changes, output_dir=tmp_path / name)
        rows = read_rows(tmp_path / name)
        assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-6), name
        assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-4), name


@pytest.mark.slow
def test_dropout_is_other_dropout_in_every_step_on_every_rank_and_of_every_seed(world, tmp_path):
    """At a learning rate of 0, on equal samples of which each rank has one, where only dropout moves the loss. The same
    run again has validations, without dropout."""
    config = GPT2Config.from_dict(FAMILIES["gpt2"].to_dict() | dict(attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3))
    model = save_tokenizer(save_model(config, tmp_path / "model"))
    ids = list(range(3, 33))
    data = write_samples(tmp_path / "data.arrow", [(ids, ids)] * 8)
    options = RUN | dict(model_name_or_path=model, data_path=data, max_tokens_per_gpu=len(ids), learning_rate=0.0)
    losses = {}
    validated = dict(validation_data_path=data, validate_every_steps=1, export_best=False)
    cases = {"one": (1, {}), "again": (1, validated), "two": (2, {}), "seed": (1, dict(seed=7))}
    for name, (num_ranks, changes) in cases.items():
        train_on(num_ranks, world, **options | dict(batch_size=num_ranks) | changes, output_dir=tmp_path / name)
        losses[name] = [row["loss"] for row in read_rows(tmp_path / name)]
    assert losses["again"] == losses["one"]
    different = [*losses["one"], *losses["two"], *losses["seed"]]
    assert min(abs(a - b) for a, b in combinations(different, 2)) > 1e-4, different


def test_validations_have_no_smoothed_targets(inputs, world, tmp_path):
    """And what trains has them, here adapters and embeddings that train beside them."""
    changes = dict(lora=True, lora_modules_to_save=("embed_tokens",))
    found, small = {}, REGULARIZED | dict(max_tokens_per_gpu=41)
    for name, given in {"plain": {}, "regularized": REGULARIZED, "small": small}.items():
        run = inputs | RUN | dict(max_steps=1, validation_data_path=(inputs["data_path"],), export_best=False)
        train_here(world, **run | changes | given, output_dir=str(tmp_path / name))
        validations = read_lines(tmp_path / name / "validation_metrics_0.jsonl")
        found[name] = (read_rows(tmp_path / name)[0]["loss"], validations[0]["loss"])
    assert found["regularized"][1] == pytest.approx(found["plain"][1], rel=1e-6)
    assert found["regularized"][0] != pytest.approx(found["plain"][0], rel=1e-3)
    assert found["small"] == pytest.approx(found["regularized"], rel=1e-6)
