"""What the fork server of forked.py imports once, so that a run's processes need not."""

import gc
import importlib

import tiny_models
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import generate  # noqa: F401
import plan.planner  # noqa: F401
import train  # noqa: F401

for config in tiny_models.FAMILIES.values():  # which transformers imports when a model is built
    importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
get_checkpoint_conversion_mapping("llama")  # compiles a thousand patterns, once
gc.collect()
gc.freeze()  # or each process's first collection would copy all of this memory
