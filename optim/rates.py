"""Learning rates of parts of a model, as multiples of the run's: by pattern, by depth, and AdamW's beside Muon's."""

import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase

from torch import Tensor

from options import OptimizationOptions, parse_rate

BLOCK = re.compile(r"\.(\d+)\.")


def choose_rates(
    params: Mapping[str, Tensor], options: OptimizationOptions, *, matrices: Collection[str]
) -> dict[str, float]:
    """Each parameter's multiple of --learning-rate. `matrices`: names of those that Muon updates.

    ValueError if a pattern of --learning-rate-for is no parameter's, or the model has no numbered blocks.
    """
    peak, adam = options.learning_rate, options.adam_learning_rate
    patterns = dict(map(parse_rate, options.learning_rate_for))
    names = {name: name_of_file(name) for name in params}
    depths = find_depths(names.values()) if options.layer_lr_decay is not None else {}
    rates, unused = {}, dict(patterns)
    for name, own in names.items():
        rate = 1.0 if adam is None or name in matrices else adam / peak
        if depths:
            rate *= options.layer_lr_decay ** depths[own]
        found = next((pattern for pattern in patterns if fnmatchcase(own, pattern)), None)
        if found is not None:
            unused.pop(found, None)
            rate = patterns[found] / peak
        rates[name] = rate
    if unused:
        raise ValueError(
            f"--learning-rate-for {next(iter(unused))}: no trained parameter has such a name that no pattern before it"
            f" has; they are like {', '.join(list(names.values())[:3])}"
        )
    return rates


def name_of_file(name: str) -> str:
    """A parameter's name in the model's own files, by its name in the model that is trained."""
    return name.removeprefix("model.")


def find_depths(names: Collection[str]) -> dict[str, int]:
    """How many layers lie above each parameter, as in BEiT (arXiv 2106.08254): 0 for what follows the blocks, 1 for the
    last block, one more for each below it, and one more again for what comes before the first: embeddings."""
    blocks = {name: int(match[1]) for name in names if (match := BLOCK.search(name))}
    if not blocks:
        raise ValueError("--layer-lr-decay: no trained parameter belongs to a numbered block: leave it out")
    above = max(blocks.values()) + 1
    depths, others = {}, above + 1
    for name in names:  # in the order of the model's parts
        if name in blocks:
            depths[name], others = above - blocks[name], 0
        else:
            depths[name] = others
    return depths
