"""GPTQ and AWQ: integers packed into 32-bit words, with a scale and a zero point a group of inputs and an output.

A layer's weight (out, in) is stored as `qweight`, `qzeros` (groups, out), `scales` (groups, out) and, for GPTQ, `g_idx`
(in), each input's group (Frantar et al. 2022, arXiv 2210.17323; Lin et al. 2023, arXiv 2306.00978). Sizes, groups and
bits follow from the shapes, so layers may differ in them. Products are exact in fp32 and rounded once.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from mini_trainer.model.dequantizing import ROWS_AT_A_TIME, refuse_leftovers, take_part
from mini_trainer.model.stored_tensors import Settings, Stored

WORD = 32  # bits
AWQ_BITS = 4
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the outputs in a word, from its lowest bits
FLOATS = ("F16", "BF16", "F32")
PARTS = (".qweight", ".qzeros", ".scales", ".g_idx")


def check_gptq(settings: Settings) -> None:
    """ValueError for layouts other than AutoGPTQ's and GPTQModel's second."""
    form = "marlin" if settings.get("is_marlin_format") else read_format(settings, "checkpoint_format", "format")
    check_choice("GPTQ's checkpoint_format", form, {"gptq", "gptq_v2"})
    check_choice("GPTQ's bits", settings.get("bits", 4), {2, 3, 4, 8})
    check_choice("GPTQ's pack_dtype", settings.get("pack_dtype") or "int32", {"int32"})


def check_awq(settings: Settings) -> None:
    """ValueError for layouts other than AutoAWQ's GEMM."""
    form = "llm-awq" if settings.get("backend") == "llm-awq" else read_format(settings, "version", "format", "gemm")
    check_choice("AWQ's version", form, {"gemm"})
    check_choice("AWQ's bits", settings.get("bits", settings.get("w_bit", AWQ_BITS)), {AWQ_BITS})
    check_choice("AWQ's zero_point", settings.get("zero_point", True), {True})


def read_format(settings: Settings, key: str, other: str, default: str = "gptq") -> str:
    return str(settings.get(key) or settings.get(other) or default).lower()


def check_choice(what: str, given: Any, allowed: set) -> None:
    if given not in allowed:
        names = " or ".join(map(str, sorted(allowed)))
        raise ValueError(
            f"quantization_config: {what} is {given!r}, which cannot be dequantized here ({names} can): use the bf16"
            " release"
        )


