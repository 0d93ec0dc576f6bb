"""LLaMA-Factory's list of data sets: each one's place and columns as options of process_data.py."""

import json
from pathlib import Path
from typing import Any

from mini_trainer.tools.importers.rules import DIFFERS, MISSING, NEEDLESS, Conversion, Refusal, read_names
from mini_trainer.tools.importers.sources import (
    MESSAGE_KEYS,
    add_sources,
    join_columns,
    name_columns,
    name_hub_rows,
    take_images,
)

ALPACA_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "system": "system",
                  "history": "history", "tools": "tools"}  # fmt: skip
QUESTIONS = ("question", "instruction")  # columns whose text becomes the user's message


def is_pretraining(to: Conversion) -> bool:
    return to.get("stage") == "pt"


def convert_datasets(to: Conversion, key: str, value: Any) -> str:
    """Data sets by name, from the list that lies beside their files."""
    info = Path(str(to.get("dataset_dir", default="data"))) / "dataset_info.json"
    listed = read_list(info)
    names, notes = read_names(key, value), []
    absent = [name for name in names if name not in listed]
    if absent:
        return (
            f"{MISSING}: give its file as input_file in data.yaml (given {value!r}; {', '.join(absent)} not in {info})"
        )
    sources = [read_entry(to, name, listed[name], info, notes) for name in names]
    return add_sources(to, sources, notes)


def read_list(path: Path) -> dict[str, dict[str, Any]]:
    """The list of data sets, empty without a file; ValueError if the file holds something else."""
    try:
        listed = json.loads(path.read_text()) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(listed, dict) or not all(isinstance(entry, dict) for entry in listed.values()):
        raise ValueError(f"{path}: not a mapping of names to data sets with a file_name and columns")
    for entry in listed.values():
        columns, tags = entry.get("columns", {}), entry.get("tags", {})
        texts = [entry.get("file_name"), *(columns.values() if isinstance(columns, dict) else [0])]
        texts += tags.values() if isinstance(tags, dict) else [0]
        if not all(isinstance(text, str | None) for text in texts):
            raise ValueError(f"{path}: not a mapping of names to data sets with a file_name and columns")
    return listed


def read_entry(to: Conversion, name: str, entry: dict[str, Any], info: Path, notes: list[str]) -> dict[str, Any]:
    """Options of process_data.py for one data set."""
    columns, tags = entry.get("columns", {}), entry.get("tags", {})
    if to.reads_texts and (entry.get("ranking") or "kto_tag" in columns):
        raise Refusal(f"{name} holds preferences: stage {to.get('stage', default='sft')} does not learn from them")
    if {"videos", "audios"} & columns.keys():
        raise Refusal(f"{name} has videos or sound, which are not trained here")
    source = read_place(name, entry, info)
    if "images" in columns and not to.reads_texts:
        raise Refusal(f"{name} has images: answers that are preferred are read without them")
    if "images" in columns:
        source |= take_images(source, name)
        convert_freezing(to, "freeze_vision_tower", True)
        if columns["images"] != "images":
            notes.append(f"{DIFFERS}: images are read from the column images, {name} has them in {columns['images']}")
    if entry.get("num_samples"):
        notes.append(f"{DIFFERS}: all rows of {name} are used, given num_samples {entry['num_samples']}")
    if is_pretraining(to):
        text = columns.get("prompt", "instruction")
        return source | name_columns(text=(text, ("text", "document")))
    kind = entry.get("formatting", "alpaca")
    if kind not in ("alpaca", "sharegpt", "openai"):
        raise Refusal(f"{name}: formatting {kind!r} is not known here: alpaca, sharegpt and openai are")
    if not to.reads_texts:
        check_message_keys(name, kind, tags)
        return source | read_preferences(to, name, entry, notes)
    if kind == "alpaca":
        return source | read_alpaca(name, columns)
    return source | read_chat(name, kind, columns, tags)


def read_place(name: str, entry: dict[str, Any], info: Path) -> dict[str, Any]:
    """The option for the rows' place: a file beside the list, or a data set of the hub."""
    if "hf_hub_url" in entry:
        return name_hub_rows(entry["hf_hub_url"], entry.get("subset"), split=entry.get("split"))
    if entry.get("file_name") is None:
        raise Refusal(f"{name} of {info} has no file_name: rows are read from files or Hugging Face's hub")
    return {"input_file": [str(info.parent / entry["file_name"])]}


