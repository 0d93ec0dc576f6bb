"""Data sets of other trainers' files as runs of process_data.py."""

from collections.abc import Sequence
from typing import Any

from mini_trainer.tools.importers.conversion import Conversion, describe

IMAGES = "rows with images are not translated: --images reads them, and --freeze chooses what trains"
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


def find_message_format(role: str, content: str) -> tuple[str, str]:
    """The format of messages with these keys, and the column that it reads."""
    if (role, content) not in MESSAGE_KEYS:
        raise ValueError(f"messages have role and content, or from and value, given {role} and {content}")
    return MESSAGE_KEYS[role, content]


def add_sources(to: Conversion, key: str, sources: list[dict[str, Any]]) -> None:
    """Adds data sets: files with the same options share a run, all others get separate runs."""
    for source in sources:
        to.tell(key, ", ".join(f"{name}: {describe(value)}" for name, value in source.items()))
        files = source.get("input_file")
        same = (other for other in to.sources if files and other | {"input_file": files} == source)
        earlier = next(same, None)
        if earlier is None:
            to.sources.append(dict(source))
        else:
            earlier["input_file"] = [*earlier["input_file"], *files]


def set_template(to: Conversion, key: str) -> None:
    """Sets the chat template of a key, given as a file, or as text, which is written to a file."""
    value = to.get(key)
    if value is None:
        return
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a file or a text, given {value!r}")
    if "{" in value:
        to.files["chat_template.jinja"], value = value, "chat_template.jinja"
    to.set(key, chat_template=value)
