"""Red Hat's module of `run_training`, for callers of its mini_trainer."""

from mini_trainer.api.arguments import TorchrunArgs, TrainingArgs
from mini_trainer.api.launch import run_training

__all__ = ["TorchrunArgs", "TrainingArgs", "run_training"]
