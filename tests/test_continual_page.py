"""The page and the table of continual experiments: their numbers, what is refused, and how a browser shows it."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from browser import needs_browser
from made_experiments import HOSTILE, make_experiment
from run_directories import read_page

from mini_trainer.continual.matrix import Cell, Experiment
from mini_trainer.continual.page import check_comparable, describe_comparison, describe_page, find_front, write_page

ORDERS = ((0, 1, 2), (2, 0, 1))
TEXTS = "[...document.querySelectorAll('{}')].map(node => node.textContent)"


def replace_cells(experiment: Experiment, change: Callable[[int, str, str, Cell], Cell | None]) -> Experiment:
    """`change(t, kind, set, cell)` returns a cell's replacement, or None to leave it out."""
    sequences = []
    for sequence in experiment.sequences:
        rows = []
        for t, row in enumerate(sequence.rows):
            new = {kind: {name: change(t, kind, name, cell) for name, cell in own.items()} for kind, own in row.items()}
            rows.append({k: {name: cell for name, cell in own.items() if cell is not None} for k, own in new.items()})
        sequences.append(dataclasses.replace(sequence, rows=tuple(rows)))
    return dataclasses.replace(experiment, sequences=tuple(sequences))


# ---- numbers


def test_a_view_has_the_mean_of_an_order_over_seeds_and_each_sequence(tmp_path):
    experiment = make_experiment("a", orders=ORDERS, seeds=(0, 1, 2), kinds=("score", "loss"))
    page = describe_page([experiment])
    for kind in ("score", "loss"):
        views = page["experiments"][0]["kinds"][kind]["views"]
        assert [view["label"] for view in views[:3]] == [
            "order 0, mean of 3 sequences", "order 0, seed 0", "order 0, seed 1"
        ]  # fmt: skip
        assert [view["tasks"] for view in views] == 4 * [("math", "code", "law")] + 4 * [("law", "math", "code")]
        names = [*views[4]["tasks"], "world_knowledge"]
        cells = [[[row[kind][name] for name in names] for row in one.rows] for one in experiment.sequences[3:]]
        means = np.array([[[np.average(c.values, weights=c.weights) for c in row] for row in own] for own in cells])
        np.testing.assert_allclose(views[5]["mean"], means[0], rtol=1e-5)
        np.testing.assert_allclose(views[4]["mean"], means.mean(0), rtol=1e-5)
        np.testing.assert_allclose(views[4]["deviation"], means.std(0, ddof=1), rtol=1e-5, atol=1e-9)
        np.testing.assert_allclose(views[4]["low"], means.min(0), rtol=1e-5)
        scale = page["kinds"][("score", "loss").index(kind)]["scales"][0]
        assert scale["higher_is_better"] == (kind == "score")
    assert page["experiments"][0]["kinds"]["loss"]["derived"]["average"]["mean"] < 0


def test_metrics_from_0_to_1_share_a_scale_and_others_have_their_own():
    metrics = {"math": ("rouge_l", 1), "code": ("exact_match", 1), "law": ("bleu", 100), "world_knowledge": ("acc", 1)}
    made = make_experiment("a")
    experiment = replace_cells(
        made, lambda t, kind, name, cell: Cell(metrics[name][0], cell.values * metrics[name][1], None, cell.samples)
    )
    scales = describe_page([experiment])["kinds"][0]["scales"]
    assert sorted(sorted(scale["metrics"]) for scale in scales) == [["acc", "exact_match", "rouge_l"], ["bleu"]]
    means = [row["score"]["law"].mean * 100 for row in made.sequences[0].rows]
    own = next(scale for scale in scales if scale["metrics"] == ["bleu"])
    assert (own["low"], own["high"]) == pytest.approx((min(means), max(means)))


