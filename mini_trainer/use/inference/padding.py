"""Check that a model answers left-padded prompts as it answers each one alone, so that they can share a batch."""

import copy

import torch
from torch import nn
from transformers import GenerationConfig

from mini_trainer.model.mixers import find_mixers

PROBE_LENGTHS = (4, 11)
# Largest change of a logit due to padding, relative to the logits' standard deviation: only rounding is allowed.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 0.2}


def find_padding_obstacle(model: nn.Module, generation_config: GenerationConfig) -> str | None:
    """Why prompts of different lengths cannot share a batch; None if they can. Applies rules, then a measurement."""
    config = model.config.get_text_config(decoder=True)
    if find_mixers(model):
        return "its layers have a recurrent state, which padding would change"
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return "it uses chunked attention, and padding would shift the chunks"
    rope = getattr(config, "rope_parameters", None) or {}
    entries = [entry for entry in rope.values() if isinstance(entry, dict)] or [rope]
    if any(entry.get("rope_type") in ("dynamic", "longrope") for entry in entries):
        return "its rotary embeddings depend on the longest prompt in a batch"
    if (generation_config.repetition_penalty or 1.0) != 1.0 or generation_config.no_repeat_ngram_size:
        return "its generation config penalizes repetition of the prompt, and padding would count"
    change = measure_padding(model, generation_config)
    limit = TOLERANCES.get(model.dtype, TOLERANCES[torch.bfloat16])
    return None if change <= limit else f"padding changes its logits by {change:.1e} of their standard deviation"


@torch.no_grad()
def measure_padding(model: nn.Module, generation_config: GenerationConfig) -> float:
    """Largest change of a prompt's logits due to left padding, relative to their standard deviation."""
    device, vocab_size = model.device, model.config.get_text_config(decoder=True).vocab_size
    short, longest = PROBE_LENGTHS
    ids = (7 * torch.arange(2 * longest) % vocab_size).view(2, longest)
    mask = torch.ones_like(ids)
    mask[0, : longest - short] = 0
    ids[0, : longest - short] = generation_config.pad_token_id
    config = copy.deepcopy(generation_config)
    config.max_new_tokens, config.output_logits, config.return_dict_in_generate = 1, True, True
    generated = [
        model.generate(input_ids=rows.to(device), attention_mask=shown.to(device), generation_config=config)
        .logits[0][0]
        .float()
        for rows, shown in ((ids, mask), (ids[:1, longest - short :], mask[:1, longest - short :]))
    ]
    padded, alone = generated
    return ((padded - alone).abs().max() / alone.std()).item()
