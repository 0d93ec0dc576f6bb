"""Conversion of a configuration's data sets to runs of process_data.py."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mini_trainer.data.rows.files import data_ending
from mini_trainer.tools.importers.rules import Conversion, Refusal

# Keys of a message, with the format that has them, and the column that it reads.
MESSAGE_KEYS = {("role", "content"): ("messages", "messages"), ("from", "value"): ("sharegpt", "conversations")}


def name_hub_rows(name: str, config: str | None, *, split: str | None = None) -> dict[str, Any]:
    """Options for a data set of the hub."""
    source = {"input_dataset": name if config is None else f"{name}:{config}"}
    return source if split in (None, "train") else source | {"split": split}


def name_columns(**names: tuple[str, Sequence[str]]) -> dict[str, list[str]]:
    """The option for columns whose names are not among those that rows are looked through for."""
    columns = [f"{value}={column}" for value, (column, known) in names.items() if column not in known]
    return {"columns": columns} if columns else {}


def join_columns(*named: dict[str, list[str]]) -> dict[str, list[str]]:
    """The option for the columns of several `name_columns`."""
    columns = [column for one in named for column in one.get("columns", ())]
    return {"columns": columns} if columns else {}


def take_images(source: dict[str, Any], name: str | None) -> dict[str, Any]:
    """The option for rows with images, which are read beside files."""
    if "input_dataset" in source:
        raise Refusal(f"images of {name}: are read from the folder of a file of rows; download it, and name its files")
    return {"images": True}


def is_file(path: str, endings: tuple[str, ...]) -> bool:
    """Whether a data set's path is a file of rows, possibly compressed."""
    return data_ending(Path(path)) in endings


def add_sources(to: Conversion, sources: list[dict[str, Any]], notes: list[str]) -> str:
    """Adds data sets: files with the same options share a run, all others get separate runs. Returns the outcome, with
    the differences in `notes`."""
    for source in sources:
        same = (earlier for earlier in to.sources if "input_file" in source and differ_in_files(earlier, source))
        earlier = next(same, None)
        if earlier is None:
            to.sources = [*to.sources, dict(source)]
        else:
            earlier["input_file"] = [*earlier["input_file"], *source["input_file"]]
    texts = [", ".join(f"{name}: {describe(value)}" for name, value in source.items()) for source in sources]
    return "; ".join([f"{' | '.join(texts)} (of process_data.py)", *dict.fromkeys(notes)])


def differ_in_files(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether two runs have the same options apart from their files."""
    return first | {"input_file": None} == second | {"input_file": None} and "input_file" in first


def describe(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def convert_template_text(to: Conversion, key: str, value: Any) -> str:
    """Sets the chat template, given as a file, or as text, which is written to a file."""
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a file or a text, given {value!r}")
    if "{" not in value:
        to.data["chat_template"] = value
        return f"chat_template: {value} (of process_data.py)"
    to.files["chat_template.jinja"] = value
    to.data["chat_template"] = "chat_template.jinja"
    return "chat_template: chat_template.jinja, written to the same directory (of process_data.py)"
