"""Another trainer's configuration in, this one's out: Axolotl's YAML, LLaMA-Factory's, or TRL's (SFTConfig's names).

    python import_config.py axolotl.yaml --output-dir configs --num-gpus 8

Writes data.yaml, for process_data.py, and train.yaml, for train.py, and prints what became of every key: which option
says it, that it needs none here, or that it has no counterpart. What it does not know it says, too.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from command_line import describe_options, parse_options, read_yaml
from corpus.files import ENDINGS, data_ending
from options import ImportConfigOptions, ProcessDataOptions, TrainOptions, iterate_fields
from ranks.ending import exit_with_message

ALPACA_COLUMNS = {("prompt", "instruction"), ("query", "input"), ("response", "output")}  # which need not be named
NEEDLESS, MISSING = "needs no option", "no counterpart"


@dataclass
class Conversion:
    """What has become of another trainer's keys so far."""

    given: dict[str, Any]
    num_gpus: int
    train: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)  # of every key, what became of it

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these keys that is given."""
        return next((self.given[name] for name in names if self.given.get(name) is not None), default)


Rule = Callable[[Conversion, str, Any], str]  # notes the options of a key with a value; returns what became of it


def say(name: str) -> Rule:
    """The key is train.py's option `name`."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        to.train[name] = value
        return f"{name}: {value}"

    return rule


def say_unless_zero(name: str) -> Rule:
    """The key is train.py's option `name`, and 0 turns it off there."""
    return lambda to, key, value: say(name)(to, key, value) if value else NEEDLESS


def say_data(name: str) -> Rule:
    """The key is process_data.py's option `name`."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        to.data[name] = value
        return f"{name}: {value} (of process_data.py)"

    return rule


def say_if_true(**values: Any) -> Rule:
    """A switch: the options `values` where it is on."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        if not value:
            return NEEDLESS
        to.train.update(values)
        return ", ".join(f"{name}: {chosen}" for name, chosen in values.items())

    return rule


def needless(reason: str) -> Rule:
    return lambda to, key, value: f"{NEEDLESS}: {reason}"


def missing(reason: str) -> Rule:
    return lambda to, key, value: f"{MISSING}: {reason}" if value else NEEDLESS


def choose(name: str, choices: dict[Any, Any]) -> Rule:
    """The option `name`, by a table of the key's values; a value that is not there has no counterpart."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        if value not in choices:
            return f"{MISSING}: {name} can be {', '.join(map(str, dict.fromkeys(choices.values())))}"
        to.train[name] = choices[value]
        return f"{name}: {choices[value]}"

    return rule


def say_model(to: Conversion, key: str, value: Any) -> str:
    to.train["model_name_or_path"] = to.data["model_name_or_path"] = value
    return f"model_name_or_path: {value}"


def say_batch(to: Conversion, key: str, value: Any) -> str:
    """One number in place of three: samples of a step over all GPUs."""
    a_gpu = to.get("micro_batch_size", "per_device_train_batch_size", default=8 if "per_device" in key else 1)
    accumulated = to.get("gradient_accumulation_steps", default=1)
    to.train["batch_size"] = a_gpu * accumulated * to.num_gpus
    return f"batch_size: {to.train['batch_size']} ({a_gpu} x {accumulated} x {to.num_gpus} GPUs)"


def say_length(to: Conversion, key: str, value: Any) -> str:
    """Longest sample, and what of such rows a GPU takes at a time."""
    a_gpu = to.get("micro_batch_size", "per_device_train_batch_size", default=1)
    to.data["max_sample_num_tokens"], to.train["max_tokens_per_gpu"] = value, value * a_gpu
    return (
        f"max_sample_num_tokens: {value} (of process_data.py: longer ones are dropped);"
        f" max_tokens_per_gpu: {value * a_gpu}"
    )


def say_warmup(to: Conversion, key: str, value: Any) -> str:
    """Steps; transformers also takes a share of the run there."""
    return say("warmup_ratio" if 0 < value < 1 else "num_warmup_steps")(to, key, value)


def say_schedule_details(to: Conversion, key: str, value: Any) -> str:
    """The end of a schedule's decay, as a share of the learning rate or as a rate."""
    if not isinstance(value, dict):
        return f"{MISSING}: not known here"
    given = dict(value)
    rate, lowest = given.pop("min_lr_rate", None), given.pop("min_lr", None)
    if rate is None and lowest is not None:
        rate = lowest / to.get("learning_rate")
    if rate is not None:
        to.train["min_lr_ratio"] = rate
    said = [] if rate is None else [f"min_lr_ratio: {rate}"]
    return "; ".join([*said, *([f"{MISSING}: {', '.join(given)}"] if given else [])]) or NEEDLESS


