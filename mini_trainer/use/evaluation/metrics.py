"""Measures of an answer against its references, from 0 to 1; the best of several references counts.

Normalisation is SQuAD's (Rajpurkar et al. 2016, arXiv 1606.05250): lower case, no punctuation, no articles, single
spaces. But the punctuation of numbers stays: -5 is not 5, nor 3.5 35. ROUGE, BLEU and chrF are from rouge-score and
sacrebleu, edit similarity from rapidfuzz, classification from scikit-learn.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import chain, zip_longest
from typing import Any

from mini_trainer.options.problems.finding import require

Measure = Callable[[str, str], float]  # (answer, reference) -> score

ARTICLES = re.compile(r"\b(a|an|the)\b")
# ASCII punctuation to remove. A number keeps its sign, a point before it, and what stands between two of its digits
# (3.5, 3/4, 10:30), except a separator of thousands.
PUNCTUATION = re.compile(
    r"(?<!\d)(?!(?:(?<!\w)|(?<=\de))-\$?\.?\d|(?<![\w.])\.\d)[!-/:-@\[-`{-~]"
    r"|(?<=\d)(?:[!-/:-@\[-`{-~](?!\d)|[,'](?=\d{3}(?!\d)))"
)
DECIMAL = r"(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?"
# A sign, not a hyphen after a word; a fraction, perhaps after a whole number, that is no part of a date; or a decimal.
NUMBER = re.compile(
    r"((?:(?<!\w)[-−]\$?|\$[-−]?)?)"
    rf"(?:(?<![\d/])(?:(\d{{1,3}}) )?({DECIMAL}) ?/ ?({DECIMAL})(?![\d/])|({DECIMAL}))"
)
MARKED_NUMBER = re.compile(rf"####\s*{NUMBER.pattern}")  # how GSM8K ends its solutions
LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
AFTER_LABEL = re.compile(r"[.,;:!?)\]'\"*]*(\s|$)")  # between a label and the next word or the end
OTHER_LABEL = "(none of the labels)"


def normalise(text: str) -> str:
    """SQuAD's normalisation, but a text that is only an article, such as the answer A, stays."""
    return join_words(ARTICLES.sub(" ", simplify(text))) or simplify(text)


def simplify(text: str) -> str:
    """Lower case, no punctuation but that of numbers, single spaces."""
    return join_words(PUNCTUATION.sub("", text.lower()))


def join_words(text: str) -> str:
    return " ".join(text.split())


def exact_match(answer: str, reference: str) -> float:
    return float(answer.strip() == reference.strip())


def first_line(answer: str, reference: str) -> float:
    """Exact match of the first lines: answers that are followed by their reasons."""
    return exact_match(*(text.strip().partition("\n")[0] for text in (answer, reference)))


def normalised_match(answer: str, reference: str) -> float:
    return float(normalise(answer) == normalise(reference))


def contains(answer: str, reference: str) -> float:
    """Whether the answer contains the reference's words consecutively."""
    return float(f" {normalise(reference)} " in f" {normalise(answer)} ")


def extract_number(text: str) -> Fraction | None:
    """The number after the last `####` (GSM8K), else the last number of the text."""
    text = LATEX_FRACTION.sub(r"\1/\2", text)
    if not (found := [*MARKED_NUMBER.finditer(text)] or [*NUMBER.finditer(text)]):
        return None
    sign, whole, top, bottom, plain = (part.replace(",", "") for part in found[-1].groups(""))
    try:
        size = int(whole or 0) + Fraction(top or plain) / Fraction(bottom or 1)
    except (ValueError, ZeroDivisionError):  # ValueError: thousands of digits
        return None
    return -size if sign.strip("$") else size


def number(answer: str, reference: str) -> float:
    wanted = extract_number(reference)
    return float(wanted is not None and extract_number(answer) == wanted)


def token_f1(answer: str, reference: str) -> float:
    """F1 of the normalised words that answer and reference have in common."""
    said, wanted = normalise(answer).split(), normalise(reference).split()
    if not said or not wanted:
        return float(said == wanted)
    common = (Counter(said) & Counter(wanted)).total()
    return 2 * common / (len(said) + len(wanted))


def rouge(answer: str, reference: str, *, kind: str) -> float:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([kind], use_stemmer=False).score(reference, answer)[kind].fmeasure


def bleu(answer: str, *references: str) -> float:
    """BLEU against all references together, whose n-grams all count."""
    import sacrebleu

    return sacrebleu.sentence_bleu(answer, references).score / 100


def chrf(answer: str, reference: str) -> float:
    import sacrebleu

    return sacrebleu.sentence_chrf(answer, [reference]).score / 100


def edit_similarity(answer: str, reference: str) -> float:
    """Share of the characters of both texts that the longest common subsequence has; fuzzywuzzy's ratio."""
    from rapidfuzz import fuzz

    return fuzz.ratio(answer, reference) / 100


