"""The arguments of `run_training` and `process_data`: the scripts' own options, and InstructLab's names beside them.

Every option of train.py is a field of `TrainingArgs`, and every option of process_data.py one of `DataProcessArgs`, by
its own name, as `options/` declares them: what is not given has the default that stands there. The fields below are
those that users of InstructLab's trainer know; they mean what they mean there.
"""

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..options import OSFTOptions, ProcessDataOptions, TrainOptions, iterate_fields


class Given(Enum):
    """`NOTHING` stands where no value was given: the option's own default holds."""

    NOTHING = "default"

    def __repr__(self) -> str:
        return self.value


NOTHING = Given.NOTHING


def make_own_fields(name: str, options_class: type) -> type:
    """A dataclass with a field for every option, whichever group it is in; none has to be given."""
    fields = [(option.name, option.type | Given, field(default=NOTHING)) for option, _ in iterate_fields(options_class)]
    return dataclasses.make_dataclass(name, fields, kw_only=True)


class DistributedBackend(Enum):
    """FSDP2 is the one there is."""

    FSDP = "fsdp"
    DEEPSPEED = "deepspeed"


class ShardingStrategies(Enum):
    """PyTorch's names for what is divided over the ranks."""

    FULL_SHARD = "FULL_SHARD"
    SHARD_GRAD_OP = "SHARD_GRAD_OP"
    NO_SHARD = "NO_SHARD"
    HYBRID_SHARD = "HYBRID_SHARD"


class QuantizeDataType(Enum):
    """How LoRA's base is held."""

    NF4 = "nf4"
    NONE = None


@dataclass(kw_only=True)
class TorchrunArgs:
    """Which processes are started: torchrun's arguments of these names, on every machine the same but `node_rank`.

    The machines meet at `rdzv_endpoint` (HOST:PORT), or at `master_addr` and `master_port`; one machine needs neither.
    """

    nproc_per_node: int | str = 1  # or "gpu": one for each
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
    """DeepSpeed's offloading, the one of its options with a counterpart."""

    cpu_offload_optimizer: bool = False
    cpu_offload_optimizer_ratio: float = 1
    cpu_offload_optimizer_pin_memory: bool = False
    save_samples: int | None = None


@dataclass(kw_only=True)
class PretrainingConfig:
    """Documents in blocks: refused by `run_training` with what to do instead."""

    block_size: int
    document_column_name: str = "document"


@dataclass(kw_only=True)
class TrainingArgs(make_own_fields("TrainFields", TrainOptions)):
    """What is trained: any option of train.py, and InstructLab's names for them, of which each is given by one.

    With `process_data`, `data_path` is chats, which are tokenized into `data_output_dir` first; without, it is what
    process_data.py has written. In place of it, `input_file`, `input_dataset` or `mock_data` say what to train on.
    `lora` and `osft` take True, with options beside, or all of theirs in one object.
    """

    process_data: bool = True
    data_output_dir: str | None = None
    max_seq_len: int | None = None
    chat_tmpl_path: str | None = None
    mock_data: int | bool | Given = NOTHING  # samples of random tokens in place of data; True: 10,000
    mock_data_len: int | Given = NOTHING  # tokens of each
    data_process_num_cpu_procs: int | None = None
    validation_split: float = 0.0
    validation_frequency: int | None = None

    model_path: str | Given = NOTHING
    ckpt_output_dir: str | Given = NOTHING
    max_batch_len: int | str | Given = NOTHING
    num_epochs: int | Given = NOTHING
    effective_batch_size: int | Given = NOTHING
    save_samples: int | Given = NOTHING
    keep_last_checkpoint_only: bool = False
    warmup_steps: int | Given = NOTHING
    random_seed: int | Given = NOTHING
    adamw_weight_decay: float | Given = NOTHING
    adamw_betas: tuple[float, float] | Given = NOTHING
    adamw_eps: float | Given = NOTHING
    use_liger: bool | Given = NOTHING
    log_level: str | Given = NOTHING

    lora: LoraOptions | bool | Given | None = NOTHING
    osft: OSFTOptions | bool | Given | None = NOTHING
    fsdp_options: FSDPOptions | None = None
    deepspeed_options: DeepSpeedOptions | None = None
    distributed_backend: DistributedBackend | str = DistributedBackend.FSDP
    disable_flash_attn: bool = False

    mlflow_tracking_uri: str | None = None
    mlflow_experiment_name: str | None = None
    mlflow_run_name: str | None = None
    wandb_project: str | None = None
    wandb_entity: str | None = None
    wandb_run_name: str | None = None
    tensorboard_log_dir: str | None = None
    is_padding_free: bool | None = None  # every batch is

    # What InstructLab has and this trainer does not; see `api.commands.NO_COUNTERPART`.
    use_dolomite: Any = NOTHING
    use_legacy_tmpl: Any = NOTHING
    accelerate_full_state_at_epoch: Any = NOTHING
    on_demand_checkpointing: Any = NOTHING
    pretraining_config: Any = NOTHING
    callbacks: Any = NOTHING


@dataclass(kw_only=True)
class DataProcessArgs(make_own_fields("DataFields", ProcessDataOptions)):
    """What is tokenized: any option of process_data.py, and InstructLab's names for them."""

    data_path: str | Given = NOTHING
    data_output_path: str | Given = NOTHING  # a directory, in which data.arrow is written; or a file
    max_seq_len: int | Given = NOTHING
    model_path: str | Given = NOTHING
    chat_tmpl_path: str | Given | None = NOTHING
    num_cpu_procs: int | Given = NOTHING
