"""Curves of runs: what is read of files that may still be written, what of it is drawn, and how a browser shows it."""

import json
import math
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from browser import Browser, needs_browser
from hypothesis import given
from hypothesis import strategies as st
from local_server import serving
from processes import ROOT, run
from run_directories import make_sources, read_page, write_run
from tiny_data import read_lines, write_jsonl

from mini_trainer.options.problems.finding import find_wrong_options
from mini_trainer.options.tools import PlotOptions
from mini_trainer.tools.plot_metrics import plot_metrics
from mini_trainer.use.plots import run_files
from mini_trainer.use.plots.board import BoardServer
from mini_trainer.use.plots.curves import MOST_OTHERS, choose_starts, describe_page, make_curves_page, thin
from mini_trainer.use.plots.run_files import MetricsReader, name_runs, open_runs

METRICS, VALIDATIONS, PARAMS = "training_metrics_0.jsonl", "validation_metrics_0.jsonl", "training_params.json"
HOSTILE = "<img src=x onerror=alert(1)> $DATA$ \"quote' %{x} <b> &lt; \u202e _ü"


def describe(*paths: Path) -> dict:
    return describe_page(open_runs(list(paths)), is_live=False)


def find_chart(page: dict, key: str, *, of_validations: bool = False) -> dict | None:
    charts = [chart for chart in page["charts"] if (chart["key"], chart["is_of_validations"]) == (key, of_validations)]
    return charts[0] if charts else None


# ---- reading


def test_a_torn_line_is_read_when_it_is_whole_and_a_damaged_one_is_counted(tmp_path):
    path = tmp_path / METRICS
    path.write_text('{"step": 1, "loss": 3.5}\nnonsense\n{"loss": 1}\n[]\n{"step": 2, "loss": NaN}\n{"step": 3, "lo')
    reader = MetricsReader(path, ("loss", "lr"))
    reader.read()
    assert reader["step"].tolist() == [1, 2] and reader.num_damaged == 3
    assert reader["loss"][0] == 3.5 and math.isnan(reader["loss"][1]) and np.isnan(reader["lr"]).all()
    with path.open("a") as file:
        file.write('ss": 2.5, "lr": 1}\n')
    reader.read()
    assert reader["step"].tolist() == [1, 2, 3] and reader["loss"][2] == 2.5 and reader["lr"][2] == 1


@pytest.mark.parametrize("num_later", [0, 1, 5])
def test_a_file_that_a_resumed_run_has_cut_is_read_again(num_later, tmp_path):
    path, reader = tmp_path / METRICS, MetricsReader(tmp_path / METRICS, ("loss",))
    write_jsonl(path, [{"step": step, "loss": 1.0} for step in range(1, 10)])
    reader.read()
    write_jsonl(path, [{"step": step, "loss": 1.0 if step < 6 else 2.0} for step in range(1, 6 + num_later)])
    reader.read()
    assert reader["step"].tolist() == list(range(1, 6 + num_later))
    assert reader["loss"].tolist() == [1.0] * 5 + [2.0] * num_later
    path.unlink()
    reader.read()
    assert len(reader) == 0


def test_of_a_step_that_is_there_twice_the_later_one_counts(tmp_path):
    write_jsonl(tmp_path / METRICS, [{"step": step, "loss": loss} for step, loss in [(1, 5), (2, 4), (3, 3), (2, 1)]])
    reader = MetricsReader(tmp_path / METRICS, ("loss",))
    reader.read()
    assert (reader["step"].tolist(), reader["loss"].tolist()) == ([1, 2], [5, 1])
    others = [{"step": 1, "loss": 1}, {"step": 2, "kl": 2}, {"step": 3, "kl": 3}, {"step": 2, "loss": 4}]
    write_jsonl(tmp_path / METRICS, [*others, {"step": 3, "kl": 5}])
    reader.read()
    assert reader["kl"].tolist()[2:] == [5] and np.isnan(reader["kl"][:2]).all() and reader["loss"][1] == 4


