"""Full fine-tuning: every parameter trains; the base class's defaults do everything."""

from mini_trainer.model.method import Method


class Full(Method):
    """Trains every parameter."""

    title = "full fine-tuning"
