"""Preference losses and gradients against TRL's DPOTrainer on the same tokens; written to results/preferences.txt.

    pip install trl==1.16 accelerate
    python benchmarks/preferences_against_trl.py --work-dir /tmp/preferences

trains one step at a learning rate of 0 on 8 random pairs, in fp32 on the CPU, with a reference that is another model
than the policy; TRL's numbers are those of its `compute_loss` and of the gradients after it.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "quickstart")]
from harness import describe_versions
from tiny_models import FAMILIES, save_model, save_tokenizer

from corpus.reader import TokenizedData
from families.sample import list_sequences

NUM_PAIRS, BETA = 8, 0.1
LOSSES = {"dpo": "sigmoid", "robust": "robust", "ipo": "ipo", "hinge": "hinge", "apo-zero": "apo_zero",
          "apo-down": "apo_down"}  # fmt: skip
SMOOTHING = {"robust": 0.2}
WORDS = ["red", "green", "blue", "one", "two", "three", "cat", "dog", "sun", "moon"]


def write_rows(path: Path) -> list[dict]:
    random = np.random.default_rng(0)

    def say() -> str:
        return " ".join(random.choice(WORDS, random.integers(1, 9)))

    def chat(prompt: str) -> list[dict]:
        return [{"role": "user", "content": prompt}, {"role": "assistant", "content": say()}]

    prompts = [f"{i} {say()}" for i in range(NUM_PAIRS)]
    rows = [{"chosen": chat(prompt), "rejected": chat(prompt)} for prompt in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def make_batch(data: TokenizedData) -> dict[str, torch.Tensor]:
    """Our tokens as TRL's collator pads them: all chosen sequences, then all rejected ones."""
    sequences = []
    for side in (0, 1):
        for row in range(NUM_PAIRS):
            sample = data.read(row)
            labels = np.split(sample["labels"], sample["sequence_lengths"][:1])[side]
            sequences.append((torch.from_numpy(list_sequences(sample)[side].copy()), torch.from_numpy(labels != -100)))
    ids, masks = (
        torch.nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in zip(*sequences, strict=True)
    )
    lengths = torch.tensor([len(sequence) for sequence, _ in sequences])
    return dict(
        input_ids=ids.long(),
        attention_mask=(torch.arange(ids.shape[1]) < lengths[:, None]).long(),
        completion_mask=masks.long(),
    )


def measure_trl(loss: str, folder: Path, rows: list[dict], batch: dict[str, torch.Tensor]) -> tuple[float, float]:
    from trl import DPOConfig, DPOTrainer

    policy, reference = (
        AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32) for name in ("policy", "reference")
    )
    args = DPOConfig(
        output_dir=str(folder / "trl"), loss_type=[LOSSES[loss]], label_smoothing=SMOOTHING.get(loss, 0.0), beta=BETA,
        per_device_train_batch_size=NUM_PAIRS, max_length=None, use_cpu=True, bf16=False, report_to=[],
        gradient_checkpointing=False,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    trainer = DPOTrainer(
        model=policy, ref_model=reference, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    policy.train()
    value = trainer.compute_loss(policy, batch)
    value.backward()
    return float(value), float(torch.stack([param.grad.double().norm() for param in policy.parameters()]).norm())


def measure_ours(loss: str, folder: Path, data: Path) -> tuple[float, float]:
    run = folder / f"run_{loss}"
    command = [sys.executable, ROOT / "train.py", "--objective", "preference", "--preference-loss", loss,
               "--preference-beta", BETA, "--preference-label-smoothing", SMOOTHING.get(loss, 0.0),
               "--model-name-or-path", folder / "policy", "--reference-model", folder / "reference",
               "--data-path", data, "--output-dir", run, "--batch-size", NUM_PAIRS, "--max-steps", 1,
               "--learning-rate", 0, "--compute-dtype", "float32", "--max-tokens-per-gpu", 256]  # fmt: skip
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    (line,) = (run / "training_metrics_0.jsonl").read_text().splitlines()
    return json.loads(line)["loss"], json.loads(line)["grad_norm"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, required=True)
    folder = parser.parse_args().work_dir
    folder.mkdir(parents=True)
    for seed, name in enumerate(("policy", "reference")):
        save_tokenizer(save_model(FAMILIES["llama"], folder / name, seed=seed))
    rows, data = write_rows(folder / "rows.jsonl"), folder / "data.arrow"
    process = [sys.executable, ROOT / "process_data.py", "--format", "preference", "--output-file", data,
               "--input-file", folder / "rows.jsonl", "--model-name-or-path", folder / "policy"]  # fmt: skip
    subprocess.run(list(map(str, process)), check=True, capture_output=True)
    batch = make_batch(TokenizedData(data))
    lines = [
        describe_versions("torch", "transformers", "trl"),
        "",
        "| loss | ours | TRL | difference | gradient norm, ours / TRL - 1 |",
        "| --- | --- | --- | --- | --- |",
    ]
    for loss in LOSSES:
        (ours, norm), (theirs, their_norm) = measure_ours(loss, folder, data), measure_trl(loss, folder, rows, batch)
        lines.append(f"| {loss} | {ours:.7f} | {theirs:.7f} | {ours - theirs:.1e} | {norm / their_norm - 1:.1e} |")
    text = "\n".join(lines) + "\n"
    print(text)
    (ROOT / "benchmarks/results/preferences.txt").write_text(text)


if __name__ == "__main__":
    main()
