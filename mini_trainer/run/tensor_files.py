"""Safetensors files that are laid out in advance and filled in any order, tensor by tensor.

https://github.com/huggingface/safetensors#format
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mini_trainer.run.write_pool import WritePool

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


class TensorFile:
    """A safetensors file, laid out from the dtypes and shapes of its tensors and filled in any order by `pool`.

    The complete file is identical to one written by `safetensors.torch.save_file`.
    """

    def __init__(self, path: Path, tensors: dict[str, tuple[str, Sequence[int]]], pool: WritePool):
        self.pool = pool
        header, self.places = lay_out(tensors)  # of the tensors not yet written
        ends = [place.stop for place in self.places.values()]
        self.number = pool.add_file(path, header, max(ends, default=len(header)))

    def write(self, name: str, tensor: Tensor) -> None:
        """Starts writing a tensor, which must not change before `pool` is done."""
        self.pool.write(self.number, self.places.pop(name), tensor)


def lay_out(tensors: dict[str, tuple[str, Sequence[int]]]) -> tuple[bytes, dict[str, range]]:
    """The header of a file of tensors of these dtypes and shapes, and each tensor's range of bytes in the file."""
    order = list(ITEM_SIZES)
    header, ends = {"__metadata__": METADATA}, [0]
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (order.index(item[1][0]), item[0])):
        ends.append(ends[-1] + math.prod(shape) * ITEM_SIZES[dtype])
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": ends[-2:]}
    text = encode_header(header)
    del header["__metadata__"]
    return text, {name: range(*(len(text) + end for end in entry["data_offsets"])) for name, entry in header.items()}
