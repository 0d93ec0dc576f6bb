"""The recipes for known models: each is what train.py takes, fits where it says, and is planned by the program itself.

A whole plan takes a minute: here models have few of their blocks.
"""

import json
import subprocess
from pathlib import Path

import pytest
import torch
from breadth import wide
from forked import run_forked
from plan_recipes import MACHINES, copy_model, make_data, name_data, plan_recipe, read_recipe
from processes import ROOT

from mini_trainer.model.config import load_config
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.options import flatten_options
from mini_trainer.options.command_line import find_config
from mini_trainer.options.option_files import RECIPES, list_recipes, read_yaml
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.tools.recipe import simplify

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
NAMES = [recipe.name for recipe in list_recipes()]
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
        *_, method, machine = recipe.path.stem.split("-")
        options = read_recipe(recipe.path, model=recipe.path.parent, data=tmp_path / "data.arrow")
        assert find_problems(options) == [] and flatten_options(options).items() >= METHODS[method].items(), recipe
        assert options.classification.objective == name_data(recipe.path), recipe
        num_gpus, device, gib = MACHINES[machine]
        needed, total = recipe.memory.removesuffix(" GiB").split(" of ")
        assert (recipe.machine, total) == (f"{num_gpus} x {device}", str(gib)), recipe
        assert 0 < float(needed) <= 0.9 * gib and recipe.seconds_per_sample > 0, recipe


def test_the_command_prints_them_and_config_takes_them(tmp_path):
    def run(*words: str) -> subprocess.CompletedProcess:
        return run_forked(0, ROOT / "mini_trainer/tools/recipe.py", *words, folder=tmp_path)

    listed = run().stdout
    assert [line.split()[0] for line in listed.splitlines()[1:-2]] == NAMES and len(NAMES) > 30
    assert "qwen3-8b/lora-1x80gb " in (of_one := run("Qwen/Qwen3-8B").stdout) and "qwen3-4b" not in of_one
    (tmp_path / "my.yaml").write_text(run("qwen3-8b/lora-1x80gb").stdout)
    assert read_yaml(tmp_path / "my.yaml", named="my.yaml") == read_yaml(find_config("qwen3-8b/lora-1x80gb"), named="")
    refused = run("qwen3-9b")
    assert refused.returncode == 2 and "there is no such recipe; did you mean qwen3-" in refused.stderr
    with pytest.raises(ValueError, match="neither a file nor a recipe; did you mean qwen3-8b/lora-1x80gb"):
        find_config("qwen3-8b/lora-1x81gb")
    assert find_config(str(tmp_path / "gone.yaml")) == tmp_path / "gone.yaml"  # refused where it is read


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("google/gemma-3-4b-it", "gemma-3-4b"),
        ("qwen3-8b/full-8x80gb", "qwen3-8b/full-8x80gb"),
    ],
)
def test_a_name_on_the_hub_is_that_of_its_recipes(given, name):
    assert simplify(given) == name


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
