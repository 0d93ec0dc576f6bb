"""Regular expressions over a model's names, with a limit on their time: those of an adapter are its author's."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from mini_trainer.data.chat.rendering import time_limit

SECONDS = 2.0  # for one pattern over all names; usual ones take milliseconds
PLAIN = re.compile(r"[\w.-]*")  # names, on which matching cannot take long

# How peft applies the patterns of an adapter's config: what it adds before and after them.
OF_PEFT = {
    **dict.fromkeys(("target_modules", "exclude_modules", "feedforward_modules"), ("", "")),
    "modules_to_save": (r"(^|.*\.)", r"($|\..*)"),
    "layers_pattern": (r"(?:(?:^|.*?\.)", r"\.(?P<idx>\d+)\.).*"),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), (r"(.*\.)?(", ")")),
}
ONLY_AS_TEXT = ("target_modules", "exclude_modules", "feedforward_modules")  # a list of these has plain names


def match_names(
    pattern: str, names: Collection[str], *, where: str, before: str = r"(.*\.)?(?:", after: str = ")"
) -> list[str]:
    """The names that a pattern matches in full, between `before` and `after`; by default also from a dot to the end.

    ValueError, beginning with `where`, for an invalid pattern, and for one that takes too long.
    """
    try:
        expression = re.compile(f"{before}{pattern}{after}")
        with time_limit(SECONDS):
            return [name for name in names if expression.fullmatch(name)]
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{where} {pattern:.100}: neither a name nor a regular expression: {error}") from None
    except TimeoutError:
        raise ValueError(
            f"{where} {pattern:.100}: takes longer than {SECONDS:g} seconds on {len(names):,} names: write it without"
            " repetitions of repetitions, or name the modules"
        ) from None


def check_patterns(settings: Mapping[str, Any], names: Collection[str], *, where: str) -> None:
    """ValueError for a pattern of an adapter's config on which peft would take too long; `where` names the file."""
    for key, (before, after) in OF_PEFT.items():
        value = settings.get(key)
        several = value if isinstance(value, (list, dict)) and key not in ONLY_AS_TEXT else ()
        for pattern in [value] if isinstance(value, str) else several:
            if isinstance(pattern, str) and not PLAIN.fullmatch(pattern):
                match_names(pattern, names, where=f"{where}: {key}", before=before, after=after)
