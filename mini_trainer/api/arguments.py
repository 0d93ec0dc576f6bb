"""The arguments of `run_training` and `process_data`: the scripts' own options, plus InstructLab's names for them.

Every option of train.py is a field of `TrainingArgs`, and every option of process_data.py one of `DataProcessArgs`,
under its own name and with its default from `options/`. The fields declared below have the names and meanings of
InstructLab's trainer.
"""

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mini_trainer.options import OSFTOptions, TrainOptions, iterate_fields
from mini_trainer.options.tools import ProcessDataOptions
from mini_trainer.run.hooks import Callback


class Given(Enum):
    """Type of `NOTHING`, which marks a field without a value: the option's own default applies."""

    NOTHING = "default"

    def __repr__(self) -> str:
        return self.value


NOTHING = Given.NOTHING


def make_own_fields(name: str, options_class: type) -> type:
    """Makes a dataclass with a field for every option of every group; all fields are optional."""
    fields = [(option.name, option.type | Given, field(default=NOTHING)) for option, _ in iterate_fields(options_class)]
    return dataclasses.make_dataclass(name, fields, kw_only=True)


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
    """Processes to start: torchrun's arguments of these names, equal on every machine except `node_rank`.

    The machines rendezvous at `rdzv_endpoint` (HOST:PORT), or at `master_addr` and `master_port`; a single machine
    needs neither.
    """

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


@dataclass(kw_only=True)
class PretrainingConfig:
    """Documents in blocks; `run_training` refuses this and says what to do instead."""

    block_size: int
    document_column_name: str = "document"


@dataclass(kw_only=True)
class TrainingArgs(make_own_fields("TrainFields", TrainOptions)):
    """Training arguments: any option of train.py, under its own name or InstructLab's, but not both.

    With `process_data`, `data_path` names chats, which are first tokenized into `data_output_dir`; without, it names
    the output of process_data.py. Alternatives to `data_path` are `input_file`, `input_dataset` and `mock_data`.
    `lora` and `osft` take True, with separate options, or an object that holds their options.
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
    mock_data_len: int | Given = NOTHING
    data_process_num_cpu_procs: int | None = None
    """Processes that tokenize."""
    validation_split: float = 0.0
    """Share of the chats that is held out for validation."""
    validation_frequency: int | None = None
    """Steps between validations."""

    model_path: str | Given = NOTHING
    ckpt_output_dir: str | Given = NOTHING
    max_batch_len: int | str | Given = NOTHING
    num_epochs: int | Given = NOTHING
    effective_batch_size: int | Given = NOTHING
    save_samples: int | Given = NOTHING
    keep_last_checkpoint_only: bool = False
    """Keep one export, which each epoch replaces: `export_name="last_epoch"`."""
    warmup_steps: int | Given = NOTHING
    random_seed: int | Given = NOTHING
    adamw_weight_decay: float | Given = NOTHING
    adamw_betas: tuple[float, float] | Given = NOTHING
    """`adam_beta1` and `adam_beta2`."""
    adamw_eps: float | Given = NOTHING
    use_liger: bool | Given = NOTHING
    log_level: str | Given = NOTHING

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
    disable_flash_attn: bool = False
    """`attention="sdpa"`."""

    callbacks: type[Callback] | str | tuple[type[Callback] | str, ...] | Given = NOTHING
    """Classes derived from `Callback`, or their import paths, package.module:Class."""

    mlflow_tracking_uri: str | None = None
    """Track with MLflow at this address."""
    mlflow_experiment_name: str | None = None
    """Track with MLflow: `track_project`."""
    mlflow_run_name: str | None = None
    """Track with MLflow: `track_name`."""
    wandb_project: str | None = None
    """Track with wandb: `track_project`."""
    wandb_entity: str | None = None
    """Track with wandb for this entity."""
    wandb_run_name: str | None = None
    """Track with wandb: `track_name`."""
    tensorboard_log_dir: str | None = None
    """Refused: `track="tensorboard"` writes into the run's directory."""
    is_padding_free: bool | None = None
    """No effect: training is always padding-free."""

    use_dolomite: Any = NOTHING
    """Refused: InstructLab's option has no counterpart (`api.commands.NO_COUNTERPART`)."""
    use_legacy_tmpl: Any = NOTHING
    """Refused: InstructLab's option has no counterpart (`api.commands.NO_COUNTERPART`)."""
    accelerate_full_state_at_epoch: Any = NOTHING
    """Refused: InstructLab's option has no counterpart (`api.commands.NO_COUNTERPART`)."""
    on_demand_checkpointing: Any = NOTHING
    """Refused: InstructLab's option has no counterpart (`api.commands.NO_COUNTERPART`)."""
    pretraining_config: Any = NOTHING
    """Refused: InstructLab's option has no counterpart (`api.commands.NO_COUNTERPART`)."""


@dataclass(kw_only=True)
class DataProcessArgs(make_own_fields("DataFields", ProcessDataOptions)):
    """Tokenization arguments: any option of process_data.py, under its own name or InstructLab's."""

    data_path: str | Given = NOTHING
    data_output_path: str | Given = NOTHING
    """A file, or a directory to write data.arrow in."""
    max_seq_len: int | Given = NOTHING
    model_path: str | Given = NOTHING
    chat_tmpl_path: str | Given | None = NOTHING
    num_cpu_procs: int | Given = NOTHING
