"""Weights that a step at learning rate 0 in bfloat16 changes, and its loss, here and in transformers; written to
results/precision.txt.

    OMP_NUM_THREADS=1 python benchmarks/precision.py --before DIR

`--before` is another checkout, for the table's first numbers; types are those of tests/test_precision.py.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import paths
import torch
from harness import describe_versions
from processes import flags
from test_precision import TYPES, find_changed, read_weights, write_model
from tiny_data import make_samples, write_samples
from torch.nn.functional import cross_entropy
from transformers import AutoConfig

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.objectives.families.text import choose_auto_class
from mini_trainer.sampler import draw_samples

OPTIONS = dict(batch_size=4, max_tokens_per_gpu=128, max_steps=1, learning_rate=0, compute_dtype="bfloat16")


def run(tree: Path, model: Path, data: Path, root: Path) -> tuple[str, str]:
    """How many tensors a step changes, and its loss; with a refusal's last words."""
    given = flags(model_name_or_path=model, data_path=data, output_dir=root / "run", **OPTIONS)
    done = subprocess.run([sys.executable, tree / "train.py", *given], capture_output=True, text=True)
    if done.returncode:
        return "refused", done.stderr.strip().splitlines()[-1][:60]
    changed = find_changed(read_weights(model), read_weights(root / "run" / "hf_format" / "samples_4"))
    return str(len(changed)), f"{json.loads((root / 'run' / 'training_metrics_0.jsonl').read_text())['loss']:.5f}"


@torch.no_grad()
def compute_plainly(path: Path, data: Path) -> float:
    """The step's loss by transformers' own bfloat16 model, a sample at a time."""
    model = choose_auto_class(AutoConfig.from_pretrained(path)).from_pretrained(path, dtype=torch.bfloat16).eval()
    rows, total, num_targets = Mixture([TokenizedData(str(data))]), 0.0, 0
    for row in draw_samples(rows, seed=42, start=0, count=4).tolist():
        ids, labels = (torch.from_numpy(rows.read(row)[name]).long() for name in ("input_ids", "labels"))
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        total += cross_entropy(logits, labels[1:], reduction="sum").item()
        num_targets += int((labels[1:] != -100).sum())
    return total / num_targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--before", type=Path, required=True)
    before = parser.parse_args().before.resolve()
    lines = ["type                tensors  in fp32   changed before  now   loss before      now  transformers"]
    for kind in TYPES:
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(kind, Path(folder))
            data = write_samples(Path(folder) / "data.arrow", make_samples(16, vocab_size=100, max_len=60))
            weights = read_weights(model)
            num_kept = sum(value.dtype == torch.float32 for value in weights.values())
            old, new = (run(tree, model, data, Path(folder) / tree.name) for tree in (before, paths.ROOT))
            plain = compute_plainly(model, data)
        lines.append(
            f"{kind:<20}{len(weights):>7}{num_kept:>9}{old[0]:>17}{new[0]:>5}{old[1]:>14}{new[1]:>9}{plain:>14.5f}"
        )
        print(lines[-1], flush=True)
    text = "\n".join([describe_versions("torch", "transformers"), "", *lines]) + "\n"
    (paths.ROOT / "benchmarks" / "results" / "precision.txt").write_text(text)


if __name__ == "__main__":
    main()
