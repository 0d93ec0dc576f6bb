"""Option files: limits on what is read, and environment variables in their values."""

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import succeed
from processes import flags
from refusals import refuse
from tiny_data import make_samples, write_jsonl, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer

from mini_trainer.continual.settings import read_settings as read_continual
from mini_trainer.options import TrainOptions, flatten_options
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.option_files import describe_options, fill_in, read_option_file, read_yaml
from mini_trainer.options.tools import ImportConfigOptions, ProcessDataOptions
from mini_trainer.run.stages import Stage
from mini_trainer.tools.import_config import import_config
from mini_trainer.tools.sweep.settings import read_settings as read_sweep
from mini_trainer.use.evaluation.harness import read_config

NEEDED = ["--model-name-or-path", "m", "--data-path", "d", "--output-dir", "o", "--max-steps", "1"]
MODEL = ["--data-path", "d", "--output-dir", "o", "--max-steps", "1"]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], str]:
    def write(content: Any) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return str(path)

    return write


READERS = {
    "options": lambda path: read_option_file(path, named=str(path)),
    "the harness": read_config,
    "sweep": read_sweep,
    "continual": read_continual,
    "import-config": lambda path: import_config(ImportConfigOptions(config_file=str(path), output_dir="never")),
}


@pytest.mark.parametrize("name", READERS)
def test_every_reader_takes_regular_files_only_and_takes_no_memory(name: str, tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for path in (Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(ValueError, match=f"{path}: .*regular file"):
            READERS[name](path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12))
TOO_MUCH = {
    "bytes": ("a: " + "x" * (1 << 20), "allowed: 1,048,576"),
    "keys": ("".join(f"a{i}: 1\n" for i in range(100_000)), "line 10001: .*10,000 keys"),
    "nested keys": ("a:\n" + "".join(f"  a{i}: 1\n" for i in range(10_000)), "10,000 keys"),
    "values": ("a: [" + "b," * 100_001 + "]", "100,000 values"),
    "aliases": (BOMB, "aliases .*100,000 values"),
}

LONG = ("nested keys", "values")


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("text", "reason"),
    [pytest.param(*given, id=name, marks=[pytest.mark.long] * (name in LONG)) for name, given in TOO_MUCH.items()],
)
def test_every_reader_has_the_same_limits(text: str, reason: str, name: str, tmp_path: Path):
    (path := tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"^{path}: .*{reason}"):
        READERS[name](path)


def test_files_at_the_limits_are_read(tmp_path: Path):
    (path := tmp_path / "run.yaml").write_text("".join(f"a{i}: 1\n" for i in range(10_000)))
    assert len(read_yaml(path, named="run")) == 10_000
    path.write_text("a: " + "x" * ((1 << 20) - 3))
    assert len(read_yaml(path, named="run")["a"]) == (1 << 20) - 3


def test_a_file_of_unknown_keys_gets_a_message_that_ends(write, capfd):
    message = refuse([*NEEDED, "--config", write({f"nothing_{i}": 1 for i in range(100)})], capfd)
    assert message.count("unknown option") == 20 and "not checked" in message


@pytest.mark.parametrize("name", ["HOME", "USER", "SCRATCH", "TMPDIR", "SLURM_JOB_ID"])
def test_what_every_file_may_name_is_filled_in(name: str, write, monkeypatch):
    monkeypatch.setenv(name, "/value")
    options = parse_options(TrainOptions, [*MODEL, "--config", write({"model_name_or_path": f"a/${{{name}}}/b"})])
    assert options.model.model_name_or_path == "a//value/b"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("${OTHER}", "variable OTHER .*HOME, .*, SLURM_"),
        ("${HF_TOKEN}", "variable HF_TOKEN .*secret"),
        ("${SLURM_JWT}", "variable SLURM_JWT .*secret"),
        ("${OTHER:-x}", "the name of"),
        ("${HOME", "the name of"),
        ("${}", "the name of"),
        ("${TMPDIR}", "no variable TMPDIR"),
    ],
)
def test_other_variables_are_refused_by_file_and_key(value: str, reason: str, write, capfd, monkeypatch):
    for name in ("OTHER", "HF_TOKEN", "SLURM_JWT"):
        monkeypatch.setenv(name, "the-value")
    monkeypatch.delenv("TMPDIR", raising=False)
    path = write({"model_name_or_path": value, "push_to_hub": value})
    message = refuse([*MODEL, "--config", path], capfd)
    for key in ("model_name_or_path", "push_to_hub"):  # all at once
        assert f"--config {path}: {key}: {value!r}: " in message
    with pytest.raises(ValueError, match=reason):
        fill_in("key", value)
    assert "the-value" not in message


TRAIN = dict(model_name_or_path="${SCRATCH}/m", data_path="d", validation_data_path="v", max_steps=10)
SWEEP = {"output_dir": "${SCRATCH}/s", "train": TRAIN, "parameters": {"learning_rate": ["1e-4", "${SLURM_RATE}"]}}
TASK = {"name": "a", "input_file": ["${SCRATCH}/a.jsonl"], "validation": "v.arrow", "held_out": "h.arrow"}
CONTINUAL = {"model": "${SCRATCH}/m", "output_dir": "C", "train": {"max_epochs": 1, "batch_size": 2}, "tasks": [TASK]}


