"""Axolotl's data sets: each type of prompt is a format with fields here, or refused by name."""

import json
from typing import Any

from mini_trainer.data.rows.files import ENDINGS
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
from mini_trainer.tools.importers.sources import (
    MESSAGE_KEYS,
    add_sources,
    convert_template_text,
    is_file,
    join_columns,
    name_columns,
    name_hub_rows,
    take_images,
)

# Types whose rows have Alpaca's columns; their prompts differ in words.
ALPACA = ("alpaca", "alpaca:chat", "alpaca:phi", "alpaca:chatml", "alpaca_chat.load_qa", "alpaca_w_system.load")
KNOWN_ROLES = {"system", "human", "user", "gpt", "chatgpt", "assistant", "model", "bot", "tool", "observation"}
TEMPLATES = {"chatml": "chatml", "zephyr": "zephyr"}

# Types that write chatml's or llama3's template, with the column of their prompts; None: rows are whole chats.
PREFERENCE_TYPES = {
    "preference": {"intel": "question", "icr": "input", "prompt_pairs": "prompt", "default": "prompt", "ultra": None,
                   "argilla_chat": None},
    "kto": {"argilla": "instruction", "intel": "question", "prompt_pairs": "prompt", "ultra": "prompt"},
    "reward": {},
}  # fmt: skip
PLAIN = {"prompt": "{prompt}", "chosen": "{chosen}", "rejected": "{rejected}", "completion": "{completion}"}


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
    return add_sources(to, sources, notes)


def read_entry(to: Conversion, entry: dict[str, Any], notes: list[str], *, is_pretraining: bool) -> dict[str, Any]:
    """Options of process_data.py for one data set."""
    rest = {name: item for name, item in entry.items() if item is not None}
    source = read_place(rest)
    kind = rest.pop("type", "pretrain" if is_pretraining else None)
    source |= read_documents(to, rest, notes, kind) if is_pretraining else read_type(to, rest, notes, kind)
    if has_images(to.given):
        source |= take_images(source, source.get("input_dataset"))
    rest = {name: item for name, item in rest.items() if not is_so_anyway(name, item)}
    if rest:
        notes.append(f"no counterpart for the data set's keys {', '.join(sorted(map(str, rest)))}")
    return source


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
    source = name_hub_rows(path, name)
    for option in ("split", "revision"):
        if option in rest:
            source[option] = str(rest.pop(option)).strip()
    return source


def read_type(to: Conversion, rest: dict[str, Any], notes: list[str], kind: Any) -> dict[str, Any]:
    """Options for the form of rows, by the data set's type."""
    if not to.reads_texts:
        read_message_keys(rest, notes)
        return read_template(to, rest, notes) | read_preferences(to, rest, notes, kind)
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
        return {"format": "sharegpt"} | name_columns(messages=(field, ("conversations",)))
    if kind == "completion":
        return read_documents(to, rest, notes, kind)
    allowed = ", ".join(("chat_template", "completion", "sharegpt", *ALPACA))
    raise Refusal(f"type {describe_type(kind)} of {rest.get('path', 'a data set')} is not known here: {allowed} are")


def describe_type(kind: Any) -> str:
    return "none" if kind is None else "that is custom (a mapping)" if isinstance(kind, dict) else repr(kind)


def read_documents(to: Conversion, rest: dict[str, Any], notes: list[str], kind: str) -> dict[str, Any]:
    """Texts that are trained on as a whole."""
    if kind not in ("completion", "pretrain"):
        raise Refusal(f"type {kind!r} of documents is not known here: completion and pretrain are")
    field = rest.pop("field", None) or rest.pop("text_column", None) or "text"
    length = read_number("sequence_len", to.get("sequence_len", default=512))
    notes.append(f"{DIFFERS}: texts are joined and cut into blocks of {length} tokens; there each text begins a block")
    source = {"format": "document", "block_size": length, "max_sample_num_tokens": None}
    return source | name_columns(text=(field, ("text", "document")))


