"""Learning rates and weight decay of parts of a model: by pattern, by depth, and AdamW's beside Muon's."""

import re
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel

from mini_trainer.model.optim.decay import find_decayed
from mini_trainer.objectives.families.parts import find_depths
from mini_trainer.options import OptimizationOptions, parse_rate

BLOCK = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True)
class Rates:
    """A parameter's multiple of --learning-rate, and its weight decay."""

    rate: float
    weight_decay: float


def choose_rates(model: nn.Module, options: OptimizationOptions, *, matrices: Collection[str]) -> dict[str, Rates]:
    """The rates of each trained parameter, by name. `matrices`: names of those that Muon updates.

    ValueError if a pattern of --learning-rate-for is no parameter's, or no block trains.
    """
    peak, adam = options.learning_rate, options.adam_learning_rate
    patterns = {pattern: values for pattern, *values in map(parse_rate, options.learning_rate_for)}
    names = {name: name_of_file(name) for name, param in model.named_parameters() if param.requires_grad}
    depths = measure_depths(model, names) if options.layer_lr_decay is not None else {}
    decayed, rates, unused = find_decayed(model), {}, dict(patterns)
    for name, own in names.items():
        rate = 1.0 if adam is None or name in matrices else adam / peak
        if depths:
            rate *= options.layer_lr_decay ** depths[name]
        decay = options.weight_decay if name in decayed else 0.0
        found = next((pattern for pattern in patterns if fnmatchcase(own, pattern)), None)
        if found is not None:
            unused.pop(found, None)
            given_rate, given_decay = patterns[found]
            rate = rate if given_rate is None else given_rate / peak
            decay = decay if given_decay is None else given_decay
        rates[name] = Rates(rate, decay)
    if unused:
        raise ValueError(
            f"--learning-rate-for {next(iter(unused))}: no trained parameter has such a name that no pattern before it"
            f" has; they are like {', '.join(list(names.values())[:3])}"
        )
    return rates


def name_of_file(name: str) -> str:
    """A parameter's name in the model's own files, by its name in the model that is trained."""
    return name.removeprefix("model.")


def measure_depths(model: nn.Module, trained: Collection[str]) -> dict[str, int]:
    """`find_depths` by names in `model`, which may hold transformers' model; ValueError if no block trains."""
    prefix, inner = next((name, part) for name, part in model.named_modules() if isinstance(part, PreTrainedModel))
    depths = {f"{prefix}.{name}" if prefix else name: depth for name, depth in find_depths(inner).items()}
    if not any(BLOCK.search(name) for name in trained):
        raise ValueError("--layer-lr-decay: no trained parameter belongs to a numbered block: leave it out")
    return depths
