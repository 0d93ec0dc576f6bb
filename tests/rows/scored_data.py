"""Tiny data sets with a teacher's scores next to them."""

import json
from pathlib import Path

from tiny_data import make_samples, write_samples
from tiny_models import VOCAB_SIZE

from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer, load_tokenizer
from mini_trainer.distributed.world import World
from mini_trainer.options import group_options
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.options.tools import ScoreDataOptions
from mini_trainer.tools.score_data import score

TOP_K = 5


def write_data(path: Path, model: Path, *, seed: int = 0, num_samples: int = 24) -> Path:
    """Random samples, as made with the model's tokenizer."""
    write_samples(path, make_samples(num_samples, vocab_size=VOCAB_SIZE, seed=seed))
    fingerprint = fingerprint_tokenizer(load_tokenizer(str(model)))
    sidecar = {"tokenizer_fingerprint": fingerprint, "max_token_id": VOCAB_SIZE - 1}
    Path(f"{path}.meta.json").write_text(json.dumps(sidecar))
    return path


def score_here(world: World, model: Path | str, data: Path, **changes: object) -> None:
    """Writes the data's scores by this model, with `TOP_K` tokens of each position."""
    options = group_options(
        ScoreDataOptions, model_name_or_path=str(model), data_path=(str(data),), **(dict(top_k=TOP_K) | changes)
    )
    assert find_problems(options) == []
    score(options, world)
