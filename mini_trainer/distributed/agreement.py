"""The comparison of all ranks by hash: options, code, libraries, environment and inputs must be equal."""

import hashlib
import json
import os
import platform
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import mini_trainer
from mini_trainer.distributed.ending import RanksDiffer
from mini_trainer.distributed.messages import describe_ranks
from mini_trainer.distributed.world import World, call_on_rank0, gather_rows
from mini_trainer.options import flag_name
from mini_trainer.options.reading import read_bytes
from mini_trainer.root_files import NAMES, ROOT, is_checkout

Items = Mapping[str, str]  # printable values by the name that messages use
Groups = Mapping[str, Items]  # such as options, code, data; all ranks have the same groups

MOST_KINDS = 4  # maximum number of groups of equal ranks whose values are printed
MOST_CHARACTERS = 300  # maximum characters of a value in a message
DIGITS = 16  # digits of a hash that a message shows
ABSENT = "missing"


@dataclass(frozen=True)
class Account:
    """A rank's values, sent if they differ from those of other ranks."""

    rank: int
    host: str
    groups: Groups


def compare_ranks(world: World, describe: Callable[[], Groups]) -> None:
    """Raises the same RanksDiffer on every rank unless `describe` returns equal groups on all. Collective."""
    if world.world_size == 1:
        return
    groups = describe()
    hashes = gather_rows(world, torch.frombuffer(bytearray(hash_groups(groups)), dtype=torch.uint8))
    kinds = {} if hashes is None else find_kinds([row.tobytes() for row in hashes.numpy()])  # on rank 0
    asked = call_on_rank0(world, lambda: list(kinds)[:MOST_KINDS])
    if len(asked) == 1:
        return
    accounts = []
    for rank in asked:
        account = [Account(rank, socket.gethostname(), groups)]  # the broadcast overwrites it on all other ranks
        dist.broadcast_object_list(account, src=rank, group=world.control, device=torch.device("cpu"))
        accounts.append(account[0])
    raise RanksDiffer(call_on_rank0(world, lambda: describe_differences(accounts, kinds)))


def hash_groups(groups: Groups) -> bytes:
    return hashlib.sha256(json.dumps(groups, sort_keys=True).encode()).digest()


def find_kinds(hashes: Sequence[bytes]) -> dict[int, list[int]]:
    """Maps the first rank of each distinct hash to all ranks with that hash; a single entry if all agree."""
    kinds: dict[int, list[int]] = {}
    for rank, value in enumerate(hashes):
        kinds.setdefault(hashes.index(value), []).append(rank)
    return kinds


def describe_differences(accounts: Sequence[Account], kinds: Mapping[int, Sequence[int]]) -> str:
    """Returns a message with one line per differing item: its values and the ranks that have them. `accounts` come from
    the first rank of each kind, or of some kinds; `kinds` maps that rank to all of its kind."""
    lines = []
    for group in sorted(accounts[0].groups):
        names = dict.fromkeys(name for account in accounts for name in account.groups[group])
        for name in names:
            ranks_by_value: dict[str, list[int]] = {}
            for account in accounts:
                value = account.groups[group].get(name, ABSENT)
                ranks_by_value.setdefault(value, []).extend(kinds[account.rank])
            if len(ranks_by_value) > 1:
                hosts = {account.rank: account.host for account in accounts}
                values = [describe_value(value, ranks, hosts) for value, ranks in ranks_by_value.items()]
                lines.append(f"\n  {group}: {name}: {'; '.join(values)}")
    others = sorted(rank for first in list(kinds)[len(accounts) :] for rank in kinds[first])
    more = f"\n  and {describe_ranks(others)} differ in further ways" if others else ""
    return (
        f"the ranks differ, and nothing has been trained:{''.join(lines)}{more}\n"
        "make them equal on all ranks; docs/reference/running.md lists what may differ"
    )


def describe_value(value: str, ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Formats a value with the `ranks` that have it and the first one's host."""
    first = min(ranks)
    shown = value if len(value) <= MOST_CHARACTERS else f"{value[:MOST_CHARACTERS]}..."
    host = hosts[first] if len(ranks) == 1 else f"rank {first} on {hosts[first]}"
    return f"{shown} on {describe_ranks(sorted(ranks))} ({host})"


# Packages whose releases compute, tokenize or lay out data differently.
PACKAGES = (
    "torch", "transformers", "tokenizers", "datasets", "pyarrow", "numpy", "numba", "safetensors", "peft",
    "bitsandbytes", "torchao", "liger-kernel", "flash-attn", "compressed-tensors", "triton",
)  # fmt: skip
# Variables that set the precision or the order of sums in libraries' matrix products.
VARIABLES = (
    "NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "ATEN_CPU_CAPABILITY",
    "MKL_CBWR", "TORCHDYNAMO_DISABLE",
)  # fmt: skip


def describe_program(values: Mapping[str, Any], world: World, *, may_differ: Collection[str]) -> Groups:
    """A script's options by name (except `may_differ`), code, library versions, device type, environment variables."""
    return {
        "options": {flag_name(name): str(value) for name, value in values.items() if name not in may_differ},
        "code": {"mini_trainer": fingerprint_code(), "python": platform.python_version()} | dict(list_versions()),
        "environment": {"device": world.device.type, **{name: os.environ.get(name, "not set") for name in VARIABLES}},
    }


def fingerprint_code() -> str:
    """Shortened SHA-256 of this program's modules: a checkout can differ from its commit."""
    package = Path(mini_trainer.__file__).parent
    files = {path.relative_to(package).as_posix(): path for path in package.rglob("*.py")}
    if is_checkout(ROOT):
        files |= {f"{name}.py": ROOT / f"{name}.py" for name in NAMES}
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(f"{name} ".encode() + hashlib.sha256(read_bytes(path)).digest())
    return digest.hexdigest()[:DIGITS]


def list_versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"
