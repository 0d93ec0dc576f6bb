"""Names in configs and tokenizers that transformers 4 reads, written beside those of transformers 5."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_trainer.data.stores.disk import write_text
from mini_trainer.data.stores.model_files import TOKENIZER
from mini_trainer.options.reading import read_document, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

# By model type: the older names of the base and of the rotated share of a head, where they are not the usual ones.
FLAT = {"gpt_neox": ("rotary_emb_base", "rotary_pct"), "gpt_neox_japanese": ("rotary_emb_base", "rotary_pct")}
# By model type: the older names of the bases of layers with full and with sliding attention.
BY_LAYER = {
    "gemma3_text": ("rope_theta", "rope_local_base_freq"),
    "gemma3n_text": ("rope_theta", "rope_local_base_freq"),
    "modernbert": ("global_rope_theta", "local_rope_theta"),
    "modernbert-decoder": ("global_rope_theta", "local_rope_theta"),
    "olmo3": ("rope_theta", "rope_theta"),
}
# By model type: older names of other keys.
RENAMED = {
    "qwen3_moe": {"num_experts": "num_local_experts"},
    "qwen3_vl_moe_text": {"num_experts": "num_local_experts"},
    "vipllava": {"vision_feature_layers": "vision_feature_layer"},
}


def add_older_keys(values: dict[str, Any]) -> bool:
    """Adds them to a config as JSON, and to the configs in it; False if transformers 4 has none for its positions."""
    rope = values.get("rope_parameters") or {}
    parts = [part for name, part in values.items() if isinstance(part, dict) and name != "rope_parameters"]
    are_expressed = all([add_older_keys(part) for part in parts])
    if isinstance(values.get("dtype"), str):
        values["torch_dtype"] = values["dtype"]
    model_type = values.get("model_type", "")
    values.update({older: values[name] for older, name in RENAMED.get(model_type, {}).items() if name in values})
    older = name_positions(model_type, rope)
    values.update(older or {})
    return are_expressed and older is not None


def name_positions(model_type: str, rope: dict[str, Any]) -> dict[str, Any] | None:
    """A config's `rope_parameters` by their older names; None if these cannot express them."""
    if not any(isinstance(part, dict) for part in rope.values()):
        base, share = FLAT.get(model_type, ("rope_theta", "partial_rotary_factor"))
        older = {base: "rope_theta", share: "partial_rotary_factor"}
        return scale(rope) | {key: rope[name] for key, name in older.items() if name in rope}
    if model_type not in BY_LAYER or rope.keys() != {"full_attention", "sliding_attention"}:
        return None
    full, sliding = rope["full_attention"], rope["sliding_attention"]
    names = BY_LAYER[model_type]
    older = scale(full) | {names[1]: sliding["rope_theta"]} | {names[0]: full["rope_theta"]}
    is_expressed = scale(sliding)["rope_scaling"] is None and older[names[1]] == sliding["rope_theta"]
    return older if is_expressed else None


def scale(rope: dict[str, Any]) -> dict[str, Any]:
    """The scaling by its older name, None if there is none; nothing for a config without rotary positions."""
    if not rope:
        return {}
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
    return {"rope_scaling": None if scaling.items() <= {"rope_type": "default"}.items() else scaling}


def rewrite_config(path: Path, config: "PreTrainedConfig") -> None:
    """Adds older names to the stored `config`, unless transformers 5 would then read other positions."""
    before = read_text(path)
    values = json.loads(before)
    add_older_keys(values)
    write_text(path, json.dumps(values, indent=2, sort_keys=True) + "\n")
    if read_positions(type(config).from_pretrained(path.parent)) != read_positions(config):
        write_text(path, before)


def read_positions(config: "PreTrainedConfig") -> dict[str, Any] | None:
    return getattr(config.get_text_config(), "rope_parameters", None)


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", directory: Path) -> None:
    """Writes a tokenizer's files. transformers 5 reads the older names as its own."""
    tokenizer.save_pretrained(directory)
    path = directory / TOKENIZER
    values = read_document(path)
    if values["tokenizer_class"] == "TokenizersBackend":
        values["tokenizer_class"] = "PreTrainedTokenizerFast"
        values["model_input_names"] = tokenizer.model_input_names  # by default with "token_type_ids" there
    if isinstance(values.get("extra_special_tokens"), list):
        values["additional_special_tokens"] = values.pop("extra_special_tokens")
    write_text(path, json.dumps(values, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
