"""Models that see: rows with images, and packed losses and gradients against transformers' own, one by one.

What images cost: patches counted as the processor makes them, FLOPs as torch counts them, and caps in runs.
"""

import inspect
import math
import re
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from breadth import long, wide
from in_process import print_plan, train_here, train_on
from small_runs import OPTIONS, read_rows
from tiny_data import read_lines
from tiny_models import compile_by, load_source, make_osft
from tiny_vision import VISION_MODELS, exact_families, lacking, load, make_image, make_rows, save_vision_model, tokenize
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, PreTrainedModel

from mini_trainer.data.columns.base import IGNORED, VISION
from mini_trainer.data.stores.image_files import load_processor, open_image
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.ending import ExitCode
from mini_trainer.model.build import build_model
from mini_trainer.model.check import check_model
from mini_trainer.model.flops import count_flops, count_tower
from mini_trainer.model.method import Full, Method
from mini_trainer.model.methods.lora import LoRA
from mini_trainer.model.optim.optimizers import build_optimizer
from mini_trainer.objectives.families.family import MicroBatch, pack_row
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.families.text_tower import list_parts
from mini_trainer.objectives.families.vision import Images, VisionLanguageFamily, VisionLanguageRowModel
from mini_trainer.objectives.next_tokens import NextTokens, VisionLanguage
from mini_trainer.options import LoRAOptions, TrainOptions, group_options
from mini_trainer.osft import OSFTLinear
from mini_trainer.run.auto_settings import MemoryCounter
from mini_trainer.run.images import count_set_images
from mini_trainer.run.inputs import RunInputs
from mini_trainer.run.plan.planner import choose_step_options
from mini_trainer.run.plan.simulation import Load, Ranks, StepMemory, lay_out_model, simulate_step
from mini_trainer.run.start import choose_method, open_inputs
from mini_trainer.sampler import RunPosition

FAMILIES = ("qwen2.5-vl", "qwen3-vl", "llava", "idefics3", "gemma3", "gemma4-both-ways")


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    return {family: save_vision_model(tmp_path_factory.mktemp(family), family) for family in ("qwen2.5-vl", "llava")}


@pytest.fixture(scope="module")
def data(models) -> dict[str, Path]:
    return {family: tokenize(make_rows(model.parent), model, model.parent) for family, model in models.items()}


UNUSED = dict(model_name_or_path="", data_path="", output_dir="", activation_checkpointing="none",
              compute_dtype="float32")  # fmt: skip


def make_objective(path: Path, freeze: tuple[str, ...] = ("vision",), **settings: object) -> VisionLanguage:
    family, config = VisionLanguageFamily(TextFamily(), freeze, **settings), AutoConfig.from_pretrained(path)
    assert family.check_config(config, trust_remote_code=False) is None
    return VisionLanguage(family.complete(config, None, trust_remote_code=False))


def build(path: Path, world, freeze: tuple[str, ...] = ("vision",), method: Method | None = None, **options: object):
    options, source = group_options(TrainOptions, **UNUSED | options), load_source(path)
    objective = make_objective(path, freeze)
    given = dict(objective=objective, method=method or Full(), world=world)
    packed = build_model(source, options.compute, options.sharding, **given)
    check_model(packed, objective, world=world)
    return objective, packed


def llama4(*values: object):
    return pytest.param("llama4", *values, marks=[pytest.mark.wide, *lacking("torchvision")])


def pack_all(objective: VisionLanguage, rows: TokenizedData) -> MicroBatch:
    return objective.pack([rows.read(row) for row in range(len(rows.lengths))])


