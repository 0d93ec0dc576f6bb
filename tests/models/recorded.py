"""Stand-ins for functions that only run on a GPU, behind the signatures that record_signatures.py has recorded."""

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RECORDED = json.loads(Path(__file__).with_name("signatures.json").read_text())
RELEASES: dict[str, list[str]] = {package: sorted(known) for package, known in RECORDED["archives"].items()}


@functools.cache
def find_signature(package: str, name: str, release: str) -> inspect.Signature:
    entries = RECORDED["signatures"][package][name]
    (text,) = (entry["signature"] for entry in entries if release in entry["releases"])
    return inspect.signature(eval(f"lambda {text[1:-1]}: None", {"torch": torch}))


def list_names(package: str, release: str, *, beginning: str = "") -> list[str]:
    """Names that the release has."""
    known = RECORDED["signatures"][package].items()
    return [
        name for name, entries in known if name.startswith(beginning) and any(release in e["releases"] for e in entries)
    ]


def stand_in(package: str, name: str, release: str, compute: Callable[..., Any]) -> Callable[..., Any]:
    """A function that takes what the release's takes, or is a TypeError; it calls `compute` with all by name."""
    signature = find_signature(package, name, release)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return compute(**bound.arguments)

    call.__signature__ = signature
    return call
