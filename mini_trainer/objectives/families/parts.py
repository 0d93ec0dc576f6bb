"""Parts of a model: its blocks; of a vision-language model the vision tower, projector and language model."""

import re

from torch import nn
from transformers import PreTrainedModel

from mini_trainer.objectives.families.text_tower import find_decoder, is_multimodal, text_config

FINAL = re.compile(r"final|project_out")  # in names of what follows the blocks, also where it is created before them
PROJECTORS = ("projector", "connector", "merger", "embed_vision", "aligner")  # words in projectors' names


def list_parts(model: PreTrainedModel) -> dict[str, list[str]]:
    """Names of a model's parameters by part: vision tower, projector and language model."""
    language = [find_decoder(model), model.get_input_embeddings(), model.get_output_embeddings()]
    inside = {id(param) for part in language if part is not None for param in part.parameters()}
    parts: dict[str, list[str]] = {"vision": [], "projector": [], "language": []}
    for name, param in model.named_parameters():
        is_projector = any(word in name for word in PROJECTORS)
        parts["language" if id(param) in inside else "projector" if is_projector else "vision"].append(name)
    return parts


def find_blocks(model: PreTrainedModel) -> nn.ModuleList:
    """Finds the transformer blocks: the module list whose length is the config's number of layers.

    If there is none (several layers per block, several stacks, a decoder's own): the longest list that is in no other
    one, plus all lists of modules of the same class.
    """
    decoder, num_blocks = find_decoder(model), getattr(text_config(model.config), "num_hidden_layers", None)
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_blocks:
            return module
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList) and len(module) > 0]
    inner = {inside for outer in lists for block in outer for inside in block.modules()}
    lists = [blocks for blocks in lists if blocks not in inner]
    if not lists:
        raise ValueError(f"model type {model.config.model_type!r}: no list of blocks found to shard")
    kind = type(max(lists, key=len)[0])
    return nn.ModuleList(block for blocks in lists if type(blocks[0]) is kind for block in blocks)


def find_depths(model: PreTrainedModel) -> dict[str, int]:
    """How many layers of its own stack lie above each parameter, as in BEiT (arXiv 2106.08254).

    0 for what follows the blocks, 1 for the last block, one more for each below it, and one more again for what comes
    before the first one: embeddings. A vision tower is a stack of its own, and a projector follows it.
    """
    parts = {"language": [name for name, _ in model.named_parameters()]}
    if is_multimodal(model.config):
        parts = list_parts(model)
    stacks = {"language": [*find_blocks(model)], "vision": find_tower_blocks(model, parts.get("vision", []))}
    embedded = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    in_decoder = set(map(id, find_decoder(model).parameters()))
    depths: dict[str, int] = {}
    for part, names in parts.items():
        blocks = stacks.get(part, [])
        above = {id(param): len(blocks) - i for i, block in enumerate(blocks) for param in block.parameters()}
        lowest = len(blocks) + 1 if blocks else 0
        others = lowest
        for name in names:  # in the order of the model's parts
            held = id(model.get_parameter(name))
            if held in above:
                depths[name], others = above[held], 0
            elif held in embedded:
                depths[name] = lowest
            else:
                is_head = part == "language" and held not in in_decoder
                depths[name] = 0 if is_head or FINAL.search(name) else others
    return depths


def find_tower_blocks(model: PreTrainedModel, names: list[str]) -> list[nn.Module]:
    """A tower's blocks: the longest list of modules whose parameters are all among `names` and that is in no other
    one, with all lists of modules of the same class; none if the tower has no such list."""
    held = {id(model.get_parameter(name)) for name in names}
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inside = [[id(param) for param in found.parameters()] for found in lists]
    lists = [found for found, params in zip(lists, inside, strict=True) if params and held.issuperset(params)]
    inner = {inside for outer in lists for block in outer for inside in block.modules()}
    lists = [found for found in lists if found not in inner]
    kind = type(max(lists, key=len)[0]) if lists else None
    return [block for found in lists if type(found[0]) is kind for block in found]
