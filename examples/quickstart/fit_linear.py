"""What a linear model makes of the same rows: scikit-learn's logistic regression on counted words, or pairs of words.

    python examples/quickstart/fit_linear.py --data-dir runs/lines

Needs scikit-learn (pip install -e ".[classification]").
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import tyro

KINDS = {"words (a bag of words)": (1, 1), "words and pairs of neighbours": (1, 2)}  # n-grams that are counted


@dataclass(frozen=True, kw_only=True)
class LinearOptions:
    """Fit linear models on train.csv, and measure them on validation.csv."""

    data_dir: str
    """Where these tables are, with the columns text and label."""


def read_table(path: Path) -> tuple[list[str], list[str]]:
    """Texts and labels."""
    with open(path, newline="", encoding="utf-8") as table:
        rows = list(csv.DictReader(table))
    return [row["text"] for row in rows], [row["label"] for row in rows]


def fit_linear(data_dir: Path) -> None:
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import f1_score

    texts, labels = read_table(data_dir / "train.csv")
    held_out, expected = read_table(data_dir / "validation.csv")
    for kind, ngrams in KINDS.items():
        vectorizer = CountVectorizer(token_pattern=r"\S+", lowercase=False, ngram_range=ngrams, min_df=2)
        model = LogisticRegression(C=0.3, max_iter=200).fit(vectorizer.fit_transform(texts), labels)
        predicted = model.predict(vectorizer.transform(held_out))
        accuracy = sum(map(str.__eq__, predicted.tolist(), expected)) / len(expected)
        f1 = f1_score(expected, predicted, average="macro")
        print(f"linear model on {kind}: accuracy {accuracy:.3f}, macro F1 {f1:.3f}")


if __name__ == "__main__":
    fit_linear(Path(tyro.cli(LinearOptions).data_dir))
