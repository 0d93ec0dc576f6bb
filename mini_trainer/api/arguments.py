"""The arguments of `run_training` and `process_data`: the scripts' own options, plus InstructLab's names for them.

Every option of train.py is a field of `TrainingArgs`, and every option of process_data.py one of `DataProcessArgs`,
under its own name and with its default from `options/`. The fields declared below have the names and meanings of
InstructLab's trainer and of Red Hat's mini_trainer.
"""

import dataclasses
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from mini_trainer.options import OSFTOptions, TrainOptions, list_types
from mini_trainer.options.foreign_names import DATA_NAMES, TRAIN_NAMES, find_option, find_row
from mini_trainer.options.tools import ProcessDataOptions


class Given(Enum):
    """Type of `NOTHING`, which marks a field without a value: the option's own default applies."""

    NOTHING = "default"

    def __repr__(self) -> str:
        return self.value


NOTHING = Given.NOTHING


class FieldsByName:
    """pydantic's `model_fields`, in which callers of InstructLab's trainer look for a field."""

    def __get__(self, instance: Any, owner: type) -> dict[str, Any]:
        return {field.name: field for field in dataclasses.fields(owner)}


def refuse_unknown(cls: type, *args: Any, **given: Any) -> Any:
    """`__new__` of a class of arguments; TypeError with what to use for a name that is no field."""
    names = {field.name for field in dataclasses.fields(cls)}
    for name in given.keys() - names:
        from mini_trainer.options.answers import describe_unknown

        raise TypeError(f"{cls.__name__}: unknown argument {name!r}{describe_unknown(name, names, spell=repr)}")
    return object.__new__(cls)


def make_fields(name: str, options_class: type, foreign: list[str]) -> type:
    """Makes a dataclass with a field for every option of every group, and for foreign names; all are optional."""
    types = list_types(options_class)
    types |= {
        each: bool if True in find_row(each).values else types.get(find_option(each, types), Any) for each in foreign
    }
    fields = [(each, kind if kind is Any else kind | Given, field(default=NOTHING)) for each, kind in types.items()]
    namespace = {"model_fields": FieldsByName(), "__new__": refuse_unknown}
    return dataclasses.make_dataclass(name, fields, kw_only=True, namespace=namespace)


class DistributedBackend(Enum):
    """InstructLab's names of backends; only FSDP (here FSDP2) is implemented."""

    FSDP = "fsdp"
    DEEPSPEED = "deepspeed"


class ShardingStrategies(Enum):
    """PyTorch's names of sharding strategies."""

    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    NO_SHARD = "NO_SHARD"
    HYBRID_SHARD = "HYBRID_SHARD"


class QuantizeDataType(Enum):
    """Quantization of LoRA's base model."""

    NF4 = "nf4"
    NONE = None


@dataclass(kw_only=True)
class TorchrunArgs:
    """Processes to start: torchrun's arguments of these names, equal on every machine except `node_rank`. The machines
    rendezvous at `rdzv_endpoint` (HOST:PORT), or at `master_addr` and `master_port`; a single machine needs neither."""

    nproc_per_node: int | str = 1  # or "gpu": one per GPU
    nnodes: int = 1
    node_rank: int = 0
    rdzv_id: int | str | None = None
    rdzv_endpoint: str | None = None
    master_addr: str | None = None
    master_port: int | None = None


@dataclass(kw_only=True)
class LoraOptions:
    """LoRA, with InstructLab's names and defaults."""

    rank: int = 4
    alpha: float = 32
    dropout: float = 0.1
    target_modules: list[str] | None = None  # None: every linear layer of the blocks
    quantize_data_type: QuantizeDataType | str | None = None


@dataclass(kw_only=True)
class FSDPOptions:
    """Sharding, with InstructLab's names and defaults."""

    cpu_offload_params: bool = False
    sharding_strategy: ShardingStrategies | str = ShardingStrategies.HYBRID_SHARD


@dataclass(kw_only=True)
class DeepSpeedOptions:
    """DeepSpeed's optimizer offloading, its only option with a counterpart."""

    cpu_offload_optimizer: bool = False
    cpu_offload_optimizer_ratio: float = 1
    cpu_offload_optimizer_pin_memory: bool = False
    save_samples: int | None = None


