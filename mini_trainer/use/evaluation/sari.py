"""SARI, how well a text was simplified, from 0 to 1 (Xu et al. 2016, ACL Q16-1029).

It compares three edits of the source with those of all references: which n-grams, up to 4 words, an answer keeps (F1),
deletes (precision) and adds (F1). Ratios of nothing are 1 and the recall of kept n-grams is over all their occurrences,
as in Hugging Face's `evaluate`, whose value is 100 times this one. No maintained package has it; the words are
sacrebleu's (13a, lower case).
"""

from collections import Counter
from collections.abc import Sequence

NGRAMS = (1, 2, 3, 4)


def sari(answer: str, references: Sequence[str], source: str) -> float:
    scores = [
        score_edits(
            # Times the references, whose counts are added up.
            Counter(list_ngrams(source, n) * len(references)),
            Counter(list_ngrams(answer, n) * len(references)),
            Counter(ngram for reference in references for ngram in list_ngrams(reference, n)),
        )
        for n in NGRAMS
    ]
    return sum(scores) / len(scores)


def list_ngrams(text: str, n: int) -> list[tuple[str, ...]]:
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    words = Tokenizer13a()(text.lower()).split(" ")  # an empty text is one empty word
    return list(zip(*(words[i:] for i in range(n)), strict=False))


def score_edits(source: Counter, answer: Counter, references: Counter) -> float:
    """The mean of the three edits' scores, for n-grams of one length."""
    kept, to_keep = source & answer, source & references
    keep = average_harmonically(average_shares(kept & references, kept), divide(kept & references, to_keep))
    deleted = source - answer
    delete = average_shares(deleted - references, deleted)
    added, to_add = (Counter(own.keys() - source.keys()) for own in (answer, references))
    add = average_harmonically(divide(added & to_add, added), divide(added & to_add, to_add))
    return (keep + delete + add) / 3


def average_shares(part: Counter, whole: Counter) -> float:
    """The mean over n-grams of the part's share in their counts."""
    return sum(part[ngram] / whole[ngram] for ngram in whole) / len(whole) if whole else 1.0


def divide(part: Counter, whole: Counter) -> float:
    return part.total() / whole.total() if whole else 1.0


def average_harmonically(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0
