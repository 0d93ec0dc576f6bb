"""Completion of options and their values in a shell: three small shell functions that ask the program itself."""

from collections.abc import Sequence
from typing import get_origin

from mini_trainer.options.choices import list_choices
from mini_trainer.options.environment import FLAG
from mini_trainer.options.fields import flag_name, list_types

# Each completes file names where the program has nothing to offer.
SHELLS = {
    "bash": """\
_mini_trainer() {
    local IFS=$'\\n'
    COMPREPLY=($(mini-trainer completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2> /dev/null))
}
complete -o default -F _mini_trainer mini-trainer
""",
    "zsh": """\
_mini_trainer() {
    local -a found
    found=(${(f)"$(mini-trainer completion words "${(@)words[2,CURRENT]}" 2> /dev/null)"})
    if (( $#found )); then compadd -a found; else _files; fi
}
compdef _mini_trainer mini-trainer
""",
    "fish": """\
function _mini_trainer
    set -l typed (commandline -opc)
    mini-trainer completion words $typed[2..-1] (commandline -ct) 2> /dev/null
end
complete -c mini-trainer -a '(_mini_trainer)'
""",
}


def complete_options(options_class: type, words: Sequence[str], *, more: Sequence[str] = ()) -> list[str]:
    """The flags, or the values of the last flag, that begin with the last of `words`. `more`: further flags."""
    *before, last = words
    types, choices = list_types(options_class), list_choices(options_class)
    if last.startswith("-"):
        flags = [flag_name(name) for name in types]
        flags += [FLAG] if "config" in types else []
        flags += [flag_name(name).replace("--", "--no-", 1) for name, kind in types.items() if kind is bool]
        return sorted(flag for flag in [*flags, *more, "--help", "--version"] if flag.startswith(last))
    places = [i for i, word in enumerate(before) if word.startswith("--")]
    if not places:
        return []
    name = before[places[-1]].removeprefix("--").replace("-", "_")
    num_values = len(before) - 1 - places[-1]
    if name not in choices or (num_values > 0 and get_origin(types[name]) is not tuple):
        return []
    return [value for value in choices[name] if value.startswith(last)]
