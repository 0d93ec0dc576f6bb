"""Axolotl: its keys that depend on others, its defaults (its pydantic schemas), and its data sets."""

import json
import re
from pathlib import Path
from typing import Any

from mini_trainer.data.rows.files import ENDINGS, data_ending
from mini_trainer.tools.importers import conversion

# Plugins that only change speed or logging; any other may change the training signal.
PLUGINS = re.compile(r"integrations\.(cut_cross_entropy|liger|kernels|expert_parallel|swanlab)\.")
OUTSIDE = {"lm_head", "embed_tokens", "embed_out", "wte"}  # not linear layers of the blocks
# Keys that are for some values of rl alone; others do not use them.
OF_RL = {
    **{"orpo_alpha": ("orpo",), "simpo_gamma": ("simpo",), "cpo_alpha": ("simpo",), "rpo_alpha": ("dpo",)},
    **{"dpo_use_weighting": ("dpo", "ipo"), "dpo_loss_type": ("dpo",)},
}
# Types whose rows have Alpaca's columns; their prompts differ in words.
ALPACA = ("alpaca", "alpaca:chat", "alpaca:phi", "alpaca:chatml", "alpaca_chat.load_qa", "alpaca_w_system.load")
TEMPLATES = ("chatml", "zephyr")
# Types of answers that are compared, by objective, without those whose prompts are in other columns than question and
# instruction: they would be continued without a chat template.
COMPARED_TYPES = {
    "preference": ("passthrough", "passthrough.default", "chat_template", "chat_template.default",
                   "chat_template.argilla_chat", "chat_template.argilla", "chatml.intel", "chatml.ultra",
                   "chatml.argilla_chat", "llama3.intel", "llama3.ultra", "llama3.argilla_chat"),
    "kto": ("chatml.argilla", "chatml.intel", "llama3.argilla", "llama3.intel"),
    "reward": (),
}  # fmt: skip
AS_HERE = ("ds_type", "roles_to_train", "train_on_eos", "train_on_eot", "trust_remote_code")
ASSISTANT = {"assistant", "gpt", "model"}


def prepare(to: conversion.Conversion) -> None:
    given = to.given
    if given.get("max_packed_sequence_len"):
        given.setdefault("sample_packing", True)
    plugins = given.pop("plugins", None) or []
    names = map(str, plugins if isinstance(plugins, list) else [plugins])
    if other := [name for name in names if not PLUGINS.search(name)]:
        raise ValueError(f"plugins: {', '.join(other)}: an unknown plugin may change the training signal")
    if given.get("model_config") == {"output_router_logits": True}:
        del given["model_config"]
        to.note("model_config", "--router-aux-loss with a coefficient turns the experts' balancing loss on")
    for key in ("tokens", "special_tokens"):  # by role
        if isinstance(given.get(key), dict):
            more, own = given.pop(key).get("additional_special_tokens") or [], given.get("tokens") or []
            given["tokens"] = [*([own] if isinstance(own, str) else own), *more]
            to.note(key, "the tokenizer's own are kept; nothing is padded")
    for key, losses in OF_RL.items():
        if key in given and given.get("rl") not in losses:
            del given[key]
            to.tell(key, "rl does not use it")
    if "rl_beta" in given:
        given.pop("dpo_beta", None)
    names = to.get("lora_target_modules", default=[])
    if to.get("lora_target_linear") and names:  # every linear layer, and those that are named: their union
        if outside := OUTSIDE & set([names] if isinstance(names, str) else names):
            raise ValueError(
                f"lora_target_linear: adapters on {', '.join(sorted(outside))} beside every linear layer of the blocks"
                " cannot be asked for together: name the layers in lora_target_modules"
            )
        del given["lora_target_modules"]
        to.tell("lora_target_modules", "lora_target_linear asks for every linear layer, these among them")
    if given.get("rl") == "dpo":
        given.setdefault("dpo_loss_type", ["sigmoid"])
        settle_losses(to, "dpo_loss_type", "dpo_loss_weights")


# Losses with a reference by TRL's names. "sft" beside one of them is the chosen answers' negative log-likelihood.
LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "apo_zero": "apo-zero"}