def say_epochs(to: Conversion, key: str, value: Any) -> str:
    if to.get("max_steps", default=-1) > 0:
        return f"{NEEDLESS}: max_steps ends the run"
    to.train["max_epochs"] = math.ceil(value)
    return f"max_epochs: {to.train['max_epochs']}" + ("" if value == math.ceil(value) else f" (given {value})")


def say_steps(to: Conversion, key: str, value: Any) -> str:
    if value <= 0:
        return NEEDLESS
    to.train["max_steps"] = value
    return f"max_steps: {value}"


def say_saves(to: Conversion, key: str, value: Any) -> str:
    """How often the model is saved; what a run resumes from is saved by the clock anyway."""
    if value == "epoch" or (key == "saves_per_epoch" and value == 1):
        to.train["checkpoint_at_epoch"] = True
        return "checkpoint_at_epoch: true"
    if key == "save_steps" and value >= 1 and to.get("save_strategy", default="steps") == "steps":
        to.train["checkpoint_every_steps"] = int(value)
        return f"checkpoint_every_steps: {int(value)} (to resume from; --min-samples-per-checkpoint exports models)"
    return f"{NEEDLESS}: a checkpoint is written every half hour, and the model at the end"


def say_evals(to: Conversion, key: str, value: Any) -> str:
    if value == "no":
        return NEEDLESS
    if not to.get("val_set_size", "val_size"):
        return f"{MISSING}: tokenize data for validation, and give validation_data_path"
    if value == "epoch" or (key == "evals_per_epoch" and value == 1):
        to.train["validate_at_epoch"] = True
        return "validate_at_epoch: true"
    if key == "eval_steps" and value >= 1:
        to.train["validate_every_steps"] = int(value)
        return f"validate_every_steps: {int(value)}"
    return (
        f"{NEEDLESS}: data for validation is measured before and after the run"
        if value in ("no", "steps")
        else (f"{MISSING}: validate_every_steps counts steps")
    )


def say_share(to: Conversion, key: str, value: Any) -> str:
    if not value:
        return NEEDLESS
    if value >= 1:
        return f"{MISSING}: validation_share is a share, given {value} rows"
    to.data["validation_share"] = value
    to.train["validation_data_path"] = "data.validation.arrow"
    return f"validation_share: {value} (of process_data.py)"


def say_lora(to: Conversion, key: str, value: Any) -> str:
    """LoRA or QLoRA, by the names that Axolotl and LLaMA-Factory have for them."""
    if value not in ("lora", "qlora"):
        return NEEDLESS if value in (None, "full") else f"{MISSING}: full, LoRA, QLoRA and OSFT train here"
    to.train["lora"] = True
    if value == "qlora":
        to.train["base_quantization"] = "nf4"
    return "lora: true" + (", base_quantization: nf4" if value == "qlora" else "")


def say_bits(to: Conversion, key: str, value: Any) -> str:
    if not value:
        return NEEDLESS
    if key == "load_in_8bit" or value == 8:
        return f"{MISSING}: base_quantization can be nf4"
    to.train["base_quantization"] = "nf4"
    return "base_quantization: nf4"


def say_targets(to: Conversion, key: str, value: Any) -> str:
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else value
    if not names or names in (["all"], ["all-linear"]) or value is True:
        return f"{NEEDLESS}: every linear layer of the blocks has an adapter"
    to.train["lora_target_modules"] = names
    return f"lora_target_modules: {names}"


def is_so_anyway(name: str, value: Any) -> bool:
    """Whether what Axolotl's data set says holds for every one here: the rows show their names and roles."""
    if name == "message_property_mappings":
        return value in ({"role": "role", "content": "content"}, {"role": "from", "content": "value"})
    if name == "roles_to_train":
        return set(value or ()) <= {"assistant", "gpt", "model"}
    return name in ("path", "type", "ds_type") or (name, value) == ("train_on_eos", "turn")