def open_gptq(parts: dict[str, Stored], settings: Settings, dtype: torch.dtype) -> dict[str, Stored]:
    """Opens weights whose words hold several inputs, of 2, 3, 4 or 8 bits."""
    adds_one = read_format(settings, "checkpoint_format", "format") == "gptq"  # zero points are stored less one
    for layer in find_layers(parts):
        own = take_layer(parts, layer)
        num_groups, num_outputs = own["scales"].shape
        bits = find_bits(layer, own["qzeros"].shape[-1] * WORD, num_outputs)
        num_words = own["qweight"].shape[0]
        num_inputs = num_words * WORD // bits
        shapes = {"qweight": (num_words, num_outputs), "qzeros": (num_groups, num_outputs * bits // WORD)}
        check_shapes(layer, own, shapes)
        groups = parts.pop(f"{layer}.g_idx", None)
        if groups is not None and groups.shape != (num_inputs,):
            raise ValueError(f"{layer}.g_idx has shape {list(groups.shape)}, expected {[num_inputs]}")
        size = choose_group_size(layer, settings, num_inputs, num_groups) if groups is None else 0
        read = functools.partial(read_gptq, own, groups, layer, bits=bits, size=size, adds_one=adds_one, dtype=dtype)
        parts[f"{layer}.weight"] = Stored(read, (num_outputs, num_inputs), "")
    refuse_leftovers(key for key in parts if key.endswith(PARTS))
    return parts


def read_gptq(
    own: dict[str, Stored],
    groups: Stored | None,
    layer: str,
    *,
    bits: int,
    size: int,
    adds_one: bool,
    dtype: torch.dtype,
) -> Tensor:  # (out, in)
    words, scales, zeros = own["qweight"].read(), own["scales"].read().float(), own["qzeros"].read()
    # GPTQModel subtracts the ones from whole words, which borrows from the next number where a zero point is 0; numbers
    # of 3 bits, which cross words, are subtracted from one by one.
    if adds_one and WORD % bits == 0:
        zeros = zeros + sum(1 << shift for shift in range(0, WORD, bits))
    zeros = unpack_words(zeros.T, bits).T  # (groups, out)
    if adds_one and WORD % bits:
        zeros = (zeros + 1) % 2**bits
    num_inputs = len(words) * WORD // bits
    groups = torch.arange(num_inputs) // size if groups is None else groups.read().long()
    if not 0 <= int(groups.min()) <= int(groups.max()) < len(scales):
        raise ValueError(f"{layer}.g_idx names group {int(groups.max())}, but there are {len(scales)} groups")
    weight = torch.empty(scales.shape[1], num_inputs, dtype=dtype)
    for start in range(0, num_inputs, ROWS_AT_A_TIME):  # a multiple of 32, which are whole words
        own_words = words[start * bits // WORD : (start + ROWS_AT_A_TIME) * bits // WORD]
        of = groups[start : start + ROWS_AT_A_TIME]
        weight[:, start : start + ROWS_AT_A_TIME] = ((unpack_words(own_words, bits) - zeros[of]) * scales[of]).T
    return weight


def unpack_words(words: Tensor, bits: int) -> Tensor:  # (words, m) -> (numbers, m)
    """Splits 32-bit words along the first dimension into numbers, from the lowest bits; 3 bits may cross words."""
    starts = torch.arange(len(words) * WORD // bits) * bits
    places, shifts = starts // WORD, (starts % WORD)[:, None]
    words = words.long() & (2**WORD - 1)
    after = words[(places + 1).clamp(max=len(words) - 1)]
    return (words[places] >> shifts | after << WORD - shifts) & (2**bits - 1)


def open_awq(parts: dict[str, Stored], settings: Settings, dtype: torch.dtype) -> dict[str, Stored]:
    """Opens weights whose words hold eight outputs of 4 bits."""
    for layer in find_layers(parts):
        own = take_layer(parts, layer)
        num_groups, num_outputs = own["scales"].shape
        num_inputs, num_words = own["qweight"].shape[0], num_outputs * AWQ_BITS // WORD
        check_shapes(layer, own, {"qweight": (num_inputs, num_words), "qzeros": (num_groups, num_words)})
        size = choose_group_size(layer, settings, num_inputs, num_groups)
        read = functools.partial(read_awq, own, size=size, dtype=dtype)
        parts[f"{layer}.weight"] = Stored(read, (num_outputs, num_inputs), "")
    refuse_leftovers(key for key in parts if key.endswith(PARTS))
    return parts


def read_awq(own: dict[str, Stored], *, size: int, dtype: torch.dtype) -> Tensor:  # (out, in)
    words, scales = own["qweight"].read(), own["scales"].read().float()
    zeros = unpack_awq(own["qzeros"].read())  # (groups, out)
    weight = torch.empty(scales.shape[1], len(words), dtype=dtype)
    for start in range(0, len(words), ROWS_AT_A_TIME):
        own_words = words[start : start + ROWS_AT_A_TIME]
        of = torch.arange(start, start + len(own_words)) // size
        weight[:, start : start + ROWS_AT_A_TIME] = ((unpack_awq(own_words) - zeros[of]) * scales[of]).T
    return weight


def unpack_awq(words: Tensor) -> Tensor:  # (n, words) -> (n, 8 words)
    numbers = torch.empty(*words.shape, len(AWQ_ORDER), dtype=torch.int32)
    for i, place in enumerate(AWQ_ORDER):
        numbers[..., place] = words >> AWQ_BITS * i & (2**AWQ_BITS - 1)
    return numbers.flatten(1)


def find_layers(parts: dict[str, Stored]) -> list[str]:
    return [key.removesuffix(".qweight") for key in parts if key.endswith(".qweight")]


def take_layer(parts: dict[str, Stored], layer: str) -> dict[str, Stored]:
    """Removes and returns a layer's integers, zero points and scales, all of them matrices."""
    own = {kind: take_part(parts, f"{layer}.{kind}", of=layer) for kind in ("qweight", "qzeros", "scales")}
    for kind, part in own.items():
        types = FLOATS if kind == "scales" else ("I32",)
        if part.dtype not in types or len(part.shape) != 2 or 0 in part.shape:
            raise ValueError(
                f"{layer}.{kind} {list(part.shape)} {part.dtype}: expected a matrix of {' or '.join(types)}"
            )
    return own


def find_bits(layer: str, num_bits: int, num_outputs: int) -> int:
    """Bits of a number, from those of all zero points of a group."""
    bits, rest = divmod(num_bits, num_outputs)
    if rest or bits not in (2, 3, 4, 8):
        raise ValueError(
            f"{layer}.qzeros holds {num_bits} bits a group for {num_outputs} outputs: expected 2, 3, 4 or 8 for each"
        )
    return bits


def choose_group_size(layer: str, settings: Settings, num_inputs: int, num_groups: int) -> int:
    """Inputs of a group: those of the config, where the number of groups allows it, else the even division."""
    given = settings.get("group_size", settings.get("q_group_size"))
    for size in (given, -(-num_inputs // num_groups)):
        if type(size) is int and size > 0 and -(-num_inputs // size) == num_groups:
            return size
    raise ValueError(f"{layer}.scales has {num_groups} groups, which do not divide {num_inputs} inputs")


def check_shapes(layer: str, own: dict[str, Stored], expected: dict[str, tuple[int, ...]]) -> None:
    for kind, shape in expected.items():
        if own[kind].shape != shape:
            raise ValueError(
                f"{layer}.{kind} has shape {list(own[kind].shape)}, expected {list(shape)} with scales"
                f" {list(own['scales'].shape)}"
            )
