"""What a user can get wrong: one message, a non-zero exit, no traceback of ours, and nothing that hangs."""

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from forked import run_forked
from processes import flags
from tiny_data import make_samples, to_row, write_rows, write_samples
from tiny_models import VOCAB_SIZE
from transformers import AutoTokenizer

from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def inputs(inputs) -> dict:
    return inputs | dict(max_steps=3, batch_size=4, max_tokens_per_gpu=64)


def check_refusal(result: subprocess.CompletedProcess, reason: str) -> None:
    assert result.returncode != 0
    assert result.stderr.count("error: ") == 1, result.stderr
    assert reason in result.stderr
    assert 'train.py", line' not in result.stderr, "a traceback of ours"


def train(inputs: dict, output_dir: Path, *, num_ranks: int = 0, **changes: object) -> subprocess.CompletedProcess:
    return run_forked(num_ranks, "train.py", *flags(**inputs | dict(output_dir=output_dir) | changes), timeout=90)


def test_an_overlong_sample_is_refused_before_the_model_is_loaded(inputs, tmp_path):
    result = train(inputs, tmp_path / "run", max_tokens_per_gpu=20)
    assert "model: " not in result.stderr
    check_refusal(result, "Raise --max-tokens-per-gpu to at least that, or drop these samples with --drop-overlong")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_output_directory_that_holds_another_run(num_ranks, inputs, tmp_path):
    (tmp_path / "training_params.json").write_text("{}")
    check_refusal(train(inputs, tmp_path, num_ranks=num_ranks), "holds no run that can be read")
    assert [path.name for path in tmp_path.iterdir()] == ["training_params.json"]


@pytest.mark.parametrize(
    ("spoil", "reason", "num_ranks"),
    [
        (lambda model: model.rename(model.parent / "other"), "there is no such directory", 0),
        (lambda model: (model.rename(model.parent / "other"), model.touch()), "is a file", 0),
        (lambda model: (model / "config.json").write_text('{"model_type": "no_such_type"}'), "no usable config", 0),
        (lambda model: (model / "model.safetensors").unlink(), "model: no weights: there is neither", 2),
    ],
)
def test_a_model_that_is_none(spoil, reason, num_ranks, inputs, tmp_path):
    model = shutil.copytree(inputs["model_name_or_path"], tmp_path / "model")
    spoil(model)
    check_refusal(train(inputs, tmp_path / "run", num_ranks=num_ranks, model_name_or_path=model), reason)


@pytest.mark.parametrize(
    ("sidecar", "reason"),
    [
        ({"tokenizer_fingerprint": "another"}, "was made with a different tokenizer"),
        ({"max_token_id": VOCAB_SIZE}, f"token id {VOCAB_SIZE}, but the model's embedding has {VOCAB_SIZE} rows"),
        ({"num_samples": 21}, "belongs to another data set: it says 21 samples"),
        ({"tokenizer_dir": "data.arrow.tokenizer"}, "data.arrow.tokenizer with its tokenizer is missing"),
        ("not json", "cannot be read"),
    ],
)
def test_data_for_another_tokenizer(sidecar, reason, inputs, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(inputs["model_name_or_path"])
    data = write_samples(tmp_path / "data.arrow", make_samples(20, vocab_size=VOCAB_SIZE))
    good = {"tokenizer_fingerprint": fingerprint_tokenizer(tokenizer), "max_token_id": VOCAB_SIZE - 1}
    text = sidecar if isinstance(sidecar, str) else json.dumps(good | sidecar)
    (tmp_path / "data.arrow.meta.json").write_text(text)
    check_refusal(train(inputs, tmp_path / "run", data_path=data), reason)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_bad_row_that_only_one_rank_reads_ends_all_ranks(num_ranks, inputs, tmp_path):
    rows = [to_row(sample) for sample in make_samples(6, vocab_size=VOCAB_SIZE, max_len=10)]
    rows[4]["input_ids"][1] = VOCAB_SIZE
    data = write_rows(tmp_path / "data.arrow", rows)
    start = time.monotonic()
    result = train(inputs, tmp_path / "run", num_ranks=num_ranks, data_path=data, batch_size=6)
    check_refusal(result, "row 5: token ids beyond the model's vocabulary")
    assert not (tmp_path / "run" / "hf_format").exists()
    assert time.monotonic() - start < 80  # not the process group's time-out of an hour


def test_a_step_without_a_trained_token_is_said_once(inputs, tmp_path):
    made = make_samples(8, vocab_size=VOCAB_SIZE)
    samples = [(ids, labels if i % 2 else [-100] * len(ids)) for i, (ids, labels) in enumerate(made)]
    data = write_samples(tmp_path / "data.arrow", samples)
    result = train(inputs | dict(data_path=data), tmp_path / "run", num_ranks=0, batch_size=1, max_steps=8)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("nothing is trained") == 1


@pytest.mark.long
def test_a_batch_smaller_than_the_number_of_ranks_trains(inputs, tmp_path):
    result = train(inputs, tmp_path / "run", num_ranks=3, batch_size=2)
    assert result.returncode == 0, result.stderr
    assert len((tmp_path / "run" / "training_metrics_0.jsonl").read_text().splitlines()) == 3
