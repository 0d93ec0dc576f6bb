"""The recipes for known models: each is what train.py takes, fits where it says, and is planned by the program itself.

A whole plan takes a minute: here models have few of their blocks.
"""

import json
from pathlib import Path

import pytest
import torch
from breadth import wide
from plan_recipes import (
    MACHINES,
    MODELS,
    copy_model,
    list_recipes,
    make_data,
    make_table,
    name_data,
    name_recipe,
    plan_recipe,
    read_recipe,
)
from processes import ROOT

from mini_trainer.model.config import load_config
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.options import flatten_options
from mini_trainer.options.problems.finding import find_problems

NUM_PARAMS = {  # of the checkpoints that their makers publish, towers of images included
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
    "gpt-oss-20b": 20_914_757_184,
}
NARROW = ("qwen3-0.6b/osft-1x24gb", "qwen3-0.6b/dpo-lora-1x24gb")  # recipes that are always planned
METHODS = {
    "full": dict(lora=False, osft=False),
    "lora": dict(lora=True, base_quantization="none"),
    "qlora": dict(lora=True, base_quantization="nf4"),
    "osft": dict(osft=True),
}


def shorten(model: Path) -> Path:
    """The model of a config with a few of its blocks, all of its kinds."""
    path = model / "config.json"
    config = json.loads(path.read_text())
    text = config.get("text_config", config)
    text["num_hidden_layers"] = text.get("sliding_window_pattern", 2)
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][: text["num_hidden_layers"]]
    path.write_text(json.dumps(config))
    return model


@pytest.mark.long
def test_each_recipe_is_what_its_name_and_first_line_say(tmp_path):
    for recipe in list_recipes():
        *_, method, machine = recipe.stem.split("-")
        options = read_recipe(recipe, model=recipe.parent, data=tmp_path / "data.arrow")
        assert find_problems(options) == [] and flatten_options(options).items() >= METHODS[method].items(), recipe
        assert options.classification.objective == name_data(recipe), recipe
        first = recipe.read_text().splitlines()[0]
        needed = float(first.split(": ")[1].split(" of ")[0])
        assert 0 < needed <= 0.9 * MACHINES[machine][2], f"{recipe}: {first}"
    assert make_table() in (ROOT / "docs" / "tasks" / "recipes.md").read_text(), "python benchmarks/plan_recipes.py --table"


@pytest.mark.long
def test_the_models_are_those_that_their_makers_publish():
    found = {}
    for path in MODELS.glob("*/config.json"):
        config = load_config(str(path.parent), TextFamily())
        with torch.device("meta"):
            model = TextFamily().make_model(config, dtype=torch.float32, trust_remote_code=False)
        found[path.parent.name] = sum(param.numel() for param in model.parameters())
    assert found == NUM_PARAMS


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name in NARROW else wide(name) for name in map(name_recipe, list_recipes())])
def test_a_recipe_is_planned_as_the_program_plans_a_run(name, elsewhere, tmp_path):
    recipe = MODELS / f"{name}.yaml"
    model = shorten(copy_model(tmp_path, recipe.parent))
    data = make_data(tmp_path, name_data(recipe))
    plan = elsewhere(plan_recipe, read_recipe(recipe, model=model, data=data))
    assert plan.problems == () and 0 < plan.num_trained <= plan.num_params and plan.gib > 0
