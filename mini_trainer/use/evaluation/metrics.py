"""Measures of an answer against its references, from 0 to 1; the best of several references counts.

Normalisation is SQuAD's (Rajpurkar et al. 2016, arXiv 1606.05250): lower case, no punctuation, no articles, single
spaces. ROUGE, BLEU and chrF are from rouge-score and sacrebleu, edit similarity from rapidfuzz, classification from
scikit-learn.
"""

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

Measure = Callable[[str, str], float]  # (answer, reference) -> score

ARTICLES = re.compile(r"\b(a|an|the)\b")
NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?|-?\$?\.\d+")
MARKED_NUMBER = re.compile(r"####\s*(-?[\$\d.,]+)")  # how GSM8K ends its solutions
OTHER_LABEL = "(none of the labels)"


def normalise(text: str) -> str:
    """SQuAD's normalisation, but a text that is only an article, such as the answer A, stays."""
    return " ".join(ARTICLES.sub(" ", simplify(text)).split()) or simplify(text)


def simplify(text: str) -> str:
    """Lower case, no punctuation, single spaces."""
    return " ".join("".join(letter for letter in text.lower() if letter not in string.punctuation).split())


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


def extract_number(text: str) -> Decimal | None:
    """The number after the last `####` (GSM8K), else the last number of the text."""
    marked, numbers = MARKED_NUMBER.findall(text), NUMBER.findall(text)
    found = (marked or numbers or [""])[-1].replace(",", "").replace("$", "").rstrip(".")
    try:
        return Decimal(found)
    except InvalidOperation:
        return None


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


@functools.cache
def make_rouge(kind: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer([kind], use_stemmer=False)


def rouge(answer: str, reference: str, *, kind: str) -> float:
    return make_rouge(kind).score(reference, answer)[kind].fmeasure


def bleu(answer: str, reference: str) -> float:
    import sacrebleu

    return sacrebleu.sentence_bleu(answer, [reference]).score / 100


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

    ValueError for a measure that does not exist.
    """
    for name in given:
        if name not in MEASURES:
            instead = "; for simplified texts, give the answers to a package that has SARI" if name == "sari" else ""
            raise ValueError(f"--metrics {name}: is not one of {', '.join(MEASURES)}{instead}")
    if given:
        return list(given)
    texts = [reference for several in references for reference in several]
    if all("####" in text or NUMBER.fullmatch(text.strip()) for text in texts):
        return ["number", "exact_match"]
    return ["exact_match", "normalised_match", "contains", "token_f1"]


def score_answer(measure: str, answer: str, references: Sequence[str], *, labels: Sequence[str] = ()) -> float:
    """The best score of the answer against any reference."""
    said = read_label(answer, labels) if measure == "label" else answer
    return max(MEASURES[measure](said, reference) for reference in references)


def read_label(answer: str, labels: Sequence[str]) -> str:
    """The longest label that the answer equals or begins with."""
    said = simplify(answer)
    fitting = [label for label in labels if f"{said} ".startswith(f"{simplify(label)} ") and simplify(label)]
    return max(fitting, key=len, default=OTHER_LABEL)


def report_labels(said: Sequence[str], wanted: Sequence[str]) -> dict[str, Any]:
    """scikit-learn's accuracy, macro F1, and precision, recall and F1 of each label."""
    from sklearn.metrics import accuracy_score, classification_report, f1_score

    labels = sorted(set(wanted))
    report = classification_report(wanted, said, labels=labels, output_dict=True, zero_division=0)
    return {
        "accuracy": float(accuracy_score(wanted, said)),
        "macro_f1": float(f1_score(wanted, said, labels=labels, average="macro", zero_division=0)),
        "labels": {label: {key: float(value) for key, value in report[label].items()} for label in labels},
    }


def score_corpus(
    measures: Sequence[str], answers: Sequence[str], references: Sequence[Sequence[str]]
) -> dict[str, Any]:
    """Measures that are not means over samples: corpus BLEU and chrF, and the report on labels."""
    found: dict[str, Any] = {}
    if {"bleu", "chrf"} & set(measures):
        import sacrebleu

        most = max(map(len, references))
        streams = [[several[i] if i < len(several) else None for several in references] for i in range(most)]
        if "bleu" in measures:
            found["corpus_bleu"] = sacrebleu.corpus_bleu(answers, streams).score
        if "chrf" in measures:
            found["corpus_chrf"] = sacrebleu.corpus_chrf(answers, streams).score
    if "label" in measures:
        wanted = [several[0] for several in references]
        labels = sorted(set(wanted))
        found["label"] = report_labels([read_label(answer, labels) for answer in answers], wanted)
    return found