def say_datasets(to: Conversion, key: str, value: Any) -> str:
    """Axolotl's list of data sets: files of rows, or one of the hub; what a row is, process_data.py sees by itself."""
    listed = value if isinstance(value, list) else [value]
    entries = [entry if isinstance(entry, dict) else {"path": entry} for entry in listed]
    paths = [str(entry["path"]) for entry in entries]
    others = {name for entry in entries for name, item in entry.items() if not is_so_anyway(name, item)}
    is_hub = len(entries) == 1 and data_ending(Path(paths[0])) not in ENDINGS
    said = {"field_messages": "messages_field"}
    if is_hub:
        said |= {"split": "split", "revision": "revision"}
        name = entries[0].get("name")
        others -= {"name"}
        to.data["input_dataset"] = paths[0] if name is None else f"{paths[0]}:{name}"
    else:
        to.data["input_file"] = paths
    for name, option in said.items():
        given = {entry.get(name) for entry in entries}
        if len(given) == 1 and None not in given:
            to.data[option] = given.pop()
            others -= {name}
    more = f"; of its own keys {', '.join(sorted(others))} have no counterpart" if others else ""
    return f"{'input_dataset' if is_hub else 'input_file'}: {', '.join(paths)} (of process_data.py){more}"


def say_hub_dataset(to: Conversion, key: str, value: Any) -> str:
    """TRL's data set of the hub, with its configuration."""
    config = to.given.get("dataset_config")
    to.data["input_dataset"] = value if config is None else f"{value}:{config}"
    return f"input_dataset: {to.data['input_dataset']} (of process_data.py)"


def say_listed_datasets(to: Conversion, key: str, value: Any) -> str:
    """LLaMA-Factory's names, by the list of data sets that is beside their files."""
    folder = Path(to.get("dataset_dir", default="data"))
    names = [name.strip() for name in str(value).split(",")]
    info = folder / "dataset_info.json"
    listed = json.loads(info.read_text()) if info.is_file() else {}
    entries = [listed.get(name, {}) for name in names]
    files = [entry.get("file_name") for entry in entries]
    if None in files:
        return f"{MISSING}: name its file as input_file in data.yaml (given {value!r}, not a file of {info})"
    to.data["input_file"] = [str(folder / file) for file in files]
    columns = {pair for entry in entries for pair in entry.get("columns", {}).items()} - ALPACA_COLUMNS
    messages = [column for what, column in columns if what == "messages"]
    if len(messages) == 1:
        to.data["messages_field"] = messages[0]
        columns.remove(("messages", messages[0]))
    others = ", ".join(sorted(f"{what}: {column}" for what, column in columns))
    more = f"; of its columns {others} have no counterpart" if others else ""
    return f"input_file: {', '.join(to.data['input_file'])} (of process_data.py){more}"


def say_template(to: Conversion, key: str, value: Any) -> str:
    if value in (None, "tokenizer_default", "default", "jinja"):
        return f"{NEEDLESS}: the model's own template is used"
    known = {"chatml": "chatml", "llama3": "llama3", "zephyr": "zephyr"}
    if value in known or str(value).endswith(".jinja"):
        to.data["chat_template"] = known.get(value, value)
        return f"chat_template: {to.data['chat_template']} (of process_data.py)"
    return f"{NEEDLESS}: the model's own template is used; if {value} is another, give its Jinja file as chat_template"


def say_trained(to: Conversion, key: str, value: Any) -> str:
    """Whether prompts are trained, too."""
    wants_all = value if key in ("train_on_inputs", "train_on_prompt") else not value
    return (
        f"{MISSING}: only the assistant's tokens are trained"
        if wants_all
        else (f"{NEEDLESS}: only the assistant's tokens are trained")
    )


def say_trackers(to: Conversion, key: str, value: Any) -> str:
    names = [value] if isinstance(value, str) else list(value or [])
    known = [name for name in names if name in ("wandb", "tensorboard", "mlflow", "trackio")]
    if known:
        to.train["track"] = known
    other = [name for name in names if name not in (*known, "none", "all")]
    return f"track: {known}" if known else f"{MISSING}: {', '.join(other)}" if other else NEEDLESS


