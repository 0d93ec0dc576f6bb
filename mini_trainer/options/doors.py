"""Tables of everything that can be chosen by name, each with the module that is imported once it is chosen.

A table is keyed by the words of options and files. With its row, a new entry needs nothing but its own module: the
options' choices, --help, the reference and the checks read the table.
"""

import importlib
from collections import UserDict
from typing import Any


def open_door(place: str) -> Any:
    """Imports "module:attribute", or the module of that name."""
    name, _, attribute = place.partition(":")
    module = importlib.import_module(name)
    return getattr(module, attribute) if attribute else module


class Doors(UserDict[str, Any]):
    """Objects by name, from their places, "module:attribute". Listing the names imports nothing."""

    def __getitem__(self, name: str) -> Any:
        return open_door(self.data[name])


DOUBTS = (  # of rows, by the names of --refuse (data/chat/linting.py)
    *("left-out", "cut-reasoning", "reasoning-tags", "unknown-tools", "no-tools", "results-first", "tools-twice"),
    *("markers", "null-arguments"),
)

METHODS = Doors({"osft": "mini_trainer.osft:OSFT", "lora": "mini_trainer.model.methods.lora:LoRA"})  # by their option

OPTIMIZERS = Doors(
    adamw="mini_trainer.model.optim.optimizers:AdamW",
    adamw8bit="mini_trainer.model.optim.optimizers:AdamW8bit",
    muon="mini_trainer.model.optim.muon:MuonForMatrices",
)

ATTENTION = Doors(  # by the backends of model.attention
    flash_attn="mini_trainer.model.attention_kernels:attend_flash_attn",  # package flash-attn
    varlen="mini_trainer.model.attention_kernels:attend_varlen",  # ships with torch
    varlen_fa3="mini_trainer.model.attention_kernels:attend_varlen",  # package flash_attn_interface
    sdpa="mini_trainer.model.attention:attend_sdpa",  # any device, one sequence at a time
    eager="mini_trainer.model.attention:attend_eager",  # the same, for every feature
)

# Schedules that fall towards the end of the run, which therefore has to be known: fraction of the peak, from 1 to 0, as
# a function of the decay's progress, from 0 to 1.
DECAYS = Doors(
    linear="mini_trainer.model.optim.optimizers:decay_linearly",
    cosine="mini_trainer.model.optim.optimizers:decay_by_cosine",
    cosine_with_restarts="mini_trainer.model.optim.optimizers:decay_in_cycles",
    polynomial="mini_trainer.model.optim.optimizers:decay_by_power",
    wsd="mini_trainer.model.optim.optimizers:decay_linearly",
)
SCHEDULES = ("constant_with_warmup", "constant", "inverse_sqrt", *DECAYS)

# Weights of single tokens' losses, by the model's own probabilities.
WEIGHTINGS = Doors(
    dft="mini_trainer.objectives.next_tokens:weigh_by_probability",
    eaft="mini_trainer.objectives.next_tokens:weigh_by_entropy",
)

# Divergences from a teacher's logits. Files, of its K most probable tokens, have forward-kl of their own.
DIVERGENCES = Doors(
    {
        "forward-kl": "mini_trainer.objectives.soft_targets:diverge_forward",
        "reverse-kl": "mini_trainer.objectives.soft_targets:diverge_in_reverse",
        "jsd": "mini_trainer.objectives.soft_targets:diverge_jensen_shannon",
    }
)

# Choices whose meaning is a value.
DTYPES = ("bfloat16", "float16", "float32")  # torch's names
CHECKPOINTING = ("none", "selective", "full")  # ordered by how much is recomputed
KERNELS = ("fused", "eager")  # in the order in which they are tried
RESHARDING = {"auto": None, "always": True, "never": False}  # fully_shard's reshard_after_forward
# --reshard-after-backward: whether weights stay gathered between a step's micro-batches. auto: until it is settled.
KEEPING = {"auto": False, "always": False, "never": True}
LORA_EXPORTS = {"adapter": (True, False), "merged": (False, True), "both": (True, True)}  # adapter, merged model
BASE_QUANTIZATIONS = {"none": False, "nf4": True}  # whether the base is packed
WEIGHED_BY = ("samples", "tokens")  # what --data-weights are shares of
FREEZABLE = ("vision", "projector", "language", "nothing")  # parts of vision-language models

TRACKERS = Doors(
    wandb="mini_trainer.run.trackers:start_wandb",
    tensorboard="mini_trainer.run.trackers:start_tensorboard",
    mlflow="mini_trainer.run.trackers:start_mlflow",
)
TRACKER_PACKAGES = {"mlflow": ("mlflow", "sqlalchemy")}  # of trackers that need more modules than their namesake

# Formats of rows that are detected by their keys, the first that fits; and those that are named, of which
# classification's rows have no loss mask.
TEXT_FORMATS = Doors(
    messages="mini_trainer.data.rows.formats:MESSAGES",
    sharegpt="mini_trainer.data.rows.formats:SHAREGPT",
    alpaca="mini_trainer.data.rows.formats:ALPACA",
    completion="mini_trainer.data.rows.formats:COMPLETION",
    document="mini_trainer.data.rows.formats:DOCUMENT",
)
MASKED_FORMATS = Doors(
    preference="mini_trainer.data.rows.preference_rows:prepare_preferences",
    feedback="mini_trainer.data.rows.preference_rows:prepare_feedback",
)
NAMED_FORMATS = ("classification", *MASKED_FORMATS)

ENGINES = Doors(
    hf="mini_trainer.use.inference.hf_engine:HFEngine",
    vllm="mini_trainer.use.inference.vllm_engine:VLLMEngine",
    openai="mini_trainer.use.inference.openai_engine:OpenAIEngine",
)

# Trainers whose configurations can be imported.
TRAINERS = Doors(
    {
        "axolotl": "mini_trainer.tools.importers.axolotl:AXOLOTL",
        "llama-factory": "mini_trainer.tools.importers.llama_factory:LLAMA_FACTORY",
        "trl": "mini_trainer.tools.importers.trl:SFT",
        "trl-dpo": "mini_trainer.tools.importers.trl:DPO",
        "trl-kto": "mini_trainer.tools.importers.trl:KTO",
        "trl-orpo": "mini_trainer.tools.importers.trl:ORPO",
        "trl-cpo": "mini_trainer.tools.importers.trl:CPO",
        "trl-reward": "mini_trainer.tools.importers.trl:REWARD",
    }
)