def test_missing_cells_and_an_experiment_that_still_runs_are_shown_as_such(tmp_path):
    made = make_experiment("a", seeds=(0, 1), probes=())
    experiment = replace_cells(made, lambda t, kind, name, cell: cell if name != "law" or t == 3 else None)
    sequences = (experiment.sequences[0], dataclasses.replace(experiment.sequences[1], rows=made.sequences[1].rows[:2]))
    experiment = dataclasses.replace(experiment, sequences=sequences)
    page = describe_page([experiment])["experiments"][0]
    assert page["facts"] == "3 tasks, 0 probes, 1 order, 2 seeds (4 of 6 trainings done)"
    mean, first, second = page["kinds"]["score"]["views"]
    assert [row[2] is None for row in first["mean"]] == [True, True, True, False]
    assert second["mean"][2:] == [[None] * 3] * 2 and mean["mean"][2:] == [[None] * 3] * 2
    assert mean["mean"][1][0] == pytest.approx((first["mean"][1][0] + second["mean"][1][0]) / 2)
    derived = page["kinds"]["score"]["derived"]
    assert derived["forgotten"] is None and derived["average"] is not None
    assert "a (4 of 6 " in describe_comparison([experiment])
    write_page(tmp_path / "page.html", [experiment])


# ---- comparisons


def test_the_table_of_a_comparison_has_the_numbers_of_each_experiment():
    several = make_experiment("several", orders=ORDERS, seeds=(0, 1), kinds=("score", "loss"))
    one = make_experiment("one", probes=("world_knowledge",), num_questions=40)
    scores, losses = describe_comparison([several, one]).split("\n\n")
    average, own = several.summary["score"]["average"], one.summary["score"]
    lines = scores.splitlines()
    assert lines[0].startswith("scores") and lines[1].split()[:3] == ["experiment", "average", "learnt"]
    assert re.match(rf"several +{average.mean:.3f} ± {average.deviation:.3f} ", lines[2])
    assert lines[2].endswith("method of several") and f" [{average.low:.3f}, {average.high:.3f}] " in lines[3]
    cells = re.split(r" {2,}", lines[4])
    assert cells[2] == f"{own['learnt'].mean:.3f}" and cells[5] == f"{own['forgetting'].mean:.3f}"
    assert "±" not in lines[4]
    assert "negated" in losses and re.search(r"^one( +–){6}", losses, flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (make_experiment("other", tasks=("math", "code", "art")), "its tasks .*math, code, art, .*math, code, law"),
        (make_experiment("other", probes=()), "its probes .*world_knowledge"),
        (replace_cells(make_experiment("other"), lambda t, kind, name, cell: (
            dataclasses.replace(cell, metric="rouge_l") if name == "law" else cell)), "law .*40 .*rouge_l, .*40 "),
        (make_experiment("other", num_questions=30), "math .*30 .*40 "),
        (make_experiment("other", seeds=()), "nothing"),
    ],
)  # fmt: skip
def test_experiments_that_measure_something_else_are_refused(other, told, tmp_path):
    experiments = [make_experiment("a"), make_experiment("b", orders=ORDERS), other]
    with pytest.raises(ValueError, match=f"other: {told}"):
        describe_comparison(experiments)
    with pytest.raises(ValueError, match="other: "):
        write_page(tmp_path / "page.html", experiments)
    assert list(tmp_path.iterdir()) == []
    check_comparable(experiments[:2])  # the order in which tasks are trained may differ


def test_the_front_has_the_points_that_no_other_beats():
    points = [(0.1, 0.5), (0.2, 0.8), (0.2, 0.7), (0.3, 0.8), None, (0.4, 0.9), (0.1, 0.5)]
    assert find_front(points) == [True, True, False, False, False, True, True]


# ---- in a browser


def write_hostile_page(folder: Path, experiments: list[Experiment]) -> str:
    write_page(folder / "page.html", experiments)
    assert "</script><img" not in (folder / "page.html").read_text()
    return (folder / "page.html").as_uri()


# The lowest contrast of a cell's text with its colour (WCAG 2.2).
CONTRAST = """Math.min(...[...document.querySelectorAll('#map tbody td:not(.none)')].map(cell => {
  const [back, front] = ['backgroundColor', 'color'].map(key =>
    luminance(getComputedStyle(cell)[key].match(/\\d+/g).map(Number)) + 0.05);
  return Math.max(back, front) / Math.min(back, front);
}))"""


