"""LLaMA-Factory: its keys that depend on others, its defaults (its hparams), and its list of data sets."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mini_trainer.options.reading import read_object
from mini_trainer.tools.importers import conversion
from mini_trainer.tools.importers.conversion import Conversion, Trainer

ALPACA_COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "system": "system",
                  "history": "history", "tools": "tools"}  # fmt: skip
# Parts of a vision-language model, and whether they are frozen by default.
PARTS = {"vision_tower": ("vision", True), "multi_modal_projector": ("projector", True),
         "language_model": ("language", False)}  # fmt: skip
FORMATTINGS = ("alpaca", "sharegpt", "openai")
TEMPLATE = "the model's own chat template is used; where LLaMA-Factory's is another, give a Jinja file as chat_template"


def prepare(to: Conversion) -> None:
    stage, given = to.get("stage"), to.given
    if stage == "dpo":
        given.setdefault("pref_loss", "sigmoid")
    if (weight := conversion.read_number("pref_ftx", given.pop("pref_ftx", 0))) and stage == "kto":
        raise ValueError("pref_ftx: a likelihood in addition to KTO's loss is not supported")
    if weight and stage == "dpo":
        to.set("pref_ftx", preference_nll_weight=weight + (given["pref_loss"] == "orpo"))
        to.note("pref_ftx", "a mean over all chosen tokens of the batch, there the mean of each answer's mean")
    if "adapter_name_or_path" in given and stage in ("dpo", "kto") and "ref_model" not in given:
        to.note("adapter_name_or_path", "the reference is the model with this adapter, there without it")
    if any(f"freeze_{name}" in given for name in PARTS):
        frozen = [part for name, (part, default) in PARTS.items() if given.pop(f"freeze_{name}", default)]
        if to.get("finetuning_type", default="lora") == "lora":
            to.note("freeze_vision_tower", "adapters are in the language part alone")
        else:
            to.set("freeze_vision_tower", freeze=frozen or ["nothing"])
    if to.get("template") not in (None, "empty"):
        to.note("template", TEMPLATE)
        del given["template"]


def read_data(to: Conversion) -> None:
    """Data sets by name, from the list that lies beside their files."""
    if "dataset" not in to.given:
        return
    info = Path(str(to.get("dataset_dir", default="data"))) / "dataset_info.json"
    names = conversion.read_names("dataset", to.given["dataset"])
    listed = read_object(info) if info.is_file() else {}
    if absent := [name for name in names if name not in listed]:
        to.note("dataset", f"give its file as input_file in data.yaml ({', '.join(absent)} not in {info})")
        return
    conversion.add_sources(to, "dataset", [read_entry(to, name, listed[name], info) for name in names])


def read_entry(to: Conversion, name: str, entry: dict[str, Any], info: Path) -> dict[str, Any]:
    """Options of process_data.py for one data set."""
    columns = {what: column for what, column in entry.get("columns", {}).items() if column is not None}
    kind = entry.get("formatting", "alpaca")
    if to.row_format is None and (entry.get("ranking") or "kto_tag" in columns):
        raise ValueError(f"{name} holds preferences: stage {to.get('stage', default='sft')} does not learn from them")
    if {"images", "videos", "audios"} & columns.keys():
        raise ValueError(f"{name}: {conversion.IMAGES}")
    if kind not in FORMATTINGS:
        raise ValueError(f"{name}: formatting {kind!r} is not known here: {', '.join(FORMATTINGS)} are")
    if "hf_hub_url" in entry:
        source = conversion.name_hub_rows(entry["hf_hub_url"], entry.get("subset"), split=entry.get("split"))
    elif entry.get("file_name") is None:
        raise ValueError(f"{name} of {info} has no file_name: rows are read from files or Hugging Face's hub")
    else:
        source = {"input_file": [str(info.parent / entry["file_name"])]}
    if entry.get("num_samples"):
        to.note("dataset", f"all rows of {name} are used, given num_samples {entry['num_samples']}")
    if to.data.get("format") == "document":
        return source | conversion.name_columns(text=(columns.get("prompt", "instruction"), ("text", "document")))
    tags = entry.get("tags", {})
    default = ("role", "content") if kind == "openai" and not tags else ("from", "value")
    keys = tags.get("role_tag", default[0]), tags.get("content_tag", default[1])
    data_format, own = conversion.find_message_format(*keys)
    if to.row_format is not None:
        return source | read_preferences(to, name, entry, columns)
    if kind == "alpaca":
        return source | read_alpaca(name, columns)
    messages = columns.get("messages", "conversations")
    return source | {"format": data_format} | conversion.name_columns(messages=(messages, (own,)))


def read_alpaca(name: str, columns: dict[str, str]) -> dict[str, Any]:
    """Alpaca's columns, or a prompt and its answer under names of their own."""
    used = {what: column for what, column in columns.items() if what in ALPACA_COLUMNS}
    has_query = not columns or "query" in used  # columns that are not listed are not read there
    if has_query and all(ALPACA_COLUMNS[what] == column for what, column in used.items()):
        return {"format": "alpaca"}
    if used.keys() <= {"prompt", "response"}:
        prompt, answer = used.get("prompt", "instruction"), used.get("response", "output")
        return {"format": "completion"} | conversion.name_columns(prompt=(prompt, ()), completion=(answer, ()))
    given = ", ".join(f"{what}: {column}" for what, column in used.items() if ALPACA_COLUMNS[what] != column)
    raise ValueError(f"{name}: columns of other names ({given}) can be read for prompt and response alone; rename them")


