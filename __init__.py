"""mini_trainer: fine-tuning in the Hugging Face format (see README.md, and docs/python_api.md).

    from mini_trainer import TorchrunArgs, TrainingArgs, run_training

Imports nothing heavy: both functions start processes.
"""

from .api.arguments import (
    DataProcessArgs,
    DeepSpeedOptions,
    DistributedBackend,
    FSDPOptions,
    LoraOptions,
    PretrainingConfig,
    QuantizeDataType,
    ShardingStrategies,
    TorchrunArgs,
    TrainingArgs,
)
from .api.callbacks import Answer, Callback, StartedRun
from .api.errors import TrainingError
from .api.launch import TrainingResult, process_data, run_training
from .api.root_modules import install
from .options import OSFTOptions

install()
del install

__version__ = "0.1.0"

__all__ = [
    "Answer",
    "Callback",
    "DataProcessArgs",
    "DeepSpeedOptions",
    "DistributedBackend",
    "FSDPOptions",
    "LoraOptions",
    "OSFTOptions",
    "PretrainingConfig",
    "QuantizeDataType",
    "ShardingStrategies",
    "StartedRun",
    "TorchrunArgs",
    "TrainingArgs",
    "TrainingError",
    "TrainingResult",
    "process_data",
    "run_training",
]
