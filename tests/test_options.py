"""Options from flags and YAML: what is accepted, and one message for what is not."""

import ast
import os
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_origin

import pytest
from breadth import long
from processes import ENV, run_unread
from program import list_sources
from refusals import refuse

from mini_trainer import options
from mini_trainer.__main__ import PROGRAMS
from mini_trainer.distributed.ending import ExitCode
from mini_trainer.objectives.objective import find_class
from mini_trainer.options import TrainOptions, flatten_options, group_options, list_types, replace_options, tools
from mini_trainer.options.command_line import SPELLINGS, parse_options
from mini_trainer.options.fields import list_choices
from mini_trainer.options.objectives import ALL_OBJECTIVES, OBJECTIVES
from mini_trainer.options.problems import finding
from mini_trainer.options.problems.finding import find_problems, find_wrong_options

ROOT = Path(__file__).parent.parent
OTHERS = sorted({*PROGRAMS} - {"train"})  # words of mini-trainer
REQUIRED = ["--model-name-or-path", "m", "--data-path", "d.arrow", "--output-dir", "o", "--max-steps", "5"]


def run_script(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *argv], cwd=ROOT, capture_output=True, text=True, check=False)


def test_flags_win_over_the_config_file(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        "learning_rate: 1e-3\nbatch-size: 7\nmax_grad_norm: null\ncompile: true\nsave_final_checkpoint: true\nseed: 9\n"
    )
    options = parse_options(TrainOptions, [*REQUIRED, "--config", str(config), "--batch-size", "8", "--no-compile"])
    expected = dict(batch_size=8, max_grad_norm=None, compile=False, seed=9, max_steps=5)
    expected |= dict(learning_rate=1e-3)  # YAML's 1e-3 is a string
    assert expected.items() <= flatten_options(options).items()


def test_underscores_and_equals_signs_are_accepted():
    options = parse_options(TrainOptions, [*REQUIRED, "--batch_size=3", "--max-grad-norm", "None"])
    assert (options.data.batch_size, options.optimization.max_grad_norm) == (3, None)


@pytest.mark.parametrize(
    ("argv", "reasons"),
    [
        (["--batch-size", "many"], ["--batch-size", "many"]), (["--compile", "true"], ["true"]),
        (["--no-compile", "--compile"], ["once: --compile"]),
        (["--start-timeout", "9999999999"], ["--start-timeout 9999999999: ", "864000"]),
        (["--max-grad-norm", "0"], ["--max-grad-norm 0", "None"]), (["--adam-beta2", "1"], ["--adam-beta2 1"]),
        (["--lr-scheduler", "constant", "--num-warmup-steps", "3"], ["--num-warmup-steps has no"]),
        (["--lr-shape", "3"], ["--lr-shape has no"]),
        (["--freeze", "nothing", "vision"], ["--freeze nothing vision: "]),
        (["--freeze", "nothing", "--lora"], ["--freeze nothing: ", "--lora-target-modules"]),
        (["--freeze", "language", "--osft", "--osft-unfreeze-rank-ratio", "0.5"], ["--freeze language: "]),
        (["--osft", "--osft-unfreeze-rank-ratio", "1.5"], ["--osft-unfreeze-rank-ratio 1.5: "]),
        (["--osft", "--osft-unfreeze-rank-ratio", "0"], ["--osft-unfreeze-rank-ratio 0", "--osft-train-others"]),
        (["--osft-unfreeze-rank-ratio", "0.5", "--osft-target-patterns", "mlp"],
         ["--osft-unfreeze-rank-ratio, --osft-target-patterns: "]),
        (["--osft", "--osft-keep-energy", "0.9", "--osft-unfreeze-rank-ratio", "0.5"], ["--osft-keep-energy"]),
        (["--osft", "--osft-basis", "activations", "--osft-keep-energy", "0.9"], ["--osft-calibration-data"]),
        (["--osft", "--osft-unfreeze-rank-ratio", "0.5", "--osft-statistics", "f"], ["--osft-statistics"]),
        (["--shard-size", "2"], ["--shard-size has no"]),
        (["--teacher-weight", "1", "--teacher-model", "self"], ["--teacher-model self: "]),
        (["--osft", "--osft-unfreeze-rank-ratio", "0.5", "--cpu-offload"], ["--cpu-offload "]),
        (["--osft", "--osft-unfreeze-rank-ratio", "0.5", "--master-weights", "bfloat16", "--float8"],
         ["--master-weights bfloat16: ", "--float8 "]),
        (["--compile", "--activation-checkpointing", "auto"], ["auto cannot", "--compile"]),
        (["--compile", "--use-liger-kernels"], ["(--use-liger-kernels) cannot", "--compile"]),
        (["--profile-steps", "5:3"], ["--profile-steps 5:3: "]),
        (["--num-warmup-steps", "1.5"], ["--num-warmup-steps 1.5: "]),
        (["--compute-dtype", "float16"], ["--compute-dtype float16: "]),
        (["--float8", "--compute-dtype", "float32"], ["--float8 needs bfloat16", "--compute-dtype float32"]),
        (
            ["--batch-size", "0", "--adam-eps", "0", "--min-lr-ratio", "2", "--lr-shape", "0"],
            ["--batch-size 0", "--adam-eps 0", "--min-lr-ratio 2", "--lr-shape 0"],  # all at once
        ),
    ],
)  # fmt: skip
def test_bad_flags_get_one_message(argv, reasons, capfd):
    message = refuse([*REQUIRED, *argv], capfd)
    for reason in reasons:
        assert reason in message


