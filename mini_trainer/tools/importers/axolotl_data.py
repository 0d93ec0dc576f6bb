"""Axolotl's data sets: each type of prompt is a format with fields here, or refused by name."""

import json
from typing import Any

from mini_trainer.data.rows.files import ENDINGS
from mini_trainer.tools.importers import axolotl_preferences
from mini_trainer.tools.importers.rules import (
    DIFFERS,
    MISSING,
    NEEDLESS,
    Conversion,
    Refusal,
    Rule,
    needless,
    read_number,
)
from mini_trainer.tools.importers.sources import add_sources, convert_template_text, describe_sources, is_file

# Types whose rows have Alpaca's columns; their prompts differ in words.
ALPACA = ("alpaca", "alpaca:chat", "alpaca:phi", "alpaca:chatml", "alpaca_chat.load_qa", "alpaca_w_system.load")
MAPPINGS = {("role", "content"): "messages", ("from", "value"): "sharegpt"}
KNOWN_ROLES = {"system", "human", "user", "gpt", "chatgpt", "assistant", "model", "bot", "tool", "observation"}
TEMPLATES = {"chatml": "chatml", "zephyr": "zephyr"}


def has_images(given: dict[str, Any]) -> bool:
    return bool(given.get("processor_type"))


def convert_datasets(to: Conversion, key: str, value: Any) -> str:
    """The data sets, each with its type."""
    listed = value if isinstance(value, list) else [value]
    entries = [entry if isinstance(entry, dict) else {"path": entry} for entry in listed]
    if not entries or not all(isinstance(entry.get("path"), str) for entry in entries):
        raise ValueError(f"{key} is a list of data sets, each with its path, given {value!r}")
    notes: list[str] = []
    is_pretraining = key == "pretraining_dataset"
    sources = [read_entry(to, entry, notes, is_pretraining=is_pretraining) for entry in entries]
    add_sources(to, sources)
    return describe_sources(sources, notes)


def read_entry(to: Conversion, entry: dict[str, Any], notes: list[str], *, is_pretraining: bool) -> dict[str, Any]:
    """Options of process_data.py for one data set."""
    rest = {name: item for name, item in entry.items() if item is not None}
    source = read_place(rest)
    kind = rest.pop("type", "pretrain" if is_pretraining else None)
    source |= read_documents(to, rest, notes, kind) if is_pretraining else read_type(to, rest, notes, kind)
    if has_images(to.given):
        source |= take_images(source)
    rest = {name: item for name, item in rest.items() if not is_so_anyway(name, item)}
    if rest:
        notes.append(f"no counterpart for the data set's keys {', '.join(sorted(map(str, rest)))}")
    return source


def take_images(source: dict[str, Any]) -> dict[str, Any]:
    """The option for rows with images, which are read beside files."""
    if "input_dataset" in source:
        raise Refusal(
            f"images of {source['input_dataset']}: are read beside files of rows; download it, and name its files"
        )
    return {"images": True}


def read_place(rest: dict[str, Any]) -> dict[str, Any]:
    """Options for the rows' place: files, or a data set of the hub with its split."""
    path, name, files = rest.pop("path"), rest.pop("name", None), rest.pop("data_files", None)
    if "://" in path:
        raise Refusal(f"{path}: rows are read from files or the hub; copy them to a file")
    files = [files] if isinstance(files, str) else files
    if is_file(path, ENDINGS):
        return {"input_file": [path]}
    if files and path in ("json", "csv", "parquet", "text"):
        return {"input_file": files}
    if files:
        raise Refusal(
            f"{path}: all files of a data set of the hub are read; download {', '.join(files)}, and give them as path"
        )
    if rest.get("ds_type"):
        return {"input_file": [path]}
    source = {"input_dataset": path if name is None else f"{path}:{name}"}
    for option in ("split", "revision"):
        if option in rest:
            source[option] = str(rest.pop(option)).strip()
    return source


def read_type(to: Conversion, rest: dict[str, Any], notes: list[str], kind: Any) -> dict[str, Any]:
    """Options for the form of rows, by the data set's type."""
    if not to.reads_texts:
        read_message_keys(rest, notes)
        return read_template(to, rest, notes) | axolotl_preferences.read_rows(to, rest, notes, kind)
    if kind is None and has_images(to.given):
        kind = "chat_template"
    if kind == "chat_template":
        return read_chat(to, rest, notes)
    if kind in ALPACA:
        notes.append(f"{DIFFERS}: type {kind} writes its own prompt; here prompts go through the chat template")
        return {"format": "alpaca"}
    if kind == "sharegpt":
        field = rest.pop("field_messages", "conversations")
        rest.pop("conversation", None)
        return {"format": "sharegpt"} | ({} if field == "conversations" else {"messages_field": field})
    if kind == "completion":
        return read_documents(to, rest, notes, kind)
    allowed = ", ".join(("chat_template", "completion", "sharegpt", *ALPACA))
    raise Refusal(f"type {describe_type(kind)} of {rest.get('path', 'a data set')} is not known here: {allowed} are")


def describe_type(kind: Any) -> str:
    return "none" if kind is None else "that is custom (a mapping)" if isinstance(kind, dict) else repr(kind)


