"""Environment variables in option files. `${NAME}` stands for one of the few whose values may be written into files
that others read, `$${` for the text `${`."""

import os
import re
from collections.abc import Collection, Sequence
from typing import Any

from mini_trainer.options.urls import is_secret

FLAG = "--allow-env"
ALLOWED, PREFIX = ("HOME", "USER", "SCRATCH", "TMPDIR"), "SLURM_"
REFERENCE = re.compile(r"\$\$\{|\$\{(\w*)(\}?)")


def take_allowed(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits every `--allow-env NAME` off a command line: returns its other words, and the names."""
    others, names, words = [], [], iter(argv)
    for word in words:
        flag, equals, name = word.partition("=")
        if flag.replace("_", "-") != FLAG:
            others.append(word)
            continue
        name = name if equals else next(words, "")
        if not re.fullmatch(r"\w+", name):
            raise ValueError(f"{FLAG}: given {name!r}, allowed: the name of an environment variable")
        if is_secret(name):
            raise ValueError(
                f"{FLAG} {name}: the name of a secret, which options would write into files that others read: leave"
                " it in the environment, where the libraries that need it look"
            )
        names.append(name)
    return others, names


def fill_in(where: str, value: Any, allowed: Collection[str]) -> Any:
    """Fills in `${NAME}` in the `value` of the key `where`, nested values included, from the environment.

    ValueError for variables other than those of `ALLOWED`, SLURM and `allowed`.
    """
    if isinstance(value, list):
        return [fill_in(where, item, allowed) for item in value]
    if isinstance(value, dict):
        return {key: fill_in(f"{where}: {key}", item, allowed) for key, item in value.items()}
    if not isinstance(value, str) or "${" not in value:
        return value

    def look_up(match: re.Match) -> str:
        name = match[1]
        if match[0] == "$${":
            return "${"
        if not name or not match[2]:
            raise ValueError(f"{where}: {value!r}: not the name of a variable; write $${{ for the text ${{")
        if is_secret(name) or not (name in ALLOWED or name.startswith(PREFIX) or name in allowed):
            advice = "; a secret is never filled in" if is_secret(name) else f", or add {FLAG} {name}"
            raise ValueError(
                f"{where}: {value!r}: the variable {name} is not filled in; allowed: {', '.join(ALLOWED)}, {PREFIX}*"
                f"{advice} ($${{ stands for the text ${{)"
            )
        if name not in os.environ:
            raise ValueError(f"{where}: {value!r}: the environment has no variable {name}")
        return os.environ[name]

    filled = REFERENCE.sub(look_up, value)
    return {"true": True, "false": False}.get(filled, filled)


def escape(value: Any) -> Any:
    """Inverse of `fill_in` for a text or a list of texts."""
    if isinstance(value, (list, tuple)):
        return list(map(escape, value))
    return value.replace("${", "$${") if isinstance(value, str) else value
