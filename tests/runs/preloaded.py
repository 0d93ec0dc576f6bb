"""What the fork server of forked.py imports once, so that a run's processes need not."""

import gc

gc.disable()

import importlib
import importlib.util
import os

from processes import flags
from tiny_classifiers import CLASSIFIERS
from tiny_models import FAMILIES, HYBRIDS
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import mini_trainer.run.plan.planner  # noqa: F401
from mini_trainer.batch_packer import pack_batch
from mini_trainer.options import TrainOptions
from mini_trainer.options.command_line import parse_options

os.fsync = os.fstat  # as in conftest.py
for package in ("bitsandbytes", "peft"):
    if importlib.util.find_spec(package) is not None:  # a borrowed GPU's machine may have neither
        importlib.import_module(package)
pack_batch([2, 1], 2, 1)  # loads what numba has compiled
parse_options(TrainOptions, flags(model_name_or_path="m", data_path="d", output_dir="o", max_steps=1))
for config in (FAMILIES | HYBRIDS | CLASSIFIERS).values():  # which transformers imports when a model is built
    importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
get_checkpoint_conversion_mapping("llama")  # compiles a thousand patterns, once
gc.collect()
gc.enable()
gc.freeze()  # or each process's first collection would copy all of this memory
