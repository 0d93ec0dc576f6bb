"""Red Hat's module of callbacks, for callers of its mini_trainer: docs/reference/callbacks.md has ours."""

from mini_trainer.api.trainer_callbacks import (
    TrainerCallback,
    TrainingContext,
    deserialize_callback,
    serialize_callback,
)

__all__ = ["TrainerCallback", "TrainingContext", "deserialize_callback", "serialize_callback"]
