"""What pages show, made up: samples of data, and models that are measured side by side."""

from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from mini_trainer.data.chat.conversation import Chat
from mini_trainer.data.chat.masking import ChatMasker
from mini_trainer.data.rows.report import Totals
from mini_trainer.data.rows.writer import TokenizedSample
from mini_trainer.use.evaluation.comparison import SampleScores, compare

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> $SCRIPT$ & \u2028"


def make_sample(
    tokenizer: PreTrainedTokenizerBase, question: str, answer: str, *, place: str = "in.jsonl:1", **extra: Any
) -> TokenizedSample:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **extra}]
    (tokens,) = ChatMasker(tokenizer).mask([Chat(messages)])
    return TokenizedSample(place, tokens)


def make_totals(samples: list[TokenizedSample], **rows: int) -> Totals:
    totals = Totals(num_shown=50)
    totals.rows.update({"in": len(samples) + sum(rows.values()), "kept": len(samples)} | rows)
    for i, sample in enumerate(samples):
        totals.add_sample(sample, i)
        totals.trained_by_role["assistant"] += sample.tokens.num_loss_counted_tokens
    return totals


def make_results(first: str, second: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """results.json of two models by their labels, and the samples of its only set: 30 questions, of which one model
    alone answers three right."""
    differing = {7: (1.0, 0.0), 13: (0.0, 1.0), 21: (1.0, 0.0)}
    scores = [differing.get(i, (1.0, 1.0)) for i in range(30)]
    metric = compare(SampleScores("exact_match", np.array(scores).T, np.ones(30)), seed=0, num_resamples=200)
    shown = [dict(place=f"rows:{i}", prompt=f"question {i} {HOSTILE}", references=["the answer"]) for i in range(30)]
    samples = [
        [dict(answer=f"{name} says {i}", finish_reason="stop", scores=dict(exact_match=pair[k]))
         for i, pair in enumerate(scores)]
        for k, name in enumerate(("first", "second"))
    ]  # fmt: skip
    sets = [dict(name="rows", kind="answers", metrics=[metric], extras=[{}, {}])]
    models = [dict(label=label, name=f"runs/{name}") for label, name in ((first, "first"), (second, "second"))]
    return dict(models=models, sets=sets), dict(shown=shown, samples=samples)
