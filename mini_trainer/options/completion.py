"""Completion of options and their values in a shell: three small shell functions that ask the program itself."""

from collections.abc import Mapping, Sequence
from typing import get_origin

from mini_trainer.options.choices import list_choices
from mini_trainer.options.environment import FLAG
from mini_trainer.options.fields import flag_name, list_types
from mini_trainer.options.help import one_sentence, read_helps

# Each completes file names where the program has nothing to offer. The program prints a line for each word, with its
# description after a tab. bash has no place for descriptions: they are part of the words, but only where several are
# listed and none of them is inserted, which COMP_TYPE says.
SHELLS = {
    "bash": """\
_mini_trainer() {
    local IFS=$'\\n' i width=$(( ${COLUMNS:-80} - 2 ))
    COMPREPLY=($(mini-trainer completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2> /dev/null))
    if (( ${#COMPREPLY[@]} < 2 )) || [[ $COMP_TYPE != @(33|63|64) ]]; then
        COMPREPLY=("${COMPREPLY[@]%%$'\\t'*}")
    else
        for i in "${!COMPREPLY[@]}"; do
            printf -v "COMPREPLY[i]" "%-*.*s" $width $width "${COMPREPLY[i]/$'\\t'/  }"
        done
    fi
}
complete -o default -F _mini_trainer mini-trainer
""",
    "zsh": """\
_mini_trainer() {
    local -a found
    found=(${(f)"$(mini-trainer completion words "${(@)words[2,CURRENT]}" 2> /dev/null)"})
    if (( $#found )); then
        found=("${(@)found/$'\\t'/:}")
        _describe mini-trainer found
    else
        _files
    fi
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
GENERAL = {"--help": "Print help", "--version": "Print the version"}


def complete_options(
    options_class: type, words: Sequence[str], *, more: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The flags, or the values of the last flag, that begin with the last of `words`, with their descriptions, which
    are empty for values. `more`: further flags with theirs."""
    *before, last = words
    types, choices = list_types(options_class), list_choices(options_class)
    if last.startswith("-"):
        flags = describe_flags(options_class) | (more or {}) | GENERAL
        return {flag: flags[flag] for flag in sorted(flags) if flag.startswith(last)}
    places = [i for i, word in enumerate(before) if word.startswith("--")]
    if not places:
        return {}
    name = before[places[-1]].removeprefix("--").replace("-", "_")
    num_values = len(before) - 1 - places[-1]
    if name not in choices or (num_values > 0 and get_origin(types[name]) is not tuple):
        return {}
    return {value: "" for value in choices[name] if value.startswith(last)}


def describe_flags(options_class: type) -> dict[str, str]:
    """The flags of all options, each with the first sentence of its help."""
    flags = {FLAG: "Name of a further variable that ${NAME} in option files may stand for"}
    types = list_types(options_class)
    if "config" not in types:
        flags = {}
    for name, text in read_helps(options_class).items():
        flags[flag_name(name)] = one_sentence(text)
        if types[name] is bool:
            flags[flag_name(name).replace("--", "--no-", 1)] = f"Off: {one_sentence(text)}"
    return flags


def format_lines(found: Mapping[str, str]) -> str:
    """A line for each word, as the shells' functions read it."""
    return "\n".join(f"{word}\t{text}" if text else word for word, text in found.items())
