"""A continual experiment's matrix: derived numbers against their papers' formulas, intervals, and its file."""

import json

import numpy as np
import pytest

from mini_trainer.continual.matrix import Cell, Experiment, Sequence, read_experiment, summarise, write_experiment

NAN = float("nan")


def make_cell(mean: float, n: int = 4) -> Cell:
    """A cell with this mean, whose questions differ."""
    return Cell("exact_match", mean + np.linspace(-1, 1, n))


def make_experiment(*grids: np.ndarray, orders: list[str] | None = None, probe: list[float] | None = None):
    """Sequences whose R[t][i] are the grids' (T + 1, T), columns in the order of training; NaN: not measured."""
    orders = orders or ["abcd"[: grids[0].shape[1]]] * len(grids)
    sequences = []
    for order, (names, grid) in enumerate(zip(orders, grids, strict=True)):
        rows = []
        for t, means in enumerate(grid):
            cells = {name: make_cell(mean) for name, mean in zip(names, means, strict=False) if not np.isnan(mean)}
            rows.append({"score": cells | ({} if probe is None else {"general": make_cell(probe[t])})})
        sequences.append(Sequence(tuple(names), order, 0, tuple(rows)))
    return Experiment("x", "full", tuple(sorted(orders[0])), ("general",), tuple(sequences))


def find_means(experiment: Experiment, kind: str = "score") -> dict[str, float]:
    return {name: one.mean for name, one in summarise(experiment, num_resamples=10)[kind].items()}


def derive_by_papers(R: np.ndarray) -> dict[str, float]:
    """The papers' formulas, tasks from 1: R[t][i - 1]."""
    T = R.shape[1]
    tasks = range(1, T + 1)
    return {
        "average": np.mean([R[T][i - 1] for i in tasks]),
        "learnt": np.mean([R[i][i - 1] for i in tasks]),
        "backward_transfer": np.mean([R[T][i - 1] - R[i][i - 1] for i in range(1, T)]),
        "forward_transfer": np.mean([R[i - 1][i - 1] - R[0][i - 1] for i in range(2, T + 1)]),
        "forgetting": np.mean([max(R[t][i - 1] for t in range(i, T)) - R[T][i - 1] for i in range(1, T)]),
    }


@pytest.mark.parametrize("num_tasks", [2, 3, 4])
def test_derived_numbers_are_the_papers(num_tasks):
    R = np.random.default_rng(num_tasks).random((num_tasks + 1, num_tasks))
    found = find_means(make_experiment(R, probe=list(np.linspace(0.5, 0.1, num_tasks + 1))))
    assert found == pytest.approx(derive_by_papers(R) | {"forgotten": 0.4})


def test_numbers_that_were_not_measured_are_missing():
    R = np.random.default_rng(0).random((4, 3))
    seen = np.where(np.arange(4)[:, None] > np.arange(3), R, NAN)
    expected = derive_by_papers(R)
    del expected["forward_transfer"]
    assert find_means(make_experiment(seen)) == pytest.approx(expected)
    assert find_means(make_experiment(R[:2, :1])) == pytest.approx(dict.fromkeys(["average", "learnt"], R[1, 0]))
    assert find_means(make_experiment(R[:1])) == {}  # the start model alone


def test_an_unfinished_sequence_counts_the_tasks_that_it_has_trained():
    R = np.random.default_rng(0).random((5, 4))
    assert find_means(make_experiment(R[:3])) == pytest.approx(derive_by_papers(R[:3, :2]))


def test_a_kind_without_some_tasks_averages_the_others():
    R = np.random.default_rng(0).random((4, 3))
    R[:, 1] = NAN
    found = find_means(make_experiment(R))
    assert found["average"] == pytest.approx((R[3, 0] + R[3, 2]) / 2)
    assert found["backward_transfer"] == pytest.approx(R[3, 0] - R[1, 0])
    assert found["forward_transfer"] == pytest.approx(R[2, 2] - R[0, 2])
    assert found["forgetting"] == pytest.approx(max(R[1, 0], R[2, 0]) - R[3, 0])