def run_plain(model: PreTrainedModel, path: Path, data: TokenizedData, row: int) -> torch.Tensor:
    """The summed loss of one row by the model's own forward pass, with what its processor makes of the images."""
    sample = data.read(row)
    ids, labels, references = sample["input_ids"], sample["labels"], sample.get("images", ())
    ids, labels = torch.tensor(ids)[None], torch.tensor(labels)
    kinds = (ids == model.config.image_token_id).long()
    own = dict(input_ids=ids, use_cache=False)
    if references:
        images = [open_image(reference, directory=Path()) for reference in references]
        processor = load_processor(str(path))
        places = processor.image_token * len(images)
        made = processor(text=[places], images=[images], add_special_tokens=False, return_tensors="pt")
        taken = inspect.signature(type(model).forward).parameters
        own |= {name: value for name, value in made.items() if name in taken and name != "attention_mask"}
        own["pixel_values"] = own["pixel_values"].to(model.dtype)  # bf16 from Llama 4's processor
        own |= dict(input_ids=ids) | (dict(mm_token_type_ids=kinds) if "mm_token_type_ids" in taken else {})
    if model.config.model_type == "gemma3":
        own["token_type_ids"] = kinds
    logits = model(**own).logits[0]
    return torch.nn.functional.cross_entropy(logits[:-1], labels[1:].long(), ignore_index=IGNORED, reduction="sum")


def run_all_plain(model: PreTrainedModel, path: Path, rows: TokenizedData) -> tuple[float, dict[str, torch.Tensor]]:
    """The summed loss of all rows, one at a time, and its gradients; zeros where there is none."""
    total = sum(run_plain(model, path, rows, row) for row in range(len(rows.lengths)))
    total.backward()
    params = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return total.item(), {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in params}


# By family: how far gradients move when each weight moves by half a unit in its last place, if by more than 1e-5.
ROUNDING = {"qwen3.5-moe": 5e-5}


def assert_same(found: torch.Tensor, expected: torch.Tensor, name: str, rel: float = 1e-5) -> None:
    assert (found.full_tensor() - expected).norm() <= rel * expected.norm() + 1e-6, name


@pytest.mark.parametrize("options", [{}, wide(dict(compile=True))])
@pytest.mark.parametrize("family", exact_families(FAMILIES))
def test_packed_losses_and_gradients_are_the_models_own(family, options, world, tmp_path, monkeypatch):
    """All parts train: the gradients of a part do not depend on which others are frozen. Compiled blocks, too, where
    features of deeper layers come in between, and tokens of an image see both ways."""
    compile_by("eager", monkeypatch, dynamic=False)
    model = save_vision_model(tmp_path, family)
    rows = TokenizedData(tokenize(make_rows(tmp_path), model, tmp_path))
    objective, packed = build(model, world, ("nothing",), **options)
    loss = packed(pack_all(objective, rows)).loss
    loss.backward()
    total, gradients = run_all_plain(load(model), model, rows)
    assert loss.item() == pytest.approx(total, rel=1e-6)
    trained = dict(packed.model.named_parameters())
    assert gradients.keys() == trained.keys()
    for name, param in trained.items():
        assert_same(param.grad, gradients[name], name, ROUNDING.get(family, 1e-5))


PARTS = {"vision": "vision_tower", "projector": "multi_modal_projector", "language": ("language_model", "lm_head")}


@pytest.mark.parametrize("mode", ["none", long("selective"), long("full")])
def test_what_is_frozen_has_no_gradient_and_the_rest_has_the_models_own(mode, models, data, world):
    """In every mix of parts, and with every way to keep activations; a mix has its own, to try each once."""
    mixes = dict(none=[("vision", "projector"), ("projector", "language")],
                 selective=[("vision", "language"), ("projector",)], full=[("language",), ("vision",)])  # fmt: skip
    rows = TokenizedData(data["llava"])
    total, gradients = run_all_plain(load(models["llava"]), models["llava"], rows)
    for freeze in mixes[mode]:
        objective, packed = build(models["llava"], world, freeze, activation_checkpointing=mode)
        loss = packed(pack_all(objective, rows)).loss
        loss.backward()
        assert loss.item() == pytest.approx(total, rel=1e-6)
        for name, param in packed.model.named_parameters():
            part = next(part for part, starts in PARTS.items() if name.removeprefix("model.").startswith(starts))
            assert (param.grad is None) == (part in freeze), (name, freeze)
            if param.grad is not None:
                assert_same(param.grad, gradients[name], name)


