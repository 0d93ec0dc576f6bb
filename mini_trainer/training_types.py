"""Red Hat's module of arguments, for callers of its mini_trainer."""

from mini_trainer.api.arguments import PretrainingConfig, TorchrunArgs, TrainingArgs, TrainingMode

__all__ = ["PretrainingConfig", "TorchrunArgs", "TrainingArgs", "TrainingMode"]