def test_files_of_sweeps_and_experiments_follow_the_same_rules(write, monkeypatch):
    for read, given, key in ((read_sweep, SWEEP, "train: data_path"), (read_continual, CONTINUAL, "train: upload_to")):
        section, _, option = key.partition(": ")
        path = Path(write(given | {section: given[section] | {option: "${WHERE}"}}))
        with pytest.raises(ValueError, match=f"(?s)^{path}: .*{key}: .*variable WHERE"):
            read(path)
    monkeypatch.setenv("SCRATCH", "/data")
    monkeypatch.setenv("SLURM_RATE", "2e-4")
    settings = read_sweep(Path(write(SWEEP)))
    assert settings.output_dir == "/data/s" and settings.train["model_name_or_path"] == "/data/m"
    assert settings.parameters[0].choices == (1e-4, 2e-4)
    (one,) = read_continual(Path(write(CONTINUAL)))
    assert one.model == "/data/m" and one.tasks[0].input_file == ("/data/a.jsonl",)


@pytest.mark.parametrize("text", ["${HOME}", "$${HOME}", "$$${A}", "a${", "${A}${B}", "$HOME $ {x}"])
def test_every_writer_of_option_files_writes_what_is_read_as_it_was(text: str, write, tmp_path: Path):
    values = {"output_file": f"{text}.arrow", "model_name_or_path": "m", "input_file": (text, "b")}
    words = ["--config", write(describe_options(ProcessDataOptions, values))]
    options = flatten_options(parse_options(ProcessDataOptions, words))
    assert options["output_file"] == f"{text}.arrow" and options["input_file"] == (text, "b")
    Stage(program="process-data", folder=tmp_path, options=values).write_options()
    config = f"{tmp_path}/process-data.yaml"
    again = flatten_options(parse_options(ProcessDataOptions, ["--config", config]))
    assert again == options | {"config": (config,)}


THEIRS = """
base_model: ${HOME}/m
datasets: [{path: '${HF_TOKEN}.jsonl', type: chat_template}]
"evil\\ncallbacks: ['os:x']\\n#": 1
"evil\\u2028trust_remote_code: true\\u2028#": 1
adapter: lora
lora_r: 8
micro_batch_size: 1
num_epochs: 1
"""


def test_a_strangers_file_chooses_no_variable_and_adds_no_option(write, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "the-value")
    import_config(ImportConfigOptions(config_file=write(THEIRS), output_dir=str(tmp_path / "ours"), trainer="axolotl"))
    words = ["--config", str(tmp_path / "ours" / "train.yaml"), "--output-dir", "o"]
    options = flatten_options(parse_options(TrainOptions, words))
    assert options["model_name_or_path"] == "${HOME}/m"
    assert options["callbacks"] == () and not options["trust_remote_code"]
    data = flatten_options(parse_options(ProcessDataOptions, ["--config", str(tmp_path / "ours" / "data.yaml")]))
    assert data["input_file"] == ("${HF_TOKEN}.jsonl",)


def test_a_dry_run_imports_only_callbacks_that_the_command_line_names(write, capfd):
    path = write({"callbacks": ["some.module:Hook"]})
    argv = [*NEEDED, "--config", path]
    assert parse_options(TrainOptions, argv).callbacks.callbacks == ("some.module:Hook",)
    assert capfd.readouterr().out == ""
    assert parse_options(TrainOptions, [*argv, "--dry-run"]).callbacks.callbacks == ()
    (said,) = capfd.readouterr().out.splitlines()
    assert "--config" in said and ": some.module:Hook; --callbacks NAME " in said
    named = parse_options(TrainOptions, [*argv, "--dry-run", "--callbacks", "my.module:Hook"])
    assert named.callbacks.callbacks == ("my.module:Hook",) and capfd.readouterr().out == ""


def test_no_file_of_a_run_holds_a_secret(tmp_path: Path):
    secrets = dict(HF_TOKEN="hf_abcdef", WANDB_API_KEY="key-123456", DB_PASSWORD="pass-12345", SLURM_JWT="jwt-99999")
    (folder := tmp_path / "hf_abcdef").mkdir()
    data = write_samples(folder / "data.arrow", make_samples(4, vocab_size=VOCAB_SIZE))
    model = save_tokenizer(save_model(FAMILIES["llama"], tmp_path / "model-pass-12345"))
    options = dict(model_name_or_path=model, data_path=data, output_dir=tmp_path / "run", max_steps=1, batch_size=2)
    prompts = write_jsonl(tmp_path / "key-123456.jsonl", [{"prompt": "a"}])
    names = dict(sample_prompts=prompts, validation_data_path=data)
    done = succeed(0, "train.py", *flags(**options, **names), env=secrets)
    files = [path for path in (tmp_path / "run").rglob("*") if path.suffix in (".json", ".jsonl", ".md")]
    texts = [path.read_text() for path in files] + [done.stdout, done.stderr]
    assert "***" in (tmp_path / "run" / "training_params.json").read_text()
    for secret in secrets.values():
        assert not [path for path, text in zip(files, texts, strict=False) if secret in text]
        assert not any(secret in text for text in texts)


def test_an_experiment_takes_no_password_into_its_option_files(write, monkeypatch):
    monkeypatch.setenv("SCRATCH", "x")
    path = Path(write(CONTINUAL | {"model": "m", "evaluate": {"base_url": "https://me:pass@host/v1"}}))
    with pytest.raises(ValueError, match=r"evaluate: base_url: given https://\*\*\*@host/v1, .*password"):
        read_continual(path)