def read_preferences(to: Conversion, name: str, entry: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """Options of process_data.py for one data set of preferences or of feedback."""
    unread = [what for what in ("system", "tools") if columns.get(what, what) != what]
    unread += ["history"] if "history" in columns else []
    if to.objective == "kto" and "kto_tag" not in columns:
        raise ValueError(f"{name} has no kto_tag, which says what answers are good")
    if to.objective != "kto" and not (entry.get("ranking") and {"chosen", "rejected"} <= columns.keys()):
        raise ValueError(f"{name} has no ranking with the columns chosen and rejected")
    if unread:
        raise ValueError(f"{name}: columns for {', '.join(unread)} are not read with answers that are preferred")
    named = name_prompt(to, name, columns, has_texts=entry.get("formatting", "alpaca") == "alpaca")
    if to.objective == "kto":
        return conversion.name_columns(**named, label=(columns["kto_tag"], ("label", "kto_tag")))
    answers = {side: (columns[side], (side, f"{side}_response")) for side in ("chosen", "rejected")}
    return conversion.name_columns(**named, **answers)


def name_prompt(
    to: Conversion, name: str, columns: dict[str, str], *, has_texts: bool
) -> dict[str, tuple[str, Sequence[str]]]:
    """For `name_columns`: the column of a prompt's messages or, for feedback, of the whole chat's; with Alpaca's texts,
    that of feedback's answer."""
    if not has_texts:
        messages = columns.get("messages", "conversations")
        if to.objective == "kto" and messages not in ("messages", "conversations"):
            raise ValueError(f"{name}: whole chats in the column {messages} are not read; rename it to messages")
        return {"prompt": (messages, ("messages", "conversations"))}
    prompt, query = columns.get("prompt", "prompt"), columns.get("query", "input")
    if prompt not in ("question", "instruction") or query != "input":
        raise ValueError(
            f"{name}: texts in the columns {prompt} and {query} would be continued without a chat template; rename them"
            " to question and input"
        )
    there = "after one line break" if "query" in columns else "nowhere"
    to.note("dataset", f"a row's input follows its prompt after a blank line, there {there}")
    answer = columns.get("response", "output")
    return {"completion": (answer, ("completion",))} if to.objective == "kto" else {}


LLAMA_FACTORY = Trainer(
    batch=("per_device_train_batch_size", 8),
    length=("cutoff_len", 2048),
    epochs=("num_train_epochs", 3),
    packing=("packing", "neat_packing"),
    data_keys=("dataset", "dataset_dir"),
    read_data=read_data,
    prepare=prepare,
    defaults={"lora": True, "lora_rank": 8, "lr_scheduler": "linear", "learning_rate": 5e-5, "adam_beta2": 0.999},
)