def test_many_names_cost_as_much_as_many_numbers_and_most_of_them_get_no_chart(tmp_path, monkeypatch):
    """Each line has a name of its own. Columns that are as long as the file would take names times lines."""
    calls, to_float = [], run_files.to_float
    monkeypatch.setattr(run_files, "to_float", lambda value: calls.append(value) or to_float(value))
    counts = []
    for number in (MOST_OTHERS + 1, 4 * (MOST_OTHERS + 1)):
        run = tmp_path / str(number)
        run.mkdir()
        write_jsonl(run / METRICS, [{"step": step, f"own {step}": 1.0} for step in range(number)])
        calls.clear()
        page = describe_page(open_runs([run]), is_live=False)
        counts.append(len(calls) + sum(len(column[0]) for column in open_runs([run])[0].steps.columns.values()))
        assert len(page["charts"]) == 1 + MOST_OTHERS
        assert f"Of {number} other metrics, the {MOST_OTHERS} with the most points have a chart." in page["notes"]
    assert counts[1] < 5 * counts[0]


def test_sources_become_columns_also_where_they_come_late(tmp_path):
    sources = {}, {"web": {"loss": 3.0}, "code": {"loss": None}, "odd": 7}, {"code": {"loss": 4.0}}
    write_jsonl(tmp_path / METRICS, [dict(step=i + 1, loss=2.0, sources=one) for i, one in enumerate(sources)])
    reader = MetricsReader(tmp_path / METRICS, ("loss",))
    reader.read()
    assert reader["source: web"][1] == 3.0 and np.isnan(reader["source: web"][[0, 2]]).all()
    assert reader["source: code"][2] == 4.0 and np.isnan(reader["source: code"][:2]).all()


def test_runs_have_the_names_that_tell_them_apart():
    assert name_runs([Path("/x/runs/a")]) == ["runs/a"]
    assert name_runs([Path("/x/runs/a"), Path("/x/runs/b")]) == ["a", "b"]
    assert name_runs([Path("/x/a/run"), Path("/x/b/c/run")]) == ["a/run", "b/c/run"]


def test_what_is_no_run_is_refused_with_what_could_be_meant(tmp_path):
    write_run(tmp_path / "sweep" / "first run", num_steps=2)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    paths = [tmp_path / name for name in ("sweep", "empty", "gone", "file", "sweep/first run", "sweep/first run")]
    done = plot(*paths, "--output", tmp_path / "x.html")
    assert (done.returncode, done.stdout) == (2, "")
    lines = done.stderr.removeprefix("error: ").splitlines()
    named = ("sweep/first run", "sweep", "empty", "gone", "file")  # what is given twice comes first
    for line, name in zip(lines, named, strict=True):
        assert line.strip().startswith(f"{tmp_path / name}: ")
    assert lines[1].endswith(f"'{tmp_path}/sweep/first run'?") and METRICS in lines[2]


# ---- what is drawn


@given(st.lists(st.floats(-1e6, 1e6) | st.just(math.nan), min_size=1, max_size=300), st.integers(1, 50))
def test_thinning_keeps_extremes_and_means(values, max_points):
    values = np.array(values)
    starts = choose_starts(len(values), max_points)
    points = thin(values, starts)
    assert len(points["mean"]) == len(starts) == min(len(values), max_points)
    if len(values) <= max_points:
        means = [math.nan if mean is None else mean for mean in points.pop("mean")]
        assert means == pytest.approx(values.tolist(), rel=1e-5, nan_ok=True) and points == {}
        return
    for i, (start, end) in enumerate(zip(starts, [*starts[1:], len(values)], strict=True)):
        there = values[start:end][np.isfinite(values[start:end])]
        expected = [there.min(), there.max(), there.mean()] if len(there) else [None] * 3
        found = [points[name][i] for name in ("low", "high", "mean")]
        assert found == [None if v is None else pytest.approx(v, rel=1e-5, abs=1e-4) for v in expected]


