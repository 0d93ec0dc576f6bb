"""Digests of a run's inputs, so that a resumed run can check that they are unchanged."""

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from mini_trainer.data.stores.contents import fingerprint_file
from mini_trainer.data.stores.disk import hash_json
from mini_trainer.data.stores.tokenizers import fingerprint_chat_template, fingerprint_tokenizer
from mini_trainer.data.tokenized.by_row import RowRange, Rows, iterate_chunks
from mini_trainer.options.reading import read_document

if TYPE_CHECKING:
    from mini_trainer.data.tokenized.reader import TokenizedData

# Files, besides weights and tokenizer, that affect a model's computation or the preparation of its images.
CONFIG_FILES = ("config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json")


def fingerprint_model(model_dir: str) -> str:
    """SHA-256 of a model's config and weight files (`fingerprint_file`), independent of their location."""
    config = read_document(Path(model_dir, "config.json"))
    config.pop("transformers_version", None)
    weights = {path.name: fingerprint_file(path) for path in Path(model_dir).glob("*.safetensors")}
    return hash_json([config, weights])


def fingerprint_config_files(model_dir: Path, *, with_code: bool) -> dict[str, str]:
    """`fingerprint_file` of each existing file in `CONFIG_FILES`, and of the model's code, by name."""
    paths = [path for name in CONFIG_FILES if (path := model_dir / name).is_file()]
    paths += sorted(model_dir.rglob("*.py")) if with_code else []
    return {str(path.relative_to(model_dir)): fingerprint_file(path) for path in paths}


def fingerprint_tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of vocabulary, pre-tokenization, chat template and special tokens."""
    return hash_json(
        [
            fingerprint_tokenizer(tokenizer),
            fingerprint_chat_template(tokenizer),
            {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        ]
    )


def fingerprint_data(data: "TokenizedData", *, source: Any = None, kept: Rows | None = None) -> str:
    """SHA-256 of a tokenized data set: its file (`fingerprint_file`), the lengths of its samples, those that are kept.
    `source` is the sidecar's record of the file that it was made from; `kept` takes the place of the data's own."""
    kept = data.kept if kept is None else kept
    return hash_json([source, hash_rows(data.lengths), hash_rows(kept), fingerprint_file(data.path)])


def hash_rows(values: Rows) -> str:
    """SHA-256 of an array's bytes."""
    return hash_range(values) if isinstance(values, RowRange) else hash_chunks(values)


def hash_chunks(values: Rows) -> str:
    digest = hashlib.sha256()
    for part in iterate_chunks(values):
        digest.update(np.ascontiguousarray(part))
    return digest.hexdigest()


hash_range = functools.lru_cache(hash_chunks)  # of most data sets all rows are kept, and several digests name them


def digest_data(data: "TokenizedData") -> str:
    """A digest of all rows, whichever of them are kept."""
    return fingerprint_data(data, kept=data.lengths[:0])
