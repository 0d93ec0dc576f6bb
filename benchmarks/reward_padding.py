"""Rewards by an exported model in transformers, in batches padded on either side with several padding tokens.

transformers reads the last token that is not the config's pad_token_id (transformers#35352, #35911).
"""

from pathlib import Path

import torch
from preference_cases import Answer, Case, Inputs
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, PreTrainedModel

TOLERANCE = 1e-4  # of a reward; a wrong token's differs by about 10
ORDINARY = 7  # a token that no answer ends with


def describe_padding(case: Case, inputs: Inputs, run: Path) -> list[str]:
    """Lines of a table: the largest differences from the reward of each sequence alone, as it was in training."""
    (export,) = (run / "hf_format").glob("samples_*")
    answers = [answer for pair in inputs.read_answers(case) for answer in pair]
    model = AutoModelForSequenceClassification.from_pretrained(export, dtype=torch.float32).eval()
    own, end = model.config.pad_token_id, int(answers[0].ids[-1])
    with torch.no_grad():
        alone = torch.stack([model(input_ids=answer.ids[None]).logits[0, 0] for answer in answers])
    lines = [
        f"`{case.command}`: the export in AutoModelForSequenceClassification, {len(answers)} sequences in one batch;"
        f" its pad_token_id is {own}, and sequences end with {end}.",
        "",
        "| padded with | pad_token_id of the config | on the right | on the left |",
        "| --- | --- | --- | --- |",
    ]
    for token in dict.fromkeys((own, end, ORDINARY)):
        for known in dict.fromkeys((own, token)):
            model.config.pad_token_id = known
            found = [describe(score(model, answers, token, side) - alone) for side in ("right", "left")]
            lines.append(f"| {token} | {known} | {' | '.join(found)} |")
    return lines


@torch.no_grad()
def score(model: PreTrainedModel, answers: list[Answer], pad_id: int, side: str) -> Tensor:  # (answers,)
    texts = [answer.ids for answer in answers]
    ids = pad_sequence(texts, batch_first=True, padding_value=pad_id, padding_side=side)
    mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True, padding_side=side)
    return model(input_ids=ids, attention_mask=mask).logits[:, 0]


def describe(difference: Tensor) -> str:
    largest = float(difference.abs().max())
    return f"{'the same' if largest < TOLERANCE else 'WRONG'} ({largest:.0e})"
