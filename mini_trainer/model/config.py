"""A model's config and tokenizer, checked against its directory and the data."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from mini_trainer.data.stores.model_files import GENERATION, check_model_dir, naming_config
from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer, load_tokenizer
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.messages import one_line
from mini_trainer.model.stored_tensors import choose_dtype, find_quantization
from mini_trainer.objectives.families.family import Family
from mini_trainer.objectives.families.text_tower import text_config


@dataclass(frozen=True)
class ModelSource:
    """A model that has been found, but whose weights have not been read."""

    directory: str
    config: PreTrainedConfig
    trust_remote_code: bool = False
    name: str = ""  # as given by the user
    new_tokens: tuple[int, ...] = ()  # ids of the tokens of the data that its own tokenizer does not have

    def describe(self) -> dict[str, str | None]:
        """Its public name and revision: an absolute path, or a hub repository and a commit."""
        directory = Path(self.directory)
        if not self.name or Path(self.name).is_dir():
            return {"name": str(directory.absolute()), "revision": None}
        return {"name": self.name, "revision": directory.name}


def read_config(model_dir: str, *, flag: str = "--model-name-or-path", trust_remote_code: bool) -> PreTrainedConfig:
    """The config in a directory that `find_model` found; ValueError if it cannot be used."""
    try:
        return AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    except Exception as error:  # code of every model type reads a file of any origin
        raise ValueError(f"{flag} {model_dir}: no usable config: config.json: {one_line(error)}") from None


def load_config(model_dir: str, family: Family, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Loads the model's config; ValueError if there is none, or the family does not support it."""
    try:
        settings = find_quantization(model_dir)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model-name-or-path {model_dir}: no usable config: {error}") from None
    config = read_config(model_dir, trust_remote_code=trust_remote_code)
    if not trust_remote_code:
        vars(config).pop("auto_map", None)  # exports would refer to code that they do not contain
    with naming_config(model_dir):
        obstacle = family.check_config(config, trust_remote_code=trust_remote_code)
    if obstacle is not None:
        raise ValueError(f"--model-name-or-path {model_dir}: {obstacle}")
    if settings is not None:
        from mini_trainer.model.quantized import check_quantization, forget_quantization

        kind, dtype = check_quantization(settings, model_dir), str(choose_dtype(config)).removeprefix("torch.")
        log.info(f"model: quantized ({kind}); weights are dequantized to {dtype}, then trained and exported as such")
        forget_quantization(config)
    return config


def load_generation_config(model_dir: str, config: PreTrainedConfig) -> GenerationConfig:
    """The model's generation config, which every export contains; made from the config if there is no such file."""
    if not Path(model_dir, GENERATION).is_file():
        return GenerationConfig.from_model_config(config)
    return load_generation_file(model_dir)