def test_a_kind_of_model_whose_prompts_are_read_both_ways_is_refused_by_its_config():
    config = AutoConfig.for_model("paligemma")
    obstacle = VisionLanguageFamily(TextFamily()).check_config(config, trust_remote_code=False)
    assert "'paligemma'" in obstacle and "bidirectional" in obstacle


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_llama_4_packs_tiles_as_its_own_forward_reads_them(dtype, world, tmp_path):
    """Tiles as its processor makes them, in bf16 and several for an image, without the package that it needs."""
    path = save_vision_model(tmp_path, "llama4")
    source, random = load_source(path), np.random.default_rng(0)
    options = group_options(TrainOptions, **UNUSED | {"compute_dtype": dtype})
    objective = VisionLanguage(VisionLanguageFamily(TextFamily(), ("nothing",)))
    packed = build_model(source, options.compute, options.sharding, objective=objective, method=Full(), world=world)
    patches = [source.config.image_token_id] * 4  # of a tile
    words = [random.integers(3, 200, length).tolist() for length in (9, 14, 7)]
    sequences = [words[0], [5, *patches, 6, *patches, *words[1]], [*patches, *words[2], *patches]]
    tiles = torch.from_numpy(random.normal(size=(4, 3, 16, 16))).bfloat16()
    labels = [torch.tensor([*ids[1:], IGNORED]) for ids in sequences]
    joined = torch.cat([torch.where(of == patches[0], IGNORED, of) for of in labels])
    targets = NextTokens(torch.nonzero(joined != IGNORED)[:, 0], labels=joined)
    row = pack_row([np.array(ids) for ids in sequences])
    loss = packed(MicroBatch(row, targets, extras=Images(16, {"pixel_values": tiles}))).loss
    loss.backward()
    model = load(path)
    given = [{}, {"pixel_values": tiles[:2].float()}, {"pixel_values": tiles[2:].float()}]
    logits = [model(torch.tensor([ids]), **seen).logits[0] for ids, seen in zip(sequences, given, strict=True)]
    own = torch.nn.functional.cross_entropy(torch.cat(logits), joined, ignore_index=IGNORED, reduction="sum")
    own.backward()
    assert loss.item() == pytest.approx(own.item(), rel=1e-6 if dtype == "float32" else 2e-2)
    for name, param in packed.model.named_parameters() if dtype == "float32" else ():
        assert_same(param.grad, model.get_parameter(name).grad, name)


@pytest.mark.parametrize("family", ["gemma3", llama4()])
def test_tokens_for_parts_of_images_typed_in_texts_are_refused(family, tmp_path):
    """Where the chat template writes another one."""
    token = VISION_MODELS[family].tokens[0]
    turns = [{"role": "user", "content": f"what is {token}?"}, {"role": "assistant", "content": "a token"}]
    with pytest.raises(ValueError, match=rf"rows.jsonl:1: .*'{re.escape(token)}', .*image"):
        tokenize([{"messages": turns}], save_vision_model(tmp_path, family), tmp_path)


def test_nothing_left_to_train_is_refused(models, world):
    with pytest.raises(ValueError, match="--freeze vision projector language: "):
        build(models["llava"], world, ("vision", "projector", "language"))
    with pytest.raises(ValueError, match=r"--lora-target-modules .*--freeze.* q_nope: "):
        build(models["llava"], world, ("vision",), make_lora("q_nope"))


@pytest.mark.parametrize("family", ["qwen2.5-vl", wide("idefics3")])
def test_files_that_became_another_number_of_tokens_are_told(family, world, tmp_path):
    model = save_vision_model(tmp_path, family)
    rows = TokenizedData(tokenize(make_rows(tmp_path), model, tmp_path))
    make_image(0).resize((20, 60)).save(tmp_path / "0.png")
    objective, packed = build(model, world)
    with pytest.raises(ValueError, match="image files"):
        packed(pack_all(objective, rows))