def test_bad_flags_end_the_script_without_a_traceback():
    result = run_script("train.py", *REQUIRED, "--bach-size", "3")
    assert result.returncode == 2 and "--bach-size" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("lora_r: 8", "'lora_rank'"), ("config: other.yaml", "option 'config'"),
        ("batch_size: true", "batch_size: given True"), ("batch_size: [1, 2]", "batch_size: given [1, 2]"),
        ("- 1", "got list"), ("", "got nothing"),
        ("a: [", "valid YAML"),
        ("bach_size: 3\ncompile: 1", "compile: given 1"),  # both at once
        ("output_dir: /a/${SLURM_NONE}/b", "output_dir: '/a/${SLURM_NONE}/b': "),
        ("batch_size: 4\nbatch-size: 8", "batch_size: is given twice"), ("batch_size: 0x10", "'0x10'"),
        ("model-name-or-path: null", "model_name_or_path: given null"),
        ("data_path: [a, null]", "data_path: given None"),
        ("lora_target_modules: ['a', no]", "lora_target_modules: given False"),
        ("data_path: --trust-remote-code", "data_path: given '--trust-remote-code'"),
        ("data_path: ['${SLURM_FLAG}']", "data_path: given '--trust-remote-code'"),
        ("label_names: ['-1', '1', --no]", "label_names: given '--no'"),
        ("data_path: [--, x]", "data_path: given '--'"),
        (None, "run.yaml: "),
    ],
)  # fmt: skip
def test_a_bad_config_file_gets_one_message(text, reason, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("SLURM_FLAG", "--trust-remote-code")
    config = tmp_path / "run.yaml"
    if text is not None:
        config.write_text(text)
    assert reason in refuse([*REQUIRED, "--config", str(config)], capfd)


def test_several_config_files_compose_in_order_and_take_the_environments_values(tmp_path, monkeypatch):
    (tmp_path / "base.yaml").write_text("batch_size: 8\nlearning_rate: 1e-4\nmax_epochs: 3\ndata_path: [a, b]\n")
    (tmp_path / "more.yaml").write_text(
        "learning-rate: ${SLURM_RATE}\ncompile: ${SLURM_B}\ndata_path: ${SCRATCH}/c.arrow\nmax_time: 1:30:00\n"
    )
    for name, value in (("SLURM_RATE", "2e-4"), ("SLURM_B", "true"), ("SCRATCH", "/data")):
        monkeypatch.setenv(name, value)
    files = ["--config", str(tmp_path / "base.yaml"), str(tmp_path / "more.yaml")]
    words = ["--model-name-or-path", "m", "--output-dir", "o", *files, "--max-epochs", "5"]
    values = flatten_options(parse_options(TrainOptions, words))
    given = dict(batch_size=8, learning_rate=2e-4, max_epochs=5, compile=True, data_path=("/data/c.arrow",))
    assert given.items() <= values.items()
    assert values["max_time"] == "1:30:00"


@pytest.mark.parametrize("join", [lambda first: ["--config", first], lambda first: [f"--config={first}"]])
def test_all_config_files_count_with_and_without_an_equals_sign(join, tmp_path):
    (tmp_path / "a.yaml").write_text("seed: 1\nbatch_size: 3\n")
    (tmp_path / "b.yaml").write_text("seed: 2\n")
    data = parse_options(TrainOptions, [*REQUIRED, *join(str(tmp_path / "a.yaml")), str(tmp_path / "b.yaml")]).data
    assert (data.seed, data.batch_size) == (2, 3)


def test_numbers_in_yaml_mean_what_the_same_words_mean_as_flags(tmp_path):
    words = ["010", "1_000", "+12", "7", "1.10", "1.0e-5", ".5", "-1", "1e3", "1_0.5", "0x10", "190:20"]
    config = tmp_path / "run.yaml"
    config.write_text(f"data_path: [{', '.join(words)}]\n")
    required = [word for word in REQUIRED if word not in ("--data-path", "d.arrow")]
    assert parse_options(TrainOptions, [*required, "--config", str(config)]).data.data_path == tuple(words)
    for word in ("010", "1_000", "+12"):
        config.write_text(f"batch_size: {word}\n")
        assert parse_options(TrainOptions, [*REQUIRED, "--config", str(config)]).data.batch_size == int(word)
    for word in ("1.0e-5", ".5", "1e-3", "1_0.5"):
        config.write_text(f"weight_decay: {word}\n")
        values = flatten_options(parse_options(TrainOptions, [*REQUIRED, "--config", str(config)]))
        assert values["weight_decay"] == float(word)


def test_a_command_without_arguments_is_told_what_it_needs(capfd):
    assert "--output-dir" in refuse([], capfd)


SEVERAL = [option.name for option, _ in options.iterate_fields(TrainOptions) if get_origin(option.type) is tuple]


@pytest.mark.parametrize("name", SEVERAL)
def test_an_option_of_several_values_takes_no_flag_from_yaml_and_is_not_given_empty(name, tmp_path, capfd):
    flag, config = options.flag_name(name), tmp_path / "run.yaml"
    required = [word for word in REQUIRED if word not in ("--data-path", "d.arrow")]
    for argv in ([flag], [flag, "--lora"], [f"{flag}="]):
        assert f"{flag}: given without" in refuse([*required, *argv], capfd)
    if name != "config":
        config.write_text(f"{name}: [a, --trust-remote-code]\n")
        assert f"{name}: given '--trust-remote-code'" in refuse([*REQUIRED, "--config", str(config)], capfd)


def test_the_printed_configuration_is_one_that_config_takes_back(tmp_path):
    words = ["--checkpoint-every-minutes", "None", "--adam-eps", "1e-9", "--lora-target-modules", "q_proj", "k: 'v",
             "--max-time", "1:30:00", "--no-save-final-checkpoint", "--config"]  # fmt: skip
    (tmp_path / "base.yaml").write_text("lora: true\n")
    printed = run_script("train.py", *REQUIRED, *words, str(tmp_path / "base.yaml"), "--print-config")
    assert printed.returncode == 0, printed.stderr
    assert "# lora\nlora: true\n" in printed.stdout.replace("\n\n", "\n")
    (tmp_path / "printed.yaml").write_text(printed.stdout)
    again = run_script("train.py", "--config", str(tmp_path / "printed.yaml"), "--print-config")
    assert again.stdout == printed.stdout, again.stderr


def test_packages_that_are_not_installed_are_named_once_nothing_else_is_wrong(monkeypatch):
    monkeypatch.setattr(finding, "is_installed", lambda module: module == "wandb")
    paths = dict(model_name_or_path="m", data_path="d", output_dir="o", max_steps=1)
    given = group_options(
        TrainOptions, **paths, lora=True, base_quantization="nf4", track=("wandb", "mlflow"), validation_data_path="v",
        objective="sequence-classification",
    )  # fmt: skip
    assert find_wrong_options(given) == []
    needs = r".*?(--[a-z].*) needs .*: pip install (.*)"
    assert [re.fullmatch(needs, problem).groups() for problem in find_problems(given)] == [
        ("--track mlflow", "mlflow sqlalchemy"),
        ("--objective sequence-classification", "scikit-learn"),
        ("--lora", "peft"),
        ("--base-quantization nf4", "bitsandbytes"),
    ]
    (problem,) = find_problems(replace_options(given, lora_rank=0))
    assert problem.startswith("--lora-rank 0: ")


@pytest.mark.parametrize(
    ("script", "some"), [("train.py", {"--max-tokens-per-gpu", "--config"}), ("process_data.py", {"--num-proc"})]
)
def test_help_names_options(script, some):
    result = run_script(script, "--help")
    assert result.returncode == 0, result.stderr
    assert some <= set(re.findall(r"--[\w-]+", result.stdout))


@pytest.mark.parametrize("words", ["--help", "--version", "train --help", *(long(f"{word} --help") for word in OTHERS)])
def test_help_that_nobody_reads_to_its_end_is_no_error(words):
    done = run_unread([sys.executable, "-m", "mini_trainer", *words.split()])
    assert (done.returncode, done.stderr) == (0, "")


# Ctrl-C at the first import of a library that takes long.
INTERRUPTED_IMPORT = """
import sys
class Interrupting:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in {"numpy", "torch", "optuna", "transformers"}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting)
"""


@pytest.mark.slow
def test_ctrl_c_while_libraries_are_imported_is_one_message(tmp_path):
    """Other programs import as late: test_start_up.py."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED_IMPORT)
    env = ENV | {"PYTHONPATH": f"{tmp_path}:{ENV['PYTHONPATH']}"}
    command = [sys.executable, "-m", "mini_trainer", "train", *REQUIRED]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == ExitCode.INTERRUPTED
    assert re.fullmatch(r"error: interrupted.*\n", done.stderr)


# Flags of other programs that our texts name.
FLAGS_OF_OTHERS = {
    *("help", "version"),  # of every script
    *("nproc-per-node", "nnodes", "node-rank", "rdzv-id", "rdzv-backend", "rdzv-endpoint", "rdzv-conf"),  # torchrun
    *("standalone", "master-addr", "master-port", "local-addr", "signals-to-handle", "log-dir"),  # torchrun
    *("max-restarts", "no-python"),  # torchrun
    *("recursive", "repo-type"),  # gcloud storage rsync, hf upload
    *("revision", "logdir"),  # hf upload, tensorboard
    "sweep",  # axolotl
    *("native", "pid"),  # py-spy
    *("enable-lora", "generation-config", "lora-modules", "max-logprobs", "max-lora-rank", "tokenizer"),  # vllm serve
    *("max-model-len", "runner"),  # vllm serve
    "model-path",  # sglang
    *("no-deps", "only-binary", "python-version", "config-settings"),  # pip
    *("nodes", "time", "kill-on-bad-exit", "array", "ntasks", "ntasks-per-node", "gpus"),  # SLURM's sbatch and srun
    *("dependency", "requeue", "open-mode", "parsable", "wrap", "signal", "batch", "full"),
    "vfs-cache-mode",  # rclone's
    *("reasoning", "template"),  # llama-server, ollama show
    "served-model-name",  # vllm serve's
}


def find_declared_flags() -> set[str]:
    """Every flag of the scripts, the benchmarks and the quickstart, without its dashes."""
    known = {**vars(options), **vars(tools)}.values()
    groups = [value for value in known if isinstance(value, type) and is_dataclass(value)]
    declared = {field.name.replace("_", "-") for group in groups for field in fields(group)}
    declared |= {f"no-{name}" for name in declared}
    for path in (*ROOT.glob("benchmarks/*.py"), *ROOT.glob("examples/*/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign) and path.parent.name == "quickstart":
                declared.add(ast.unparse(node.target).replace("_", "-"))  # a field of a script's options
            if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "add_argument":
                words = [word.value for word in node.args if isinstance(word, ast.Constant)]
                declared |= {word.removeprefix("--") for word in words if word.startswith("--")}
    return declared


def read_texts() -> dict[str, list[str]]:
    """What our modules and pages say: of a module the strings, docstrings among them."""
    texts = {}
    for path, source in list_sources().items():
        nodes = ast.walk(ast.parse(source))
        texts[path] = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    return texts | {str(page.relative_to(ROOT)): [page.read_text()] for page in pages}


def find_unknown_flags(texts: list[str], declared: set[str]) -> list[str]:
    """Flags in `texts` that nothing declares. `--osft-*`, or one that a program completes, may begin a declared one."""
    named = {flag for text in texts for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", text)}
    named = {flag.replace("_", "-") for flag in named}
    return sorted(
        f"--{flag}"
        for flag in named - declared
        if not (flag.endswith("-") and any(known.startswith(flag) for known in declared))
    )


def test_every_flag_that_a_text_names_exists():
    declared = find_declared_flags() | FLAGS_OF_OTHERS | {spelling.removeprefix("--") for spelling in SPELLINGS}
    assert {"batch-size", "input-file", "no-compile", "messages-file"} <= declared
    unknown = {place: find_unknown_flags(texts, declared) for place, texts in read_texts().items()}
    told = [f"{place}: {', '.join(flags)}" for place, flags in unknown.items() if flags]
    assert not told, "\n".join(told)


def test_without_the_reader_of_options_one_message_says_what_to_install(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['tyro'] = None")
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "train.py", *REQUIRED], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == ExitCode.BAD_INPUT and "Traceback" not in done.stderr
    assert "package tyro" in done.stderr and "pip install -e ." in done.stderr


def test_the_table_of_objectives_is_that_of_the_code_and_names_options_and_formats():
    assert all(find_class(name).list_metrics() for name in ALL_OBJECTIVES)
    for facts in OBJECTIVES.values():
        assert {*facts.options, *facts.excluded} <= list_types(TrainOptions).keys()
        assert facts.row_format in (None, *list_choices(TrainOptions)["format"])


def test_train_has_no_more_options_than_it_had():
    """A new one takes an old one out; options of the data belong to process_data.py."""
    assert len(list(options.iterate_fields(TrainOptions))) == 153
