"""Options from flags and YAML: what is accepted, and one message for what is not."""

import subprocess
import sys
from pathlib import Path

import pytest

from command_line import parse_options
from options import ProcessDataOptions, TrainOptions, find_problems, flatten_options, group_options

ROOT = Path(__file__).parent.parent
REQUIRED = ["--model-name-or-path", "m", "--data-path", "d.arrow", "--output-dir", "o", "--max-steps", "5"]


def run_script(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, check=False)


def test_flags_win_over_the_config_file(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        "learning_rate: 1e-3\nbatch-size: 7\nmax_grad_norm: null\ncompile: true\nsave_final_checkpoint: true\nseed: 9\n"
    )
    options = parse_options(TrainOptions, [*REQUIRED, "--config", str(config), "--batch-size", "8", "--no-compile"])
    options = flatten_options(options)
    assert options["learning_rate"] == 1e-3  # YAML's 1e-3 is a string
    assert options["batch_size"] == 8
    assert options["max_grad_norm"] is None
    assert options["compile"] is False
    assert options["seed"] == 9
    assert options["max_steps"] == 5


def test_underscores_and_equals_signs_are_accepted():
    options = parse_options(TrainOptions, [*REQUIRED, "--batch_size=3", "--max-grad-norm", "None"])
    assert (options.data.batch_size, options.optimization.max_grad_norm) == (3, None)


@pytest.mark.parametrize(
    ("argv", "reasons"),
    [
        (["--bach-size", "3"], ["--bach-size"]),
        (["--batch-size", "many"], ["--batch-size", "many"]),
        (["--lr-scheduler", "triangle"], ["--lr-scheduler", "triangle", "cosine"]),
        (["--compile", "true"], ["true"]),
        (["--max-steps", "6"], ["given more than once: --max-steps"]),
        (["--no-compile", "--compile"], ["given more than once: --compile"]),
        (["--batch-size", "0"], ["--batch-size 0: must be at least 1"]),
        (["--max-grad-norm", "0"], ["--max-grad-norm 0", "None"]),
        (["--learning-rate", "nan"], ["--learning-rate nan"]),
        (["--adam-beta2", "1"], ["--adam-beta2 1"]),
        (["--min-lr-ratio", "0.1"], ["--min-lr-ratio has no effect"]),
        (["--lr-scheduler", "constant", "--num-warmup-steps", "3"], ["--num-warmup-steps has no effect"]),
        (["--num-decay-steps", "3"], ["--num-decay-steps has no effect"]),
        (["--osft"], ["--osft needs --osft-unfreeze-rank-ratio"]),
        (["--osft", "--osft-unfreeze-rank-ratio", "1.5"], ["--osft-unfreeze-rank-ratio 1.5: must be from 0 to 1"]),
        (["--osft", "--osft-unfreeze-rank-ratio", "nan"], ["--osft-unfreeze-rank-ratio nan: must be from 0 to 1"]),
        (["--osft", "--osft-unfreeze-rank-ratio", "0"], ["without --osft-train-others trains nothing"]),
        (
            ["--osft-unfreeze-rank-ratio", "0.5", "--osft-target-patterns", "mlp"],
            ["--osft-unfreeze-rank-ratio, --osft-target-patterns: no effect without --osft"],
        ),
        (["--osft", "--osft-keep-energy", "0.9", "--osft-unfreeze-rank-ratio", "0.5"], ["belongs to activations"]),
        (["--osft", "--osft-basis", "activations", "--osft-keep-energy", "0.9"], ["need --osft-calibration-data"]),
        (["--osft", "--osft-basis", "activations", "--osft-keep-energy", "2"], ["--osft-keep-energy 2.0: must be"]),
        (
            ["--osft", "--osft-unfreeze-rank-ratio", "0.5", "--osft-statistics", "f"],
            ["have no effect with --osft-basis weights"],
        ),
        (["--shard-size", "2"], ["--shard-size has no effect with --sharding full"]),
        (
            ["--osft", "--osft-unfreeze-rank-ratio", "0.5", "--cpu-offload"],
            ["--cpu-offload cannot be used with --osft"],
        ),
        (
            ["--osft", "--osft-unfreeze-rank-ratio", "0.5", "--master-weights", "bfloat16", "--float8"],
            ["--master-weights bfloat16: --osft keeps directions exactly", "--float8: --osft's layers"],
        ),
        (["--compile", "--activation-checkpointing", "auto"], ["auto cannot be used with --compile"]),
        (["--float8", "--compute-dtype", "float32"], ["--float8 needs bfloat16", "given --compute-dtype float32"]),
        (["--no-save-final-checkpoint"], ["never be written"]),
        (
            ["--batch-size", "0", "--adam-eps", "0", "--min-lr-ratio", "2", "--num-decay-steps", "0"],
            ["--batch-size 0", "--adam-eps 0", "--min-lr-ratio 2", "--num-decay-steps 0"],  # all at once
        ),
    ],
)
def test_bad_flags_get_one_message_and_no_traceback(argv, reasons):
    result = run_script("train.py", *REQUIRED, *argv)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    for reason in reasons:
        assert reason in result.stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("bach_size: 3", "unknown option 'bach_size'; did you mean 'batch_size'"),
        ("config: other.yaml", "unknown option 'config'"),
        ("compile: 1", "compile: given 1, allowed: true or false"),
        ("batch_size: true", "batch_size: given True"),
        ("batch_size: [1, 2]", "batch_size: given [1, 2]"),
        ("batch_size: many", "--batch-size"),
        ("- 1", "expected 'option: value' lines, got list"),
        ("", "expected 'option: value' lines, got NoneType"),
        ("a: [", "not valid YAML"),
        ("seed: 1\nseed: 2", "a key is there twice among seed, seed"),
        ("bach_size: 3\ncompile: 1", "compile: given 1, allowed: true or false"),  # both at once
        (None, "cannot be read"),
    ],
)
def test_a_bad_config_file_gets_one_message_and_no_traceback(text, reason, tmp_path):
    config = tmp_path / "run.yaml"
    if text is not None:
        config.write_text(text)
    result = run_script("train.py", *REQUIRED, "--config", str(config))
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert reason in result.stderr


