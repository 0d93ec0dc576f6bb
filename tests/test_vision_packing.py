"""What images cost: patches counted as the processor makes them, FLOPs as torch counts them, and caps in runs."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import print_plan, train_on
from small_runs import OPTIONS, read_rows
from tiny_models import load_source
from tiny_vision import exact_families, load, make_image, make_rows, save_vision_model, tokenize
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.devices import MemoryCounter
from mini_trainer.distributed.ending import ExitCode
from mini_trainer.model.build import build_model
from mini_trainer.model.flops import count_flops
from mini_trainer.model.method import Full
from mini_trainer.model.optim.optimizers import build_optimizer
from mini_trainer.model.tower_flops import count_tower
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.families.text_tower import list_parts
from mini_trainer.objectives.families.vision import VisionLanguageFamily, VisionLanguageReader
from mini_trainer.objectives.pictured_tokens import VisionLanguage
from mini_trainer.options import TrainOptions, group_options
from mini_trainer.run.choosing import choose_method
from mini_trainer.run.images import count_set_images
from mini_trainer.run.plan.planner import choose_step_options
from mini_trainer.run.plan.simulation import Load, Ranks, StepMemory, lay_out_model, simulate_step
from mini_trainer.run.start import open_inputs
from mini_trainer.sampler import RunPosition

FAMILIES = ("qwen2.5-vl", "llava-next", "internvl", "gemma3")
NUM_TOKENS, NUM_TRAINED = 600, 300


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: save_vision_model(root, family) for family in ("qwen2.5-vl", "llava")}


@pytest.fixture(scope="module")
def data(models, tmp_path_factory) -> dict[str, Path]:
    found = {}
    for family, model in models.items():
        directory = tmp_path_factory.mktemp(family)
        found[family] = tokenize(make_rows(directory), model, directory)
    return found


def make_objective(path: Path, **settings: object) -> VisionLanguage:
    family, config = VisionLanguageFamily(TextFamily(), ("vision",), **settings), AutoConfig.from_pretrained(path)
    assert family.check_config(config, trust_remote_code=False) is None
    return VisionLanguage(family.complete(config, None, trust_remote_code=False))


@pytest.mark.parametrize("family", exact_families(FAMILIES))
def test_patches_are_those_that_the_processor_makes(family, tmp_path):
    vision_inputs = make_objective(save_vision_model(tmp_path, family)).family.vision_inputs
    for seed in range(6):
        image = make_image(seed)
        made = vision_inputs.processor(
            text=[vision_inputs.processor.image_token], images=[[image]], return_tensors="pt"
        )
        pixels = made["pixel_values"]
        if pixels.ndim < 4:  # patches, laid out
            num_made = math.prod(pixels.shape[:-1])
        else:  # of 4 x 4 pixels, of images whose last rows and columns may be no whole one
            num_made = math.prod(pixels.shape[:-3]) * (pixels.shape[-2] // 4) * (pixels.shape[-1] // 4)
        assert math.prod(vision_inputs.count_patches(image.height, image.width)) == num_made


@pytest.mark.parametrize("family", ["qwen2.5-vl", "llava"])
def test_flops_of_the_tower_are_those_that_torch_counts(family, models, data):
    objective, model = make_objective(models[family]), load(models[family])
    for name in list_parts(model)["vision"]:
        model.get_parameter(name).requires_grad_(False)
    rows, counted = Mixture([TokenizedData(data[family])]), FlopCounterMode(display=False)
    count_set_images(rows, objective.family.vision_inputs.count_patches, cap=None, drop_overlong=False)
    tower = count_tower(model, model.config)
    ids = np.arange(len(rows.lengths))
    images = rows.images.of(ids)
    batch = objective.pack([rows.read(row) for row in ids.tolist()])
    with counted, torch.no_grad():
        VisionLanguageReader(model).base.get_image_features(**batch.extras.pixels, return_dict=True)
    # Forward only, also of the projector, which trains: a third of its FLOPs.
    expected = tower.per_patch * images.patches + tower.per_pair * images.pairs + tower.per_token / 3 * images.tokens
    # Windows at an image's edge are counted as if they were whole.
    assert expected.sum() == pytest.approx(counted.get_total_flops(), rel=0.12)
    flops = count_flops(model)
    assert (flops.of_images(images) > 0).tolist() == (images.patches > 0).tolist()
    alone = flops.of_batch(rows.lengths, 10)
    assert flops.of_batch(rows.lengths, 10, images) == pytest.approx(alone + flops.of_images(images).sum())


@pytest.mark.long
def test_runs_keep_the_cap_of_patches_and_compute_the_same(models, data, world, tmp_path):
    """With both caps a step has more micro-batches, and the same loss and gradient."""
    family = "qwen2.5-vl"
    most = dict(model_name_or_path=models[family], data_path=data[family], max_steps=2, batch_size=6)

    def train(name: str, **options: object) -> list[dict]:
        train_on(1, world, **OPTIONS | most | dict(output_dir=tmp_path / name, max_tokens_per_gpu=900) | options)
        return read_rows(tmp_path / name)

    rows = Mixture([TokenizedData(data[family])])
    count_set_images(
        rows, make_objective(models[family]).family.vision_inputs.count_patches, cap=None, drop_overlong=False
    )
    cap = int(rows.images.patches.max())
    plain, capped = train("plain"), train("capped", max_image_tokens_per_gpu=cap)
    for row, other in zip(plain, capped, strict=True):
        assert row["grad_accum"] == 1 < other["grad_accum"]
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    number = int(rows.images.patches.argmax()) + 1
    with pytest.raises(ValueError, match=rf"data.arrow: row {number} .*{cap:,} patches .*--drop-overlong"):
        train("refused", max_image_tokens_per_gpu=cap - 1)
    (dropped,) = train("dropped", max_image_tokens_per_gpu=cap - 1, drop_overlong=True, max_steps=1)
    assert dropped["loss"] != plain[0]["loss"]


def simulate(given: dict, freeze: str, cap: int | None = None) -> StepMemory:
    options = group_options(TrainOptions, **given | dict(freeze=(freeze,), max_image_tokens_per_gpu=cap))
    inputs = open_inputs(options, device=torch.device("cpu"), world_size=1, start=RunPosition())
    inputs.errors.raise_all()
    load = Load(NUM_TOKENS, NUM_TRAINED, longest=inputs.longest, accumulates=False)
    step_options = choose_step_options(options)
    planned = lay_out_model(step_options, inputs, options.compute, choose_method(options))
    return simulate_step(step_options, planned, load, Ranks(world_size=1, num_shards=1))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("family", exact_families(FAMILIES[:1]))
def test_the_simulated_peak_is_that_of_a_real_step_with_images(family, elsewhere, world, tmp_path):
    """With the tower trained and frozen."""
    model = save_vision_model(tmp_path, family)
    given = OPTIONS | dict(model_name_or_path=str(model), data_path=str(tokenize(make_rows(tmp_path), model, tmp_path)),
                           output_dir=str(tmp_path / "run"), activation_checkpointing="none",
                           max_tokens_per_gpu=NUM_TOKENS)  # fmt: skip
    for freeze in ("nothing", "vision"):
        options = group_options(TrainOptions, **given | dict(freeze=(freeze,)))
        inputs = open_inputs(options, device=torch.device("cpu"), world_size=1, start=RunPosition())
        inputs.errors.raise_all()
        source = load_source(model)
        packed = build_model(source, options.compute, options.sharding, objective=inputs.objective, method=Full(),
                             world=world)  # fmt: skip
        optimizer, counter = build_optimizer(packed, options.optimization), MemoryCounter()
        for tensor in [*packed.parameters(), *packed.buffers()]:
            counter.count(tensor)
        for _ in range(2):
            micro_batch = inputs.objective.make_probe(NUM_TOKENS, NUM_TRAINED, longest=inputs.longest)
            with counter:
                for tensor in micro_batch.extras.pixels.values():
                    counter.count(tensor)
                packed(micro_batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        predicted = elsewhere(simulate, given, freeze)
        assert predicted.total == pytest.approx(counter.num_peak, rel=0.03)


@pytest.mark.wide
def test_plans_know_the_tower_and_its_cap(models, data, elsewhere, tmp_path):
    """More patches in a micro-batch, of as many tokens, need more memory: the tower runs in the simulation."""
    given = {
        family: OPTIONS | dict(model_name_or_path=str(models[family]), data_path=str(data[family]), batch_size=6,
                               output_dir=str(tmp_path / "run"), activation_checkpointing="none",
                               max_tokens_per_gpu=NUM_TOKENS, max_steps=2)
        for family in models
    }  # fmt: skip
    few, many = (elsewhere(simulate, given["llava"], "nothing", cap) for cap in (64, 256))
    assert many.peak["activations"] > few.peak["activations"] + 192 * 4 * 32 * 4  # bytes of a few vectors a patch
    frozen = elsewhere(simulate, given["llava"], "vision", 256)
    assert frozen.peak["activations"] < many.peak["activations"]
    assert frozen.peak["frozen"] > many.peak["frozen"]
    code, text = elsewhere(print_plan, given["qwen2.5-vl"] | dict(dry_run=True, plan_for="2"))
    assert code == ExitCode.DONE and "memory" in text and "token more" in text


@pytest.mark.long
def test_auto_measures_with_images(models, data, world, tmp_path):
    objective = make_objective(models["llava"], largest_image=(30, 20), max_patches=40)  # of 16 patches each
    probe = objective.make_probe(90, 45, longest=60)
    assert probe.row.seq_lengths == [60, 30] and len(probe.extras.pixels["pixel_values"]) == 2
    assert probe.extras.num_tokens == 32
    assert 40 <= len(probe.targets.index) <= 46
    given = dict(model_name_or_path=str(models["llava"]), data_path=str(data["llava"]), max_steps=1, batch_size=6,
                 output_dir=str(tmp_path / "run"), max_tokens_per_gpu="auto", max_image_tokens_per_gpu=64)  # fmt: skip
    train_on(1, world, **OPTIONS | given)
    assert len(read_rows(tmp_path / "run")) == 1
