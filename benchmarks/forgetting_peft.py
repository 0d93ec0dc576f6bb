"""LoRA by peft in a plain loop, on the rows of examples/recipes/forgetting.yaml: what ours should learn and forget.

    python benchmarks/forgetting_peft.py --model runs/smollm2 --learning-rate 1e-3 --output-dir runs/forgetting/peft \
        --data runs/forgetting/methods/data/facts/train/facts.arrow
    mini-trainer evaluate --model runs/forgetting/peft --task runs/forgetting/facts_test.jsonl --metrics contains \
        --max-new-tokens 24 --dtype bfloat16 --output-dir runs/forgetting/peft_answers

Padded batches in bf16 by autocast, with the recipe's steps, schedule and AdamW; the samples' order is another one.
"""

import argparse
import math
import random

import paths  # noqa: F401
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from mini_trainer.data.tokenized.reader import TokenizedData

BATCH_SIZE, NUM_STEPS, WARMUP_RATIO, RANK = 16, 94, 0.1, 16


def find_factor(step: int) -> float:
    """The learning rate's factor: linear warmup, then cosine."""
    warmup = math.ceil(WARMUP_RATIO * NUM_STEPS)
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (NUM_STEPS - warmup)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--output-dir", required=True)
    args = parser.parse_args()
    torch.manual_seed(42)
    data = TokenizedData(args.data)
    rows = [data.read(i) for i in range(len(data.lengths))]
    order = [i for epoch in range(NUM_STEPS) for i in random.Random(epoch).sample(range(len(rows)), len(rows))]
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    adapted = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
    trained = [param for param in adapted.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, find_factor)
    for step in range(NUM_STEPS):
        batch = [rows[i] for i in order[step * BATCH_SIZE : (step + 1) * BATCH_SIZE]]
        ids, labels = (
            pad_sequence([torch.tensor(row[key].astype("int64")) for row in batch], True, padding)
            for key, padding in (("input_ids", 0), ("labels", -100))
        )
        mask = pad_sequence([torch.ones(len(row["input_ids"])) for row in batch], True)
        with torch.autocast("cpu", torch.bfloat16):
            loss = adapted(input_ids=ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    print(f"loss of the last step: {loss.item():.3f}")
    adapted.merge_and_unload().to(torch.bfloat16).save_pretrained(args.output_dir)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
