"""Safetensors files that hold a hash of their tensors, for caches and statistics that have no manifest."""

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

KEY = "sha256"  # in the file's metadata


def save_hashed(tensors: dict[str, Tensor], path: Path, metadata: Mapping[str, str] = {}) -> None:
    """Writes the tensors with their hash."""
    save_file(tensors, path, metadata={**metadata, KEY: hash_tensors(tensors)})


def load_hashed(file: safe_open) -> dict[str, Tensor]:
    """All tensors of the open file; ValueError if they have another hash. Older versions recorded none."""
    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if (file.metadata() or {}).get(KEY, expected := hash_tensors(tensors)) != expected:
        raise ValueError("damaged: its tensors have another hash than it records")
    return tensors


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
