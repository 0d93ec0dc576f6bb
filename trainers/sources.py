"""Data sets of a configuration as runs of process_data.py."""

from pathlib import Path
from typing import Any

from corpus.files import data_ending
from trainers.rules import Conversion


def is_file(path: str, endings: tuple[str, ...]) -> bool:
    """Whether a data set's path names a file of rows, also a compressed one."""
    return data_ending(Path(path)) in endings


def add_sources(to: Conversion, sources: list[dict[str, Any]]) -> None:
    """Files with the same options are tokenized in one run; everything else in one of its own."""
    for source in sources:
        rest = {name: value for name, value in source.items() if name != "input_file"}
        for earlier in to.sources:
            if (
                "input_file" in source
                and "input_file" in earlier
                and rest == {n: v for n, v in earlier.items() if n != "input_file"}
            ):
                earlier["input_file"] = [*earlier["input_file"], *source["input_file"]]
                break
        else:
            to.sources = [*to.sources, dict(source)]


def describe_sources(sources: list[dict[str, Any]], notes: list[str]) -> str:
    """Every data set with its options, and what differs."""
    texts = [", ".join(f"{name}: {describe(value)}" for name, value in source.items()) for source in sources]
    return "; ".join([f"{' | '.join(texts)} (of process_data.py)", *dict.fromkeys(notes)])


def describe(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def say_template_text(to: Conversion, key: str, value: Any) -> str:
    """A template's file, or its text, which becomes a file."""
    if not isinstance(value, str):
        raise ValueError(f"{key} is a file or a text, given {value!r}")
    if "{" not in value:
        to.data["chat_template"] = value
        return f"chat_template: {value} (of process_data.py)"
    to.files["chat_template.jinja"] = value
    to.data["chat_template"] = "chat_template.jinja"
    return "chat_template: chat_template.jinja, written beside (of process_data.py)"