def settle_losses(to: conversion.Conversion, key: str, weights_key: str) -> None:
    """Losses by TRL's names: one with a reference, alone or with "sft"; `weights_key` has their weights."""
    names = conversion.read_names(key, to.given.pop(key))
    weights = to.get(weights_key, default=[1] * len(names))
    by_name = dict(zip(names, weights, strict=False)) if isinstance(weights, list) else {}
    nll = by_name.pop("sft", None)
    is_one = len(by_name) == 1 and by_name.keys() <= {*LOSSES} and len({*names}) == len(names) == len(weights)
    if not is_one:
        raise ValueError(f"{key}: {', '.join(names)}: one of {', '.join(LOSSES)} can be trained, alone or with sft")
    ((name, weight),) = by_name.items()
    if weight != 1:
        raise ValueError(f"{key}: the weight {weight} of {name}: is 1 here; only that of sft can be chosen")
    to.set(key, preference_loss=LOSSES[name])
    if nll:
        to.set(key, preference_nll_weight=nll)


def read_data(to: conversion.Conversion) -> None:
    """The data sets, each with its type, and the chat template."""
    value = to.get("datasets", "pretraining_dataset", default=[])
    listed = value if isinstance(value, list) else [value]
    entries = [entry if isinstance(entry, dict) else {"path": entry} for entry in listed]
    if to.get("processor_type"):
        raise ValueError(f"processor_type: {conversion.IMAGES}")
    conversion.set_template(to, "chat_template_jinja")
    to.data |= choose_template(to, to.get("chat_template"))
    if arguments := to.get("chat_template_kwargs"):
        words = [f"{name}={json.dumps(argument)}" for name, argument in arguments.items()]
        to.set("chat_template_kwargs", template_args=words)
    key = "pretraining_dataset" if to.get("pretraining_dataset") and not to.get("datasets") else "datasets"
    conversion.add_sources(to, key, [read_entry(to, dict(entry), key) for entry in entries])


def choose_template(to: conversion.Conversion, name: Any) -> dict[str, Any]:
    """The option for a chat template by its name."""
    if name in TEMPLATES:
        return {"chat_template": name}
    if name not in (None, "tokenizer_default", "jinja"):
        to.note("chat_template", f"the model's own; if {name} is another, give its Jinja file as chat_template")
    return {}


def read_entry(to: conversion.Conversion, rest: dict[str, Any], key: str) -> dict[str, Any]:
    """Options of process_data.py for one data set."""
    source = read_place(rest)
    kind = rest.pop("type", None)
    if to.row_format is not None:
        conversion.find_message_format(*pop_message_keys(rest))
        source |= choose_template(to, rest.pop("chat_template", None)) | read_preferences(to, rest, kind)
    elif key == "pretraining_dataset" or kind == "completion":
        source |= read_documents(to, rest, kind)
    else:
        source |= read_texts(to, rest, kind)
    if unread := sorted(str(name) for name, item in rest.items() if item is not None and name not in AS_HERE):
        to.note(key, f"no counterpart for the data set's keys {', '.join(unread)}")
    return source


def read_place(rest: dict[str, Any]) -> dict[str, Any]:
    """Options for the rows' place: files, or a data set of the hub with its split."""
    path, name, files = rest.pop("path"), rest.pop("name", None), rest.pop("data_files", None)
    if "://" in path:
        raise ValueError(f"{path}: rows are read from files or the hub; copy them to a file")
    files = [files] if isinstance(files, str) else files
    if data_ending(Path(path)) in ENDINGS or (rest.get("ds_type") and not files):
        return {"input_file": [path]}
    if files and path in ("json", "csv", "parquet", "text"):
        return {"input_file": files}
    if files:
        raise ValueError(f"{path}: a hub data set is read whole; download {', '.join(files)}, and give them as path")
    chosen = {option: str(rest.pop(option)).strip() for option in ("split", "revision") if rest.get(option)}
    if chosen.get("split") == "train":
        del chosen["split"]
    return conversion.name_hub_rows(path, name) | chosen


