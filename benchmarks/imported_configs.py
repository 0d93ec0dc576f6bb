"""Runs the importer over folders of other trainers' configurations, and compares what each file says with ours.

    python benchmarks/imported_configs.py FOLDER... [--output results.txt] [--verbose]

The reading below is its own: keys and defaults as the trainers' sources have them, none of the importer's rules. Each
written pair is parsed as the scripts do, then compared by field. A difference counts as reported if the importer's
notes name one of the field's keys.
"""

import argparse
from collections import Counter, defaultdict
from pathlib import Path

import paths  # noqa: F401
import yaml

from mini_trainer.options import TrainOptions, flatten_options, group_options
from mini_trainer.options.option_files import parse_value, read_yaml
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.options.tools import ProcessDataOptions
from mini_trainer.tools.import_config import describe_file, recognize
from mini_trainer.tools.importers.conversion import Conversion, convert

GPUS = 8
# (key of the batch, length's key with its default, epochs' key with its default, default warm-up)
PEERS = {
    "axolotl": ("micro_batch_size", 1, "sequence_len", 512, "num_epochs", 1),
    "llama-factory": ("per_device_train_batch_size", 8, "cutoff_len", 2048, "num_train_epochs", 3),
    "trl": ("per_device_train_batch_size", 8, "max_length", 1024, "num_train_epochs", 3),
}
# By field, the keys in whose notes a difference may be reported.
NOTED = {
    "rows of a step": ("batch_size", "batch_tokens"),
    "length": ("sequence_len", "max_length", "cutoff_len", "datasets", "pretraining_dataset"),
    "epochs or steps": ("num_epochs", "num_train_epochs", "max_epochs", "max_steps"),
    "warm-up": ("warmup", "warmup_ratio", "warmup_steps"),
    "learning rate": ("learning_rate",),
    "schedule": ("lr_scheduler", "lr_scheduler_type"),
    "optimizer": ("optimizer", "optim"),
    "beta2": ("adam_beta2",),
    "what trains": ("adapter", "finetuning_type", "use_peft"),
    "rank": ("lora_r", "lora_rank"),
    "layers": (
        "lora_target_modules",
        "default of lora_target_modules",
        "lora_target",
        "lora_target_linear",
        "lora_target_parameters",
    ),
    "whole modules": ("lora_modules_to_save", "additional_target"),
    "bits": ("load_in_4bit", "load_in_8bit", "quantization_bit", "adapter"),
    "rows' place": ("datasets", "dataset", "dataset_name", "dataset_mixture", "dataset_mixer"),
    "rows' type": ("datasets", "dataset"),
    "template": ("chat_template", "template", "datasets"),
    "prompts": ("assistant_only_loss", "train_on_inputs"),
    "objective": ("rl", "stage", "objective"),
    "loss": ("rl", "pref_loss", "loss_type", "loss"),
    "beta": ("beta", "rl_beta", "pref_beta"),
    "gamma": ("simpo_gamma",),
    "likelihood": ("cpo_alpha", "rpo_alpha", "pref_ftx", "dpo_loss_type", "loss_type"),
    "smoothing": ("label_smoothing", "dpo_label_smoothing"),
    "weights of answers": ("kto_desirable_weight", "desirable_weight", "kto_chosen_weight"),
    "centering": ("center_rewards_coefficient",),
    "reference": ("ref_model",),
}


def number(value):
    return float(value) if value is not None else None


