"""Answers to unknown options and values: the option or value with the same meaning here, the reason why there is none,
or the closest name. Loaded only for unknown ones."""

import difflib
import re
from collections.abc import Callable, Collection

from mini_trainer.options import TrainOptions, flag_name, list_types
from mini_trainer.options.foreign_names import TABLE, find_row
from mini_trainer.options.tools import ProcessDataOptions

LEAST_SIMILARITY = 0.75  # below, most suggestions mean something else: --sharding-strategy is not --learning-rate
PROGRAMS = {"train.py": list_types(TrainOptions), "process_data.py": list_types(ProcessDataOptions)}


def describe_unknown(name: str, known: Collection[str], *, spell: Callable[[str], str]) -> str:
    """The end of a message about an unknown option: a reason, the option that may be meant, or nothing.
    `known`: options of the program, with no_ in front where that turns one off. `spell`: writes one as users do."""
    is_off = name.startswith(("no_", "disable_"))
    for each in (name, re.sub("^(no|disable|use|enable|with)_", "", name)):
        row = None if find_program(each) else find_row(each)
        if row is not None and not row.options:
            return f": {name_programs(row.reason, known)}"
        meant = [each] if row is None else row.list_options(each)
        if option := next((option for option in meant if option in known), None):
            value = row.values.get(True) if row is not None and each == name and spell is flag_name else None
            given = f" {value}" if isinstance(value, str) else ""
            return f"; did you mean {spell(f'no_{option}' if is_off and f'no_{option}' in known else option)}{given}?"
        if program := find_program(meant[0]):
            return f"; {flag_name(meant[0])} is an option of {program}"
    close = difflib.get_close_matches(
        name, [option for option in known if is_off or not option.startswith("no_")], n=1, cutoff=LEAST_SIMILARITY
    )
    return f"; did you mean {spell(close[0])}?" if close else ""


def describe_value(option: str, value: str) -> str:
    """The end of a message about an unknown value of an option: what another trainer's is here, or nothing."""
    row = next((row for row in TABLE if option in row.list_options(option) and value in row.values), None)
    if row is None:
        return ""
    ours = row.convert(value, name=option)
    others = "".join(f" with {flag_name(name)}" for name in ours if name != option)
    return f"; did you mean {ours.get(option, value)}{others}?"


def find_program(option: str) -> str | None:
    return next((program for program, options in PROGRAMS.items() if option in options), None)


def name_programs(text: str, known: Collection[str]) -> str:
    """A text with the program's name after options that are another program's."""

    def name_program(flag: re.Match) -> str:
        option = flag[1].replace("-", "_")
        program = None if option in known else find_program(option)
        return flag[0] if program is None else f"{flag[0]} of {program}"

    return re.sub(r"--([a-z][a-z\d-]+)", name_program, text)