def say_tracker(name: str, *, option: str | None = None) -> Rule:
    """A key that only matters to one tracker, which it thereby asks for."""

    def rule(to: Conversion, key: str, value: Any) -> str:
        if not value:
            return NEEDLESS
        to.train["track"] = sorted({*to.train.get("track", []), name})
        if option is not None:
            to.train[option] = value
        return f"track: {name}" + (f", {option}: {value}" if option else "")

    return rule


def offloads(value: Any) -> bool:
    """Whether a file's name says so, or an entry that is not off."""
    if not isinstance(value, dict):
        return "offload" in str(value).lower()
    for key, item in value.items():
        switch = item.get("device") if isinstance(item, dict) else item
        if offloads(item) or ("offload" in key and switch not in (False, None, "none", "false")):
            return True
    return False


def say_sharding(to: Conversion, key: str, value: Any) -> str:
    """DeepSpeed's and FSDP's files: everything is sharded by FSDP2 here."""
    if offloads(value):
        to.train["cpu_offload"] = True
        return "cpu_offload: true; else needs no option: FSDP2 shards everything"
    return f"{NEEDLESS}: FSDP2 shards weights, gradients and optimizer"


SCHEDULES = {
    name: name for name in ("constant", "constant_with_warmup", "linear", "cosine", "polynomial", "inverse_sqrt")
} | {"cosine_with_restarts": "cosine_with_restarts", "warmup_stable_decay": "wsd", "cosine_with_min_lr": "cosine"}
OPTIMIZERS = dict.fromkeys(
    ("adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused"), "adamw"
) | dict.fromkeys(("adamw_bnb_8bit", "adamw_8bit", "paged_adamw_8bit", "adamw_torch_8bit"), "adamw8bit")  # fmt: skip
PACKED = needless("samples are always packed, and never see each other")
LOGGED = needless("every step is a line of training_metrics_0.jsonl")
IN_BF16 = needless("on CUDA compute is in bfloat16, with weights in float32")
RESUMED = needless("the same command goes on where it was")
CHECKPOINTING = choose("activation_checkpointing", {True: "full", False: "none", "unsloth": "full", "offload": "full"})
OFFLOADING = say_if_true(activation_checkpointing="full", offload_activations=True)
ATTENTION = needless("the fastest attention that the machine has is taken")