def make_lora(*targets: str) -> LoRA:
    return LoRA(LoRAOptions(lora=True, lora_rank=4, lora_target_modules=targets), seed=0)


def train_adapters(family: str, method: LoRA, freeze: tuple[str, ...], models, data, world) -> set[str]:
    """Compares with peft's adapters of the same numbers, one row at a time; the layers that have adapters."""
    objective, packed = build(models[family], world, freeze, method)
    torch.manual_seed(1)
    trained = {name: param for name, param in packed.model.named_parameters() if param.requires_grad}
    for param in trained.values():  # what has learned nothing hides half of the gradients
        param.data.to_local().normal_(std=0.2)
    own = peft.get_peft_model(load(models[family]), method.config)
    for name, param in own.base_model.model.named_parameters():
        if name in trained:
            param.data.copy_(trained[name].data.full_tensor())
    rows = TokenizedData(data[family])
    loss = packed(pack_all(objective, rows)).loss
    loss.backward()
    total, gradients = run_all_plain(own.base_model.model, models[family], rows)
    assert gradients.keys() == trained.keys()
    assert loss.item() == pytest.approx(total, rel=1e-5)
    for name, param in trained.items():
        assert_same(param.grad, gradients[name], name)
    return {name.partition(".lora_")[0].removeprefix("model.") for name in trained}


@pytest.mark.long
def test_adapters_on_language_on_vision_and_on_both_are_pefts(models, data, world):
    """By default the language model's blocks have them; where else one is looked for, --freeze says."""
    language = train_adapters("llava", make_lora(), ("vision",), models, data, world)
    assert all(name.startswith("language_model.layers") for name in language) and len(language) == 14
    same = train_adapters("llava", make_lora("q_proj"), ("vision",), models, data, world)
    assert same == {name for name in language if name.endswith("q_proj")}
    vision = train_adapters("llava", make_lora("q_proj"), ("language",), models, data, world)
    assert len(vision) == 2 and all(name.startswith("vision_tower") for name in vision)
    method = make_lora("q_proj", "attn.qkv", r"merger\.mlp\.0")
    both = train_adapters("qwen2.5-vl", method, ("nothing",), models, data, world)
    assert len(both) == 5 and {name.split(".")[0] for name in both} == {"visual", "language_model"}


def test_osft_trains_directions_of_the_language_model_by_the_models_own_gradients(models, data, world, tmp_path):
    """Of dW = B V^T, or U C V^T, B's and C's gradients are the weight's, seen through V and U."""
    rows = TokenizedData(data["llava"])
    method = make_osft(tmp_path, osft_unfreeze_rank_ratio=0.5)
    objective, packed = build(models["llava"], world, ("vision",), method)
    loss = packed(pack_all(objective, rows)).loss
    loss.backward()
    total, gradients = run_all_plain(load(models["llava"]), models["llava"], rows)
    assert loss.item() == pytest.approx(total, rel=1e-5)
    layers = {name: layer for name, layer in packed.model.named_modules() if isinstance(layer, OSFTLinear)}
    assert len(layers) == 14 and all("language_model.layers" in name for name in layers)
    for name, layer in layers.items():
        weight = gradients[f"{name}.weight"]
        expected = (weight if layer.on_input else weight.T) @ layer.V_low.full_tensor()
        if layer.U_low is not None:
            expected = layer.U_low.full_tensor().T @ expected
        assert_same(layer.coefficients.grad, expected, name)
    trained = {name for name, param in packed.model.named_parameters() if param.requires_grad}
    assert trained == {f"{name}.coefficients" for name in layers}


def train(world, output_dir: Path, model: Path, *, num_ranks: int = 1, **options: object) -> Path:
    """A run's last export."""
    given = OPTIONS | dict(model_name_or_path=model, output_dir=output_dir, max_steps=2, batch_size=3,
                           max_tokens_per_gpu=120)  # fmt: skip
    train_on(num_ranks, world, **given | options)
    return max((output_dir / "hf_format").glob("samples_*"))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("family", "cap"), [("qwen2.5-vl", 120), llama4(160)])
