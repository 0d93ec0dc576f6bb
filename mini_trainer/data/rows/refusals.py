"""Refuses a data set without samples, with an empty side, or with invalid rows that are not to be skipped."""

from collections.abc import Sequence

from mini_trainer.data.rows.files import Source
from mini_trainer.data.rows.report import DROPPED, Totals, describe_sources
from mini_trainer.data.rows.split import SIDES


def check_rejected(totals: Totals, reasons: list[tuple[str, str]], *, skip_invalid: bool) -> None:
    """Refuses invalid rows, listing the first, unless they are to be skipped."""
    if reasons and not skip_invalid:
        more = ", the first of them" if totals.rows["invalid"] > len(reasons) else ""
        raise ValueError(
            f"{totals.rows['invalid']:,} of {totals.rows['in']:,} rows cannot be used{more}:{list_below(reasons)}\n"
            "fix them, or pass --skip-invalid to skip them"
        )


def list_below(reasons: list[tuple[str, str]]) -> str:
    """Lines that say each reason once, with the first row that has it and the places of the others."""
    places: dict[str, list[str]] = {}
    for place, reason in reasons:
        places.setdefault(reason, []).append(place)
    lines = []
    for reason, (first, *others) in places.items():
        lines += [f"\n  {first}: {reason}", *([f"\n    also {', '.join(others)}"] if others else [])]
    return "".join(lines)


def check_kept(
    totals: Totals,
    reasons: list[tuple[str, str]],
    *,
    sources: Sequence[Source],
    max_sample_num_tokens: int | None,
) -> None:
    """Refuses a data set without samples."""
    if totals.rows["in"] == 0:
        raise ValueError(f"{describe_sources(sources)}: has no rows")
    if totals.rows["kept"] == 0:
        dropped = ", ".join(f"{totals.rows[key]:,} {label}" for key, label in DROPPED.items() if totals.rows[key])
        hint = f"; raise --max-sample-num-tokens {max_sample_num_tokens}" if totals.rows["too_long"] else ""
        raise ValueError(
            f"{describe_sources(sources)}: no row is left of {totals.rows['in']:,}: {dropped}{hint}"
            f"{list_below(reasons)}"
        )


def check_sides(sides: Sequence[Totals], *, share: float) -> None:
    """Refuses a split with nothing on one side."""
    num_kept = sum(side.rows["kept"] for side in sides)
    for name, totals, change in zip(SIDES, sides, ("smaller", "larger"), strict=True):
        if totals.rows["kept"] == 0:
            raise ValueError(
                f"--validation-share {share}: of {num_kept:,} kept rows, none is left for {name}; use a {change} share,"
                " or more rows (rows with the same text always fall on the same side)"
            )
