"""Distillation on the quickstart's chats: a small model alone and with a larger teacher; results/distillation.txt.

    OMP_NUM_THREADS=1 python benchmarks/distillation.py --work-dir /tmp/distillation

trains a random Qwen3 of 0.9 million parameters as the quickstart does, scores the training rows with it, and trains
a model of a sixth of its size on the same rows, for three seeds of its weights and of the order: by cross-entropy
alone, with the teacher's files at two temperatures, and by dynamic fine-tuning; then cross-entropy and the teacher once
more, from the student that cross-entropy alone has trained. Measured are the loss and the share of exactly right
answers on the held-out questions. All of it by the program's own commands; finished steps are kept.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from harness import describe_versions

SEEDS = (0, 1, 2)
TEACHER_SHAPE = ("--hidden-size", 128, "--num-layers", 4)  # the quickstart's
STUDENT_SHAPE = ("--hidden-size", 64, "--num-layers", 2)
TEACHER_RATE, STUDENT_RATE = "2e-3", "4e-3"
TAUGHT = ("--teacher-weight", 0.5)
AT_2 = ("--teacher-temperature", 2, "--teacher-scores", "at_2")
WAYS: dict[str, tuple] = {
    "cross-entropy": (),
    "teacher, T 1": TAUGHT,
    "teacher, T 2": (*TAUGHT, *AT_2),
    "teacher alone, T 2": ("--teacher-weight", 1, *AT_2),
    "dft": ("--loss-weighting", "dft"),
    "then cross-entropy": (),
    "then teacher, T 2": (*TAUGHT, *AT_2),
}


def run(script: str, *words: object) -> None:
    """Runs one of the program's commands; shows its output if it fails."""
    done = subprocess.run(
        [sys.executable, str(ROOT / script), *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


def make_model(work: Path, name: str, shape: tuple, *, seed: int) -> None:
    if not (work / name).exists():
        run("quickstart/make_tiny_model.py", "--messages-file", work / "train.jsonl", "--output-dir", work / name,
            "--vocab-size", 1024, "--seed", seed, *shape)  # fmt: skip


def train(work: Path, start: str, name: str, *words: object) -> None:
    """Trains the model `start` by the quickstart's recipe, and links the export under the run's name."""
    if (work / name).exists():
        return
    output_dir = work / "runs" / name
    run("train.py", "--config", ROOT / "recipes/quickstart.yaml", "--model-name-or-path", work / start,
        "--data-path", work / "train.arrow", "--validation-data-path", work / "held_out.arrow",
        "--output-dir", output_dir, *words)  # fmt: skip
    (export,) = (output_dir / "hf_format").glob("samples_*")
    (work / name).symlink_to(export)


def prepare(work: Path) -> None:
    """Writes the data, trains the teacher, and scores the training rows at both temperatures."""
    if not (work / "train.jsonl").exists():
        run("quickstart/make_data.py", "--output-dir", work)
    make_model(work, "random_teacher", TEACHER_SHAPE, seed=0)
    for part in ("train", "held_out"):
        if not (work / f"{part}.arrow").exists():
            run("process_data.py", "--input-file", work / f"{part}.jsonl", "--output-file", work / f"{part}.arrow",
                "--model-name-or-path", work / "random_teacher", "--preview", 0)  # fmt: skip
    train(work, "random_teacher", "teacher", "--learning-rate", TEACHER_RATE)
    for name, temperature in (("teacher", 1), ("at_2", 2)):
        run("tools/score_data.py", "--model-name-or-path", work / "teacher", "--data-path", work / "train.arrow",
            "--name", name, "--temperature", temperature)  # fmt: skip


def name_run(way: str, seed: int) -> str:
    return f"{way.replace(',', '').replace(' ', '_')}_{seed}"


def run_seed(work: Path, seed: int) -> None:
    """Trains one seed's students and evaluates them together with the teacher."""
    compared = work / f"compared_{seed}"
    make_model(work, f"random_{seed}", STUDENT_SHAPE, seed=seed)
    for way, words in WAYS.items():
        start = name_run("cross-entropy", seed) if way.startswith("then") else f"random_{seed}"
        train(work, start, name_run(way, seed), "--learning-rate", STUDENT_RATE, "--seed", seed, *words)
    models = [work / "teacher", *(work / name_run(way, seed) for way in WAYS)]
    run("evaluate_model.py", "--model", *models, "--data", work / "held_out.arrow", "--task", work / "held_out.jsonl",
        "--metrics", "exact_match", "--max-new-tokens", 32, "--output-dir", compared)  # fmt: skip


def read_measures(work: Path, seed: int) -> dict[str, dict[str, float]]:
    """The held-out loss and exact match of the teacher and of each way, by metric."""
    sets = json.loads((work / f"compared_{seed}" / "results.json").read_text())["sets"]
    metrics = {metric["name"]: metric["values"] for measured in sets for metric in measured["metrics"]}
    names = ["the teacher", *WAYS]
    return {
        key: dict(zip(names, (value["mean"] for value in metrics[key]), strict=True)) for key in ("loss", "exact_match")
    }


def count_parameters(work: Path, name: str) -> int:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(work / name).num_parameters()


def make_table(work: Path) -> str:
    """Mean and standard deviation over seeds, and differences from cross-entropy alone for as long, seed by seed."""
    measures = [read_measures(work, seed) for seed in SEEDS]
    lines = [
        "| | held-out loss | exact match | loss, less cross-entropy's of the same seed |",
        "| --- | --- | --- | --- |",
    ]
    for name in ("the teacher", *WAYS):
        loss, match = ([found[key][name] for found in measures] for key in ("loss", "exact_match"))
        plain = "then cross-entropy" if name.startswith("then") else "cross-entropy"
        less = " ".join(f"{found['loss'][name] - found['loss'][plain]:+.3f}" for found in measures)
        cells = f"{describe(loss)} | {describe(match)} | {less if name in WAYS else ''}"
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines) + "\n"


def describe(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--num-workers", type=int, default=1, help="seeds that train at the same time")
    args = parser.parse_args()
    work = args.work_dir.absolute()
    work.mkdir(parents=True, exist_ok=True)
    prepare(work)
    with ThreadPoolExecutor(args.num_workers) as pool:
        list(pool.map(lambda seed: run_seed(work, seed), SEEDS))
    sizes = " and ".join(f"{count_parameters(work, name):,}" for name in ("random_teacher", "random_0"))
    text = f"""OMP_NUM_THREADS=1 python benchmarks/distillation.py --work-dir /tmp/distillation
{describe_versions("torch", "transformers")}; {sizes} parameters, {len(SEEDS)} seeds, mean and standard deviation

{make_table(work)}"""
    print(text)
    (ROOT / "benchmarks/results/distillation.txt").write_text(text)


if __name__ == "__main__":
    main()
