"""Full fine-tuning: every parameter trains, and the method's defaults are all there is to it."""

from model.method import Method


class Full(Method):
    """Everything trains."""

    title = "full fine-tuning"
