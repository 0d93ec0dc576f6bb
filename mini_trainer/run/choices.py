"""Batch size, epochs and learning rate of a run that names none, and what is usual (docs/tasks/learning_rate.md)."""

import math
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from mini_trainer.data.columns.base import CAUSAL_LM
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.objectives.families.text_tower import text_config
from mini_trainer.options import (
    TRAINING_DATA,
    EndOptions,
    OptimizationOptions,
    TrainOptions,
    ValidationOptions,
    flag_name,
    replace_options,
)
from mini_trainer.run.inputs import RunInputs

NUM_UPDATES, MOST_EPOCHS = 200, 10
PATIENCE, LEAST_HELD_OUT = 2, 50  # validations without a better one; samples of which the loss is more than chance
# Learning rates of a model of 1.5 billion parameters; others have them by the root of the ratio of sizes.
SIZE, RATES, MOST_RATE = 1.5e9, {"lora": 2e-4, "osft": 2e-4, "full": 2e-5}, 1e-3
# Usual ones by the method's option: of published runs, OSFT's as measured in docs/reference/osft.md.
USUAL_RATES = {
    "lora": ("LoRA", "1e-4 to 2e-4"),
    "osft": ("OSFT", "1e-4 to 1e-3"),
    "full": ("full fine-tuning", "2e-6 to 2e-5"),
}


def choose_values(inputs: RunInputs) -> TrainOptions:
    """The run's options with a batch size, an end and a learning rate where none is given, for language modelling."""
    options, data = inputs.options, inputs.data
    o = options.data
    if options.classification.objective != CAUSAL_LM or data is None or inputs.config is None:
        return options
    chosen, num_samples, size = {}, len(data.kept), estimate_size(inputs.config)
    per_update = o.batch_size or choose_batch_size(num_samples)
    if o.batch_tokens is not None:
        per_update = o.batch_tokens * num_samples / data.num_tokens
    elif o.batch_size is None:
        chosen["batch_size"] = per_update
    if options.chooses_end:
        chosen["max_epochs"] = choose_epochs(num_samples / per_update)
        chosen |= choose_stop(options.validation, inputs.validation_data)
    if options.optimization.learning_rate is None:
        chosen["learning_rate"] = choose_rate(find_method(inputs), size)
    shown = " ".join(flag_name(name) + ("" if value is True else f" {value:g}") for name, value in chosen.items())
    inputs.chosen = f"; chosen for them and {size / 1e6:.3g} million parameters: {shown}"
    inputs.options = options = replace_options(options, **chosen)
    inputs.data_options = replace(inputs.data_options, batch_size=options.data.batch_size)
    inputs.values |= chosen
    return options


def choose_batch_size(num_samples: int) -> int:
    """Samples per update: the power of two that is nearest to half of the root of their number, from 4 to 64."""
    return min(64, max(4, 2 ** round(math.log2(math.sqrt(num_samples) / 2))))


def choose_epochs(num_updates: float) -> int:
    """Epochs of so many updates each."""
    return min(MOST_EPOCHS, math.ceil(NUM_UPDATES / num_updates))


def choose_stop(o: ValidationOptions, held_out: Mixture | None) -> dict[str, Any]:
    """Early stopping by held-out data, if there are enough and nothing else says when to validate."""
    says = o.validate_at_epoch or o.validate_every_steps or o.early_stopping_patience
    is_enough = held_out is not None and len(held_out.kept) >= LEAST_HELD_OUT
    is_chosen = is_enough and not says and TRAINING_DATA not in o.validation_data_path
    return {"validate_at_epoch": True, "early_stopping_patience": PATIENCE} if is_chosen else {}


def find_method(inputs: RunInputs) -> str:
    return next((name for name in RATES if inputs.values.get(name)), "full")


def choose_rate(method: str, size: float) -> float:
    """A learning rate of one digit."""
    return float(f"{min(MOST_RATE, RATES[method] * math.sqrt(SIZE / size)):.0e}")


def estimate_size(config: PreTrainedConfig) -> float:
    """About how many parameters the language model has, without its experts that a token does not use."""
    text = text_config(config)
    return 12 * getattr(text, "num_hidden_layers", 1) * text.hidden_size**2 + text.vocab_size * text.hidden_size


def describe_few_updates(
    num_updates: int, usual: int, inputs: RunInputs, o: OptimizationOptions, end: EndOptions
) -> str:
    """Warning that a model learns little in so few updates, with values that give more."""
    flag, size = inputs.batching.flag.split()
    share = num_updates / usual
    advice = [f"{flag} {int(int(size) * share)}"] if int(size) * share >= 1 else []
    advice += [f"--max-epochs {math.ceil(end.max_epochs / share)}"] if end.max_epochs is not None else []
    name, rates = USUAL_RATES[find_method(inputs)]
    return (
        f"the run has only {num_updates} optimizer updates, in which a model learns little; {usual} or more are"
        f" usual: {' or '.join([*advice, 'more data'])}. Usual learning rates of {name} are {rates}, this run's is"
        f" {o.peak_rate:g}"
    )
