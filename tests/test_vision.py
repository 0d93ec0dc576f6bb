"""Models that see: rows with images, and the loss and gradients of packed rows against transformers' own, one by one."""

import json
from pathlib import Path

import pytest
import torch
from in_process import train_on
from small_runs import OPTIONS, read_rows
from tiny_models import load_source
from tiny_seeing import TOKENS, make_rows, save_seeing
from transformers import AutoModelForImageTextToText, PreTrainedModel

from chat.labels import IGNORED
from chat.pictures import load_processor, open_image
from corpus.reader import TokenizedData
from methods.full import Full
from model.build import build_model
from model.check import check_model
from objectives.vision import VisionLanguage
from options import ProcessDataOptions, TrainOptions, VisionOptions, group_options
from process_data import process_data

FAMILIES = tuple(TOKENS)


def tokenize(rows: list[dict], model: Path, directory: Path, **options: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = dict(input_file=str(directory / "rows.jsonl"), output_file=str(directory / "data.arrow"), num_proc=1,
                 model_name_or_path=str(model), images=True, preview=0)  # fmt: skip
    process_data(group_options(ProcessDataOptions, **given | options))
    return directory / "data.arrow"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: save_seeing(root, family) for family in FAMILIES}


@pytest.fixture(scope="module")
def data(models, tmp_path_factory) -> dict[str, Path]:
    found = {}
    for family, model in models.items():
        directory = tmp_path_factory.mktemp(family)
        found[family] = tokenize(make_rows(directory), model, directory)
    return found


def load(path: Path) -> PreTrainedModel:
    model, report = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


def build(path: Path, world, freeze: tuple[str, ...] = ("vision",)):
    given = dict(model_name_or_path="", data_path="", output_dir="", activation_checkpointing="none",
                 compute_dtype="float32")  # fmt: skip
    options, source = group_options(TrainOptions, **given), load_source(path)
    objective = VisionLanguage(VisionOptions(freeze=freeze))
    assert objective.check_config(source.config, trust_remote_code=False) is None
    objective.use_tokenizer(None)
    return objective, build_model(
        source, options.compute, options.sharding, objective=objective, method=Full(), world=world
    )


def run_plain(model: PreTrainedModel, path: Path, data: TokenizedData, row: int) -> torch.Tensor:
    """The summed loss of one row by the model's own forward pass, with what its processor makes of the images."""
    ids, labels, references = data.read(row)
    ids, labels = torch.tensor(ids)[None], torch.tensor(labels)
    kinds = (ids == model.config.image_token_id).long()
    own = dict(input_ids=ids, use_cache=False)
    if references:
        images = [open_image(reference, directory=Path()) for reference in references]
        own |= load_processor(str(path)).image_processor(images=[images], return_tensors="pt")
        own.pop("num_crops", None), own.pop("rows", None), own.pop("cols", None)
        if model.config.model_type == "qwen2_5_vl":
            own["mm_token_type_ids"] = kinds
    if model.config.model_type == "gemma3":
        own["token_type_ids"] = kinds
    logits = model(**own).logits[0]
    return torch.nn.functional.cross_entropy(logits[:-1], labels[1:].long(), ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_losses_and_gradients_are_the_models_own(family, models, data, world):
    rows = TokenizedData(data[family])
    for freeze in (("vision",), ("nothing",)) if family == "qwen2.5-vl" else (("vision",),):
        objective, packed = build(models[family], world, freeze)
        check_model(packed, objective, Full(), device=world.device)
        loss = packed(objective.pack([rows.read(row) for row in range(len(rows.lengths))]))
        loss.backward()
        own = load(models[family])
        total = sum(run_plain(own, models[family], rows, row) for row in range(len(rows.lengths)))
        total.backward()
        assert loss.item() == pytest.approx(total.item(), rel=1e-6)
        gradients = dict(own.named_parameters())
        trained = {name: param for name, param in packed.model.named_parameters() if param.requires_grad}
        assert any("language_model" in name or "text_model" in name for name in trained)
        assert any(word in name for name in trained for word in ("projector", "merger", "connector"))
        for name, param in trained.items():
            gradient = gradients[name].grad
            found = param.grad.full_tensor()
            assert (found - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, name


def test_runs_do_not_depend_on_ranks_and_resume_bit_for_bit_and_export_the_same_class(models, data, world, tmp_path):
    """Two ranks, of which one often has no image, with the tower and the projector trained."""
    family = "qwen2.5-vl"

    def train(name: str, *, num_ranks: int = 1, **options: object) -> Path:
        given = OPTIONS | dict(model_name_or_path=models[family], data_path=data[family], freeze="nothing",
                               output_dir=tmp_path / name, max_steps=3, batch_size=3, max_tokens_per_gpu=90)  # fmt: skip
        train_on(num_ranks, world, **given | options)
        return max((tmp_path / name / "hf_format").glob("samples_*"))

    exports = {n: train(f"on_{n}", num_ranks=n) for n in (1, 2)}
    for row, other in zip(read_rows(tmp_path / "on_1"), read_rows(tmp_path / "on_2"), strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)
    own, before = load(exports[1]), load(models[family])
    assert type(own) is type(before)
    changed = {name for name, param in own.named_parameters() if not torch.equal(param, before.get_parameter(name))}
    assert any("visual.blocks" in name for name in changed) and any("merger" in name for name in changed)
    assert load_processor(str(exports[1])).image_token == TOKENS[family][0]
    resumed = train("resumed", resume=str(tmp_path / "on_1/checkpoints/step_1"))
    assert (resumed / "model.safetensors").read_bytes() == (exports[1] / "model.safetensors").read_bytes()
