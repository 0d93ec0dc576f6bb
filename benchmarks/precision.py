"""Tensors that a step at learning rate 0 in bfloat16 changes, and its loss, in another checkout, here, in transformers:

OMP_NUM_THREADS=1 python benchmarks/precision.py ../before > benchmarks/results/precision.txt
"""

import json
import math
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

from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.objectives.families.text import choose_auto_class


def run(tree: Path, model: Path, data: Path, root: Path) -> tuple[int | str, float]:
    options = dict(batch_size=4, max_tokens_per_gpu=128, max_steps=1, learning_rate=0, compute_dtype="bfloat16")
    for attention in ("eager", "auto"):  # transformers' own code, or the model's where that is all there is
        given = flags(model_name_or_path=model, data_path=data, output_dir=root, attention=attention, **options)
        if not subprocess.run([sys.executable, tree / "train.py", *given], capture_output=True).returncode:
            break
    else:
        return "fails", math.nan
    changed = find_changed(read_weights(model), read_weights(root / "hf_format" / "samples_4"))
    return len(changed), json.loads((root / "training_metrics_0.jsonl").read_text())["loss"]


@torch.no_grad()
def compute_plainly(path: Path, data: Path) -> float:
    """The loss of all samples by transformers' own bfloat16 model, one at a time."""
    auto_class, how = choose_auto_class(AutoConfig.from_pretrained(path)), dict(attn_implementation="eager")
    model = auto_class.from_pretrained(path, dtype=torch.bfloat16, **how).eval()
    rows, total = TokenizedData(str(data)), 0.0
    for row in range(len(rows.lengths)):
        ids, labels = (torch.tensor(rows.read(row)[name]).long() for name in ("input_ids", "labels"))
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        total += cross_entropy(logits, labels[1:], reduction="sum").item()
    return total / int(rows.num_loss_tokens.sum())


print(describe_versions("torch", "transformers"))
print("type                tensors  in fp32   changed before  now   loss before      now  transformers")
for kind in TYPES:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model, data = write_model(kind, root), write_samples(root / "d.arrow", make_samples(4, vocab_size=100))
        weights = read_weights(model)
        kept = sum(value.dtype == torch.float32 for value in weights.values())
        old, new = run(Path(sys.argv[1]), model, data, root / "old"), run(paths.ROOT, model, data, root / "new")
        own = compute_plainly(model, data)
    changed = f"{len(weights):>7}{kept:>9}{old[0]:>17}{new[0]:>5}"
    print(f"{kind:<20}{changed}{old[1]:>14.5f}{new[1]:>9.5f}{own:>14.5f}", flush=True)
