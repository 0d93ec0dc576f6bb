"""Models measured side by side: every score against its library or a plain loop, and what is said of differences."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import sacrebleu
from browser import Browser, needs_browser
from evaluations import evaluate_here
from forked import succeed
from in_process import train_here
from made_pages import HOSTILE, make_results
from processes import flags
from scipy import stats
from sklearn.metrics import f1_score
from small_runs import OPTIONS
from tiny_data import make_samples, read_lines, write_jsonl, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from mini_trainer.distributed.ending import RunError
from mini_trainer.use.evaluation import metrics
from mini_trainer.use.evaluation.comparison import SampleScores, adjust_by_holm, compare
from mini_trainer.use.evaluation.metrics import MEASURES, choose_measures, read_label, score_answer, score_corpus
from mini_trainer.use.evaluation.models import make_labels, name_files
from mini_trainer.use.evaluation.results import make_results_page
from mini_trainer.use.evaluation.set_scores import CLASSES, LOSSES, PAIRS

QUESTIONS = [("Hi", "Ho"), ("Who are you?", "Me"), ("12 and 30?", "12 + 30 = 42\n#### 42"), ("a b c", "d")]
NEW = 8


@pytest.mark.parametrize(
    ("measure", "answer", "reference", "score"),
    [
        ("exact_match", " Paris\n", "Paris", 1.0),
        ("exact_match", "paris", "Paris", 0.0),
        ("first_line", "A \nfor it is so", "A\nIt leaves 1.", 1.0),
        ("first_line", "A, for it is so", "A\nIt leaves 1.", 0.0),
        ("normalised_match", "The  answer, is: PARIS!", "answer is paris", 1.0),
        ("normalised_match", "A.", "a", 1.0),  # one of the letters A to D, and no article
        ("normalised_match", "The", "A", 0.0),
        ("contains", "I think it is New York, in fact.", "the new york", 1.0),
        ("contains", "Newer Yorkshire", "new york", 0.0),
        ("number", "so 12 + 30 = 42.", "#### 42", 1.0),
        ("number", "so it is $1,042.50", "1042.5", 1.0),
        ("number", "#### 7 or 42", "#### 42", 0.0),
        ("number", "none", "#### 42", 0.0),
        ("token_f1", "the cat sat", "a cat sat down", 0.8),
        ("token_f1", "", "x", 0.0),
        ("rouge_l", "a b c d", "a x c d", 0.75),
        ("bleu", "the cat is on the mat", "the cat is on the mat", 1.0),
        ("chrf", "abc", "abc", 1.0),
        ("edit_similarity", "this is a test", "this is a test!", 28 / 29),  # fuzzywuzzy's documentation: 97
        ("edit_similarity", "", "x", 0.0),
    ],
)
def test_scores_of_answers(measure, answer, reference, score):
    assert MEASURES[measure](answer, reference) == pytest.approx(score)


def test_a_number_is_read_without_its_sign_its_denominator_or_as_a_part_of_it():
    numbers = {
        "#### 1,234": 1234, "#### -5": -5, "in 2024 .5": 0.5, "x": None, "####": None, "5.": 5, "#### $3.50": 3.5,
        "50%": 50, "$-5": -5, "-$5": -5, "so −5": -5, "10-20": 20, "3/4": 0.75, "#### 6 / 8": 0.75, "-1/4": -0.25,
        "1 3/4 cups": 1.75, r"\frac{3}{4}": 0.75, "on 12/31/1999": 1999, "3/0": None, "2.5e-3": 0.0025,
        "9" * 5000: None,
    }  # fmt: skip
    found = {text: metrics.extract_number(text) for text in numbers}
    assert {text: None if value is None else float(value) for text, value in found.items()} == numbers


@pytest.mark.parametrize("measure", ["normalised_match", "contains", "token_f1"])
def test_different_numbers_are_equal_without_their_punctuation(measure):
    others = {"-5": "5", "3.5": "35", "1/4": "14", "10:30": "1030", "1e-5": "1e5", ".5": "5", "1,5": "15"}
    same = {"$-5": "-$5.", "1,234.50": "1234.50", "covid-19": "covid19", "(3.5)!": "3.5", "5-": "5"}
    assert [MEASURES[measure](*pair) for pair in others.items()] == [0.0] * len(others)
    assert [MEASURES[measure](*pair) for pair in same.items()] == [1.0] * len(same)


def test_measures_suit_the_references():
    assert choose_measures([], [("1\n#### 2",), ("#### 3",)]) == ["number", "exact_match"]
    assert choose_measures([], [("1.5",)]) == ["number", "exact_match"]
    assert "token_f1" in choose_measures([], [("Paris in 1900",)])
    assert choose_measures(["bleu"], [("1",)]) == ["bleu"]


def test_labels_are_read_out_of_answers_and_counted_by_scikit_learn():
    labels = ["New York", "New", "York"]
    assert [read_label(text, labels) for text in ("new york!", "New Yorks", "York, I think", "Old York")] == [
        "New York", "New", "York", "(none of the labels)",
    ]  # fmt: skip
    wanted, said = ["a", "b", "c", "a", "b"], ["a", "c", "c", "x", "b"]
    report = score_corpus(["label"], said, [(label,) for label in wanted])["label"]
    assert score_corpus(["label"], ["b"], [("a", "b")])["label"]["accuracy"] == 1  # any right one, as for the score
    padded = [label if label in "abc" else "none" for label in said]
    assert report["macro_f1"] == pytest.approx(f1_score(wanted, padded, labels=["a", "b", "c"], average="macro"))
    assert report["accuracy"] == pytest.approx(0.6)


@pytest.mark.parametrize("labels", [["-1", "0", "1"], ["C", "C++", "C#"], ["a", "A"], ["+", "-"], ["1.5", "15", "1"]])
def test_a_perfect_model_says_labels_that_normalising_makes_equal_or_empty(labels):
    for ending in ("", " ", ".", ", because"):
        answers = [label + ending for label in labels]
        assert score_corpus(["label"], answers, [(label,) for label in labels])["label"]["accuracy"] == 1
    assert read_label("other", labels) == read_label("D++", labels) == "(none of the labels)"


@pytest.mark.parametrize(("labels", "named"), [(["a  b", "a b", "c"], "'a  b', 'a b'"), (["", "x"], "''")])
def test_labels_that_nothing_tells_apart_are_scored(labels, named, world, root, files, tmp_path):
    task = write_jsonl(tmp_path / "task.jsonl", [dict(question="q", references=[label]) for label in labels])
    with pytest.raises(ValueError, match=f"--metrics label: given the labels {named}, which"):
        run(world, tmp_path / "out", model=files["base"], task=str(task), metrics="label")


def test_bleu_of_several_references_is_another_than_sacrebleus():
    answers = ["the cat sat on the mat", "x y z w"]
    references = [["the cat sat there", "a dog sat on the mat"], ["x y z w v"]]
    for pair in zip(answers, references, strict=True):
        assert score_answer("bleu", *pair) == pytest.approx(sacrebleu.sentence_bleu(*pair).score / 100)
    streams = [[several[0] for several in references], [references[0][1], None]]
    assert score_corpus(["bleu", "chrf"], answers, references) == {
        "corpus_bleu": sacrebleu.BLEU().corpus_score(answers, streams).score,
        "corpus_chrf": sacrebleu.CHRF().corpus_score(answers, streams).score,
    }


def make_scores(sums: list[list[float]], divisors: list[float] | None = None) -> SampleScores:
    return SampleScores("s", np.array(sums), np.array(divisors or [1.0] * len(sums[0])))


def test_intervals_are_scipys_and_the_same_each_time():
    random = np.random.default_rng(0)
    values, sizes = random.normal(2, 1, 60) * 5, random.integers(1, 9, 60).astype(float)
    scores = make_scores([values.tolist(), (values + 1).tolist()], sizes.tolist())
    found = compare(scores, seed=0, num_resamples=4000)
    assert found == compare(scores, seed=0, num_resamples=4000)
    expected = stats.bootstrap(
        (values, sizes), lambda a, b, axis: a.sum(axis) / b.sum(axis), paired=True, vectorized=True,
        n_resamples=4000, method="percentile", rng=1,
    ).confidence_interval  # fmt: skip
    width = expected.high - expected.low
    value = found["values"][0]
    assert value["mean"] == pytest.approx(values.sum() / sizes.sum())
    assert abs(value["low"] - expected.low) < 0.1 * width and abs(value["high"] - expected.high) < 0.1 * width


@pytest.mark.parametrize(("right", "low", "high"), [(20, 0.8389, 1.0), (0, 0.0, 0.1611), (15, 0.5313, 0.8881)])
def test_the_interval_of_a_share_is_a_bootstraps(right, low, high):
    (value,) = compare(make_scores([[1.0] * right + [0.0] * (20 - right)]), seed=0, num_resamples=200)["values"]
    assert (value["low"], value["high"]) == pytest.approx((low, high), abs=5e-5)


def test_right_and_wrong_answers_are_compared_by_mcnemars_exact_test():
    first = [1.0] * 10 + [0.0] * 8 + [1.0] * 2
    second = [1.0] * 10 + [1.0] * 8 + [0.0] * 2
    (pair,) = compare(make_scores([first, second]), seed=0, num_resamples=200)["pairs"]
    assert (pair["num_better"], pair["num_worse"]) == (8, 2)
    assert pair["p"] == pytest.approx(2 * sum(math.comb(10, k) for k in range(3)) / 2**10)
    assert pair["difference"] == pytest.approx(0.3)


def test_other_scores_are_compared_by_permuting_signs():
    changes = [0.5, 0.3, -0.1, 0.7, 0.2, 0.4, 0.05, 0.6]
    zeros = [0.0] * 8
    (pair,) = compare(make_scores([zeros, changes]), seed=0, num_resamples=9999)["pairs"]
    sums = [sum(s * c for s, c in zip(signs, changes, strict=True)) for signs in itertools.product((1, -1), repeat=8)]
    assert pair["p"] == pytest.approx(sum(abs(value) >= sum(changes) - 1e-9 for value in sums) / 2**8)
    (same,) = compare(make_scores([changes, changes]), seed=0, num_resamples=200)["pairs"]
    assert (same["p"], same["difference"], same["low"], same["high"]) == (1.0, 0.0, 0.0, 0.0)


def test_p_values_of_several_pairs_are_adjusted_by_holm():
    assert adjust_by_holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert adjust_by_holm([0.9, 0.5]) == [1.0, 1.0] and adjust_by_holm([]) == []


def test_models_and_files_have_short_names_of_their_own():
    assert make_labels(["a/run/hf_format/samples_3", "b/run/hf_format/samples_3", "Qwen/Q 2"]) == [
        "a_run_samples_3", "b_run_samples_3", "Qwen_Q_2",
    ]  # fmt: skip
    assert make_labels(["x/base", "x/run/hf_format/samples_3"]) == ["base", "samples_3"]
    assert name_files(["a/x.jsonl", "b/y.jsonl", "b/x.arrow"]) == {
        "a/x.jsonl": "x.jsonl", "b/y.jsonl": "y", "b/x.arrow": "x.arrow",
    }  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("evaluate")


@pytest.fixture(scope="module")
def files(root) -> dict[str, str]:
    """Two models, two tasks, and a tokenized set."""
    (root / "task.jsonl").write_text("".join(json.dumps(dict(question=q, answer=a)) + "\n" for q, a in QUESTIONS))
    (root / "more.jsonl").write_text(json.dumps(dict(prompt="One, two,", answer="three")) + "\n")
    data = write_samples(root / "data.arrow", make_samples(13, vocab_size=VOCAB_SIZE))
    base = save_tokenizer(save_model(FAMILIES["llama"], root / "base"))
    other = save_tokenizer(save_model(FAMILIES["llama"], root / "other", seed=1))
    return dict(
        base=str(base), other=str(other), task=str(root / "task.jsonl"), more=str(root / "more.jsonl"),
        data=str(data),
    )  # fmt: skip


def run(world, output_dir: Path, **changes) -> dict:
    return evaluate_here(world, output_dir, **dict(max_new_tokens=NEW) | changes)


@pytest.fixture(scope="module")
def results(world, root, files) -> dict:
    models = (files["base"], files["other"])
    return run(world, root / "results", model=models, task=(files["task"], files["more"]), data=files["data"])


def test_answers_are_kept_scored_and_added_up(results, root, files):
    measured = results["sets"][0]
    names = [metric["name"] for metric in measured["metrics"]]
    assert names == ["exact_match", "normalised_match", "contains", "token_f1"]
    lines = read_lines(root / "results" / "samples" / "base" / "task.scores.jsonl")
    assert [(line["prompt"], line["references"]) for line in lines] == [(q, [a]) for q, a in QUESTIONS]
    for metric in measured["metrics"]:
        scores = [line["scores"][metric["name"]] for line in lines]
        assert metric["values"][0]["mean"] == pytest.approx(sum(scores) / len(scores))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(files["base"]), AutoTokenizer.from_pretrained(files["base"])
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    ids = model.generate(**prompt, do_sample=False, max_new_tokens=NEW)[0, prompt["input_ids"].shape[1] :]
    assert lines[0]["answer"] == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_losses_of_an_export_are_those_of_the_runs_validation(method, world, root, files):
    adapter = dict(lora=True, lora_rank=2) if method == "lora" else {}
    output_dir = root / f"run_{method}"
    train_here(
        world, **OPTIONS, **adapter, model_name_or_path=files["base"], data_path=files["data"], max_steps=3,
        validation_data_path=files["data"], output_dir=str(output_dir), export_best=False,
    )  # fmt: skip
    last = read_lines(output_dir / "validation_metrics_0.jsonl")[-1]
    export = str(output_dir / "hf_format" / "samples_24")
    (measured,) = run(world, root / f"of_{method}", model=export, data=files["data"])["sets"]
    loss, accuracy = (metric["values"][0]["mean"] for metric in measured["metrics"])
    assert loss == pytest.approx(last["loss"], rel=1e-6)
    assert accuracy == pytest.approx(last["token_accuracy"])
    assert measured["extras"][0]["perplexity"] == pytest.approx(last["perplexity"], rel=1e-6)
    assert measured["extras"][0]["num_loss_counted_tokens"] == last["num_loss_counted_tokens"]
    # an adapter answers, too, beside the model that it belongs to
    both = run(world, root / f"both_{method}", model=(files["base"], export), task=files["task"])
    assert [model["label"] for model in both["models"]] == ["base", "samples_24"]
    assert ("adapter" in both["models"][1]) == (method == "lora")


def test_what_is_there_is_not_computed_again_and_one_more_model_costs_that_model(results, world, root, files):
    folder = root / "results" / "samples"
    kept = [path for path in folder.rglob("*") if path.name.endswith((".answers.jsonl", ".losses.jsonl"))]
    before = {path: path.stat().st_mtime_ns for path in kept}
    assert len(before) == 6
    sets = dict(task=(files["task"], files["more"]), data=files["data"])
    again = run(world, root / "results", model=(files["base"], files["other"]), **sets)
    assert again == results and {path: path.stat().st_mtime_ns for path in kept} == before
    third = save_tokenizer(save_model(FAMILIES["llama"], root / "third", seed=2))
    more = run(world, root / "results", model=(files["base"], files["other"], str(third)), **sets)
    assert {path: path.stat().st_mtime_ns for path in kept} == before
    assert len(more["sets"][0]["metrics"][0]["pairs"]) == 3
    with pytest.raises(RunError, match=r"max_new_tokens 8, now 9"):
        run(world, root / "results", model=files["base"], task=files["task"], max_new_tokens=9)


@pytest.mark.parametrize("read", [LOSSES.read, PAIRS.read, CLASSES.read])
@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"loss_sum": "x"}'])
def test_damaged_scores_of_all_kinds_are_refused_by_line(read, text, tmp_path):
    (tmp_path / "x.jsonl").write_text(f"{text}\n")
    with pytest.raises(ValueError, match=rf"^{tmp_path}/x\.jsonl: line 1 is damaged: see .*; remove it"):
        read(tmp_path / "x.jsonl")


def test_two_processes_find_what_one_finds(results, root, files):
    words = flags(
        output_dir=root / "two", model=(files["base"], files["other"]), task=(files["task"], files["more"]),
        data=files["data"], max_new_tokens=NEW, num_resamples=200,
    )  # fmt: skip
    done = succeed(2, "evaluate_model.py", *words)
    assert "file://" in done.stdout and "* " in done.stdout
    two = json.loads((root / "two" / "results.json").read_text())
    for one, other in zip(results["sets"], two["sets"], strict=True):
        for metric, its in zip(one["metrics"], other["metrics"], strict=True):
            means, theirs = ([value["mean"] for value in m["values"]] for m in (metric, its))
            assert theirs == pytest.approx(means, rel=1e-6), metric["name"]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([dict(question="Hi")], "task.jsonl:1 .*reference"),
        ([dict(question="Hi", choices=["a", "b"], answer=0)], "task.jsonl:1 has choices: .*--lm-eval"),
    ],
)
def test_tasks_without_what_is_right_are_refused(rows, reason, world, root, files, tmp_path):
    write_jsonl(tmp_path / "task.jsonl", rows)
    with pytest.raises(ValueError, match=reason):
        run(world, tmp_path / "out", model=files["base"], task=str(tmp_path / "task.jsonl"))


def test_data_of_another_tokenizer_is_refused(world, root, files, tmp_path):
    data = write_samples(tmp_path / "data.arrow", make_samples(3, vocab_size=VOCAB_SIZE))
    (tmp_path / "data.arrow.meta.json").write_text(json.dumps(dict(tokenizer_fingerprint="0" * 64)))
    with pytest.raises(ValueError, match=f"--data {data}: .*a tokenizer other than"):
        run(world, tmp_path / "out", model=files["base"], data=str(data))


@pytest.fixture(scope="module")
def page(root, results) -> Path:
    """A page of made-up samples: 30 that two models answer alike, and among them three that they do not."""
    result, samples = make_results("first", HOSTILE)
    losses = [[dict(scores=dict(loss=loss, token_accuracy=0))] for loss in (1.0, 2.0)]
    other = dict(shown=[dict(place="a", prompt="", references=[])], samples=losses)
    path = root / "page.html"
    result["sets"] += results["sets"][2:]
    path.write_text(make_results_page(result, [samples, other]), encoding="utf-8")
    return path


@needs_browser
def test_the_page_lays_models_side_by_side_and_differences_come_first(page, tmp_path):
    browser = Browser(tmp_path / "profile")
    try:
        browser.open(page.as_uri())
        places = "[...document.querySelectorAll('.place')].map(node => node.textContent)"
        assert browser.ask(places)[:4] == ["rows:7", "rows:13", "rows:21", "rows:0"]
        assert browser.ask("byId('position').textContent") == "1–20 of 30"
        sides = "[...document.querySelector('.sample').querySelectorAll('.answer')].map(node => node.className)"
        assert browser.ask(sides) == ["answer right", "answer wrong"]
        assert browser.ask("document.querySelector('.mean.best span').textContent") == "first"
        ticks = "[...document.querySelectorAll('.ticks span')].map(tick => tick.textContent)"
        assert browser.ask(ticks) == ["0", "0.25", "0.5", "0.75", "1"]
        shares = browser.ask("[...document.querySelectorAll('.track s')].map(bar => parseFloat(bar.style.width))")
        told = browser.ask("[...document.querySelectorAll('.told')].map(text => parseFloat(text.textContent))")
        assert shares == pytest.approx([100 * value for value in told], abs=0.01) and told == [0.9667, 0.9333]
        row = "[...byId('pairs-table').rows[1].cells].map(cell => cell.textContent)"
        first, second, difference, _, better, worse, p = browser.ask(row)
        assert (first, second, difference, better, worse, p) == ("first", HOSTILE, "−0.0333", "1", "2", "1.0000")
        # searching, filters, pages
        browser.ask("byId('search').value = 'SECOND says 21'; byId('search').dispatchEvent(new Event('input'))")
        assert browser.ask(places) == ["rows:21"]
        assert browser.ask("document.querySelector('mark').textContent") == "second says 21"
        browser.ask("byId('search').value = ''; byId('filter').value = 'differ'; find()")
        assert browser.ask("found.length") == 30  # none of them said the same
        browser.ask("byId('filter').value = 'low 0'; byId('filter').dispatchEvent(new Event('change'))")
        assert browser.ask(places) == ["rows:13"]
        browser.ask("byId('filter').value = 'all'; byId('order').value = 'file'")
        browser.ask("byId('order').dispatchEvent(new Event('change'))")
        browser.ask("byId('next').click()")
        assert browser.ask(places) == [f"rows:{i}" for i in range(20, 30)]
        # the other set
        browser.ask("byId('sets').children[1].click()")
        assert browser.ask("byId('set').textContent") == "data"
        losses = list(map(float, browser.ask(ticks)))  # not shares: a scale of their own, without bars from zero
        assert len(losses) > 1 and min(losses) > 0 and browser.ask("document.querySelectorAll('.track s').length") == 0
        assert browser.list_complaints() == []
        assert browser.list_requests() == [page.as_uri()]
    finally:
        browser.close()