def test_the_page_has_the_numbers_of_the_files(tmp_path):
    path = write_run(tmp_path / "run", num_steps=60, sets=("held_out",), resumes=(20, 40))
    page = read_page(make_curves_page(open_runs([path])))
    (shown,), rows, validations = page["runs"], read_lines(path / METRICS), read_lines(path / VALIDATIONS)
    keys = [chart["key"] for chart in page["charts"] if not chart["is_of_validations"]]
    assert keys == ["loss", "lr", "grad_norm", "tokens_per_second", "peak_memory_usage_GB"]
    for key in keys:
        assert shown["curves"][key]["mean"] == pytest.approx([row[key] for row in rows], rel=1e-5), key
    assert shown["x"]["tokens"] == [row["total_tokens_accumulated"] for row in rows]
    assert shown["x"]["samples"] == [row["total_samples_accumulated"] for row in rows]
    assert shown["x"]["hours"] == pytest.approx([0.51 * row["step"] / 3600 for row in rows], rel=1e-5)
    assert shown["validations"]["curves"]["loss"] == pytest.approx([row["loss"] for row in validations], rel=1e-5)
    assert shown["validations"]["x"]["tokens"] == [8192 * row["step"] for row in validations]
    assert validations[shown["validations"]["best"]]["loss"] == min(row["loss"] for row in validations)
    assert shown["resumes"]["x"]["step"] == [20, 40] and shown["resumes"]["x"]["samples"] == [640, 1280]
    assert [row[2] for row in page["tables"]["starts"]["rows"]] == ["0", "20", "40"]
    assert page["smoothing"] == 3
    summary = dict(zip(page["tables"]["summary"]["head"], page["tables"]["summary"]["rows"][0], strict=True))
    assert (summary["state"], summary["steps"], summary["tokens"]) == ("finished", "60", "492 k")
    assert summary["best validation"] == f"{min(row['loss'] for row in validations):.4f}"
    # The best validation is the last that the run itself calls best.
    write_jsonl(path / VALIDATIONS, [row | {"is_best": row["step"] in (5, 20)} for row in validations])
    page = describe(path)
    best = page["runs"][0]["validations"]["best"]
    assert page["runs"][0]["validations"]["x"]["step"][best] == 20
    summary = dict(zip(page["tables"]["summary"]["head"], page["tables"]["summary"]["rows"][0], strict=True))
    assert (summary["best validation"], summary["at step"]) == (f"{validations[best]['loss']:.4f}", "20")


def test_charts_are_there_where_there_is_something_to_draw(tmp_path):
    bare = write_run(tmp_path / "bare", num_steps=5)
    rich = write_run(tmp_path / "rich", num_steps=30, sources=("web", "code"), sets=("a", "b"))
    assert not any(chart["is_of_validations"] or chart["section"] for chart in describe(bare)["charts"])
    both = describe(bare, rich)
    expected = {"Loss by source": {"web", "code"}, "Validation loss by set": {"a", "b"}}
    assert expected == {of: {chart["title"] for chart in both["charts"] if chart["section"] == of} for of in expected}
    assert find_chart(both, "token_accuracy", of_validations=True) and not find_chart(both, "mfu")
    write_jsonl(bare / METRICS, [row | {"mfu": 0.4} for row in read_lines(bare / METRICS)])
    assert find_chart(describe(bare), "mfu")


def test_metrics_that_no_table_names_have_charts_of_their_own(tmp_path):
    path = write_run(tmp_path / "run", num_steps=20, sets=("held_out",))
    plain = write_run(tmp_path / "plain", num_steps=9, sets=("held_out",))
    own = ("cross_entropy", "teacher_kl", "teacher_tail", "teacher_agreement")
    rows = [row | {name: i / row["step"] for i, name in enumerate(own)} for row in read_lines(path / METRICS)]
    rows[0] |= dict.fromkeys(own)  # a step without targets
    write_jsonl(path / METRICS, rows)
    validations = [row | {"teacher_kl": row["loss"] / 2} for row in read_lines(path / VALIDATIONS)]
    write_jsonl(path / VALIDATIONS, validations)
    page = describe(plain, path)
    first, *tails = page["runs"][1]["curves"]["teacher_tail"]["mean"]
    assert first is None and tails == pytest.approx([2 / step for step in range(2, 21)], rel=1e-5)
    found = page["runs"][1]["validations"]["curves"]["teacher_kl"]
    assert found == pytest.approx([row["teacher_kl"] for row in validations], rel=1e-5)
    assert "teacher_kl" not in page["runs"][0]["curves"]
    titles = {chart["title"] for chart in page["charts"] if not chart["is_of_validations"]}
    titles -= {chart["title"] for chart in describe(plain)["charts"]}
    assert titles == {"Cross entropy", "Teacher KL", "Teacher tail", "Teacher agreement"}
    assert find_chart(page, "teacher_kl", of_validations=True)["title"] == "Validation teacher KL"