def read_alpaca(name: str, columns: dict[str, Any]) -> dict[str, Any]:
    """Alpaca's columns, or a prompt and its answer under names of their own."""
    used = {what: column for what, column in columns.items() if what in ALPACA_COLUMNS and column is not None}
    has_query = not columns or "query" in used  # columns that are not listed are not read there
    if has_query and all(ALPACA_COLUMNS[what] == column for what, column in used.items()):
        return {"format": "alpaca"}
    if used.keys() <= {"prompt", "response"}:
        prompt, answer = used.get("prompt", "instruction"), used.get("response", "output")
        return {"format": "completion"} | name_columns(prompt=(prompt, ()), completion=(answer, ()))
    given = ", ".join(f"{what}: {column}" for what, column in used.items() if ALPACA_COLUMNS[what] != column)
    raise Refusal(f"{name}: columns of other names ({given}) can be read for prompt and response alone; rename them")


def read_chat(name: str, kind: str, columns: dict[str, Any], tags: dict[str, Any]) -> dict[str, Any]:
    """Messages, by the names of their keys; speakers must have names that process_data.py knows."""
    data_format, own = check_message_keys(name, kind, tags)
    return {"format": data_format} | name_columns(messages=(columns.get("messages") or "conversations", (own,)))


def check_message_keys(name: str, kind: str, tags: dict[str, Any]) -> tuple[str, str]:
    """The format of messages with the column that it reads, by the names of their keys."""
    pair = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    if kind == "openai" and not tags:
        pair = ("role", "content")
    if pair not in MESSAGE_KEYS:
        raise Refusal(f"{name}: messages have role and content, or from and value, given {pair[0]} and {pair[1]}")
    return MESSAGE_KEYS[pair]


def read_preferences(to: Conversion, name: str, entry: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Options of process_data.py for one data set of preferences or of feedback."""
    columns = {what: column for what, column in entry.get("columns", {}).items() if column is not None}
    check_columns(to, name, entry, columns)
    read_prompt = read_text_prompt if entry.get("formatting", "alpaca") == "alpaca" else read_chat_prompt
    prompt = read_prompt(to, name, columns, notes)
    if to.objective == "kto":
        answers = name_columns(label=(columns["kto_tag"], ("label", "kto_tag")))
    else:
        answers = name_columns(
            chosen=(columns["chosen"], ("chosen", "chosen_response")),
            rejected=(columns["rejected"], ("rejected", "rejected_response")),
        )
    return {"format": to.row_format} | join_columns(prompt, answers)


def check_columns(to: Conversion, name: str, entry: dict[str, Any], columns: dict[str, str]) -> None:
    """Refuses data sets without the answers that are needed, and with columns that are not read."""
    if to.objective == "kto" and "kto_tag" not in columns:
        raise Refusal(f"{name} has no kto_tag, which says what answers are good")
    if to.objective != "kto" and not (entry.get("ranking") and {"chosen", "rejected"} <= columns.keys()):
        raise Refusal(f"{name} has no ranking with the columns chosen and rejected")
    unread = [what for what in ("history",) if what in columns]
    unread += [what for what in ("system", "tools") if columns.get(what, what) != what]
    if unread:
        raise Refusal(f"{name}: columns for {', '.join(unread)} are not read with answers that are preferred")


def read_text_prompt(to: Conversion, name: str, columns: dict[str, str], notes: list[str]) -> dict[str, Any]:
    """The columns of Alpaca's prompt and, for feedback, of its answer."""
    prompt, query = columns.get("prompt", "prompt"), columns.get("query", "input")
    if prompt not in QUESTIONS or query != "input":
        raise Refusal(
            f"{name}: texts in the columns {prompt} and {query} would be continued without a chat template; rename them"
            " to question and input"
        )
    there = "after one line break" if "query" in columns else "nowhere"
    notes.append(f"{DIFFERS}: a row's input follows its prompt after a blank line, there {there}")
    answer = columns.get("response", "output")
    return name_columns(completion=(answer, ("completion",))) if to.objective == "kto" else {}


def read_chat_prompt(to: Conversion, name: str, columns: dict[str, str], notes: list[str]) -> dict[str, Any]:
    """The column of a prompt's messages or, for feedback, of the whole chat's."""
    messages = columns.get("messages", "conversations")
    if to.objective == "kto" and messages not in ("messages", "conversations"):
        raise Refusal(f"{name}: whole chats in the column {messages} are not read; rename it to messages")
    return name_columns(prompt=(messages, ("messages", "conversations")))


def convert_freezing(to: Conversion, key: str, value: Any) -> str:
    """Parts of a vision-language model: by default vision and projector are frozen, and the language part trains."""
    parts = {"vision": to.get("freeze_vision_tower", default=True),
             "projector": to.get("freeze_multi_modal_projector", default=True),
             "language": to.get("freeze_language_model", default=False)}  # fmt: skip
    frozen = [part for part, is_frozen in parts.items() if is_frozen]
    if to.is_lora:
        if frozen == ["vision", "projector"]:
            return f"{NEEDLESS}: adapters are in the language part"
        return f"{DIFFERS}: only the language part has adapters"
    to.train["freeze"] = frozen or ["nothing"]
    return f"freeze: {', '.join(to.train['freeze'])}"
