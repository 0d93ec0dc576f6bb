"""Options from flags and a YAML file, and one message for whatever is wrong with them.

Imports nothing heavy, so that `--help` and a mistyped flag answer at once.
"""

import difflib
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, NoReturn, get_origin

from options import Options, find_problems, flag_name, iterate_fields
from ranks.ending import SECONDS_TO_BE_ENDED, ExitCode


def parse_options(options_class: type[Options], argv: list[str] | None = None) -> Options:
    """Reads flags (`argv`, by default the command line) over the YAML file named by `--config`.

    Prints one message and exits with `ExitCode.BAD_INPUT` on anything unknown, mistyped, missing or contradictory.
    """
    import tyro

    argv = sys.argv[1:] if argv is None else argv
    try:
        refuse_repeated_flags(argv, options_class)
        options = tyro.cli(
            options_class,
            config=(tyro.conf.OmitArgPrefixes,),  # an option's group is a heading of --help, and no part of its flag
            args=read_config_as_flags(find_config(argv), options_class) + argv,
            console_outputs=os.environ.get("LOCAL_RANK", "0") == "0",  # one help or error text per node
        )
        problems = find_problems(options)
        if problems:
            raise ValueError("these options cannot be used as they are:\n  " + "\n  ".join(problems))
    except ValueError as error:
        exit_with_message(str(error))
    return options


def refuse_repeated_flags(argv: list[str], options_class: type) -> None:
    """Of two values for one option, one would be dropped without a word."""
    names = [word.split("=")[0].removeprefix("--").replace("-", "_") for word in argv if word.startswith("--")]
    names = [name.removeprefix("no_") for name in names]
    repeated = {option.name for option, _ in iterate_fields(options_class) if names.count(option.name) > 1}
    if repeated:
        raise ValueError(f"given more than once: {', '.join(map(flag_name, sorted(repeated)))}")


def find_config(argv: list[str]) -> Path | None:
    """The value of `--config F` or `--config=F`, the last one given."""
    path = None
    for i, flag in enumerate(argv):
        if flag == "--config" and i + 1 < len(argv):
            path = Path(argv[i + 1])
        elif flag.startswith("--config="):
            path = Path(flag.removeprefix("--config="))
    return path


def read_config_as_flags(path: Path | None, options_class: type) -> list[str]:
    """A YAML file as command-line flags, so that both are converted and checked by the same code."""
    if path is None:
        return []
    import yaml

    class UniqueKeyLoader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            if len(set(keys)) < len(keys):
                raise yaml.YAMLError(f"a key is there twice among {', '.join(keys)}")
            return super().construct_mapping(node, deep)

    # YAML 1.1 reads 1:30:00 as the number 5400
    times = ("tag:yaml.org,2002:str", re.compile(r"\d+(:\d+)+"))
    resolvers = yaml.SafeLoader.yaml_implicit_resolvers
    UniqueKeyLoader.yaml_implicit_resolvers = resolvers | {d: [times, *resolvers[d]] for d in "0123456789"}
    try:
        config = yaml.load(path.read_text(), Loader=UniqueKeyLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"--config {path}: not valid YAML: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--config {path}: expected 'option: value' lines, got {type(config).__name__}")
    fields = {option.name: option.type for option, _ in iterate_fields(options_class)}
    flags, problems = [], []
    for key, value in config.items():
        name = str(key).replace("-", "_")
        try:
            if name not in fields or name == "config":
                close = difflib.get_close_matches(name, fields, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; allowed: {', '.join(fields)}"
                raise ValueError(f"unknown option {key!r}{hint}")
            flags += flag_for(name, value, field_type=fields[name])
        except ValueError as error:
            problems.append(f"--config {path}: {error}")
    if problems:
        raise ValueError("\n  ".join(problems))
    return flags


def flag_for(name: str, value: Any, *, field_type: Any) -> list[str]:
    """`name: value` of the YAML file as command-line words."""
    flag, is_bool = "--" + name.replace("_", "-"), field_type is bool
    if is_bool != isinstance(value, bool):
        allowed = "true or false" if is_bool else "a value that is not true or false"
        raise ValueError(f"{name}: given {value!r}, allowed: {allowed}")
    if is_bool:
        return [flag if value else flag.replace("--", "--no-", 1)]
    if get_origin(field_type) is tuple:
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(item, (dict, list)) for item in values):
            raise ValueError(f"{name}: given {value!r}, allowed: one value, or a list of values")
        return [flag, *map(str, values)]
    if isinstance(value, (dict, list)):
        raise ValueError(f"{name}: given {value!r}, allowed: one value")
    return [f"{flag}={value}"]


def exit_with_message(message: str, *, code: int = ExitCode.BAD_INPUT) -> NoReturn:
    """Prints one message to stderr and ends this process with `code`.

    Under torchrun a mistake usually shows on every rank at once. Local rank 0 speaks; the others wait to be ended
    by torchrun, and speak only if they are still there, because then the mistake was theirs alone.
    """
    rank, local_rank = os.environ.get("RANK"), os.environ.get("LOCAL_RANK", "0")
    if local_rank != "0":
        time.sleep(SECONDS_TO_BE_ENDED)
    where = "" if rank in (None, "0") else f"[rank {rank}] "
    print(f"{where}error: {message}", file=sys.stderr, flush=True)
    os._exit(code)  # not sys.exit: threads and process groups must not hold up the end of a failed rank