def test_options_that_differ_and_those_that_are_shared(tmp_path):
    first = write_run(tmp_path / "a", num_steps=2, options={"lr_scheduler": "cosine", "lora_target_modules": []})
    options = dict(lr_scheduler="cosine", learning_rate=5e-5, lora_target_modules=["q_proj", "k_proj"])
    second = write_run(tmp_path / "b", num_steps=2, options=options)
    params = json.loads((second / PARAMS).read_text())
    params["identity"]["data"] = "b" * 64
    (second / PARAMS).write_text(json.dumps(params))
    tables = describe(first, second)["tables"]
    assert tables["differing"]["rows"] == [
        ["learning-rate", "0.001", "5e-5"],
        ["lora-target-modules", "none", "q_proj k_proj"],
        ["digest of data", "a" * 12, "b" * 12],
    ]
    assert tables["shared"]["rows"] == [["batch-size", "32"], ["lr-scheduler", "cosine"]]
    (second / PARAMS).write_text("{")
    page = describe(first, second)
    assert page["tables"]["differing"]["rows"] == [] and any("is damaged" in note for note in page["notes"])


def test_a_run_without_steps_and_damaged_files_have_a_page(tmp_path):
    empty = write_run(tmp_path / "empty", num_steps=2)
    (empty / METRICS).unlink()
    page = describe(empty)
    assert page["runs"][0]["x"]["step"] == [] and page["tables"]["summary"]["rows"][0][1] == "0"
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / METRICS).write_bytes(b'\xff\xfe\n{"step": 1}\n{"step": "2"}\n' + b"[" * 100_000 + b"\n")
    (odd / PARAMS).write_text("[]")
    page = describe(empty, odd)
    assert page["runs"][1]["x"]["step"] == [1] and page["runs"][1]["curves"]["loss"]["mean"] == [None]
    assert any("3 damaged lines" in note for note in page["notes"])


def list_tags(page: str) -> list[str]:
    return re.findall(r"<\w[^>]*", re.sub(r"<script\b.*?</script>", "<script>", page, flags=re.DOTALL))


def test_nothing_in_a_name_becomes_a_part_of_the_page(tmp_path):
    calm = write_run(tmp_path / "calm" / "run", num_steps=3, sources=("a", "b"))
    hostile = write_run(tmp_path / HOSTILE / "run", num_steps=3, sources=(HOSTILE, "</script><script>alert(1)"),
                        options={"data_path": "</script><script>alert(2)</script>"})  # fmt: skip
    calm, hostile = (make_curves_page(open_runs([path])) for path in (calm, hostile))
    tags = list_tags(calm)
    assert list_tags(hostile) == tags and tags.count("<script") == hostile.count("</script>") == 3
    assert not re.search(r"\s(src|href|onerror|onclick)\b", " ".join(tags))
    shown = read_page(hostile)
    assert shown["runs"][0]["name"] == f"{HOSTILE}/run" and HOSTILE in {chart["title"] for chart in shown["charts"]}


def test_runs_of_one_colour_have_other_dashes(tmp_path):
    path = write_run(tmp_path / "run_0", num_steps=1)
    paths = [path, *(shutil.copytree(path, tmp_path / f"run_{i}") for i in range(1, 15))]
    looks = [(tuple(run["colours"]), run["dash"]) for run in describe(*paths)["runs"]]
    assert len(set(looks)) == 15


def write_samples(path: Path, steps: Iterable[int], prompts: Iterable[str], *, answer: str = "answer") -> None:
    write_jsonl(path / "samples_0.jsonl", [
        dict(step=step, prompt=prompt, answer=f"{answer} {step}", finish_reason="length" if step else "stop")
        for step in steps for prompt in prompts
    ])  # fmt: skip


def test_answers_to_sample_prompts_are_there_by_prompt(tmp_path):
    first, second, third = (write_run(tmp_path / name, num_steps=5) for name in "abc")
    write_samples(first, range(40), ["one", "two"])
    write_samples(second, (0, 4), ["two", "x" * 5000])
    with (second / "samples_0.jsonl").open("a") as file:
        file.write('nonsense\n{"step": 5, "prompt": "torn')
    page = describe(first, second, third)
    shown = [(one["prompt"][:3], [(row["run"], row["step"]) for row in one["answers"]]) for one in page["samples"]]
    assert shown == [
        ("one", [(0, step) for step in (0, 13, 26, 39)]),
        ("two", [(0, step) for step in (0, 13, 26, 39)] + [(1, 0), (1, 4)]),
        ("xxx", [(1, 0), (1, 4)]),
    ]
    assert len(page["samples"][2]["prompt"]) < 2100 and any("up to 40 in a run, 4 of each" in n for n in page["notes"])
    answers = [(row["text"], row["is_cut"]) for row in page["samples"][2]["answers"]]
    assert answers == [("answer 0", False), ("answer 4", True)]
    assert describe(third)["samples"] == []
    before = describe(third)["version"]
    write_samples(third, (0,), ["one"])
    assert describe(third)["version"] != before and len(describe(third)["samples"]) == 1


