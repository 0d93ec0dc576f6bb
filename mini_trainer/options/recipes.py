"""Recipes: option files for known models and machines, which --config takes by name.

A recipe's first line is what it needs, as planned by benchmarks/plan_recipes.py. The files are in known_models/.
"""

import re
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "known_models"
HEADER = re.compile(
    r"# (?P<machine>.+): (?P<memory>.+) a GPU, a step of (?P<samples>\d+) samples in (?P<seconds>\d+) s \(planned\);"
    r" trains (?P<trained>.+)"
)


@dataclass(frozen=True)
class Recipe:
    """A recipe, by what its first line says."""

    name: str  # qwen3-8b/lora-1x80gb
    machine: str  # 1 x H100
    memory: str  # 21.6 of 80 GiB
    trained: str  # 0.04 of 8.19 billion parameters
    seconds_per_sample: float

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.yaml"


def list_recipes() -> list[Recipe]:
    """All recipes, by model and name."""
    recipes = []
    for path in sorted(FOLDER.glob("*/*.yaml")):
        told = HEADER.fullmatch(path.read_text().partition("\n")[0])
        name = path.relative_to(FOLDER).with_suffix("").as_posix()
        seconds = int(told["seconds"]) / int(told["samples"])
        recipes.append(Recipe(name, told["machine"], told["memory"], told["trained"], seconds))
    return recipes
