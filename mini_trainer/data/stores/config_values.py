"""Values in a model's JSON files that no model can be made of: checked before anything is, and before memory is taken.

transformers checks the types of most keys, and few ranges.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
# Sizes by their keys, also in the configs of towers: the least, and the most, which is far above those of any model.
SIZES = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "head_dim"), (1, 1 << 20)),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), (1, 1 << 14)),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "n_heads", "num_heads"), (1, 1 << 20)),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "n_inner", "ffn_dim"), (0, 1 << 26)),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), (0, 1 << 20)),
    "vocab_size": (1, 1 << 28),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (1, 1 << 40)),
}
NUMBERS = (
    "temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "max_length", "max_new_tokens",
    "min_length", "min_new_tokens", "num_beams", "no_repeat_ngram_size",
)  # fmt: skip
DROPOUTS = ("dropout", "_pdrop")  # ends of keys
TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")
MOST_TOKEN = 1 << 28
# What code raises on values that it does not expect.
ODD_VALUE = (TypeError, KeyError, IndexError, AttributeError, ArithmeticError, AssertionError)


def check_values(config: dict[str, Any], path: Path) -> None:
    """ValueError for the first value of the JSON file `path` that is out of range, with its key."""
    for key, value in config.items():
        allowed = find_allowed(key, value, path.name)
        if allowed is not None:
            raise ValueError(f"{path}: {key} is {json.dumps(value):.60}, but must be {allowed}")
        if isinstance(value, dict):
            check_values(value, path)


def find_allowed(key: str, value: Any, file: str) -> str | None:
    """The allowed values of a key that has another one; None for a good value, and for keys without a check."""
    items = value if isinstance(value, list) else [value]  # such as the sizes of layers, or several tokens
    if value is None:
        return None
    if file == GENERATION and key in NUMBERS and not is_number(value):
        return "a number or null"
    if file == GENERATION and key in TOKENS and not all(is_whole(item, -1, MOST_TOKEN) for item in items):
        return "a token id, a list of those, or null"
    if file == CONFIG and key in SIZES and not all(item is None or is_whole(item, *SIZES[key]) for item in items):
        return "an integer from {} to {:,}".format(*SIZES[key])
    if file == CONFIG and key == "architectures" and not all(isinstance(item, str) for item in items):
        return "a list of names"
    if file == TOKENIZER and key == "model_max_length" and not is_number(value):
        return "a number or null"
    if file == CONFIG and key.endswith(DROPOUTS) and is_number(value) and not 0 <= value <= 1:
        return "a number from 0 to 1"
    return None


def is_whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@contextmanager
def naming_config(directory: str | Path, *, file: str = CONFIG) -> Iterator[None]:
    """Turns an error of code that cannot work with a model's config into a ValueError that names the file."""
    try:
        yield
    except ODD_VALUE as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{Path(directory) / file}: cannot be used: {type(error).__name__}: {reason:.300}") from None
