"""Whether the rows of a data set teach the model to stop."""

from collections.abc import Collection

from mini_trainer.data.rows.report import Totals
from mini_trainer.options import RowOptions

LEAST_SHARE = 0.5  # share of the rows that must train a stop token


def check_stops(totals: Totals, options: RowOptions, *, stop: str | None, open_turns: Collection[str]) -> list[str]:
    """Notes on rows that train no stop token, such as `stop`.

    ValueError if more than half of the rows train none because the chat template leaves some turns open (`open_turns`:
    inner, last), unless that is allowed.
    """
    num_rows, num_trained = totals.stops["rows"], totals.stops["trained"]
    if options.append_stop_token and not totals.stops["appended"]:
        return ["--append-stop-token had no effect: no row ends with a trained turn that lacks a stop token"]
    if num_trained == num_rows:
        needless = options.allow_missing_stop_token and "inner" not in open_turns
        return ["--allow-missing-stop-token is not needed: every row trains a stop token"] if needless else []
    found = f"{num_trained:,} of {num_rows:,} rows train a stop token"
    found += f" such as {stop!r}" if stop is not None else ""
    is_enough = num_trained >= LEAST_SHARE * num_rows
    if is_enough or options.allow_missing_stop_token or not open_turns:
        return [found if is_enough else f"{found}: the model may not learn to stop"]
    if options.append_stop_token:
        raise ValueError(
            f"only {found} with --append-stop-token, which appends it to rows that end with a trained turn of the"
            " assistant: let more rows end with one, or pass --allow-missing-stop-token instead"
        )
    raise ValueError(
        f"only {found}, so the model would not learn to stop: the chat template writes none after a conversation's last"
        " turn. Pass --append-stop-token to append one there and train it, or --allow-missing-stop-token to train"
        " without"
    )
