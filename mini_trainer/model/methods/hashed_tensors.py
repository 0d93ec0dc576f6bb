"""Safetensors files that hold a hash of their tensors, for caches and statistics that have no manifest."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

KEY, ABOUT = "sha256", "about"  # in the file's metadata: the hash alone, or JSON that holds it


def save_hashed(tensors: dict[str, Tensor], path: Path, about: Mapping[str, Any] | None = None) -> None:
    """Writes the tensors with their hash, as one entry: of several entries the order differs from file to file."""
    hashed = {KEY: hash_tensors(tensors)}
    save_file(tensors, path, metadata=hashed if about is None else {ABOUT: json.dumps({**about, **hashed})})


def read_about(file: safe_open) -> dict[str, Any]:
    """The open file's contents other than tensors."""
    about = dict(json.loads(file.metadata()[ABOUT]))
    about.pop(KEY, None)
    return about


def load_hashed(file: safe_open) -> dict[str, Tensor]:
    """All tensors of the open file; ValueError if they have another hash. Older versions recorded none."""
    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    metadata, expected = file.metadata() or {}, hash_tensors(tensors)
    if metadata.get(KEY, json.loads(metadata.get(ABOUT, "{}")).get(KEY, expected)) != expected:
        raise ValueError("damaged: the hash of its tensors differs from the recorded one")
    return tensors


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