def read_texts(to: conversion.Conversion, rest: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Options for the form of rows of texts, by the data set's type."""
    if kind in ALPACA:
        to.note("datasets", f"type {kind} writes its own prompt; here prompts go through the chat template")
        return {"format": "alpaca"}
    if kind == "sharegpt":
        rest.pop("conversation", None)
        field = rest.pop("field_messages", "conversations")
        return {"format": "sharegpt"} | conversion.name_columns(messages=(field, ("conversations",)))
    if kind != "chat_template":
        given = "none" if kind is None else "that is custom (a mapping)" if isinstance(kind, dict) else repr(kind)
        allowed = ", ".join(("chat_template", "completion", "sharegpt", *ALPACA))
        raise ValueError(f"type {given} of a data set is not known here: {allowed} are")
    data_format, own = conversion.find_message_format(*pop_message_keys(rest))
    # Only the assistant's turns, with their ends, are trained here.
    roles = rest.get("roles_to_train")
    if roles is not None and not (isinstance(roles, list) and all(role in ASSISTANT for role in map(str, roles))):
        raise ValueError(f"roles_to_train {roles}: only the assistant's tokens are trained on here")
    for name in ("train_on_eos", "train_on_eot"):
        if rest.get(name, "turn") != "turn":
            raise ValueError(f"{name} {rest[name]!r}: the end of each trained turn is trained on here ('turn')")
    if rest.pop("drop_system_message", False):
        to.note("datasets", "system messages stay")
    field = rest.pop("field_messages", "messages")
    template = choose_template(to, rest.pop("chat_template", None))
    return {"format": data_format} | template | conversion.name_columns(messages=(field, (own,)))


def read_documents(to: conversion.Conversion, rest: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Texts that are trained on as a whole."""
    if kind not in ("completion", "pretrain", None):
        raise ValueError(f"type {kind!r} of documents is not known here: completion and pretrain are")
    field = rest.pop("field", None) or rest.pop("text_column", None) or "text"
    length = to.get_number("sequence_len", default=512)
    to.note("datasets", f"texts are joined and cut into blocks of {length} tokens; there each text begins a block")
    source = {"format": "document", "block_size": length, "max_sample_num_tokens": None}
    return source | conversion.name_columns(text=(field, ("text", "document")))


def read_preferences(to: conversion.Conversion, rest: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Options of process_data.py for a data set of answers that are compared, by its type."""
    known = COMPARED_TYPES[to.objective]
    if kind is not None and kind not in known:
        raise ValueError(
            f"type {kind!r}: answers are compared in rows without a type, or with one of {', '.join(known) or 'none'};"
            " rename a text's column to question, so that the chat template is put around it"
        )
    template, _, _ = str(kind).partition(".")
    if template == "llama3":
        to.note("datasets", "the template llama3 leaves out blanks around messages")
    columns = {part: (rest.pop(f"field_{part}", part), (part,)) for part in ("chosen", "rejected")}
    if kind in ("chat_template", "chat_template.default"):
        columns["prompt"] = (rest.pop("field_messages", "messages"), ("messages", "conversations"))
    own = {"chat_template": template} if template in ("chatml", "llama3") else {}
    return own | conversion.name_columns(**columns)


def pop_message_keys(rest: dict[str, Any]) -> tuple[str, str]:
    """The keys of a message's role and content."""
    mapping = rest.pop("message_property_mappings", None) or {}
    if any(name != item for name, item in mapping.items() if name not in ("role", "content")):
        rest["message_property_mappings of other keys"] = True
    role = rest.pop("message_field_role", None) or mapping.get("role", "role")
    return role, rest.pop("message_field_content", None) or mapping.get("content", "content")


AXOLOTL = conversion.Trainer(
    batch=("micro_batch_size", 1),
    length=("sequence_len", 512),
    epochs=("num_epochs", 1),
    packing=("sample_packing",),
    data_keys=(
        *("datasets", "pretraining_dataset", "processor_type", "batch_size"),
        *("chat_template", "chat_template_jinja", "chat_template_kwargs"),
    ),
    read_data=read_data,
    prepare=prepare,
    defaults={"lr_scheduler": "cosine", "adam_beta2": 0.999},
)