# Keys of transformers.TrainingArguments, which all three share.
SHARED: dict[str, Rule] = {
    "output_dir": say("output_dir"),
    "learning_rate": say("learning_rate"),
    "lr_scheduler": choose("lr_scheduler", SCHEDULES),
    "lr_scheduler_type": choose("lr_scheduler", SCHEDULES),
    "lr_scheduler_kwargs": say_schedule_details,
    "warmup_steps": say_warmup,
    "warmup_ratio": say("warmup_ratio"),
    "weight_decay": say("weight_decay"),
    "adam_beta1": say("adam_beta1"),
    "adam_beta2": say("adam_beta2"),
    "adam_epsilon": say("adam_eps"),
    "max_grad_norm": say("max_grad_norm"),
    "optim": choose("optimizer", OPTIMIZERS),
    "optimizer": choose("optimizer", OPTIMIZERS),
    "num_epochs": say_epochs,
    "num_train_epochs": say_epochs,
    "max_steps": say_steps,
    "micro_batch_size": say_batch,
    "per_device_train_batch_size": say_batch,
    "gradient_accumulation_steps": say_batch,
    "seed": say("seed"),
    "attn_implementation": ATTENTION,
    "trust_remote_code": needless("a model that brings code of its own is refused, and told how to be trusted"),
    "gradient_checkpointing": CHECKPOINTING,
    "gradient_checkpointing_kwargs": needless("recomputation is torch's, without reentry"),
    "save_steps": say_saves,
    "save_strategy": say_saves,
    "saves_per_epoch": say_saves,
    "save_total_limit": say("keep_checkpoints"),
    "eval_steps": say_evals,
    "eval_strategy": say_evals,
    "evals_per_epoch": say_evals,
    "early_stopping_patience": say("early_stopping_patience"),
    "torch_compile": say_if_true(compile=True),
    "report_to": say_trackers,
    "run_name": say("track_name"),
    "hub_model_id": say("push_to_hub"),
    "push_to_hub": needless("push_to_hub is the repository's name"),
    "hub_private_repo": say("hub_private"),
    "use_liger_kernel": say_if_true(use_liger_kernels=True),
    "bf16": IN_BF16,
    "tf32": needless("products are in bfloat16"),
    "fp16": missing("compute_dtype can be bfloat16 or float32"),
    "logging_steps": LOGGED,
    "logging_first_step": LOGGED,
    "logging_strategy": LOGGED,
    "logging_dir": LOGGED,
    "resume_from_checkpoint": RESUMED,
    "overwrite_output_dir": missing("another run's directory is never written into"),
    "save_only_model": RESUMED,
    "load_best_model_at_end": needless("hf_format/best is the export with the lowest validation loss"),
    "metric_for_best_model": needless("the best export is the one with the lowest validation loss"),
    "greater_is_better": needless("the best export is the one with the lowest validation loss"),
    "group_by_length": PACKED,
    "deepspeed": say_sharding,
    "fsdp": say_sharding,
    "fsdp_config": say_sharding,
    "ddp_timeout": needless("--hang-timeout ends a run that hangs"),
    "dataloader_num_workers": needless("batches are packed in the background"),
    "dataloader_pin_memory": needless("batches are packed in the background"),
    "remove_unused_columns": needless("tokenized data has the columns that training reads"),
    "per_device_eval_batch_size": needless("validation is packed as training is"),
    "eval_batch_size": needless("validation is packed as training is"),
    "neftune_noise_alpha": say_unless_zero("neftune_alpha"),
    "label_smoothing_factor": say_unless_zero("label_smoothing"),
    "do_train": needless("train.py trains"),
    "do_eval": needless("data for validation is measured"),
    "lora_r": say("lora_rank"),
    "lora_rank": say("lora_rank"),
    "lora_alpha": say("lora_alpha"),
    "lora_dropout": say("lora_dropout"),
    "lora_target_modules": say_targets,
    "lora_modules_to_save": say("lora_modules_to_save"),
    "use_rslora": say("lora_use_rslora"),
    "use_dora": say("lora_use_dora"),
    "load_in_4bit": say_bits,
    "load_in_8bit": say_bits,
}
AXOLOTL: dict[str, Rule] = SHARED | {
    "base_model": say_model,
    "revision_of_model": say("model_revision"),
    "datasets": say_datasets,
    "chat_template": say_template,
    "chat_template_jinja": say_data("chat_template"),
    "val_set_size": say_share,
    "dataset_processes": say_data("num_proc"),
    "sequence_len": say_length,
    "adapter": say_lora,
    "lora_model_dir": say("lora_adapter"),
    "lora_target_linear": say_targets,
    "peft_use_rslora": say("lora_use_rslora"),
    "peft_use_dora": say("lora_use_dora"),
    "noisy_embedding_alpha": say_unless_zero("neftune_alpha"),
    "cosine_min_lr_ratio": say("min_lr_ratio"),
    "wandb_project": say_tracker("wandb", option="track_project"),
    "wandb_name": say_tracker("wandb", option="track_name"),
    "wandb_run_id": needless("a resumed run goes on in the tracker's run"),
    "wandb_entity": missing("set WANDB_ENTITY"),
    "wandb_watch": missing("gradients are not sent"),
    "wandb_log_model": missing("--push-to-hub uploads exports"),
    "use_tensorboard": say_tracker("tensorboard"),
    "mlflow_tracking_uri": say_tracker("mlflow"),
    "mlflow_experiment_name": say_tracker("mlflow", option="track_project"),
    "special_tokens": missing("process_data.py --add-special-tokens adds tokens; roles of tokens are the tokenizer's"),
    "tokens": say_data("add_special_tokens"),
    "train_on_inputs": say_trained,
    "roles_to_train": needless("the assistant's tokens are trained"),
    "tiled_mlp": say_if_true(tiled_mlp=True),
    "activation_offloading": OFFLOADING,
    "plugins": needless("--use-liger-kernels takes Liger's kernels"),
    "liger_rope": say_if_true(use_liger_kernels=True),
    "liger_rms_norm": say_if_true(use_liger_kernels=True),
    "liger_glu_activation": say_if_true(use_liger_kernels=True),
    "liger_fused_linear_cross_entropy": needless("the loss never holds all logits"),
    "hub_strategy": needless("every export is uploaded"),
    **dict.fromkeys(("sample_packing", "eval_sample_packing", "pad_to_sequence_len", "multipack_real_batches"), PACKED),
    **dict.fromkeys(("flash_attention", "sdp_attention", "xformers_attention", "flex_attention"), ATTENTION),
    **dict.fromkeys(("auto_resume_from_checkpoints", "dataset_prepared_path"), RESUMED),
    **dict.fromkeys(("model_type", "tokenizer_type", "base_model_config", "is_llama_derived_model"),
                    needless("the checkpoint's config says it")),
    **dict.fromkeys(("shuffle_merged_datasets", "shuffle_before_merging_datasets"),
                    needless("samples come in a random order, another one in each epoch")),
    **dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "flash_attn_cross_entropy",
                     "flash_attn_rms_norm", "flash_attn_fuse_qkv", "flash_attn_fuse_mlp"),
                    needless("a matter of speed alone")),
    **dict.fromkeys(("dp_shard_size", "dp_replicate_size", "fsdp_version"), say_sharding),
    **dict.fromkeys(("tensor_parallel_size", "context_parallel_size", "expert_parallel_size"),
                    lambda to, key, value: NEEDLESS if value == 1 else f"{MISSING}: data and weights are sharded"),
    "save_first_step": needless("--preset sanity tries an export first"),
    "eval_table_size": missing("generate.py writes answers"),
    **dict.fromkeys(("local_rank", "debug"), needless("torchrun says it")),
    "strict": needless("an unknown option is always refused"),
}  # fmt: skip
LLAMA_FACTORY: dict[str, Rule] = SHARED | {
    "model_name_or_path": say_model,
    "model_revision": say("model_revision"),
    "stage": lambda to, key, value: NEEDLESS if value == "sft" else f"{MISSING}: {value} is not fine-tuning on answers",
    "finetuning_type": say_lora,
    "lora_target": say_targets,
    "adapter_name_or_path": say("lora_adapter"),
    "additional_target": say_targets,
    "quantization_bit": say_bits,
    "dataset": say_listed_datasets,
    "dataset_dir": needless("input_file is a path"),
    "eval_dataset": lambda to, key, value: f"{MISSING}: tokenize it, and give validation_data_path (given {value!r})",
    "val_size": say_share,
    "template": say_template,
    "cutoff_len": say_length,
    "max_samples": missing("the first rows of a file are not taken for all of it"),
    "preprocessing_num_workers": say_data("num_proc"),
    "overwrite_cache": needless("process_data.py writes what it is told to"),
    "packing": PACKED,
    "neat_packing": PACKED,
    "train_on_prompt": say_trained,
    "mask_history": missing("every turn of the assistant is trained; rows can say it by message with train: false"),
    "flash_attn": ATTENTION,
    "enable_liger_kernel": say_if_true(use_liger_kernels=True),
    "plot_loss": needless("plot_metrics.py draws every metric"),
    "interleave_probs": say("data_weights"),
    "mix_strategy": needless("--data-weights mix data sets"),
}
TRL: dict[str, Rule] = SHARED | {
    "model_name_or_path": say_model,
    "model_revision": say("model_revision"),
    "dataset_name": say_hub_dataset,
    "dataset_config": needless("it is written into input_dataset"),
    "dataset_train_split": say_data("split"),
    "dataset_test_split": missing("tokenize it, and give validation_data_path"),
    "max_length": say_length,
    "max_seq_length": say_length,
    "chat_template_path": say_data("chat_template"),
    "dataset_num_proc": say_data("num_proc"),
    "use_peft": say_if_true(lora=True),
    "assistant_only_loss": say_trained,
    "completion_only_loss": say_trained,
    "eos_token": missing("turns end with the stop token that the chat template writes"),
    "activation_offloading": OFFLOADING,
    **dict.fromkeys(("packing", "eval_packing", "packing_strategy", "padding_free", "pad_to_multiple_of"), PACKED),
    **dict.fromkeys(("dtype", "torch_dtype"), IN_BF16),
}
# Which trainer a file is of: by keys that only its files have.
TRAINERS = {
    "axolotl": (AXOLOTL, ("base_model", "datasets", "micro_batch_size", "sequence_len")),
    "llama-factory": (LLAMA_FACTORY, ("finetuning_type", "stage", "cutoff_len", "template")),
    "trl": (TRL, ("max_length", "max_seq_length", "dataset_name", "use_peft", "per_device_train_batch_size")),
}