def read_documents(to: Conversion, rest: dict[str, Any], notes: list[str], kind: str) -> dict[str, Any]:
    """Texts that are trained whole."""
    if kind not in ("completion", "pretrain"):
        raise Refusal(f"type {kind!r} of documents is not known here: completion and pretrain are")
    field = rest.pop("field", None) or rest.pop("text_column", None) or "text"
    length = read_number("sequence_len", to.get("sequence_len", default=512))
    notes.append(f"{DIFFERS}: texts are joined and cut into blocks of {length} tokens; there each text begins a block")
    return {"format": "document", "block_size": length, "max_sample_num_tokens": None} | (
        {} if field in ("text", "document") else {"text_field": field}
    )


def read_chat(to: Conversion, rest: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Messages, by the names of their keys."""
    kind, field = read_message_keys(rest, notes), rest.pop("field_messages", "messages")
    check_trained(rest)
    if rest.pop("drop_system_message", False):
        notes.append(f"{DIFFERS}: system messages stay")
    own = {"messages": "messages", "sharegpt": "conversations"}[kind]
    return {"format": kind} | read_template(to, rest, notes) | ({} if field == own else {"messages_field": field})


def read_message_keys(rest: dict[str, Any], notes: list[str]) -> str:
    """The format of messages, by the names of their keys and of their roles."""
    mapping = dict(rest.pop("message_property_mappings", None) or {})
    role = rest.pop("message_field_role", None) or mapping.pop("role", "role")
    content = rest.pop("message_field_content", None) or mapping.pop("content", "content")
    if (role, content) not in MAPPINGS:
        allowed = " or ".join(" and ".join(pair) for pair in MAPPINGS)
        raise Refusal(f"messages have {allowed}, given {role} and {content}")
    for name, item in mapping.items():
        if name != item:
            notes.append(f"{DIFFERS}: the key {item} of messages is not read as {name}")
    check_roles(rest.pop("roles", None), notes)
    return MAPPINGS[role, content]


def read_template(to: Conversion, rest: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The data set's own chat template, if it has one."""
    template, said = rest.pop("chat_template", None), {}
    if template is not None and template != to.get("chat_template"):
        notes.append(convert_template(to, "chat_template", template, into=said))
    return said


def check_trained(rest: dict[str, Any]) -> None:
    """Refuses data sets that train anything but the assistant's turns with their ends."""
    roles = rest.get("roles_to_train")
    if roles is not None and not (
        isinstance(roles, list) and all(role in ("assistant", "gpt", "model") for role in roles)
    ):
        raise Refusal(f"roles_to_train {roles}: only the assistant's tokens are trained here")
    for name in ("train_on_eos", "train_on_eot"):
        if rest.get(name, "turn") != "turn":
            raise Refusal(f"{name} {rest[name]!r}: the end of each trained turn is trained here ('turn')")


def check_roles(roles: Any, notes: list[str]) -> None:
    """Adds a note on roles that rows cannot have here."""
    if not isinstance(roles, dict):
        return
    names = {str(name) for listed in roles.values() for name in (listed if isinstance(listed, list) else [listed])}
    if names - KNOWN_ROLES:
        notes.append(f"{DIFFERS}: rows with the roles {', '.join(sorted(names - KNOWN_ROLES))} are invalid")


def is_so_anyway(name: str, value: Any) -> bool:
    """Whether every data set here has this key's value."""
    always = ("ds_type", "roles_to_train", "train_on_eos", "train_on_eot")
    return name in always or (name, value) in (("trust_remote_code", False), ("split", "train"))


def convert_template(to: Conversion, key: str, value: Any, *, into: dict[str, Any] | None = None) -> str:
    """The chat template by its name, or its text."""
    if value in (None, "tokenizer_default", "jinja"):
        return f"{NEEDLESS}: the model's own template, or chat_template_jinja, is used"
    if not isinstance(value, str):
        raise ValueError(f"{key} is a name, given {value!r}")
    if value in TEMPLATES:
        (to.data if into is None else into)["chat_template"] = TEMPLATES[value]
        return f"chat_template: {TEMPLATES[value]} (of process_data.py)"
    return (
        f"{DIFFERS}: the model's own chat template is used; if {value} is another, give its Jinja file as chat_template"
    )


def convert_template_args(to: Conversion, key: str, value: Any) -> str:
    """Arguments of the chat template."""
    if not value:
        return NEEDLESS
    if not isinstance(value, dict):
        raise ValueError(f"{key} are arguments by name, given {value!r}")
    to.data["template_args"] = tuple(f"{name}={json.dumps(argument)}" for name, argument in value.items())
    return f"template_args: {' '.join(to.data['template_args'])} (of process_data.py)"


def convert_images(to: Conversion, key: str, value: Any) -> str:
    if not value:
        return NEEDLESS
    if not to.is_lora and to.get("freeze_mm_modules") is None:
        to.train["freeze"] = ["nothing"]
    if "Voxtral" in str(value):
        raise Refusal(f"{value}: audio models are not trained here")
    return "images: true (of process_data.py)"


FORMAT_RULES: dict[str, Rule] = {
    "datasets": convert_datasets,
    "pretraining_dataset": convert_datasets,
    "chat_template": convert_template,
    "chat_template_jinja": convert_template_text,
    "chat_template_kwargs": convert_template_args,
    "processor_type": convert_images,
    "skip_prepare_dataset": needless("rows are tokenized by process_data.py"),
    "image_size": lambda to, key, value: f"{MISSING}: the model's own processor sizes images",
    "num_labels": needless("language is learned"),
}
