"""Samples that a model has drawn itself (--keep self): where the cache holds those of a model, which `draw-samples`
writes.

    {--data-cache-dir}/drawn/{key}/samples.jsonl, with its sidecar: rows of token ids, labels and text

The key is a hash of the model, its tokenizer and chat template, and how the samples were drawn.
"""

import shlex
from dataclasses import asdict
from pathlib import Path

from mini_trainer.data.stores.disk import hash_json
from mini_trainer.data.stores.model_files import find_model, find_weights
from mini_trainer.data.stores.tokenizers import fingerprint_chat_template, fingerprint_tokenizer, load_tokenizer
from mini_trainer.data.tokenized.detection import DRAWN_FILE
from mini_trainer.distributed.command import name_program
from mini_trainer.model.fingerprints import fingerprint_model
from mini_trainer.options import TrainOptions, flag_name, flatten_options
from mini_trainer.options.places import expand
from mini_trainer.options.tools import DrawSamplesOptions

FOLDER, KEY_LENGTH, VERSION = "drawn", 32, 1
OF_RUN = ("model_name_or_path", "model_revision", "trust_remote_code", "skip_verification", "data_cache_dir")


def describe_drawing(o: DrawSamplesOptions) -> dict[str, float]:
    """How samples are drawn."""
    return {"num_samples": o.num_samples, "max_new_tokens": o.max_new_tokens, "seed": o.seed, "temperature": 1.0}


def make_draw_options(options: TrainOptions) -> DrawSamplesOptions:
    """The options of `draw-samples` for a run's model."""
    values = flatten_options(options)
    return DrawSamplesOptions(**{name: values[name] for name in OF_RUN})


def locate_samples(o: DrawSamplesOptions) -> Path:
    """The file of the samples, existing or not; downloads the model if it is on the hub."""
    model_dir = find_model(o.model_name_or_path, revision=o.model_revision, trust_remote_code=o.trust_remote_code)
    find_weights(o.model_name_or_path, model_dir)
    tokenizer = load_tokenizer(model_dir, trust_remote_code=o.trust_remote_code)
    prints = [fingerprint_model(model_dir), fingerprint_tokenizer(tokenizer), fingerprint_chat_template(tokenizer)]
    key = hash_json([*prints, describe_drawing(o), VERSION])
    return expand(o.data_cache_dir) / FOLDER / key[:KEY_LENGTH] / DRAWN_FILE


def find_samples(options: TrainOptions, *, flag: str) -> str:
    """The samples that the run's model has drawn; ValueError with the command that draws them if there are none."""
    path = locate_samples(make_draw_options(options))
    if not path.exists():
        words = shlex.join(list_draw_words(options))
        raise ValueError(
            f"{flag} self: {options.model.model_name_or_path} has drawn no samples yet: {name_program('draw-samples')}"
            f" {words} draws them once; mini-trainer train does so by itself"
        )
    return str(path)


def list_draw_words(options: TrainOptions) -> list[str]:
    """The words after `draw-samples` for a run's model."""
    given, default = asdict(make_draw_options(options)), asdict(DrawSamplesOptions(model_name_or_path=""))
    changed = {flag_name(name): value for name, value in given.items() if value != default[name]}
    return [word for flag, value in changed.items() for word in ([flag] if value is True else [flag, str(value)])]