# ---- the command


def test_options_that_cannot_be_used():
    for runs, output, problem in (((), "x.html", "no run"), (("a",), None, "no output"),
                                  (("a",), "x.png", "--output x.png: must end in .html")):  # fmt: skip
        assert problem in "\n".join(find_wrong_options(PlotOptions(runs=runs, output=output)))
    assert find_wrong_options(PlotOptions(runs=("a",), output="x.HTML")) == []


def plot(*words: object, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return run([sys.executable, "-m", "mini_trainer", "plot-metrics", *map(str, words)], cwd=cwd)


def test_the_command_writes_a_page_and_says_where_but_not_over_a_directory(tmp_path):
    first, second = (write_run(tmp_path / name, num_steps=4) for name in ("a", "b c"))
    with (second / METRICS).open("a") as file:
        file.write("damaged\n{torn")
    target = tmp_path / "my page.html"
    done = plot(first, second, "--output", target)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"curves: {target.as_uri()}\n"
    assert re.fullmatch(rf"warning: {second / METRICS}: 1 .*\n", done.stderr)
    assert [shown["name"] for shown in read_page(target.read_text())["runs"]] == ["a", "b c"]
    assert not list(tmp_path.glob(".*"))
    (tmp_path / "page.html").mkdir()
    with pytest.raises(ValueError, match=f"^--output {tmp_path}/page.html"):
        plot_metrics(PlotOptions(runs=(str(first),), output=str(tmp_path / "page.html")))


# ---- in a browser


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """Three runs: the first has everything, the second only its steps, the third an odd name, and still runs."""
    folder = tmp_path_factory.mktemp("runs")
    first = write_run(folder / "first", num_steps=400, sources=("web", "code"), sets=("a", "b"), resumes=(100,))
    second = write_run(folder / "second", num_steps=300, seed=1, options={"learning_rate": 5e-4})
    third = write_run(folder / HOSTILE, num_steps=200, seed=2, sources=("web",), finished=False)
    write_samples(third, (0, 100, 200), ["What?", HOSTILE], answer=HOSTILE)
    text = make_curves_page(open_runs([first, second, third]))
    (folder / "page.html").write_text(re.sub(r'"smoothing":\d+', '"smoothing":20', text))
    return folder / "page.html"


def open_page(browser: Browser, url: str, **window: object) -> None:
    browser.open(url, **window)
    browser.resize(window.get("width", 1280), browser.ask("document.documentElement.scrollHeight"))  # all charts near
    browser.rest()
    browser.wait_until("isDrawn() && near.size === data.charts.length")


def settle(browser: Browser) -> None:
    browser.rest()
    browser.wait_until("isDrawn()")


def act(browser: Browser, script: str) -> None:
    browser.ask(script)
    settle(browser)


def find_box(browser: Browser) -> list[float]:
    """The first chart's x, y, width and height."""
    return browser.ask("(({x, y, width, height}) => [x, y, width, height])"
                       "(document.querySelector('.first .over').getBoundingClientRect())")  # fmt: skip


COUNT_TRACES = """Object.fromEntries(data.charts.map(chart =>
    [idOf(chart), byId(idOf(chart)).querySelectorAll(".trace").length]))"""


@needs_browser
@pytest.mark.slow
def test_a_browser_draws_every_curve_and_asks_for_nothing(browser, page):
    open_page(browser, page.as_uri())
    assert browser.list_complaints() == []
    assert browser.list_requests() == [page.as_uri()]
    # Noisy curves are there twice, each step and smoothed; the first run has a line where it was resumed, everywhere.
    assert browser.ask(COUNT_TRACES) == {
        "s loss": 3 * 2 + 1 + 1, "v loss": 1 + 1, "v token_accuracy": 1 + 1, "s lr": 3 + 1, "s grad_norm": 3 * 2 + 1,
        "s tokens_per_second": 3 * 2 + 1, "s peak_memory_usage_GB": 3 + 1, "s source: web": 2 * 2 + 1,
        "s source: code": 2 + 1, "v set: a": 1 + 1, "v set: b": 1 + 1,
    }  # fmt: skip
    assert browser.ask("byId('title').textContent") == f"3 runs in {page.parent.name}"
    names = browser.ask("[...document.querySelectorAll('#summary tr td:first-child')].map(cell => cell.textContent)")
    assert names == ["first", "second", HOSTILE]
    assert browser.ask("document.querySelectorAll('#differing tr').length") == 1 + 1
    assert browser.ask("document.querySelectorAll('img').length") == 0
    asked = browser.ask("[...document.querySelectorAll('#samples summary')].map(one => one.innerText)")
    assert asked == ["What?", HOSTILE]
    texts = browser.ask("[...document.querySelectorAll('#samples td')].map(cell => cell.textContent)")
    assert texts == [f"{HOSTILE} {step}{end}" for step, end in ((0, ""), (100, " …"), (200, " …"))] * 2
    assert browser.ask("new Set([...document.querySelectorAll('[aria-pressed=true].run')]).size") == 3
    # A run is hidden on all charts, then alone on them.
    act(browser, "byId('runs').children[0].click()")
    hidden = browser.ask(COUNT_TRACES)
    assert (hidden["s loss"], hidden["v loss"], hidden["s source: code"], hidden["s lr"]) == (4, 0, 0, 2)
    act(browser, "byId('runs').children[1].dispatchEvent(new MouseEvent('dblclick'))")
    assert browser.ask("visibleRuns().map(run => run.name)") == ["second"]


@needs_browser
@pytest.mark.slow
def test_the_pointer_reads_all_runs_at_a_step(browser, page):
    open_page(browser, page.as_uri())
    x, y, width, height = find_box(browser)
    low, high = browser.ask("byId('s loss').drawn.ranges.x")
    at = x + width * (160 - low) / (high - low)
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=at, y=y + height / 2)
    browser.rest()
    head, *lines = browser.ask("[...document.querySelectorAll('.first .tip p')].map(line => line.textContent)")
    names = [re.search(r"  (\S+)", line)[1] for line in lines]
    assert head == "step 160" and names == ["first", "second", "<img", "first"]
    losses = [json.loads(line)["loss"] for line in (page.parent / "first" / METRICS).read_text().splitlines()]
    assert f"({losses[159]:.4g})" in lines[0] and "validation" in lines[3]
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
    browser.rest()
    assert not browser.ask("document.querySelector('.first .tip').checkVisibility()")


