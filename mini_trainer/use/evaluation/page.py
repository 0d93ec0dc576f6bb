"""The page of results: means with their intervals, pairs of models, and samples side by side, differences first."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mini_trainer.use.pages.page import escape_json, fold, make_page

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
    return {
        "name": one["name"],
        "kind": one["kind"],
        "total": len(shown),
        "metrics": one["metrics"],
        "extras": one["extras"],
        "samples": [
            {
                "at": i,
                "place": shown[i]["place"],
                "prompt": fold(shown[i]["prompt"], MAX_CHARS),
                "references": [fold(text, MAX_CHARS) for text in shown[i]["references"]],
                "answers": [describe_answer(own[i], names) for own in samples],
            }
            for i in kept
        ],
    }


def describe_answer(sample: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {
        "text": fold(sample.get("answer", ""), MAX_CHARS),
        "is_cut": sample.get("finish_reason") == "length",
        "scores": [round(sample["scores"][name], 4) for name in names],
    }


def measure_spread(samples: Sequence[dict[str, Any]], name: str) -> float:
    """The range of the models' scores on a sample, slightly more if their answers differ."""
    scores = [sample["scores"][name] for sample in samples]
    said = {sample.get("answer") for sample in samples}
    return max(scores) - min(scores) + (1e-9 if len(said) > 1 else 0.0)
