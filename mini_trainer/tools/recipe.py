"""Prints options for a known model and machine, as a file for train.py --config, or lists what there is.

    python -m mini_trainer recipe
    python -m mini_trainer recipe qwen3-8b
    python -m mini_trainer recipe qwen3-8b/lora-1x80gb > recipe.yaml

The files are those of options/option_files.py.
"""

from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import RecipeOptions

if __name__ == "__main__":
    options = parse_options(RecipeOptions)

import re

from mini_trainer.distributed.ending import ending_with_message
from mini_trainer.distributed.messages import say
from mini_trainer.options.command_line import suggest
from mini_trainer.options.option_files import Recipe, list_recipes

NUM_SAMPLES, NUM_EPOCHS = 10_000, 2  # for the time in lists: chats of about 1,000 tokens
COLUMNS = ("recipe", "GPUs", "memory a GPU", "hours", "trains")


def print_recipe(options: RecipeOptions) -> None:
    """Prints a recipe, those of a model, or all; ValueError for a name that is none."""
    recipes = list_recipes()
    if not options.name:
        return list_table(recipes)
    if len(options.name) > 1:
        raise ValueError(f"{len(options.name)} names are given: give one")
    given = options.name[0]
    name = simplify(given)
    if len(found := [recipe for recipe in recipes if recipe.name == name]) == 1:
        return say(describe(found[0]))
    models = {recipe.name.partition("/")[0] for recipe in recipes}
    found = [recipe for recipe in recipes if recipe.name.startswith(f"{name}/")]
    if not found:
        known = [*sorted(models), *(recipe.name for recipe in recipes)]
        raise ValueError(
            f"{given}: there is no such recipe{suggest(name, known)}; models with recipes: {', '.join(sorted(models))}."
            " For another model, take the recipe of one of its size, and change model_name_or_path"
        )
    list_table(found)


def simplify(given: str) -> str:
    """A recipe's or model's name as recipes spell it: of Qwen/Qwen3-8B, qwen3-8b."""
    name = given.lower().removesuffix(".yaml")
    if re.search(r"-\d+x\d+gb$", name) is None:
        name = name.rpartition("/")[2]  # without the owner of a name on the hub
    return re.sub(r"^meta-(?=llama)|-(instruct|it|chat)$", "", name)


def describe(recipe: Recipe) -> str:
    """The recipe's file, with the command that it is for."""
    command = (
        f"# mini-trainer train --config {recipe.name} --input-file chats.jsonl --validation-share 0.05"
        f" --output-dir runs/{recipe.name.partition('/')[0]}"
    )
    return f"{command}\n{recipe.path.read_text().rstrip()}"


def list_table(recipes: list[Recipe]) -> None:
    """A line for each recipe: machine, memory, hours for `NUM_EPOCHS` of `NUM_SAMPLES` chats, trainable parameters."""
    rows = [COLUMNS, *map(make_row, recipes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    say(
        f"\nMemory and hours are planned, not measured; hours are for {NUM_EPOCHS} epochs of {NUM_SAMPLES:,} chats of"
        f" 1,000 tokens. mini-trainer recipe {recipes[0].name} prints one"
    )


def make_row(recipe: Recipe) -> tuple[str, ...]:
    hours = recipe.seconds_per_sample * NUM_SAMPLES * NUM_EPOCHS / 3600
    return (recipe.name, recipe.machine, recipe.memory, f"{hours:.2f}", recipe.trained)


if __name__ == "__main__":
    with ending_with_message(when_interrupted="interrupted"):
        print_recipe(options)