def test_a_schedule_that_decays_needs_an_end_and_a_run_without_end_needs_exports():
    paths = dict(model_name_or_path="m", data_path="d", output_dir="o")
    assert (
        "decays towards the run's end" in find_problems(group_options(TrainOptions, **paths, lr_scheduler="cosine"))[0]
    )
    assert find_problems(group_options(TrainOptions, **paths, min_samples_per_checkpoint=10)) == []
    for scheduler in ("linear", "cosine", "wsd"):
        assert (
            find_problems(group_options(TrainOptions, **paths, lr_scheduler=scheduler, max_epochs=1, min_lr_ratio=0.0))
            == []
        )


def test_process_data_options():
    paths = dict(input_file="i.jsonl", model_name_or_path="m")
    assert find_problems(ProcessDataOptions(**paths, output_file="o.csv", num_proc=0)) == [
        "--output-file o.csv: must end in .arrow, .parquet or .jsonl",
        "--num-proc 0: must be at least 1",
    ]
    assert find_problems(ProcessDataOptions(**paths, output_file="o.parquet")) == []


@pytest.mark.parametrize("script", ["train.py", "process_data.py"])
def test_help_names_every_option_and_imports_nothing_heavy(script):
    code = (
        f"import runpy, sys; sys.argv = [{script!r}, '--help']\n"
        f"try: runpy.run_path({script!r}, run_name='__main__')\n"
        "except SystemExit as end: code = end.code\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'datasets', 'numba'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy), 'CODE', code)"
    )
    result = run_script("-c", code)
    assert "HEAVY [] CODE 0" in result.stdout, result.stdout + result.stderr
    for flag in {"train.py": ["--max-tokens-per-gpu", "--config"], "process_data.py": ["--num-proc"]}[script]:
        assert flag in result.stdout
