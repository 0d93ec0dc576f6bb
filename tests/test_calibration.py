"""What OSFT reads of earlier tasks' data may be of another kind than the run's, and is the same on ranks that share
rows (--osft-calibration-data, --osft-statistics)."""

from pathlib import Path

import pytest
import torch
from breadth import long
from in_process import train_on
from tiny_classifiers import make_class_samples, write_classified
from tiny_data import make_samples, write_samples
from tiny_models import VOCAB_SIZE
from tiny_pairs import write_pairs
from torch import Tensor
from transformers import AutoModel

from mini_trainer.data.columns.base import list_sequences
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.model.methods.osft_directions import Statistics, read_statistics

OBJECTIVE_OF = {"chats": "causal-lm", "pairs": "preference", "feedback": "kto", "classes": "sequence-classification",
                "tags": "token-classification"}  # fmt: skip
PAIRS = [(kind, earlier) for kind in OBJECTIVE_OF for earlier in OBJECTIVE_OF]
CASES = [long(*pair) if i % 7 else pair for i, pair in enumerate(PAIRS)]


def write_data(kind: str, root: Path, model: Path, *, seed: int) -> Path:
    path = root / f"{kind}_{seed}.arrow"
    if kind in ("pairs", "feedback"):
        return write_pairs(path, model, size=8, good=kind == "feedback", seed=seed)
    if kind == "chats":
        return write_samples(path, make_samples(16, vocab_size=VOCAB_SIZE, seed=seed))
    is_of_tokens = kind == "tags"
    samples = make_class_samples(16, of_tokens=is_of_tokens, seed=seed)
    return write_classified(path, samples, model, of_tokens=is_of_tokens)


def study(world, root: Path, model: Path, kind: str, calibration: Path, *, num_ranks: int = 1, **options) -> Statistics:
    """The statistics that a run for one kind of data makes of other data."""
    root.mkdir(exist_ok=True)
    path = root / "statistics.safetensors"
    train_on(
        num_ranks, world, model_name_or_path=str(model), data_path=str(write_data(kind, root, model, seed=1)),
        objective=OBJECTIVE_OF[kind], output_dir=root / "run", batch_size=6, max_tokens_per_gpu=96, max_steps=1,
        learning_rate=1e-3, export_dtype="float32", osft=True, osft_unfreeze_rank_ratio=0.5,
        osft_cache_dir=root / "cache", osft_basis="activations", osft_calibration_data=str(calibration),
        osft_statistics=str(path), **options,
    )  # fmt: skip
    return read_statistics(path)


def compute_plainly(model: Path, data: Path, names: set[str]) -> dict[str, Tensor]:
    """The covariances of what transformers' layers see of each sequence by itself."""
    base = AutoModel.from_pretrained(model, attn_implementation="eager").eval()
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    for name in names:
        layer = base.get_submodule(name.removeprefix("model."))
        layer.register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0].flatten(0, -2).double()))
    rows = TokenizedData(str(data))
    with torch.no_grad():
        for row in range(len(rows.lengths)):
            for ids in list_sequences(rows.read(row)):
                base(torch.from_numpy(ids.astype("int64"))[None], use_cache=False)
    inputs = {name: torch.cat(parts) for name, parts in seen.items()}
    return {name: each.T @ each / len(each) for name, each in inputs.items()}


@pytest.mark.parametrize(("kind", "earlier"), CASES)
def test_data_of_one_kind_is_read_by_a_run_of_another(kind, earlier, model, world, tmp_path):
    calibration = write_data(earlier, tmp_path, model, seed=2)
    statistics = study(world, tmp_path, model, kind, calibration)
    for name, expected in compute_plainly(model, calibration, set(statistics.inputs)).items():
        torch.testing.assert_close(statistics.covariance(name), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_ranks_that_share_rows_see_the_same(model, world, tmp_path):
    calibration = write_data("chats", tmp_path, model, seed=2)
    alone, shared = (
        study(world, tmp_path / str(n), model, "chats", calibration, num_ranks=n, **options)
        for n, options in ((1, {}), (2, dict(context_parallel=2)))
    )
    for name in alone.inputs:
        found, expected = shared.covariance(name), alone.covariance(name)
        assert (found - expected).norm() <= 1e-6 * expected.norm(), name
