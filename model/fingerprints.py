"""Short digests of what a run is made from, so that a resumed run can tell whether it is still the same."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from transformers.utils import cached_file

from disk import hash_json

BLOCK_BYTES = 4096
NUM_BLOCKS = 1024  # read of every large file


def fingerprint_file(path: Path) -> str:
    """SHA-256 of a file's size and content; of a large file, 1,024 evenly spaced blocks of 4 KiB are its content."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    num_blocks = -(-size // BLOCK_BYTES)
    chosen = np.linspace(0, num_blocks - 1, min(num_blocks, NUM_BLOCKS)).astype(int)
    with open(path, "rb") as file:
        for block in chosen:
            file.seek(int(block) * BLOCK_BYTES)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def fingerprint_model(model_name_or_path: str) -> str:
    """SHA-256 of a model's config and of its weights' files (`fingerprint_file`), wherever they lie."""
    config_path = Path(cached_file(model_name_or_path, "config.json"))
    config = json.loads(config_path.read_text())
    config.pop("transformers_version", None)
    weights = {path.name: fingerprint_file(path) for path in config_path.parent.glob("*.safetensors")}
    return hash_json([config, weights])


def fingerprint_data(path: Path, *, source: Any, lengths: np.ndarray, kept: np.ndarray) -> str:
    """SHA-256 of a tokenized data set: its file (`fingerprint_file`), its rows' `lengths` (samples,), those `kept`.

    `source` is what the sidecar says of the file that it was made from.
    """
    arrays = [hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest() for array in (lengths, kept)]
    return hash_json([source, *arrays, fingerprint_file(path)])