MEASURES: dict[str, Measure] = {
    "exact_match": exact_match,
    "first_line": first_line,
    "normalised_match": normalised_match,
    "contains": contains,
    "number": number,
    "token_f1": token_f1,
    "label": exact_match,  # with the label that `read_label` finds in the answer
    "rouge_1": functools.partial(rouge, kind="rouge1"),
    "rouge_2": functools.partial(rouge, kind="rouge2"),
    "rouge_l": functools.partial(rouge, kind="rougeL"),
    "bleu": bleu,
    "chrf": chrf,
    "edit_similarity": edit_similarity,
}
PACKAGES = {"rouge_1": "rouge_score", "rouge_2": "rouge_score", "rouge_l": "rouge_score", "bleu": "sacrebleu",
            "chrf": "sacrebleu", "edit_similarity": "rapidfuzz", "label": "sklearn"}  # fmt: skip


def choose_measures(given: Sequence[str], references: Sequence[Sequence[str]]) -> list[str]:
    """The given measures, or defaults: numeric ones if all references are numbers, else comparisons of words.
    ValueError for a measure that does not exist, or whose package is not installed."""
    for name in given:
        if name not in MEASURES:
            instead = "; for simplified texts, give the answers to a package that has SARI" if name == "sari" else ""
            raise ValueError(f"--metrics {name}: is not one of {', '.join(MEASURES)}{instead}")
        if name in PACKAGES:
            require(PACKAGES[name], flag=f"--metrics {name}")
    if given:
        return list(given)
    if all("####" in text or NUMBER.fullmatch(text.strip()) for text in chain(*references)):
        return ["number", "exact_match"]
    return ["exact_match", "normalised_match", "contains", "token_f1"]


def score_answer(measure: str, answer: str, references: Sequence[str], *, labels: Sequence[str] = ()) -> float:
    """The best score of the answer against any reference."""
    if measure == "bleu":
        return bleu(answer, *references)
    said = read_label(answer, labels) if measure == "label" else answer
    return max(MEASURES[measure](said, reference) for reference in references)


@functools.cache
def choose_form(labels: tuple[str, ...]) -> Callable[[str], str]:
    """The loosest form in which the labels differ: without case and punctuation, without case, or as they are.
    ValueError if they differ in none, or one is empty."""
    labels = tuple({label.strip() for label in labels})
    for form in (simplify, lambda text: join_words(text.lower()), join_words):
        if len({form(label) for label in labels} - {""}) == len(labels):
            return form
    same = Counter(map(join_words, labels))
    wrong = sorted(label for label in labels if not label or same[join_words(label)] > 1)
    raise ValueError(
        f"--metrics label: given the labels {', '.join(map(repr, wrong))}, which are empty or differ only in white"
        " space: rename them in the references"
    )


def read_label(answer: str, labels: Sequence[str]) -> str:
    """The longest label that the answer equals or begins with."""
    form = choose_form(tuple(labels))
    said, forms = form(answer), {form(label): label for label in labels}
    fitting = [one for one in forms if said.startswith(one) and AFTER_LABEL.match(said, len(one))]
    return forms[max(fitting, key=len)] if fitting else OTHER_LABEL


def score_corpus(
    measures: Sequence[str], answers: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Measures that are not means over samples: corpus BLEU and chrF, and the report on labels."""
    found: dict[str, Any] = {}
    if {"bleu", "chrf"} & set(measures):
        import sacrebleu

        streams = [*zip_longest(*references)]  # of every answer the first reference, the second or None, and so on
        if "bleu" in measures:
            found["corpus_bleu"] = sacrebleu.corpus_bleu(answers, streams).score
        if "chrf" in measures:
            found["corpus_chrf"] = sacrebleu.corpus_chrf(answers, streams).score
    if "label" in measures:
        found["label"] = report_labels(answers, references)
    return found


def report_labels(answers: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, Any]:
    """scikit-learn's accuracy, macro F1, and precision, recall and F1 of each label. Of several right labels the one
    that is said counts, or else the first."""
    from sklearn.metrics import accuracy_score, classification_report

    right = [[label.strip() for label in several] for several in references]
    labels = sorted({*chain(*right)})
    said = [read_label(answer, labels) for answer in answers]
    wanted = [label if label in several else several[0] for label, several in zip(said, right, strict=True)]
    labels = sorted(set(wanted))
    report = classification_report(wanted, said, labels=labels, output_dict=True, zero_division=0)
    return {
        "accuracy": float(accuracy_score(wanted, said)),
        "macro_f1": float(report["macro avg"]["f1-score"]),
        "labels": {label: {key: float(value) for key, value in report[label].items()} for label in labels},
    }
