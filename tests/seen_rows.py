"""Rows with images, tokenized for tiny models that see."""

import json
from pathlib import Path

import pytest
import torch
from tiny_seeing import make_rows, save_seeing
from transformers import AutoModelForImageTextToText, PreTrainedModel

from options import ProcessDataOptions, group_options
from process_data import process_data


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
    return {family: save_seeing(root, family) for family in ("qwen2.5-vl", "llava")}


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
