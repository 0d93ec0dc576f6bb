"""Safetensors files that are laid out in advance and filled in any order, with only one tensor in memory.

https://github.com/huggingface/safetensors#format
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# The library's names, in the order in which its files store them, so that all numbers are aligned.
DTYPES = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64", torch.float32: "F32",
    torch.uint32: "U32", torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16",
    torch.int16: "I16", torch.float8_e5m2fnuz: "F8_E5M2FNUZ", torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
ITEM_SIZES = {name: dtype.itemsize for dtype, name in DTYPES.items()}
METADATA = {"format": "pt"}


def encode_header(header: dict[str, Any]) -> bytes:
    """The first bytes of a file: the header's length, and the header."""
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def view_bytes(tensor: Tensor) -> np.ndarray:
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()


def lay_out(path: Path, tensors: dict[str, tuple[str, Sequence[int]]]) -> dict[str, range]:
    """Creates a file for `tensors` of these dtypes and shapes, without data; returns each tensor's range of bytes.

    After `write_into` has filled it, it is identical to a file written by `safetensors.torch.save_file`.
    """
    order = list(ITEM_SIZES)
    header, ends = {"__metadata__": METADATA}, [0]
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (order.index(item[1][0]), item[0])):
        ends.append(ends[-1] + math.prod(shape) * ITEM_SIZES[dtype])
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": ends[-2:]}
    text = encode_header(header)
    with path.open("xb") as file:
        file.write(text)
        file.truncate(len(text) + ends[-1])
    del header["__metadata__"]
    return {name: range(*(len(text) + offset for offset in entry["data_offsets"])) for name, entry in header.items()}


def write_into(path: Path, place: range, tensor: Tensor) -> None:
    """Writes a tensor's data to its place in a laid-out file."""
    assert tensor.nbytes == len(place), f"{tensor.nbytes} bytes for {len(place)} in {path.name}"
    with path.open("r+b") as file:
        file.seek(place.start)
        file.write(view_bytes(tensor))
