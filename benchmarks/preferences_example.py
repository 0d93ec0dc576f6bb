"""The whole example of docs/preferences.md: rates before and after preference learning, on held-out prompts.

    OMP_NUM_THREADS=1 python benchmarks/preferences_example.py --work-dir /tmp/preferences_example

runs the page's commands for three seeds, then with the first seed also other losses and objectives on the same pairs,
and writes results/preferences_example.txt. `evaluate_model.py` measures the rates, sampling at temperature 1.
Finished steps are kept.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from harness import describe_versions

SEEDS = (0, 1, 2)
SFT = ("--batch-size", 32, "--max-tokens-per-gpu", 4096, "--max-epochs", 3, "--learning-rate", "3e-3",
       "--lr-scheduler", "cosine", "--num-warmup-steps", 20, "--activation-checkpointing", "none")  # fmt: skip
WAYS = {
    "simpo": ("--preference-loss", "simpo"),
    "orpo": ("--preference-loss", "orpo"),
    "kto": ("--objective", "kto"),
    "reward": ("--objective", "reward"),
}


def run(script: str, *words: object) -> float:
    """CPU seconds of one of the project's commands."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, ROOT / script, *words]
    subprocess.run(list(map(str, command)), check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def tokenize(work: Path, name: str, *words: object) -> float:
    return run("process_data.py", "--input-file", work / f"{name}.jsonl", "--model-name-or-path", work / "model",
               "--preview", 0, *words)  # fmt: skip


def prepare(work: Path, seed: int) -> float:
    """Writes the data and the random model; CPU seconds."""
    seconds = run("quickstart/make_preferences.py", "--output-dir", work, "--seed", seed)
    seconds += run("quickstart/make_tiny_model.py", "--messages-file", work / "train.jsonl",
                   "--output-dir", work / "model", "--vocab-size", 512, "--num-layers", 2, "--seed", seed)  # fmt: skip
    seconds += tokenize(work, "train", "--output-file", work / "train.arrow")
    for name in ("pairs", "held_out_pairs"):
        seconds += tokenize(work, name, "--format", "preference", "--output-file", work / f"{name}.arrow")
    return seconds


def train(work: Path, name: str, *words: object) -> float:
    """Trains, and links the export under the run's name; CPU seconds."""
    seconds = run("train.py", "--output-dir", work / "runs" / name, *words)
    (export,) = (work / "runs" / name / "hf_format").glob("samples_*")
    (work / name).symlink_to(export)
    return seconds


def prefer(work: Path, name: str, *words: object, data: str = "pairs") -> float:
    """Preference learning from the model after supervised fine-tuning; CPU seconds."""
    return train(work, name, "--config", ROOT / "recipes/preferences.yaml", "--model-name-or-path", work / "sft",
                 "--data-path", work / f"{data}.arrow", "--validation-data-path", work / f"held_out_{data}.arrow",
                 *words)  # fmt: skip


def measure(work: Path, *names: str) -> float:
    """Rates of right and of polite answers in work/compared/results.json; CPU seconds."""
    return run("evaluate_model.py", "--model", *[work / name for name in names],
               "--task", work / "held_out.jsonl", work / "polite.jsonl", "--metrics", "contains",
               "--temperature", 1, "--max-new-tokens", 32, "--output-dir", work / "compared")  # fmt: skip


def run_example(work: Path, seed: int) -> None:
    """The page's commands, with one seed; finished phases and their CPU seconds are kept in seconds.json."""
    model = ("--model-name-or-path", work / "model", "--data-path", work / "train.arrow", "--seed", seed)
    phases = {
        "data and model": lambda: prepare(work, seed),
        "SFT": lambda: train(work, "sft", *model, *SFT),
        "DPO": lambda: prefer(work, "dpo", "--seed", seed, "--preference-nll-weight", 1),
        "measuring": lambda: measure(work, "sft", "dpo"),
    }
    file = work / "seconds.json"
    seconds = json.loads(file.read_text()) if file.exists() else {}
    for name, phase in phases.items():
        if name not in seconds:
            seconds[name] = phase()
            file.write_text(json.dumps(seconds))


def run_others(work: Path) -> None:
    """The other losses and objectives from the same model."""
    if not (work / "feedback.arrow").exists():
        tokenize(work, "pairs", "--format", "preference", "--feedback-from-pairs",
                 "--output-file", work / "feedback.arrow")  # fmt: skip
        tokenize(work, "held_out_pairs", "--format", "preference", "--feedback-from-pairs",
                 "--output-file", work / "held_out_feedback.arrow")  # fmt: skip
    for name, words in WAYS.items():
        if not (work / name).exists():
            prefer(work, name, *words, data="feedback" if name == "kto" else "pairs")
    measure(work, "sft", "dpo", "simpo", "orpo", "kto")


def read_rates(work: Path) -> dict[str, tuple[float, float]]:
    """The shares of right and of polite answers by model."""
    rates: dict[str, list[float]] = {}
    for task in ("held_out", "polite"):
        for path in sorted((work / "compared" / "samples").glob(f"*/{task}.scores.jsonl")):
            scores = [json.loads(line)["scores"]["contains"] for line in path.read_text().splitlines()]
            rates.setdefault(path.parent.name, []).append(sum(scores) / len(scores))
    return {name: (right, polite) for name, (right, polite) in rates.items()}


def read_validation(work: Path, name: str) -> dict:
    return json.loads((work / "runs" / name / "validation_metrics_0.jsonl").read_text().splitlines()[-1])


def make_table(folder: Path) -> str:
    """The rates of all runs as Markdown."""
    text = "| seed | model | right | polite | CPU seconds |\n| --- | --- | --- | --- | --- |\n"
    for seed in SEEDS:
        seconds, rates = json.loads((folder / str(seed) / "seconds.json").read_text()), read_rates(folder / str(seed))
        for name in rates:
            own = seconds.get(name.upper())
            right, polite = rates[name]
            text += f"| {seed} | {name} | {right:.1%} | {polite:.1%} | {'' if own is None else f'{own:.0f}'} |\n"
        text += f"| {seed} | all, with data and measuring | | | {sum(seconds.values()):.0f} |\n"
    accuracy = read_validation(folder / str(SEEDS[0]), "reward")["rewards/accuracies"]
    return text + f"\nreward model, seed {SEEDS[0]}: rewards/accuracies on the held-out pairs {accuracy:.1%}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--only-seed", type=int, help="run this seed alone, and write no results")
    options = parser.parse_args()
    folder = options.work_dir.absolute()
    for seed in SEEDS if options.only_seed is None else (options.only_seed,):
        run_example(folder / str(seed), seed)
    if options.only_seed is not None:
        return
    run_others(folder / str(SEEDS[0]))
    text = f"{describe_versions('torch', 'transformers')}\n\n{make_table(folder)}"
    print(text)
    (ROOT / "benchmarks/results/preferences_example.txt").write_text(text)


if __name__ == "__main__":
    main()
