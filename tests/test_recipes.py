"""The recipes for known models: each is what train.py takes, fits where it says, and is planned by the program itself.

A whole plan takes a minute: here models have few of their blocks.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from breadth import wide
from plan_recipes import MACHINES, copy_model, make_data, name_data, plan_recipe, read_recipe
from processes import ROOT

from mini_trainer.model.config import load_config
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.options import flatten_options
from mini_trainer.options.command_line import find_config
from mini_trainer.options.option_files import RECIPES, list_recipes
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
NAMES = [*list_recipes()]
FIRST_LINE = re.compile(
    r"# (?P<machine>.+): (?P<memory>.+) a GPU, a step of 128 samples in [1-9]\d* s \(planned\); trains (?P<trained>.+)"
)
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
    for recipe in list_recipes().values():
        *_, method, machine = recipe.stem.split("-")
        options = read_recipe(recipe, model=recipe.parent, data=tmp_path / "data.arrow")
        assert find_problems(options) == [] and flatten_options(options).items() >= METHODS[method].items(), recipe
        assert options.classification.objective == name_data(recipe), recipe
        planned, (num_gpus, device, gib) = FIRST_LINE.match(recipe.read_text()), MACHINES[machine]
        needed, total = planned["memory"].removesuffix(" GiB").split(" of ")
        assert (planned["machine"], total) == (f"{num_gpus} x {device}", str(gib)), recipe
        assert 0 < float(needed) <= 0.9 * gib, recipe


def test_config_takes_recipes_by_name(tmp_path):
    assert find_config("qwen3-8b/lora-1x80gb") == RECIPES / "qwen3-8b" / "lora-1x80gb.yaml"
    with pytest.raises(ValueError, match=r"neither a file nor a recipe; recipes: .*, qwen3-8b/lora-1x80gb, "):
        find_config("qwen3-8b/lora-1x81gb")
    assert find_config(str(tmp_path / "gone.yaml")) == tmp_path / "gone.yaml"  # refused where it is read


def test_the_page_lists_them():
    page = (ROOT / "docs" / "tasks" / "recipes.md").read_text()
    for name, path in list_recipes().items():
        machine, memory, trained = FIRST_LINE.match(path.read_text()).group("machine", "memory", "trained")
        row = f"| `{name}` | {machine} | {memory} | HOURS | {trained} |".replace(" x ", "x")
        row = row.replace(" GiB", "").replace(" billion parameters", "")  # units, which the headings have
        assert re.search(re.escape(row).replace("HOURS", r"[\d.]+"), page), name


@pytest.mark.long
def test_the_models_are_those_that_their_makers_publish():
    found = {}
    for path in RECIPES.glob("*/config.json"):
        config = load_config(str(path.parent), TextFamily())
        with torch.device("meta"):
            model = TextFamily().make_model(config, dtype=torch.float32, trust_remote_code=False)
        found[path.parent.name] = sum(param.numel() for param in model.parameters())
    assert found == NUM_PARAMS


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name in NARROW else wide(name) for name in NAMES])
def test_a_recipe_is_planned_as_the_program_plans_a_run(name, elsewhere, tmp_path):
    recipe = RECIPES / f"{name}.yaml"
    model = shorten(copy_model(tmp_path, recipe.parent))
    data = make_data(tmp_path, name_data(recipe))
    plan = elsewhere(plan_recipe, read_recipe(recipe, model=model, data=data))
    assert plan.problems == () and 0 < plan.num_trained <= plan.num_params and plan.gib > 0
