"""A DPO step's cost against supervised fine-tuning on the same tokens; written to results/preferences_cost.txt.

    OMP_NUM_THREADS=1 python benchmarks/preferences_cost.py --work-dir /tmp/preferences_cost

trains a random Llama of 35 million parameters in fp32 on random pairs: DPO on the pairs, and next tokens of the same
sequences, of which the same tokens are trained; and the same pairs by TRL's DPOTrainer, padded, with its reference
model in memory and with precomputed log-probabilities. Reported are medians over rounds of a step's seconds on one
thread, and the largest resident memory.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import paths
import pyarrow as pa
import torch
from harness import describe_versions
from tiny_models import save_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from mini_trainer.data.columns.base import IGNORED
from mini_trainer.data.columns.preference_columns import PreferenceColumns
from mini_trainer.data.columns.token_columns import TextColumns
from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer, load_tokenizer

IN_MEMORY, PRECOMPUTED = "TRL, reference in memory", "TRL, reference precomputed"
NUM_PAIRS, BATCH_SIZE, NUM_STEPS, NUM_ROUNDS = 32, 8, 5, 3
SHAPE = dict(vocab_size=32_000, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6)


def make_sides(random: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids and labels of two sequences that begin alike."""
    prompt, *answers = random.integers(30, 120, 3).tolist()
    shared = random.integers(3, 400, prompt)
    sides = [np.concatenate([shared, random.integers(3, 400, length)]) for length in answers]
    return [(ids, np.where(np.arange(len(ids)) < prompt, IGNORED, ids)) for ids in sides]


def to_row(sides: list[tuple[np.ndarray, np.ndarray]]) -> dict:
    ids, labels = (np.concatenate(part) for part in zip(*sides, strict=True))
    lengths = [len(side) for side, _ in sides]
    return dict(input_ids=ids, labels=labels, sequence_lengths=lengths, len=len(ids),
                num_loss_counted_tokens=int((labels != IGNORED).sum()))  # fmt: skip


def write_data(path: Path, rows: list[dict], schema: pa.Schema, model: Path, objective: dict) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    made_by = {"tokenizer_fingerprint": fingerprint_tokenizer(load_tokenizer(str(model))), "max_token_id": 400}
    Path(f"{path}.meta.json").write_text(json.dumps(made_by | objective))


def run(name: str, folder: Path, round_number: int, *options: object) -> tuple[float, float]:
    """Seconds of a step, the median without the first; GB of memory at the peak."""
    output = folder / f"{name}_{round_number}"
    command = [sys.executable, paths.ROOT / "train.py", "--model-name-or-path", folder / "model", "--output-dir",
               output, "--max-steps", NUM_STEPS, "--compute-dtype", "float32", "--max-tokens-per-gpu", 2048, *options,
               "--no-save-final-checkpoint", "--activation-checkpointing", "none"]  # fmt: skip
    subprocess.run(list(map(str, command)), check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    steps = [json.loads(line) for line in (output / "training_metrics_0.jsonl").read_text().splitlines()]
    return statistics.median(row["time_per_batch"] for row in steps[1:]), steps[-1]["peak_memory_usage_GB"]


def run_trl(way: str, folder: Path) -> tuple[float, float]:
    """The same of TRL, in a process of its own."""
    command = [sys.executable, __file__, "--work-dir", folder, "--trl", way]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True, env=environment)
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def measure_trl(way: str, folder: Path) -> tuple[float, float]:
    """Steps of TRL's DPOTrainer in this process: its loss, the backward pass, and AdamW's update."""
    from preference_cases import Answer
    from trl_losses import pad

    trainer = make_trl_trainer(folder, is_precomputed=way == PRECOMPUTED)
    model, seconds = trainer.model.train(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    pairs = [make_sides(np.random.default_rng(seed)) for seed in range(NUM_PAIRS)]
    for step in range(NUM_STEPS):
        own = [pairs[i % NUM_PAIRS] for i in range(step * BATCH_SIZE, (step + 1) * BATCH_SIZE)]
        answers = [
            Answer(torch.from_numpy(ids), torch.from_numpy(labels != IGNORED))
            for side in (0, 1)
            for ids, labels in (pair[side] for pair in own)
        ]
        batch = pad(answers, 0)
        if way == PRECOMPUTED:
            batch |= {f"ref_{name}_logps": torch.zeros(BATCH_SIZE) for name in ("chosen", "rejected")}
        begin = time.perf_counter()
        trainer.compute_loss(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:]), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def make_trl_trainer(folder: Path, *, is_precomputed: bool):
    """The trainer, whose own data set is not used."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model, reference = (LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32) for _ in range(2))
    args = DPOConfig(
        output_dir=str(folder / "trl"), per_device_train_batch_size=BATCH_SIZE, use_cpu=True, bf16=False,
        gradient_checkpointing=False, report_to=[], precompute_ref_log_probs=is_precomputed,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}] * BATCH_SIZE)
    tokenizer = load_tokenizer(str(folder / "model"))
    return DPOTrainer(model, reference, args=args, train_dataset=rows, processing_class=tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--trl", choices=(IN_MEMORY, PRECOMPUTED), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trl is not None:
        print(json.dumps(measure_trl(given.trl, given.work_dir)))
        return
    folder = given.work_dir
    folder.mkdir(parents=True)
    LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)).save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    pairs = [make_sides(np.random.default_rng(seed)) for seed in range(NUM_PAIRS)]
    rows = [to_row(sides) for sides in pairs]
    write_data(folder / "pairs.arrow", rows, PreferenceColumns.schema, folder / "model", {"objective": "preference"})
    alone = [{key: value for key, value in to_row([side]).items() if key != "sequence_lengths"}
             for sides in pairs for side in sides]  # fmt: skip
    write_data(folder / "alone.arrow", alone, TextColumns.schema, folder / "model", {})
    ways = {
        "next tokens": ("--data-path", folder / "alone.arrow", "--batch-size", 2 * BATCH_SIZE),
        "dpo": ("--data-path", folder / "pairs.arrow", "--batch-size", BATCH_SIZE, "--objective", "preference"),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in (*ways, IN_MEMORY, PRECOMPUTED)}
    for i in range(NUM_ROUNDS):  # in turns
        for name, options in ways.items():
            found[name].append(run(name.replace(" ", "_"), folder, i, *options))
        for way in (IN_MEMORY, PRECOMPUTED):
            found[way].append(run_trl(way, folder))
    seconds = {name: statistics.median(s for s, _ in rounds) for name, rounds in found.items()}
    memory = {name: max(m for _, m in rounds) for name, rounds in found.items()}
    text = f"{describe_versions('torch', 'transformers', 'trl')}\n\n"
    text += "| | seconds a step | memory, GB |\n| --- | --- | --- |\n"
    text += "".join(f"| {name} | {seconds[name]:.2f} | {memory[name]:.2f} |\n" for name in found)
    ratios = seconds["dpo"] / seconds["next tokens"], memory["dpo"] / memory["next tokens"]
    text += f"| dpo / next tokens | {ratios[0]:.2f} | {ratios[1]:.2f} |\n"
    print(text)
    (paths.ROOT / "benchmarks/results/preferences_cost.txt").write_text(text)


if __name__ == "__main__":
    main()
