"""mini_trainer: fine-tuning in the Hugging Face format (see README.md, and docs/reference/python_api.md).

    from mini_trainer import TorchrunArgs, TrainingArgs, run_training

These names are imported when they are asked for. They import nothing heavy: both functions start processes.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mini_trainer.root_files import install

if TYPE_CHECKING:
    from mini_trainer.api.arguments import (
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
        TrainingMode,
    )
    from mini_trainer.api.errors import TrainingError
    from mini_trainer.api.launch import TrainingResult, process_data, run_training
    from mini_trainer.api.trainer_callbacks import TrainerCallback, TrainingContext
    from mini_trainer.options import OSFTOptions
    from mini_trainer.run.hooks import Answer, Callback, StartedRun

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
    "TrainerCallback",
    "TrainingArgs",
    "TrainingContext",
    "TrainingError",
    "TrainingMode",
    "TrainingResult",
    "process_data",
    "run_training",
]

MODULES = {  # of these names; all others are in api.arguments
    **dict.fromkeys(("Answer", "Callback", "StartedRun"), "run.hooks"),
    **dict.fromkeys(("TrainingResult", "process_data", "run_training"), "api.launch"),
    **dict.fromkeys(("TrainerCallback", "TrainingContext"), "api.trainer_callbacks"),
    "TrainingError": "api.errors",
    "OSFTOptions": "options",
}


class Package(ModuleType):
    """This package, whose function `process_data` and module of that name are one: the module can be called."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "process_data" and isinstance(value, ModuleType):
            value.__class__ = CallableModule
        super().__setattr__(name, value)


class CallableModule(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return importlib.import_module("mini_trainer.api.launch").process_data(*args, **kwargs)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"mini_trainer.{MODULES.get(name, 'api.arguments')}"), name)


def __dir__() -> list[str]:
    return __all__


install()
sys.modules[__name__].__class__ = Package