@needs_browser
@pytest.mark.slow
def test_axes_have_titles_a_constant_rate_is_level_and_a_run_without_steps_has_a_page(browser, tmp_path):
    path = write_run(tmp_path / "run", num_steps=50)
    rounded = [row | {"lr": 1e-5 * (1 + 1e-6 * (row["step"] % 3))} for row in read_lines(path / METRICS)]
    write_jsonl(path / METRICS, rounded)
    target = tmp_path / "page.html"
    target.write_text(make_curves_page(open_runs([path])))
    open_page(browser, target.as_uri())
    low, high = browser.ask("byId('s lr').drawn.ranges.y")
    assert low == 0 and 1e-5 < high < 1.3e-5
    titles = browser.ask("data.charts.map(chart => ['x', 'y'].map(axis =>"
                         " byId(idOf(chart)).querySelector(`.${axis}title`).textContent))")  # fmt: skip
    assert titles[0] == ["step", "Loss"] and ["step", "Peak memory (GB)"] in titles
    low, high = browser.ask("byId('s loss').drawn.ranges.y")
    assert low > 0.3  # others fill the chart
    (path / METRICS).write_text("")
    target.write_text(make_curves_page(open_runs([path])))
    open_page(browser, target.as_uri())
    assert browser.list_complaints() == [] and browser.ask("byId('empty').checkVisibility()")