def expect(given: dict, trainer: str) -> dict:
    """What the file says, field by field."""
    objective, peers_name = expect_objective(given, trainer), trainer
    trainer = "trl" if trainer.startswith("trl") else trainer
    rows_key, rows_default, length_key, length_default, epochs_key, epochs_default = PEERS[trainer]
    get = lambda key, default=None: default if given.get(key) is None else given[key]  # noqa: E731
    rows = get(rows_key, rows_default)
    accumulated = (
        get("gradient_accumulation_steps") or (get("batch_size", 0) // rows if trainer == "axolotl" else 0) or 1
    )
    gpus = GPUS // (get("context_parallel_size", 1) * get("tensor_parallel_size", 1)) if trainer == "axolotl" else GPUS
    length = get(length_key, get("max_seq_length", length_default))
    documents = bool(get("pretraining_dataset")) or get("stage") == "pt"
    packs = (
        (get("sample_packing") or get("max_packed_sequence_len") or get("packing") or get("neat_packing"))
        and not documents
        and objective == "causal-lm"
    )
    steps = number(get("max_steps", -1))
    schedule = get("lr_scheduler", get("lr_scheduler_type", "cosine" if trainer == "axolotl" else "linear"))
    warmup = expect_warmup(get, trainer, schedule, steps)
    lora = {"axolotl": get("adapter") in ("lora", "qlora"), "llama-factory": get("finetuning_type", "lora") == "lora",
            "trl": bool(get("use_peft"))}[trainer]  # fmt: skip
    said = {
        "rows of a step": ("tokens", int(rows * accumulated * gpus) * length) if packs
        else ("samples", int(rows * accumulated * gpus)),
        "length": length,
        "epochs or steps": ("steps", steps) if steps > 0 else ("epochs", number(get(epochs_key, epochs_default))),
        "warm-up": warmup,
        "learning rate": number(get("learning_rate", RATES.get(peers_name))),
        "schedule": {"cosine_with_min_lr": "cosine", "warmup_stable_decay": "wsd"}.get(schedule, schedule),
        "optimizer": "8 bits" if "8bit" in str(get("optimizer", get("optim", ""))) else
        "4 bits" if "4bit" in str(get("optimizer", get("optim", ""))) else "32 bits",
        "beta2": number(get("adam_beta2", 0.999)),
        "what trains": "adapters" if lora else "everything",
        "bits": 4 if lora and (get("load_in_4bit") or get("adapter") == "qlora" or get("quantization_bit") == 4)
        else 8 if lora and get("load_in_8bit") else 16,
        "template": expect_template(given, trainer),
        "prompts": "masked" if trainer != "trl" or get("assistant_only_loss") or objective != "causal-lm"
        else "trained",
    }  # fmt: skip
    if objective != "causal-lm":
        said |= {"length": 2 * length} | expect_preferences(given, objective, peers_name)
    if lora:
        said |= expect_layers(get, trainer)
    return said | expect_data(given, trainer)


RATES = {"trl": 2e-5, "llama-factory": 5e-5, "trl-dpo": 1e-6, "trl-kto": 1e-6, "trl-orpo": 1e-6, "trl-cpo": 1e-6,
         "trl-reward": 1e-4}  # fmt: skip


def expect_objective(given: dict, trainer: str) -> str:
    if trainer == "axolotl":
        return "reward" if given.get("reward_model") else {"kto": "kto", None: "causal-lm"}.get(
            given.get("rl"), "preference")  # fmt: skip
    if trainer == "llama-factory":
        return {"dpo": "preference", "kto": "kto", "rm": "reward"}.get(given.get("stage"), "causal-lm")
    return {"trl": "causal-lm", "trl-kto": "kto", "trl-reward": "reward"}.get(trainer, "preference")


def expect_preferences(given: dict, objective: str, trainer: str) -> dict:
    """The loss with its numbers, by each trainer's own names."""
    get = lambda *keys: next((given[key] for key in keys if given.get(key) is not None), None)  # noqa: E731
    if objective == "reward":
        return {"objective": objective, "centering": number(get("center_rewards_coefficient")) or 0}
    beta = number(get("beta", "rl_beta", "dpo_beta", "pref_beta", "orpo_alpha"))
    rows = {"objective": objective, "beta": beta or 0.1,
            "reference": get("ref_model")}  # fmt: skip
    if objective == "kto":
        good, bad = (number(get(*(f"{name}{part}" for name in ("kto_", ""))) or 1) for part in
                     ("desirable_weight", "undesirable_weight"))  # fmt: skip
        good, bad = number(get("kto_chosen_weight")) or good, number(get("kto_rejected_weight")) or bad
        return rows | {"weights of answers": good / bad}
    losses = get("dpo_loss_type", "loss_type", "pref_loss") or "sigmoid"
    losses = [losses] if isinstance(losses, str) else losses
    loss = next((name for name in losses if name != "sft"), "sft")
    loss = {"ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}.get(given.get("rl"), loss)
    loss = {"trl-orpo": "orpo", "trl-cpo": "simpo"}.get(trainer, loss)
    is_simpo, is_papers = loss == "simpo", "gamma_beta_ratio" in given
    gamma = number(get("simpo_gamma") or 0.5)
    if is_papers:
        rows["beta"] = number(get("beta") or 2)
        gamma = number(given["gamma_beta_ratio"]) * rows["beta"]
    nll = number(get("cpo_alpha", "rpo_alpha", "sft_weight") or 0)
    if is_simpo and not is_papers and trainer != "llama-factory" and given.get("loss_type") != "alphapo":
        nll = number(1 if get("cpo_alpha") is None else get("cpo_alpha"))
    if "sft" in losses:
        nll = number((get("dpo_loss_weights", "loss_weights") or [1] * len(losses))[losses.index("sft")])
    nll += number(get("pref_ftx") or 0)
    return rows | {
        "loss": {"sigmoid": "dpo", "apo_zero": "apo-zero"}.get(loss, loss),
        "gamma": gamma if is_simpo else None,
        "likelihood": nll + (loss == "orpo"),
        "smoothing": number(get("label_smoothing", "dpo_label_smoothing") or 0),
    }


def read_our_preferences(t: dict) -> dict:
    """The same fields of the options."""
    loss, beta = t["preference_loss"], t["preference_beta"]
    own = 1 if loss == "orpo" else 0
    return {
        "objective": t["objective"],
        "loss": loss,
        "beta": beta,
        "gamma": t["preference_gamma"],
        "likelihood": own if t["preference_nll_weight"] is None else t["preference_nll_weight"],
        "smoothing": t["label_smoothing"],
        "weights of answers": t["kto_weight_ratio"],
        "centering": t["reward_centering"],
        "reference": t["reference_model"],
    }


def expect_warmup(get, trainer: str, schedule: str, steps: float):
    if schedule == "constant":
        return ("steps", 0)
    if (number(get("warmup_steps", 0)) or 0) >= 1:
        return ("steps", number(get("warmup_steps")))
    if get("warmup_ratio") is not None or get("warmup_steps") is not None:
        share = number(get("warmup_ratio", get("warmup_steps", 0)))
        return ("share", share) if share else ("steps", 0)
    if trainer == "axolotl":
        return ("steps", {1: 2}.get(min(int(0.03 * steps), 100), min(int(0.03 * steps), 100))) if steps > 0 else (
            "share", 0.03, "at most 100 steps")  # fmt: skip
    return ("steps", 0)


def expect_layers(get, trainer: str) -> dict:
    chosen = get("lora_target_modules", get("lora_target", "all" if trainer == "llama-factory" else None))
    if trainer == "llama-factory":
        chosen = [name.strip() for name in chosen.split(",")]
    if trainer == "trl" and chosen is None:
        chosen = ["q_proj", "v_proj", "by peft's table"]
    is_all = get("lora_target_linear") or chosen in (["all"], "all-linear", ["all-linear"]) or not chosen
    layers = () if is_all else tuple([chosen] if isinstance(chosen, str) else chosen)
    if get("lora_target_parameters") and not is_all:
        layers += tuple(get("lora_target_parameters"))
    saved = get("lora_modules_to_save", get("additional_target", []))
    default = {"llama-factory": 8, "trl": 16}.get(trainer)
    return {"rank": get("lora_r", get("lora_rank", default)), "layers": layers,
            "whole modules": tuple(saved.split(",") if isinstance(saved, str) else saved)}  # fmt: skip


def expect_template(given: dict, trainer: str) -> str:
    value = given.get("template" if trainer == "llama-factory" else "chat_template")
    own = [entry.get("chat_template") for entry in given.get("datasets") or [] if isinstance(entry, dict)]
    if trainer == "axolotl":
        value = next((template for template in own if template), value)
        if any(str(entry.get("type")).startswith("alpaca") for entry in given.get("datasets") or []):
            return "Alpaca's prompt"
    if value in (None, "tokenizer_default"):
        return "model's own"
    return "text" if "{" in str(value) else str(value)


def expect_data(given: dict, trainer: str) -> dict:
    """Places as (name, split) and types, in the file's order."""
    if trainer == "axolotl":
        entries = given.get("datasets") or given.get("pretraining_dataset") or []
        entries = [entry if isinstance(entry, dict) else {"path": entry} for entry in entries]
        places = {(f"{entry.get('path')}:{entry['name']}" if entry.get("name") else entry.get("path"),
                   str(entry.get("split") or "train").strip()) for entry in entries}  # fmt: skip
        types = sorted({type_of(given, entry) for entry in entries})
        if (objective := expect_objective(given, trainer)) != "causal-lm":
            types = ["feedback" if objective == "kto" else "preference"]
        return {"rows' place": places, "rows' type": types}
    if trainer == "llama-factory":
        return {}
    if given.get("dataset_mixture"):
        listed = given["dataset_mixture"]["datasets"]
        name = lambda e: f"{e['id']}:{e['config']}" if e.get("config") else e["id"]  # noqa: E731
        split = lambda e: cut(str(e.get("split") or "train").strip(), e.get("weight"))  # noqa: E731
        return {"rows' place": {(name(e), split(e)) for e in listed}}
    if given.get("dataset_mixer"):
        splits = [split for split in given.get("dataset_splits") or ["train"] if "train" in split]
        return {
            "rows' place": {
                (name, cut(split, share)) for name, share in given["dataset_mixer"].items() for split in splits
            }
        }
    name, config = given.get("dataset_name"), given.get("dataset_config")
    return {"rows' place": {(f"{name}:{config}" if config else name, given.get("dataset_train_split") or "train")}}


def cut(split: str, weight) -> str:
    return split if weight in (None, 1, 1.0) else f"{split}[:{round(100 * weight)}%]"


def type_of(given: dict, entry: dict) -> str:
    kind = entry.get("type")
    if given.get("pretraining_dataset") or kind == "completion":
        return "document"
    if kind in ("chat_template", None):
        mapping = entry.get("message_property_mappings") or {}
        return "sharegpt" if (mapping.get("role") or entry.get("message_field_role")) == "from" else "messages"
    return str(kind).partition(":")[0].partition(".")[0]


def read_ours(train: TrainOptions, sources: list[ProcessDataOptions]) -> dict:
    """The same fields of the written files."""
    t, rows = flatten_options(train), [flatten_options(source) for source in sources]
    steps = ("steps", t["max_steps"]) if t["max_steps"] else ("epochs", t["max_epochs"])
    warmup = ("share" if 0 < t["num_warmup_steps"] < 1 else "steps", t["num_warmup_steps"])
    templates = {row["chat_template"] for row in rows}
    return {
        "rows of a step": ("samples", t["batch_size"]) if t["batch_tokens"] is None else ("tokens", t["batch_tokens"]),
        "length": rows[0]["block_size"] or rows[0]["max_sample_num_tokens"],
        "epochs or steps": steps,
        "warm-up": warmup,
        "learning rate": t["learning_rate"],
        "schedule": t["lr_scheduler"],
        "optimizer": "8 bits" if t["optimizer"] == "adamw8bit" else "32 bits",
        "beta2": t["adam_beta2"],
        "what trains": "adapters" if t["lora"] else "everything",
        "bits": 4 if t["base_quantization"] == "nf4" else 16,
        "rank": t["lora_rank"],
        "layers": tuple(t["lora_target_modules"]),
        "whole modules": tuple(t["lora_modules_to_save"]),
        "rows' place": {(place, row["split"] or "train") for row in rows
                        for place in row["input_file"] or [row["input_dataset"]]},
        "rows' type": sorted({row["format"] for row in rows}, key=str),
        "template": "model's own" if templates == {None}
        else next("text" if str(name).endswith(".jinja") else name for name in templates if name),
        "prompts": "masked",
    } | read_our_preferences(t)  # fmt: skip


def check_file(path: Path) -> tuple[str, str, list[str], list[str]]:
    """Trainer, outcome ("written" or the reason), the fields that differ and are reported, and those that are not."""
    try:
        given = {str(key): value for key, value in read_yaml(path, named=path.name).items()}
        trainer = recognize(given, path)
    except ValueError as error:
        return "none", str(error), [], []
    try:
        to = convert(given, trainer, num_gpus=GPUS)
    except ValueError as error:
        return trainer, str(error), [], []
    train, sources = read_written(to)
    theirs, ours = expect(given, trainer), read_ours(train, sources)
    reported, silent = [], []
    for field, said in theirs.items():
        if said == ours[field]:
            continue
        is_noted = any(key in to.noted for key in NOTED[field])
        (reported if is_noted else silent).append(f"{field}: {said} / {ours[field]}")
    silent += [f"problem: {line}" for line in find_problems(train) + [p for s in sources for p in find_problems(s)]]
    return trainer, "written", reported, silent


def read_written(to: Conversion) -> tuple[TrainOptions, list[ProcessDataOptions]]:
    """The options as the scripts read them from the files' text; what a user has to give is given."""
    values = {"output_dir": "run"} | yaml.safe_load(describe_file(TrainOptions, to.train, ""))
    train = group_options(TrainOptions, **parse_all(values, TrainOptions))
    sources = []
    for source in to.sources:
        values = yaml.safe_load(describe_file(ProcessDataOptions, source, ""))
        if not {"input_file", "input_dataset"} & values.keys():
            values["input_file"] = ["given.jsonl"]
        sources.append(group_options(ProcessDataOptions, **parse_all(values, ProcessDataOptions)))
    return train, sources


def parse_all(values: dict, options_class: type) -> dict:
    return {name: value if value is None else parse_value(name, value, options_class) for name, value in values.items()}


def group_reason(reason: str) -> str:
    """A reason without the file's own values."""
    for text, group in (
        ("no trainer", "no trainer's keys"),
        ("reinforcement", "reinforcement learning"), ("rewards of single", "rewards of single steps"),
        ("continued without a chat template", "prompts in a column that no chat template is put around"),
        ("are read without", "answers with images"), ("equally", "several trainers' keys fit"),
        ("ms-swift", "ms-swift's"), ("LLaMA-Factory v1", "LLaMA-Factory v1's"), ("is not training",
        "export, inference"),
        ("distillation", "distillation"), ("of documents is not", "type of data"),
        ("is not known here: chat", "type of data"), ("quantization-aware", "quantization-aware, compression"),
        ("another loss", "another loss"), ("may change what", "a plugin that may change training"), ("optimizer",
        "optimizer"),
        ("has no objective", "another objective"), ("OSFT are supported", "another method (OFT, freeze, ...)"),
    ):  # fmt: skip
        if text in reason:
            return group
    return reason.split(": ")[-1][:90]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    counts: dict[str, Counter] = defaultdict(Counter)
    reasons, reported, silent = Counter(), Counter(), Counter()
    for folder in options.folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".yaml", ".yml")):
            try:
                trainer, outcome, differing, unsaid = check_file(path)
            except Exception as error:  # a fault of the importer or of what it wrote
                trainer, outcome, differing, unsaid = "none", f"CRASH {type(error).__name__}: {error}", [], []
            row = counts[folder.name]
            row["files"] += 1
            row["written" if outcome == "written" else "refused"] += 1
            if outcome != "written":
                reasons[group_reason(outcome) if not outcome.startswith("CRASH") else outcome[:90]] += 1
            reported.update(line.partition(":")[0] for line in differing)
            silent.update(line.partition(":")[0] for line in unsaid)
            if options.verbose and (unsaid or outcome.startswith("CRASH")):
                print(path, trainer, outcome if outcome != "written" else "", *unsaid, sep="\n    ")
    lines = ["| folder | files | written | refused |", "| --- | --- | --- | --- |"]
    lines += [f"| {name} | {row['files']} | {row['written']} | {row['refused']} |" for name, row in counts.items()]
    total = sum(counts.values(), Counter())
    lines += [f"| all | {total['files']} | {total['written']} | {total['refused']} |", ""]
    lines += [
        "| refused because | files |",
        "| --- | --- |",
        *(f"| {reason} | {n} |" for reason, n in reasons.most_common()),
        "",
    ]
    lines += ["| field | differs, and reported | differs silently |", "| --- | --- | --- |"]
    lines += [f"| {field} | {reported[field]} | {silent[field]} |" for field in [*NOTED, *({*silent} - {*NOTED})]]
    print("\n".join(lines))
    if options.output is not None:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