def test_sequences_count_tasks_in_their_own_order():
    grids = np.random.default_rng(0).random((3, 4, 3))
    derived = summarise(make_experiment(*grids, orders=["abc", "cab", "bca"]), num_resamples=100)["score"]
    own = [derive_by_papers(R) for R in grids]
    for name, found in derived.items():
        assert found.by_sequence == pytest.approx([one[name] for one in own])
        assert found.mean == pytest.approx(np.mean(found.by_sequence))
        assert found.deviation == pytest.approx(np.std(found.by_sequence, ddof=1))


def test_losses_are_weighed_by_tokens_and_negated():
    weights = np.array([10.0, 30.0])
    rows = [{"loss": {"a": Cell("loss", np.array(values), weights)}} for values in ([2.0, 4.0], [1.0, 2.0])]
    experiment = Experiment("x", "full", ("a",), (), (Sequence(("a",), 0, 0, tuple(rows)),))
    assert rows[0]["loss"]["a"].mean == 3.5
    assert find_means(experiment, "loss")["learnt"] == -1.75


def test_models_are_resampled_on_the_same_questions():
    """If every question loses as much, forgetting is certain though each mean is not."""
    before = np.random.default_rng(0).random(50)
    rows = [
        {"score": {"a": Cell("rouge_l", before + change), "b": Cell("rouge_l", before)}} for change in (0, 0.5, 0.25)
    ]
    sequence = Sequence(("a", "b"), 0, 0, tuple(rows))
    derived = summarise(Experiment("x", "full", ("a", "b"), (), (sequence,)))["score"]
    assert derived["backward_transfer"].high - derived["backward_transfer"].low < 1e-12
    assert derived["average"].high - derived["average"].low > 0.05


def test_intervals_cover_the_truth():
    random = np.random.default_rng(0)
    before, after, covered = 0.7, 0.6, 0  # of 100 questions; truth: -0.1
    for _ in range(200):
        rows = [{}, *({"score": {"a": Cell("acc", (random.random(100) < p) * 1.0)}} for p in (before, after))]
        sequence = Sequence(("a", "b"), 0, 0, tuple(rows))
        own = summarise(Experiment("x", "full", ("a", "b"), (), (sequence,)), num_resamples=400)["score"]
        covered += own["backward_transfer"].low <= after - before <= own["backward_transfer"].high
    assert 0.90 <= covered / 200 <= 0.99


def test_an_experiment_survives_its_file(tmp_path):
    grids = np.random.default_rng(0).random((2, 3, 2))
    experiment = make_experiment(*grids, orders=["ab", "ba"], probe=[0.1, 0.2, 0.3])
    loss = Cell("loss", np.array([0.1, 1 / 3]), np.array([3.0, 5.0]), samples="measured/a.jsonl")
    experiment.sequences[0].rows[1]["loss"] = {"a": loss}
    path = tmp_path / "results.json"
    write_experiment(experiment, path)
    first, found = path.read_bytes(), read_experiment(tmp_path)
    write_experiment(found, path)
    assert path.read_bytes() == first
    assert (found.name, found.tasks, found.sequences[1].tasks) == ("x", ("a", "b"), ("b", "a"))
    cell = found.sequences[0].rows[1]["loss"]["a"]
    assert (cell.values == loss.values).all() and (cell.weights == loss.weights).all()
    assert cell.samples == loss.samples
    content = json.loads(first)
    average = content["derived"]["score"]["average"]["mean"]
    assert average == pytest.approx(np.mean([derive_by_papers(R)["average"] for R in grids]))
    assert content["sequences"][0]["rows"][2]["score"]["b"]["mean"] == pytest.approx(grids[0, 2, 1])


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "results.json").write_text('{"models": []}')
    with pytest.raises(ValueError, match=r"results\.json: .*KeyError\('name'\)"):
        read_experiment(tmp_path)