@pytest.mark.wide
@needs_browser
@pytest.mark.slow
def test_smoothing_axes_and_zoom(browser, page):
    open_page(browser, page.as_uri())
    act(browser, "byId('smoothing').value = 0, byId('smoothing').dispatchEvent(new Event('input'))")
    assert browser.ask("byId('window').textContent") == "none" and browser.ask(COUNT_TRACES)["s loss"] == 3 + 1 + 1
    ranges = "data.charts.map(chart => byId(idOf(chart)).drawn.ranges.x)"
    assert all(low <= 0 and 400 < high < 420 for low, high in browser.ask(ranges))
    act(browser, "byId('axes').children[1].click()")
    assert all(32 * 400 < high < 33 * 400 for _, high in browser.ask(ranges))
    act(browser, "byId('axes').children[0].click()")

    # What is dragged over on one chart is what all of them show, and the scale is that of what is shown.
    x, y, width, height = find_box(browser)
    browser.drag((x + width * 0.5, y + height / 2), (x + width * 0.75, y + height / 2))
    browser.wait_until("view.x !== null")
    settle(browser)
    assert all(190 < low < 215 and 285 < high < 315 for low, high in browser.ask(ranges))
    assert browser.ask("byId('s loss').drawn.ranges.y[1]") < 3
    act(browser, "byId('reset').click()")
    assert all(high > 400 for _, high in browser.ask(ranges)) and browser.ask("byId('reset').disabled")
    act(browser, "document.querySelector('.first .log').click()")
    assert browser.ask("byId('s loss').drawn.isLog")
    assert browser.list_complaints() == []


@pytest.mark.long
@needs_browser
@pytest.mark.slow
def test_the_page_thins_what_it_draws_and_keeps_spikes(browser, tmp_path):
    path = write_run(tmp_path / "run", num_steps=5000)
    rows = read_lines(path / METRICS)
    rows[3210]["loss"] = 50.0
    write_jsonl(path / METRICS, rows)
    target = tmp_path / "page.html"
    target.write_text(re.sub(r'"smoothing":\d+', '"smoothing":1', make_curves_page(open_runs([path]))))
    open_page(browser, target.as_uri())
    points = "(({x, y}) => [Array.from(x), Array.from(y)])(byId('s loss').drawn.traces[0])"
    xs, ys = browser.ask(points)
    assert len(xs) < 2500 and max(ys) == 50.0 and abs(xs[ys.index(50.0)] - 3211) < 10
    act(browser, "view.x = [3200, 3220], drawAll()")
    xs, ys = browser.ask(points)
    assert xs == list(range(3199, 3222)) and xs[ys.index(50.0)] == 3211
    browser.ask("view.window = 10")
    smoothed = browser.ask("smoothed(data.runs[0], 'loss')")
    losses = np.array([row["loss"] for row in rows])
    weights = (9 / 11) ** np.abs(np.arange(len(losses)) - 3205)
    assert smoothed[3205] == pytest.approx(weights @ losses / weights.sum(), rel=1e-4)


@pytest.mark.wide
@needs_browser
@pytest.mark.slow
def test_a_followed_page_grows_without_losing_its_place(browser, tmp_path):
    path = write_run(tmp_path / "run", num_steps=20, finished=False)
    with serving(BoardServer(tmp_path, port=0)) as server:
        open_page(browser, f"{server.address}curves?run={server.board.read()['runs'][0]['id']}")
        act(browser, "view.x = [5, 15], view.window = 5, drawAll()")
        last = read_lines(path / METRICS)[-1]
        rows = [last | {"step": step, "total_samples_accumulated": 32 * step} for step in range(21, 61)]
        row = rows[-1] | {"step": 61, "sources": make_sources(61, ("web", "code", "x"), 1.0, random.Random(0))}
        with (path / METRICS).open("a") as file:
            file.write("".join(json.dumps(one) + "\n" for one in (*rows, row)))
        browser.wait_until("data.runs[0].x.step.length === 61")
        settle(browser)
        assert browser.ask("[view.x, view.window, byId('s loss').drawn.ranges.x]") == [[5, 15], 5, [5, 15]]
        assert browser.ask("document.querySelectorAll('.plot').length") == 5 + 3
        assert "following" in browser.ask("byId('live').textContent")
        assert browser.list_complaints() == []
        shutil.rmtree(path)
        browser.wait_until("byId('live').className === 'lost'")
        assert f"{path}: " in browser.ask("byId('live').textContent")
