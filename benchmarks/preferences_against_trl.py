"""Preference losses, gradients and rewards against TRL on the same tokens; written to results/preferences.txt.

    pip install trl==1.16 accelerate
    OMP_NUM_THREADS=1 python benchmarks/preferences_against_trl.py --work-dir /tmp/preferences

For each loss train.py takes one step at a learning rate of 0 on one batch of 8 random rows, in fp32 on the CPU, packed
into several micro-batches; its gradient is AdamW's first moment with a beta of 0. TRL's numbers are those of its
`compute_loss` and of the gradients after it. Both are compared with a plain loop in fp64 (plain_preferences.py).
"""

import argparse
import json
import math
from pathlib import Path

import paths
from harness import describe_versions
from plain_preferences import measure_plainly
from preference_cases import CASES, NUM_ROWS, Case, Inputs, Measured, make_inputs, run_script
from safetensors.torch import load_file

RESULTS = paths.ROOT / "benchmarks/results/preferences.txt"
MOMENT = "optimizer/exp_avg/model."  # prefix of a checkpoint's tensors
HEAD = ("TRL's trainer", "data, options", "loss: ours", "TRL", "plain, fp64", "ours / plain - 1", "TRL / plain - 1",
        "gradient norm: ours / TRL - 1", "largest error of a gradient: ours", "TRL", "")  # fmt: skip
EXPLANATION = f"""\
One batch of {NUM_ROWS} rows, a random Llama, fp32, CPU. The largest error of a gradient is over all parameters, in
terms of the largest number of that parameter's gradient in fp64.
"""


def measure_ours(case: Case, inputs: Inputs, run: Path) -> tuple[Measured, dict]:
    """The loss and its gradient, and the step's metrics."""
    policy, reference = inputs.find_models(case)
    options = {"objective": "preference", "reference_model": reference} | case.ours
    if case.name in ("reward", "simpo", "orpo"):
        del options["reference_model"]
    run_script(
        "train.py", **options, model_name_or_path=policy, data_path=inputs.locate_data(case), output_dir=run,
        batch_size=NUM_ROWS, max_steps=1, learning_rate=0, compute_dtype="float32", export_dtype="float32",
        max_tokens_per_gpu=256, adam_beta1=0, max_grad_norm=None, checkpoint_every_steps=1,
    )  # fmt: skip
    (line,) = map(json.loads, (run / "training_metrics_0.jsonl").read_text().splitlines())
    tensors = load_file(run / "checkpoints/step_1/rank_00000.safetensors")
    gradients = {name.removeprefix(MOMENT): tensor for name, tensor in tensors.items() if name.startswith(MOMENT)}
    nll = case.nll_weight * line["nll_loss"] if case.nll_weight else 0.0
    return Measured(line["loss"] + nll, gradients), line


def compare(case: Case, inputs: Inputs, run: Path) -> str:
    """A row of the table."""
    from trl_losses import measure_trl  # not in the processes that are forked for our runs

    ours, line = measure_ours(case, inputs, run)
    theirs, exact = measure_trl(case, inputs), measure_plainly(case, inputs)
    assert math.isclose(ours.norm, line["grad_norm"], rel_tol=1e-5), (ours.norm, line["grad_norm"])
    notes = [case.note] if case.note else []
    notes += [f"point z {line['kl']:.4f}"] if case.trainer == "KTO" else []
    cells = [case.trainer, case.command, f"{ours.loss:.7f}", f"{theirs.loss:.7f}", f"{exact.loss:.7f}"]
    cells += [f"{found.loss / exact.loss - 1:.0e}" for found in (ours, theirs)]
    cells += [f"{ours.norm / theirs.norm - 1:.0e}"]
    cells += [f"{found.find_largest_error(exact):.0e}" for found in (ours, theirs)]
    return f"| {' | '.join([*cells, '; '.join(notes)])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True, help="a directory to make")
    folder = parser.parse_args().work_dir
    folder.mkdir(parents=True)
    inputs = make_inputs(folder)
    lines = ["$ OMP_NUM_THREADS=1 python benchmarks/preferences_against_trl.py --work-dir /tmp/preferences",
             describe_versions("torch", "transformers", "trl"), "", EXPLANATION,
             f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}"]  # fmt: skip
    runs = [folder / f"run_{number}" for number in range(len(CASES))]
    for case, run in zip(CASES, runs, strict=True):
        lines.append(compare(case, inputs, run))
        print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    RESULTS.write_text(text)


if __name__ == "__main__":
    main()