@dataclass
class PretrainingConfig:
    """Pre-training: documents are joined, and cut into blocks of this many tokens."""

    block_size: int
    document_column_name: str = "document"  # of documents that are not tokenized yet


class TrainingMode(StrEnum):
    """Red Hat's name for the end of a run: which of `max_epochs`, `max_steps` and `max_tokens` counts."""

    EPOCH = "epoch"
    STEP = "step"
    TOKEN = "token"
    INFINITE = "infinite"


@dataclass(kw_only=True)
class TrainingArgs(make_fields("TrainFields", TrainOptions, TRAIN_NAMES)):
    """Training arguments: any option of train.py, under its own name or InstructLab's, but not both.

    If `data_path` names chats, they are first tokenized into `data_output_dir`; if it names tokenized data, that is
    trained on, and with `process_data=False` nothing is tokenized. Alternatives to `data_path` are `input_file`,
    `input_dataset` and `mock_data`. `lora` and `osft` take True, with separate options, or an object that holds their
    options.
    """

    process_data: bool = True
    """Tokenize the chats of `data_path` first; if False, `data_path` is tokenized data."""
    data_output_dir: str | None = None
    """Directory for the tokenized data."""
    max_seq_len: int | None = None
    """Longer samples are dropped, and counted."""
    chat_tmpl_path: str | None = None
    """Jinja file of the chat template. Default: the model's."""
    mock_data: int | bool | Given = NOTHING
    """Number of samples of random tokens, instead of data; True: 10,000."""
    data_process_num_cpu_procs: int | None = None
    """Processes that tokenize."""
    validation_split: float = 0.0
    """Share of the chats that is held out for validation."""

    adamw_betas: tuple[float, float] | Given = NOTHING
    """`adam_beta1` and `adam_beta2`."""

    lora: LoraOptions | bool | Given | None = NOTHING
    """LoRA: True, with options of their own, or an object with InstructLab's."""
    osft: OSFTOptions | bool | Given | None = NOTHING
    """OSFT: True, with options of their own, or an object with them."""
    fsdp_options: FSDPOptions | None = None
    """Sharding, with InstructLab's names."""
    deepspeed_options: DeepSpeedOptions | None = None
    """Optimizer offloading, with InstructLab's names."""
    distributed_backend: DistributedBackend | str = DistributedBackend.FSDP
    """Must be "fsdp"."""

    callbacks: Any = NOTHING
    """Classes derived from `Callback` or from Red Hat's `TrainerCallback`, objects of them, or import paths,
    package.module:Class; one, or a list."""

    mlflow_tracking_uri: str | None = None
    """Track with MLflow at this address."""
    mlflow_experiment_name: str | None = None
    """Track with MLflow: the experiment."""
    mlflow_run_name: str | None = None
    """Track with MLflow: the run's name."""
    wandb_project: str | None = None
    """Track with wandb: the project."""
    wandb_entity: str | None = None
    """Track with wandb for this entity."""
    wandb_run_name: str | None = None
    """Track with wandb: the run's name."""
    tensorboard_log_dir: str | None = None
    """Refused: `track="tensorboard"` writes into the run's directory."""

    training_mode: TrainingMode | str | Given | None = NOTHING
    """Which of `max_epochs`, `max_steps` and `max_tokens` ends the run. Callers that give it are written for Red Hat's
    mini_trainer: its defaults apply where they differ (docs/reference/training_hub.md)."""
    lr_scheduler_kwargs: dict[str, Any] | None = None
    """transformers' arguments of the schedule: `min_lr`, `min_lr_rate`, `num_cycles`, `power`, `lr_end`,
    `num_decay_steps`, `min_lr_ratio`."""
    osft_upcast_dtype: str | Given | None = NOTHING
    """No effect: OSFT decomposes in float64 and computes in float32; lower precision is refused."""
    min_samples_per_validation: int | None = None
    """Validate whenever this many samples were trained on: `validate_every_steps`, by `batch_size`."""
    val_loss_improvement_threshold: float | Given | None = NOTHING
    """Least improvement by which a validation is the best: `best_metric="loss:0.01"`."""
    pretraining_config: PretrainingConfig | None = None
    """Documents, tokenized or not, in blocks of tokens."""


@dataclass(kw_only=True)
class DataProcessArgs(make_fields("DataFields", ProcessDataOptions, DATA_NAMES)):
    """Tokenization arguments: any option of process_data.py, under its own name or InstructLab's."""
