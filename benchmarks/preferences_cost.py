"""A DPO step's cost against supervised fine-tuning on the same tokens; written to results/preferences_cost.txt.

    OMP_NUM_THREADS=1 python benchmarks/preferences_cost.py --work-dir /tmp/preferences_cost

trains a random Llama of 35 million parameters in fp32 on random pairs: DPO on the pairs, and next tokens of the same
sequences, of which the same tokens are trained. Reported are medians over rounds of a step's seconds on one thread, and
the largest resident memory.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "quickstart")]
from harness import describe_versions
from tiny_models import save_tokenizer

from chat.fingerprints import fingerprint_tokenizer
from chat.labels import IGNORED
from chat.templates import load_tokenizer
from objectives.preference_columns import PreferenceColumns
from objectives.token_columns import TextColumns

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
    command = [sys.executable, ROOT / "train.py", "--model-name-or-path", folder / "model", "--output-dir", output,
               "--max-steps", NUM_STEPS, "--compute-dtype", "float32", "--max-tokens-per-gpu", 2048, *options,
               "--no-save-final-checkpoint", "--activation-checkpointing", "none"]  # fmt: skip
    subprocess.run(list(map(str, command)), check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    steps = [json.loads(line) for line in (output / "training_metrics_0.jsonl").read_text().splitlines()]
    return statistics.median(row["time_per_batch"] for row in steps[1:]), steps[-1]["peak_memory_usage_GB"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, required=True)
    folder = parser.parse_args().work_dir
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
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for i in range(NUM_ROUNDS):  # in turns
        for name, options in ways.items():
            found[name].append(run(name.replace(" ", "_"), folder, i, *options))
    seconds = {name: statistics.median(s for s, _ in rounds) for name, rounds in found.items()}
    memory = {name: max(m for _, m in rounds) for name, rounds in found.items()}
    text = f"{describe_versions('torch', 'transformers')}\n\n| | seconds a step | memory, GB |\n| --- | --- | --- |\n"
    text += "".join(f"| {name} | {seconds[name]:.2f} | {memory[name]:.2f} |\n" for name in ways)
    ratios = seconds["dpo"] / seconds["next tokens"], memory["dpo"] / memory["next tokens"]
    text += f"| dpo / next tokens | {ratios[0]:.2f} | {ratios[1]:.2f} |\n"
    print(text)
    (ROOT / "benchmarks/results/preferences_cost.txt").write_text(text)


if __name__ == "__main__":
    main()
