"""The options that the arguments of the Python API become."""

import functools

import tyro

from mini_trainer import TrainingArgs
from mini_trainer.api.commands import make_train_words
from mini_trainer.options import TrainOptions, flatten_options

NEEDED = dict(model_name_or_path="m", data_path="d.arrow", output_dir="o", process_data=False, max_steps=5)


def parse(options_class: type, words: list[str]) -> dict:
    """Every option's value, as the script reads it; whether they fit together is not asked."""
    return flatten_options(tyro.cli(options_class, args=words, config=[tyro.conf.OmitArgPrefixes]))


@functools.cache
def parse_defaults() -> dict:
    return parse(TrainOptions, make_train_words(TrainingArgs(**NEEDED)))