def test_runs_do_not_depend_on_ranks_and_resume_bit_for_bit_and_export_the_same_class(family, cap, world, tmp_path):
    """Four ranks, of which most have no image in a micro-batch, with tower and projector trained; validations, too."""
    model_dir = save_vision_model(tmp_path, family)
    data = tokenize(make_rows(tmp_path), model_dir, tmp_path)
    given = dict(data_path=data, freeze="nothing", validation_data_path=(str(data),), max_tokens_per_gpu=cap)
    exports = {n: train(world, tmp_path / f"on_{n}", model_dir, num_ranks=n, **given) for n in (1, 4)}
    for row, same in zip(read_rows(tmp_path / "on_1"), read_rows(tmp_path / "on_4"), strict=True):
        assert row["loss"] == pytest.approx(same["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(same["grad_norm"], rel=1e-4)
    measured, same = (read_lines(tmp_path / f"on_{n}" / "validation_metrics_0.jsonl") for n in (1, 4))
    assert [row["loss"] for row in measured] == pytest.approx([row["loss"] for row in same], rel=1e-5)
    rows, before = TokenizedData(data), load(model_dir)
    for row, model in ((measured[0], before), (measured[-1], load(exports[1]))):
        total = run_all_plain(model, model_dir, rows)[0]
        assert row["loss"] == pytest.approx(total / int(rows.num_loss_tokens.sum()), rel=1e-5)
    own = load(exports[1])
    assert type(own) is type(before)
    changed = {name for name, param in own.named_parameters() if not torch.equal(param, before.get_parameter(name))}
    assert all(not changed.isdisjoint(names) for names in list_parts(before).values())
    assert load_processor(str(exports[1])).image_token == load_processor(str(model_dir)).image_token
    resume = str(tmp_path / "on_1/checkpoints/step_1")
    resumed = train(world, tmp_path / "resumed", model_dir, **given, resume=resume)
    assert (resumed / "model.safetensors").read_bytes() == (exports[1] / "model.safetensors").read_bytes()


def test_broken_images_and_rows_are_refused_with_their_reasons(models, tmp_path):
    """test_image_files.py has all kinds of files; the network is not looked at."""
    image = make_image(0)
    image.save(tmp_path / "fine.png")
    whole = (tmp_path / "fine.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])

    def ask(*parts: object, answer: object = "noise", **fields: object) -> dict:
        messages = [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": answer}]
        return {"messages": messages} | fields

    def show(name: object) -> dict:
        return {"type": "image", "image": name}

    words = {"type": "text", "text": "what?"}
    cases = [
        (ask(show("none.png"), words), "image 1: .*none.png: no such"),
        (ask(show("fine.png"), show("cut.png"), words), "image 2: cut.png: .*broken"),
        (ask(show("https://example.org/a.png"), words), "a.png: .*download it before"),
        (ask(show("data:image/png;base64,!!"), words), "data: URL .*base64 .*broken"),
        (ask(show("data:image/png,abc"), words), "data: URL .* not"),
        (ask(show(3), words), "an image is 3,"),
        (ask(show(""), words), "an image is '',"),
        (ask({"type": "image"}, words), "more places"),
        (ask(words, images=["fine.png"]), "1 images, .*places for 0"),
        (ask(show("fine.png"), {"type": "text", "text": "<image> too"}), "1 images, .* 2 times"),
        (ask({"type": "text", "text": "an <image>"}), "0 images, .* 1 times"),
        (ask({"type": "video", "video": "a.mp4"}, words), "content part"),
        (ask(words, answer=[show("fine.png"), words]), "trained .*assistant .*image"),
        (ask(words, show("fine.png"), words, unmask=True), "trained .*user .*image"),
        ({"text": "a document", "images": ["fine.png"]}, "no messages"),
    ]
    rows = [ask(show("fine.png"), words), *(row for row, _ in cases)]
    found = TokenizedData(tokenize(rows, models["llava"], tmp_path, skip_invalid=True))
    assert len(found.lengths) == 1 and found.task.objective == VISION
    (rejected,) = tmp_path.glob("*rejected*")
    reasons = read_lines(rejected)
    assert [entry["line"] for entry in reasons] == list(range(2, 2 + len(cases)))
    for entry, (_, reason) in zip(reasons, cases, strict=True):
        assert re.search(reason, entry["reason"]), (reason, entry["reason"])
    image_id = AutoConfig.from_pretrained(models["llava"]).image_token_id
    assert (found.read(0)["labels"] != image_id).all()


@pytest.mark.parametrize("objective", ["preference", "kto", "reward", "sequence-classification"])
def test_objectives_of_texts_refuse_data_with_images(objective, world, elsewhere, tmp_path):
    """Once, with what to change, in a run and in a plan, which lists all problems."""
    model = save_vision_model(tmp_path, "qwen2-vl")
    data = tokenize(make_rows(tmp_path), model, tmp_path)
    options = dict(model_name_or_path=str(model), data_path=[str(data)], output_dir=str(tmp_path / "run"),
                   objective=objective, batch_size=4, max_tokens_per_gpu=256, max_steps=1)  # fmt: skip
    message = f"--objective {objective}: "
    with pytest.raises(ValueError, match=f"{message}.*images") as raised:
        train_here(world, **options)
    code, printed = elsewhere(print_plan, options | dict(dry_run=True, plan_for="2"))
    assert code == ExitCode.BAD_INPUT
    for text in (str(raised.value), printed):
        assert text.count(message) == 1 and "--objective causal-lm" in text


COSTED_FAMILIES = ("qwen2.5-vl", "llava-next", "internvl", "gemma3")
NUM_TOKENS, NUM_TRAINED = 600, 300


@pytest.mark.parametrize("family", exact_families(COSTED_FAMILIES))
def test_patches_are_those_that_the_processor_makes(family, tmp_path):
    vision_inputs = make_objective(save_vision_model(tmp_path, family)).family.vision_inputs
    processor = vision_inputs.processor
    for image in map(make_image, range(6)):
        pixels = processor(text=[processor.image_token], images=[[image]], return_tensors="pt")["pixel_values"]
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
        VisionLanguageRowModel(model).base.get_image_features(**batch.extras.pixels, return_dict=True)
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

    rows, vision_inputs = Mixture([TokenizedData(data[family])]), make_objective(models[family]).family.vision_inputs
    count_set_images(rows, vision_inputs.count_patches, cap=None, drop_overlong=False)
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


def open_all(given: dict, freeze: str) -> tuple[TrainOptions, RunInputs]:
    options = group_options(TrainOptions, **given | dict(freeze=(freeze,)))
    inputs = open_inputs(options, device=torch.device("cpu"), world_size=1, start=RunPosition())
    inputs.errors.raise_all()
    return options, inputs


def simulate(given: dict, freeze: str) -> StepMemory:
    options, inputs = open_all(given, freeze)
    load = Load(NUM_TOKENS, NUM_TRAINED, longest=inputs.longest, accumulates=False)
    step_options = choose_step_options(options)
    planned = lay_out_model(step_options, inputs, options.compute, choose_method(options))
    return simulate_step(step_options, planned, load, Ranks(world_size=1, num_shards=1))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("family", exact_families(COSTED_FAMILIES[:1]))
def test_the_simulated_peak_is_that_of_a_real_step_with_images(family, elsewhere, world, tmp_path):
    """With the tower trained and frozen."""
    model = save_vision_model(tmp_path, family)
    given = OPTIONS | dict(model_name_or_path=str(model), data_path=str(tokenize(make_rows(tmp_path), model, tmp_path)),
                           output_dir=str(tmp_path / "run"), activation_checkpointing="none",
                           max_tokens_per_gpu=NUM_TOKENS)  # fmt: skip
    for freeze in ("nothing", "vision"):
        options, inputs = open_all(given, freeze)
        made = dict(objective=inputs.objective, method=Full(), world=world)
        packed = build_model(load_source(model), options.compute, options.sharding, **made)
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