# Where a key is not given, what these trainers take, and this one would not.
OF_TRANSFORMERS = {
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "num_train_epochs": 3,
    "per_device_train_batch_size": 8,
    "adam_beta2": 0.999,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "axolotl": {"lr_scheduler": "cosine", "num_epochs": 1, "micro_batch_size": 1, "adam_beta2": 0.999},
    "llama-factory": OF_TRANSFORMERS | {"cutoff_len": 2048},
    "trl": OF_TRANSFORMERS | {"learning_rate": 2e-5, "max_length": 1024},
}
DEFAULTS_OF_LORA: dict[str, dict[str, Any]] = {
    "axolotl": {},
    "llama-factory": {"lora_rank": 8},
    "trl": {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]},
}


def recognize(given: dict[str, Any]) -> str:
    """The trainer with the most keys of its own in the file."""
    counts = {name: sum(key in given for key in own) for name, (_, own) in TRAINERS.items()}
    best = max(counts, key=counts.get)
    if counts[best] == 0:
        raise ValueError(f"its keys are of no trainer that is known ({', '.join(TRAINERS)}): say which with --trainer")
    return best


def convert(given: dict[str, Any], trainer: str, *, num_gpus: int) -> Conversion:
    """Goes through every key, in the file's order, and through those left out that have other defaults here."""
    rules, _ = TRAINERS[trainer]
    has_lora = given.get("use_peft") or given.get("adapter") or given.get("finetuning_type") == "lora"
    defaults = DEFAULTS[trainer] | (DEFAULTS_OF_LORA[trainer] if has_lora else {})
    to = Conversion(defaults | {key: value for key, value in given.items() if value is not None}, num_gpus)
    for key, value in given.items():
        if key not in rules:
            to.told[key] = f"{MISSING}: not known here"
        elif value is None and key not in defaults:
            to.told[key] = f"{NEEDLESS}: empty"
        else:
            to.told[key] = rules[key](to, key, to.given[key])
    for key in [name for name in defaults if name not in given]:
        to.told[key] = f"{rules[key](to, key, defaults[key])} ({trainer}'s default)"
    to.data.setdefault("output_file", "data.arrow")
    to.train.setdefault("data_path", "data.arrow")
    return to


