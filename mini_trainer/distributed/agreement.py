"""Comparison of the ranks at startup: options, code, data and files that must be equal.

Rank 0 gathers one hash per group of values, 32 bytes per rank and group, and answers whether they are equal: a few
messages per rank, where an all-gather takes N². Only if hashes differ do a few ranks, one of each kind, send the values
themselves, and every rank raises the same error.
"""

import hashlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mini_trainer.distributed.ending import RanksDiffer
from mini_trainer.distributed.messages import describe_ranks
from mini_trainer.distributed.world import World, call_on_rank0, gather_rows

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
    own = torch.frombuffer(bytearray(hash_groups(groups)), dtype=torch.uint8)
    hashes = gather_rows(world, own)
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
    """Concatenated SHA-256 digests of the groups, ordered by name."""
    return b"".join(
        hashlib.sha256(json.dumps(dict(groups[name]), sort_keys=True).encode()).digest() for name in sorted(groups)
    )


def find_kinds(hashes: Sequence[bytes]) -> dict[int, list[int]]:
    """Maps the first rank of each distinct hash to all ranks with that hash; a single entry if all agree."""
    first: dict[bytes, int] = {}
    kinds: dict[int, list[int]] = {}
    for rank, value in enumerate(hashes):
        kinds.setdefault(first.setdefault(value, rank), []).append(rank)
    return kinds


def describe_differences(accounts: Sequence[Account], kinds: Mapping[int, Sequence[int]]) -> str:
    """Returns a message with one line per differing item: its values and the ranks that have them.

    `accounts` come from the first rank of each kind, or of some kinds; `kinds` maps that rank to all of its kind.
    """
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
        "make them equal on all ranks; docs/running.md lists what may differ"
    )


def describe_value(value: str, ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """Formats a value with the `ranks` that have it and the first one's host."""
    first = min(ranks)
    shown = value if len(value) <= MOST_CHARACTERS else f"{value[:MOST_CHARACTERS]}..."
    host = hosts[first] if len(ranks) == 1 else f"rank {first} on {hosts[first]}"
    return f"{shown} on {describe_ranks(sorted(ranks))} ({host})"
