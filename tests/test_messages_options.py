"""The whole texts of messages about options: of flags, of option files, and of values that do not go together."""

import pytest

from mini_trainer.distributed.command import name_command
from mini_trainer.options import Options, TrainOptions, command_line
from mini_trainer.options.tools import EvaluateOptions, GenerateOptions, ProcessDataOptions

REQUIRED = {
    TrainOptions: "--model-name-or-path m --data-path d.arrow --output-dir o --max-steps 5",
    ProcessDataOptions: "--model-name-or-path m --input-file i.jsonl",
    GenerateOptions: "--model m",
    EvaluateOptions: "--output-dir o",
}
# What is read wrongly, of train.py.
FLAGS = [
    ("--bach-size 3", "unknown option --bach-size; did you mean --batch-size?"),
    ("--lr 1e-5", "unknown option --lr; did you mean --learning-rate?"),
    ("--launcher x", "unknown option --launcher"),
    ("--preview 3", "unknown option --preview; --preview is an option of process_data.py"),
    ("--wandb_run_name x", "unknown option --wandb-run-name: --track wandb, and the environment variable WANDB_NAME"),
    (
        "--osft-rank-allocation importance",
        "unknown option --osft-rank-allocation: every layer keeps the same share (--osft-unfreeze-rank-ratio);"
        " --osft-keep-energy lets the activations decide how many",
    ),
    (
        "--preference-loss hinge",
        "--preference-loss hinge: allowed: dpo, ipo, apo-zero, simpo, orpo; hinge was removed: use dpo, or ipo, which"
        " also stops at a margin",
    ),
    (
        "--lora-target-modules q_proj,v_proj",
        "--lora-target-modules q_proj,v_proj: values of a list are separated by spaces:"
        " --lora-target-modules q_proj v_proj (in a file: [q_proj, v_proj])",
    ),
    (
        "--lr-scheduler triangle",
        "--lr-scheduler triangle: allowed: constant_with_warmup, constant, inverse_sqrt, linear, cosine, "
        "cosine_with_restarts, polynomial, wsd",
    ),
    ("--max-epochs 1.5", "--max-epochs: given '1.5', allowed: int"),
    ("--max-tokens-per-gpu all", "--max-tokens-per-gpu: given 'all', allowed: int or auto"),
    ("--learning-rate fast", "--learning-rate: given 'fast', allowed: float"),
    ("--data-weights a b", "--data-weights: given 'a', 'b', allowed: a list of float"),
    ("--max-steps 6", "given more than once: --max-steps"),
    ("--lora-target-modules --lora", "--lora-target-modules: given without a value; give one or more, or leave it out"),
]
# What is read and cannot be used.
PROBLEMS = [
    (
        TrainOptions,
        "--batch-size 0 --adam-eps 0",
        "--batch-size 0: must be at least 1\n  --adam-eps 0.0: must be above 0, and finite",
    ),
    (
        TrainOptions,
        "--min-lr-ratio 0.1",
        "--min-lr-ratio has no effect with --lr-scheduler constant_with_warmup, only with linear, cosine,"
        " cosine_with_restarts, polynomial, wsd",
    ),
    (
        TrainOptions,
        "--num-warmup-steps 2.5",
        "--num-warmup-steps 2.5: must be a whole number of steps (100), or a share of the run's below 1 (0.03)",
    ),
    (TrainOptions, "--osft", "--osft needs --osft-unfreeze-rank-ratio: the share of directions to train, from 0 to 1"),
    (
        TrainOptions,
        "--lora --osft --osft-unfreeze-rank-ratio 0.5",
        "--lora and --osft are two training methods: give only one",
    ),
    (TrainOptions, "--lora-rank 8", "--lora-rank: no effect without --lora"),
    (
        TrainOptions,
        "--input-file i.jsonl",
        "--data-path and --input-file both specify training data: give only one of them",
    ),
    (ProcessDataOptions, "--output-file o.csv", "--output-file o.csv: must end in .arrow, .parquet or .jsonl"),
    (GenerateOptions, "--prompts p.jsonl", "--prompts needs --output, the file to write the answers to"),
    (EvaluateOptions, "--model m", "nothing to evaluate on: give --data, --task or --lm-eval"),
]
# Contents of a file of train.py's options; DIR stands for its folder.
FILES = [
    ("bach_size: 3", "unknown option 'bach_size'; did you mean 'batch_size'?"),
    ("launcher: x", "unknown option 'launcher'"),
    (
        "use_cpu: true",
        "unknown option 'use_cpu': a machine without a GPU trains on the CPU; CUDA_VISIBLE_DEVICES= hides GPUs",
    ),
    (
        "track: wandb, mlflow",
        "--track wandb, mlflow: values of a list are separated by spaces: --track wandb mlflow"
        " (in a file: [wandb, mlflow])",
    ),
    ("compile: 1", "compile: given 1, allowed: true or false"),
    ("output_dir:", "output_dir: given null, allowed: a value; leave the line out for the default, if it has one"),
    (
        "data_path: [x, --trust-remote-code]",
        "data_path: given '--trust-remote-code', allowed: values that cannot be taken for flags",
    ),
    ("seed: 1\nseed: 2", "line 2: not valid YAML: a key is repeated: seed"),
    (
        "optimization:\n  seed: 1",
        "optimization: the file has no groups: write the options below it without it",
    ),
    (
        "output_dir: ${OTHER}",
        "output_dir: '${OTHER}': the variable OTHER is not filled in; allowed: HOME, USER, SCRATCH, TMPDIR, "
        "SLURM_*, or add --allow-env OTHER ($${ stands for the text ${)",
    ),
    (
        "output_dir: ${HF_TOKEN}",
        "output_dir: '${HF_TOKEN}': the variable HF_TOKEN is not filled in; allowed: HOME, USER, SCRATCH, TMPDIR, "
        "SLURM_*; a secret is never filled in ($${ stands for the text ${)",
    ),
]


def refuse(options_class: type[Options], words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The message with which a command line ends its process, without the line about --help."""

    def end(message: str) -> None:
        raise SystemExit(message)

    monkeypatch.setattr(command_line, "exit_with_message", end)
    with pytest.raises(SystemExit) as ended:
        command_line.parse_options(options_class, [*REQUIRED[options_class].split(), *words])
    text, _, rest = str(ended.value).rpartition("\n")
    assert rest == f"{name_command()} --help all lists all options"
    return text


@pytest.mark.parametrize(("words", "text"), FLAGS)
def test_flags_that_cannot_be_read(words, text, monkeypatch):
    assert refuse(TrainOptions, words.split(), monkeypatch) == text


@pytest.mark.parametrize(("options_class", "words", "text"), PROBLEMS)
def test_options_that_cannot_be_used(options_class, words, text, monkeypatch):
    message = refuse(options_class, words.split(), monkeypatch)
    assert message == f"these options cannot be used as they are:\n  {text}"


@pytest.mark.parametrize(("content", "text"), FILES)
def test_option_files_that_cannot_be_read(content, text, tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(content)
    message = refuse(TrainOptions, ["--config", str(tmp_path / "run.yaml")], monkeypatch)
    assert message.replace(str(tmp_path), "DIR") == f"--config DIR/run.yaml: {text}"