@needs_browser
@pytest.mark.slow
def test_a_browser_shows_one_experiment(browser, tmp_path):
    experiment = make_experiment(HOSTILE, tasks=("math", HOSTILE, "law"), keeping=0.2)
    url = write_hostile_page(tmp_path, [experiment])
    browser.open(url)
    assert browser.list_complaints() == [] and browser.list_requests() == [url]
    assert browser.ask("document.querySelectorAll('img').length") == 0
    assert browser.ask("document.querySelector('h1').textContent") == HOSTILE
    rows = experiment.sequences[0].rows
    wanted = [f"{row['score'][name].mean:.3f}" for row in rows for name in ("math", HOSTILE, "law", "world_knowledge")]
    assert browser.ask(TEXTS.format("#map tbody td")) == wanted
    assert browser.ask(TEXTS.format("#map tbody th")) == ["before training", "1 math", f"2 {HOSTILE}", "3 law"]
    own = [f"{rows[i + 1]['score'][name].mean:.3f}" for i, name in enumerate(experiment.tasks)]
    assert browser.ask(TEXTS.format("#map .own")) == own
    assert browser.ask(TEXTS.format("#derived tr:nth-child(2) td:first-child")) == ["Average"]
    assert browser.ask("document.querySelectorAll('#curves .line').length") == 4
    assert browser.ask("document.querySelectorAll('#curves .own').length") == 3
    for key in ("kinds", "experiments", "view", "each"):
        assert browser.ask(f"byId('{key}').hidden")
    assert browser.ask(f"{CONTRAST}") >= 4.5

    # a line that is hidden leaves the chart
    browser.ask("byId('lines').children[0].click()")
    assert browser.ask("document.querySelectorAll('#curves .line').length") == 3


@needs_browser
@pytest.mark.slow
def test_a_browser_lays_experiments_over_each_other(browser, tmp_path):
    names = ("first", "second one", "the third")
    experiments = [
        make_experiment(name, keeping=keeping, orders=ORDERS, seeds=(0, 1), kinds=("score", "loss"))
        for name, keeping in zip(names, (0.2, 0.9, 0.5), strict=True)
    ]
    browser.open(write_hostile_page(tmp_path, experiments))
    assert browser.list_complaints() == []
    rows = browser.ask(TEXTS.format("#derived td:first-child"))
    assert [row[: len(name)] for row, name in zip(rows, names, strict=True)] == list(names)
    assert len(browser.ask(TEXTS.format("#points .point"))) == 3
    fronts = browser.ask(TEXTS.format("#points-table td.on"))
    page = read_page((tmp_path / "page.html").read_text())
    assert [text == "front" for text in fronts] == page["kinds"][0]["fronts"][0]["on_front"] and fronts[1] == "front"
    browser.ask("byId('forgotten').selectedIndex = 1; byId('forgotten').dispatchEvent(new Event('change'))")
    assert "probes forgotten" in browser.ask(TEXTS.format("#points .title"))[1]

    # another experiment, order and seed
    browser.ask("byId('experiments').children[2].click()")
    browser.ask("byId('view').selectedIndex = 5; byId('view').dispatchEvent(new Event('change'))")
    last = experiments[2].sequences[3]
    wanted = [f"{row['score'][name].mean:.3f}" for row in last.rows for name in (*last.tasks, "world_knowledge")]
    assert browser.ask(TEXTS.format("#map tbody td")) == wanted

    # losses: more is worse
    browser.ask("byId('kinds').children[1].click()")
    assert "lower is better" in browser.ask("byId('scales').textContent")
    assert "negated" in browser.ask("byId('about').textContent")
    first = browser.ask("luminance(mix(0)) < luminance(mix(0.5)) && luminance(mix(0.5)) < luminance(mix(1))")
    assert first and browser.ask(CONTRAST) >= 4.5