def read_chat(to: Conversion, rest: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Messages, by the names of their keys."""
    (kind, own), field = read_message_keys(rest, notes), rest.pop("field_messages", "messages")
    check_trained(rest)
    if rest.pop("drop_system_message", False):
        notes.append(f"{DIFFERS}: system messages stay")
    return {"format": kind} | read_template(to, rest, notes) | name_columns(messages=(field, (own,)))


def read_preferences(to: Conversion, rest: dict[str, Any], notes: list[str], kind: Any) -> dict[str, Any]:
    """Options of process_data.py for a data set of preferences, by its type."""
    source = {"format": to.row_format}
    if isinstance(kind, dict) and to.objective != "reward":
        return source | read_own_format(to, kind)
    if kind is None or (kind in ("passthrough", "passthrough.default") and to.objective == "preference"):
        return source
    family, _, name = str(kind).partition(".")
    if family == "bradley_terry" and to.objective == "reward":
        check_prompt(kind, "input", instead="without a type")
    if family == "chat_template" and to.objective == "preference":
        return source | read_messages(to, rest, notes, name or "default")
    if family in ("chatml", "llama3") and (name or "default") in PREFERENCE_TYPES[to.objective]:
        check_prompt(kind, PREFERENCE_TYPES[to.objective][name or "default"], instead=f"with type {family}.intel")
        if family == "llama3":
            notes.append(f"{DIFFERS}: the template llama3 leaves out blanks around messages")
        return source | {"chat_template": family}
    raise Refusal(
        f"type {kind!r} is not known here: chat_template, {', '.join(PREFERENCE_TYPES['preference'])} and (kto)"
        f" {', '.join(PREFERENCE_TYPES['kto'])} with chatml or llama3, and mappings of columns without formats are"
    )


def check_prompt(kind: str, column: str | None, *, instead: str) -> None:
    """Refuses a type whose prompts are in a column that is not read as the user's message."""
    if column not in ("question", "instruction", None):
        raise Refusal(
            f"type {kind!r}: texts in the column {column} would be continued without a chat template; rename it to"
            f" question, which is read {instead}"
        )


def read_messages(to: Conversion, rest: dict[str, Any], notes: list[str], name: str) -> dict[str, Any]:
    """Chats: a prompt's messages with two answers, or two whole chats."""
    # argilla, ORPO's only name, reads whole chats as argilla_chat does
    names = ("argilla",) if to.get("rl") == "orpo" else ("default", "argilla_chat")
    if name not in names:
        raise Refusal(f"type 'chat_template.{name}': with rl {to.get('rl')} {' and '.join(names)} are known here")
    chosen, rejected = rest.pop("field_chosen", "chosen"), rest.pop("field_rejected", "rejected")
    answers = name_columns(chosen=(chosen, ("chosen",)), rejected=(rejected, ("rejected",)))
    if name != "default":
        return answers
    prompt = name_columns(prompt=(rest.pop("field_messages", "messages"), ("messages", "conversations")))
    if prompt:
        notes.append(f"{DIFFERS}: a prompt that is one text is continued unchanged ({prompt['columns'][0]})")
    return join_columns(prompt, answers)


def read_own_format(to: Conversion, kind: dict[str, Any]) -> dict[str, Any]:
    """Columns with other names, whose texts are continued unchanged; custom formats are refused."""
    given = {name: value for name, value in kind.items() if value is not None}
    for part, plain in PLAIN.items():
        text = given.pop(f"{part}_format", None) or plain
        if text != plain:
            raise Refusal(f"{part}_format {text!r}: texts are continued unchanged; write it into the rows, or use"
                          " messages with a chat template")  # fmt: skip
    given.pop("field_system", None)  # only formats write it
    parts = ("prompt", "completion", "label") if to.objective == "kto" else ("prompt", "chosen", "rejected")
    columns = {part: (given.pop(f"field_{part}", part), (part,)) for part in parts}
    if given:
        raise Refusal(f"a type with the keys {', '.join(sorted(map(str, given)))} is not known here")
    return name_columns(**columns)


def read_message_keys(rest: dict[str, Any], notes: list[str]) -> tuple[str, str]:
    """The format of messages with the column that it reads, by the names of their keys and of their roles."""
    mapping = dict(rest.pop("message_property_mappings", None) or {})
    role = rest.pop("message_field_role", None) or mapping.pop("role", "role")
    content = rest.pop("message_field_content", None) or mapping.pop("content", "content")
    if (role, content) not in MESSAGE_KEYS:
        allowed = " or ".join(" and ".join(pair) for pair in MESSAGE_KEYS)
        raise Refusal(f"messages have {allowed}, given {role} and {content}")
    for name, item in mapping.items():
        if name != item:
            notes.append(f"{DIFFERS}: the key {item} of messages is not read as {name}")
    check_roles(rest.pop("roles", None), notes)
    return MESSAGE_KEYS[role, content]


def read_template(to: Conversion, rest: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """The data set's own chat template, if it has one."""
    template, said = rest.pop("chat_template", None), {}
    if template is not None and template != to.get("chat_template"):
        notes.append(convert_template(to, "chat_template", template, into=said))
    return said


def check_trained(rest: dict[str, Any]) -> None:
    """Refuses data sets that train on anything but the assistant's turns with their ends."""
    roles = rest.get("roles_to_train")
    if roles is not None and not (
        isinstance(roles, list) and all(role in ("assistant", "gpt", "model") for role in roles)
    ):
        raise Refusal(f"roles_to_train {roles}: only the assistant's tokens are trained on here")
    for name in ("train_on_eos", "train_on_eot"):
        if rest.get(name, "turn") != "turn":
            raise Refusal(f"{name} {rest[name]!r}: the end of each trained turn is trained on here ('turn')")


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
