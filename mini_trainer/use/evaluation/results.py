"""Results of an evaluation, and their page: means with intervals, pairs of models, the best model, and samples side by
side, differences first.

Results are stored with a record of how they were made, so that they are not computed again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_trainer.data.stores.disk import written_aside
from mini_trainer.options.reading import list_wrong, read_bytes, read_object
from mini_trainer.use.evaluation.comparison import SampleScores, compare
from mini_trainer.use.inference.engine import REFUSED
from mini_trainer.use.pages.page import escape_json, fold, make_page

ALPHA = 0.05  # significance level of differences
SEED = 0  # of the bootstrap and the permutations

AnswerRecord = dict[str, Any]  # one model's answer and scores


@dataclass
class Measured:
    """One task or data set, measured for all models: `samples[model][i]`."""

    name: str
    kind: str  # answers, losses, pairs, classes, harness
    shown: list[dict[str, Any]]  # prompt and references of each sample
    samples: list[list[AnswerRecord]]
    scores: list[SampleScores]
    extras: list[dict[str, Any]]  # one per model


def write_results(
    folder: Path, measured: Sequence[Measured], models: list[dict[str, Any]], *, num_resamples: int
) -> list[str]:
    """Writes results.json and the page, and returns the verdicts."""
    sets = [
        {"name": one.name, "kind": one.kind, "num_samples": len(one.shown),
         "metrics": [compare(scores, seed=SEED, num_resamples=num_resamples) for scores in one.scores],
         "extras": one.extras}
        for one in measured
    ]  # fmt: skip
    result = {"models": models, "num_resamples": num_resamples, "seed": SEED, "sets": sets}
    with written_aside(folder / "results.json", folder / "results.html") as (results, page):
        results.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        samples = [{"shown": one.shown, "samples": one.samples} for one in measured]
        page.write_text(make_results_page(result, samples), encoding="utf-8")
    return write_verdicts(result, [model["label"] for model in models])


def write_verdicts(result: dict[str, Any], labels: Sequence[str]) -> list[str]:
    """Text lines that compare the models with the best one, by each set's first measure."""
    lines, width = [], max(map(len, labels))
    for measured in result["sets"]:
        metric = measured["metrics"][0]
        means = [value["mean"] * (1 if metric["higher_is_better"] else -1) for value in metric["values"]]
        best = means.index(max(means))
        lines.append(f"{measured['name']}, {metric['num_samples']:,} samples, by {metric['name']}:")
        for i, (label, value) in enumerate(zip(labels, metric["values"], strict=True)):
            line = f"  {'*' if i == best else ' '} {label:{width}}  {value['mean']:.4f}"
            line += f" [{value['low']:.4f}, {value['high']:.4f}]" + describe_difference(metric, best, i)
            if num_refused := measured["extras"][i].get("num_refused"):
                line += f"   (prompts too long, counted as wrong: {num_refused:,})"
            lines.append(line)
    return lines


def describe_difference(metric: dict[str, Any], best: int, i: int) -> str:
    """A model's difference from the best one; "" for the best one itself."""
    if i == best:
        return ""
    pair = next(pair for pair in metric["pairs"] if {pair["a"], pair["b"]} == {best, i})
    sign, counts = (1, ("num_better", "num_worse")) if pair["b"] == i else (-1, ("num_worse", "num_better"))
    num_better, num_worse = (pair[name] for name in counts)
    told = "" if pair["p_holm"] < ALPHA else ", which may be chance"
    return (
        f"   {sign * pair['difference']:+.4f}; better on {num_better:,}, worse on {num_worse:,}"
        f" (p {pair['p_holm']:.2g}{told})"
    )


PAGE = Path(__file__).with_name("results.html")
MAX_SAMPLES = 2000  # per set on the page, those on which models differ most
MAX_NAMED = 4  # most models named in the title
MAX_CHARS = 6000  # longer texts lose their middle


def make_results_page(result: dict[str, Any], sets: Sequence[dict[str, Any]]) -> str:
    """The page as HTML; `sets`: prompts and answers of each of `result`'s sets."""
    labels = [model["label"] for model in result["models"]]
    described = [describe_set(one, own["shown"], own["samples"]) for one, own in zip(result["sets"], sets, strict=True)]
    title = ", ".join(labels) if len(labels) <= MAX_NAMED else f"{len(labels)} models"
    page = {"models": labels, "names": [model["name"] for model in result["models"]], "sets": described}
    return make_page(PAGE, {"DATA": escape_json(page)}, title=title)


def describe_set(
    one: dict[str, Any], shown: Sequence[dict[str, Any]], samples: Sequence[Sequence[dict[str, Any]]]
) -> dict[str, Any]:
    """The script's data of a set: its numbers, and the samples on which models differ most."""
    names = [metric["name"] for metric in one["metrics"]]
    ordered = sorted(range(len(shown)), key=lambda i: (-measure_spread([own[i] for own in samples], names[0]), i))
    kept = sorted(ordered[:MAX_SAMPLES])
    return one | {
        "samples": [
            {
                "at": i,
                "place": shown[i]["place"],
                "prompt": fold(shown[i]["prompt"], MAX_CHARS),
                "references": [fold(text, MAX_CHARS) for text in shown[i]["references"]],
                "answers": [
                    {
                        "text": fold(sample.get("answer", ""), MAX_CHARS),
                        "is_cut": sample.get("finish_reason") == "length",
                        "is_refused": sample.get("finish_reason") == REFUSED,
                        "scores": [round(sample["scores"][name], 4) for name in names],
                    }
                    for sample in (own[i] for own in samples)
                ],
            }
            for i in kept
        ]
    }


def measure_spread(samples: Sequence[dict[str, Any]], name: str) -> float:
    """The range of the models' scores on a sample, slightly more if their answers differ."""
    scores = [sample["scores"][name] for sample in samples]
    said = {sample.get("answer") for sample in samples}
    return max(scores) - min(scores) + (1e-9 if len(said) > 1 else 0.0)


def is_made_by(path: Path, made_by: dict[str, Any]) -> bool:
    """Whether `path` exists and was made by `made_by`; ValueError if it was made by something else."""
    beside = name_beside(path)
    if not beside.is_file() or not path.is_file():
        return False
    if read_object(beside) != json.loads(json.dumps(made_by)):
        raise ValueError(
            f"{path}: was measured differently before (see {beside.name}): name another --output-dir, or remove it"
        )
    return True


def read_lines(
    path: Path, kinds: Mapping[str, Any] | None = None, *, advice: str = "remove it to measure again"
) -> list[Any]:
    """A JSONL file's values: with `kinds`, objects of these keys and types; ValueError names a damaged line."""
    try:
        # Bytes, because splitlines splits text also at line separators within answers.
        lines = read_bytes(path).splitlines()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}; {advice}") from None
    values = []
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
            wrong = [] if kinds is None else list_wrong(value, kinds) if isinstance(value, dict) else list(kinds)
            if wrong:
                raise ValueError(f"see {', '.join(wrong)}")
            values.append(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: line {number} is damaged: {error}; {advice}") from None
    return values


def write_made(path: Path, text: str, made_by: dict[str, Any]) -> None:
    with written_aside(path, name_beside(path)) as (aside, beside):
        aside.write_text(text, encoding="utf-8")
        beside.write_text(json.dumps(made_by), encoding="utf-8")


def name_beside(path: Path) -> Path:
    return path.with_suffix(".made_by.json")
