"""Comparison of the ranks at the start: options, code, data and files that have to be equal.

The ranks exchange one hash a group in one collective, 32 bytes a rank and group. Only if hashes differ do a few ranks,
one of each kind, send the values themselves, and every rank raises the same error.
"""

import hashlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ranks.ending import RanksDiffer
from ranks.peers import describe_ranks
from ranks.world import World

Items = Mapping[str, str]  # values as messages print them, by the name that messages use
Groups = Mapping[str, Items]  # such as options, code, data; all ranks have the same groups

MOST_KINDS = 4  # groups of equal ranks whose values are printed
MOST_CHARACTERS = 300  # characters of a value that a message shows
DIGITS = 16  # digits of a hash that a message shows
ABSENT = "not there"


@dataclass(frozen=True)
class Account:
    """A rank's values, sent if they differ from those of others."""

    rank: int
    host: str
    groups: Groups


def compare_ranks(world: World, describe: Callable[[], Groups]) -> None:
    """Raises RanksDiffer, the same on every rank, unless `describe` gives all ranks the same. All ranks call this."""
    if world.world_size == 1:
        return
    groups = describe()
    own = torch.frombuffer(bytearray(hash_groups(groups)), dtype=torch.uint8)
    hashes = torch.empty(world.world_size, len(own), dtype=torch.uint8)
    dist.all_gather(list(hashes.unbind()), own, group=world.control)
    kinds = find_kinds([row.tobytes() for row in hashes.numpy()])
    if len(kinds) == 1:
        return
    accounts = []
    for rank in list(kinds)[:MOST_KINDS]:
        account = [Account(rank, socket.gethostname(), groups)]  # replaced by that of `rank` on all other ranks
        dist.broadcast_object_list(account, src=rank, group=world.control, device=torch.device("cpu"))
        accounts.append(account[0])
    raise RanksDiffer(describe_differences(accounts, kinds))


def hash_groups(groups: Groups) -> bytes:
    """SHA-256 of each group, one after the other, in the order of their names."""
    return b"".join(
        hashlib.sha256(json.dumps(dict(groups[name]), sort_keys=True).encode()).digest() for name in sorted(groups)
    )


def find_kinds(hashes: Sequence[bytes]) -> dict[int, list[int]]:
    """Ranks with equal hashes, by the first of them; a single entry if all agree."""
    first: dict[bytes, int] = {}
    kinds: dict[int, list[int]] = {}
    for rank, value in enumerate(hashes):
        kinds.setdefault(first.setdefault(value, rank), []).append(rank)
    return kinds


def describe_differences(accounts: Sequence[Account], kinds: Mapping[int, Sequence[int]]) -> str:
    """A message with one line for each item that differs: its values, and the ranks that have them.

    `accounts`: the first rank's of each kind, or of some kinds; `kinds`: all ranks by the first of their kind.
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
        f"the ranks do not agree, and nothing has been trained:{''.join(lines)}{more}\n"
        "give all ranks the same; docs/running.md lists what may differ"
    )


def describe_value(value: str, ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    """A value, the `ranks` that have it, and the host of the first."""
    first = min(ranks)
    shown = value if len(value) <= MOST_CHARACTERS else f"{value[:MOST_CHARACTERS]}..."
    host = hosts[first] if len(ranks) == 1 else f"rank {first} on {hosts[first]}"
    return f"{shown} on {describe_ranks(sorted(ranks))} ({host})"