def as_number(value: Any) -> Any:
    """YAML 1.1 takes 1e-4 for a word."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def import_config(options: ImportConfigOptions) -> None:
    path, output_dir = Path(options.config_file), Path(options.output_dir)
    given = {str(key): as_number(value) for key, value in read_yaml(path, named=str(path)).items()}
    try:
        trainer = options.trainer or recognize(given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    to = convert(given, trainer, num_gpus=options.num_gpus)
    outputs = {
        output_dir / "data.yaml": (ProcessDataOptions, to.data),
        output_dir / "train.yaml": (TrainOptions, to.train),
    }
    there = [str(output) for output in outputs if output.exists()]
    if there:
        raise ValueError(f"{', '.join(there)}: there already; name another --output-dir")
    output_dir.mkdir(parents=True, exist_ok=True)
    for output, (options_class, values) in outputs.items():
        needed = [option.name for option, _ in iterate_fields(options_class) if option.default is dataclasses.MISSING]
        head = f"# From {path.name} ({trainer}), by import_config.py.\n"
        if options_class is ProcessDataOptions and not {"input_file", "input_dataset"} & set(values):
            needed.append("input_file")
        head += "".join(f"# {name}: has to be given\n" for name in needed if name not in values)
        output.write_text(head + describe_options(options_class, values))
    print(f"{path}: read as {trainer}'s, for {options.num_gpus} GPU{'s' if options.num_gpus > 1 else ''}")
    width = max(map(len, to.told))
    for key, what in to.told.items():
        print(f"  {key:{width}}  {what}")
    unsaid = [key for key, what in to.told.items() if what.startswith(MISSING)]
    num_said = len(to.told) - len(unsaid)
    print(f"{num_said} of {len(to.told)} keys are said or needless; no counterpart: {', '.join(unsaid) or 'none'}")
    print(f"wrote {' and '.join(map(str, outputs))}")


if __name__ == "__main__":
    options = parse_options(ImportConfigOptions)
    try:
        import_config(options)
    except (ValueError, OSError) as error:
        exit_with_message(str(error))