def list_stops(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that end an answer: the generation config's, or else the tokenizer's."""
    stops = config.eos_token_id if config.eos_token_id is not None else tokenizer.eos_token_id
    return [] if stops is None else list(stops) if isinstance(stops, (list, tuple)) else [stops]


def load_generation_file(model_dir: str | Path) -> GenerationConfig:
    """The generation config in a directory; ValueError if it cannot be used."""
    try:
        return GenerationConfig.from_pretrained(model_dir)
    except Exception as error:  # as in `read_config`
        where = Path(model_dir, GENERATION)
        raise ValueError(f"{where}: not a usable generation config: {one_line(error)}") from None


def choose_tokenizer(
    model_dir: str,
    sidecars: dict[Path, dict[str, Any] | None],
    *,
    vocab_size: int,
    vocabulary_multiple: int,
    trust_remote_code: bool,
) -> tuple[PreTrainedTokenizerBase, int, tuple[int, ...]]:
    """Returns the tokenizer that made the data, the number of embeddings that the model needs for it, and the ids of
    the tokens that the model's own tokenizer does not have.

    `sidecars`: those of all data sets, by path. The tokenizer is the model's, or an extension of it saved next to the
    data; ValueError if it is any other, or differs between data sets. Every export contains it. Embeddings grow to a
    multiple of `vocabulary_multiple`.
    """
    # Find the tokenizer that made the data: the model's, or its extension next to the data.
    model_tokenizer = tokenizer = load_tokenizer(model_dir, trust_remote_code=trust_remote_code)
    for path in (path for path, sidecar in sidecars.items() if sidecar is None):
        log.warning(f"warning: no {path}.meta.json: cannot check whether this tokenizer made the data")
    known = {path: sidecar for path, sidecar in sidecars.items() if sidecar is not None}
    if not known:
        return tokenizer, vocab_size, ()
    data_path, sidecar = next(iter(known.items()))
    if sidecar.get("tokenizer_dir") is not None:
        tokenizer_dir = data_path.parent / sidecar["tokenizer_dir"]
        if not tokenizer_dir.is_dir():
            raise ValueError(
                f"--data-path {data_path}: the directory {tokenizer_dir} with its tokenizer is missing: copy it"
                " next to the data, or tokenize the data again with process_data.py"
            )
        check_model_dir(tokenizer_dir, trust_remote_code=trust_remote_code)
        tokenizer = load_tokenizer(str(tokenizer_dir), trust_remote_code=trust_remote_code)
    own, vocabulary = model_tokenizer.get_vocab(), tokenizer.get_vocab()  # each call makes the whole dictionary
    new_tokens = {text: i for text, i in vocabulary.items() if text not in own}
    if new_tokens:
        rows = f"{vocab_size:,} rows"
        if len(tokenizer) > vocab_size:
            vocab_size = -(-len(tokenizer) // vocabulary_multiple) * vocabulary_multiple
            rows += f" grow to {vocab_size:,}"
        log.info(
            f"vocabulary: {rows}; {len(new_tokens)} are for tokens that the model does not have, such as"
            f" {min(new_tokens, key=new_tokens.get)}: they begin as the mean of the others, and train"
        )
    # It must match the sidecar, and the model needs an embedding for every token.
    extends = own.items() <= vocabulary.items()
    if not extends or sidecar.get("tokenizer_fingerprint") != fingerprint_tokenizer(tokenizer):
        raise ValueError(
            f"--data-path {data_path} was made with a different tokenizer than --model-name-or-path's:"
            " tokenize the data again with process_data.py and this model"
        )
    for path, other in known.items():
        # Of samples that the model has drawn (--keep self) the ids are its own, which the vocabulary extends.
        maker = fingerprint_tokenizer(model_tokenizer if "drawn_with" in other else tokenizer)
        if other.get("tokenizer_fingerprint") != maker:
            raise ValueError(
                f"{path} was made with a different tokenizer than {data_path}: tokenize both with process_data.py and"
                " this model, with the same --chat-template and --add-special-tokens"
            )
        if other["max_token_id"] >= vocab_size:
            raise ValueError(
                f"{path} contains token id {other['max_token_id']}, but the model's embedding has {vocab_size} rows"
            )
    return tokenizer, vocab_size, tuple(sorted(new_tokens.values()))


def check_rope(config: PreTrainedConfig, *, longest: int) -> None:
    """Refuses rotary embeddings that depend on a row's longest sequence, if that would change the other sequences.
    `longest`: tokens of the longest sample. transformers switches "dynamic" and "longrope" to other frequencies for a
    whole row as soon as one position exceeds the length that the model was originally trained with."""
    config = text_config(config)
    rope = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [entry for entry in rope.values() if isinstance(entry, dict)]  # as in Gemma 3
    for entry in by_layer_type or [rope]:
        if entry.get("rope_type") not in ("dynamic", "longrope"):
            continue
        limit = entry.get("original_max_position_embeddings")
        limit = limit or getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
        if longest > limit:
            raise ValueError(
                f"model type {config.model_type!r} has {entry['rope_type']} rotary embeddings, which change for a whole"
                f" packed row when one sequence is longer than {limit}; the longest sample has {longest} tokens: drop"
                f" samples longer than {limit} (--max-tokens-per-gpu {limit} --drop-overlong)"
            )
