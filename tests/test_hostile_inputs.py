"""Model directories and templates of ill will: refused by name, before anything in them has been executed."""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
from forked import run_forked
from processes import flags, run
from safetensors.torch import load_file
from tiny_data import make_samples, write_samples
from tiny_models import VOCAB_SIZE, change_json, load_source
from transformers import AutoTokenizer

from mini_trainer.data.chat.masking import ChatMasker
from mini_trainer.data.stores.model_files import find_model, find_weights
from mini_trainer.data.stores.tokenizers import load_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"

CUSTOM_MODEL = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({marker!r}).touch()
class CustomConfig(LlamaConfig):
    model_type = "custom"
class CustomModel(LlamaForCausalLM):
    config_class = CustomConfig
"""
CUSTOM_CLASSES = {"AutoConfig": "custom_model.CustomConfig", "AutoModelForCausalLM": "custom_model.CustomModel"}


class Payload:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


@pytest.fixture
def marker(tmp_path):
    """A file that appears when something of the model is executed."""
    return tmp_path / "executed"


@pytest.fixture
def model(model, marker, tmp_path) -> Path:
    """A good model with the payload beside it, which nothing refers to."""
    path = shutil.copytree(model, tmp_path / "model")
    (path / "custom_model.py").write_text(CUSTOM_MODEL.format(marker=str(marker)))
    return path


def ask_for_custom_model(model: Path) -> None:
    change_json(model / "config.json", model_type="custom", auto_map=CUSTOM_CLASSES)


def keep_only_a_pickle(model: Path) -> None:
    os.remove(model / "model.safetensors")
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(model.parent / "executed")))


def shard(model: Path, name: str) -> None:
    """One shard of that name, as the index calls it."""
    os.rename(model / "model.safetensors", model / "shard.safetensors")
    weight_map = dict.fromkeys(load_file(model / "shard.safetensors"), name)
    change_json(model / "model.safetensors.index.json", metadata={}, weight_map=weight_map)


def link_out(file: Path) -> None:
    outside = shutil.move(file, file.parent.parent / "outside")
    file.symlink_to(outside)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 100)


def overwrite(file: Path, content: bytes) -> None:
    with file.open("r+b") as stream:
        stream.write(content)


def config(**values: object):
    return lambda model: change_json(model / "config.json", **values)


def custom_tokenizer(auto_map: object):
    return lambda model: change_json(model / "tokenizer_config.json", tokenizer_class="Custom", auto_map=auto_map)


def weights(spoil, *args: object):
    return lambda model: spoil(model / "model.safetensors", *args)


HOSTILE = {
    "custom classes": (ask_for_custom_model, r"config.json \(auto_map: custom_model.CustomConfig.*--trust-remote-code"),
    "custom tokenizer": (custom_tokenizer({"AutoTokenizer": ["custom.T", None]}),
                         r"tokenizer_config.json \(auto_map: custom.T\).*--trust-remote-code"),
    "custom tokenizer, the old way": (custom_tokenizer(["custom.T", None]),
                                      r"tokenizer_config.json \(auto_map: custom.T\).*--trust-remote-code"),
    "another repository's classes": (config(auto_map={"AutoConfig": "some/repo--custom.Config"}),
                                     "config.json: auto_map .*some/repo--custom.Config"),
    "custom generation": (lambda model: (model / "custom_generate").mkdir(),
                          "model: .*custom_generate.*--trust-remote-code"),
    "a kernel as attention": (config(attn_implementation="some/kernel"), "config.json: attn_impl.*some/kernel"),
    "a kernel as attention, nested": (config(text_config={"_attn_implementation": {"": "some/kernel"}}),
                                      "config.json: _attn_implementation .*some/kernel"),
    "other weights": (config(transformers_weights="adapter_model.bin"),
                      "config.json: transformers_weights .*adapter_model.bin"),
    "an adapter": (lambda model: change_json(model / "adapter_config.json", base_model_name_or_path="some/repo"),
                   "adapter_config.json: .*merge-adapter"),
    "a config that is none": (lambda model: (model / "config.json").write_text("[1]"), "config.json: .*list"),
    "a config without end": (lambda model: (model / "config.json").write_text("[" * 100_000), "config.json: .*nested"),
    "a link out": (lambda model: link_out(model / "tokenizer.json"), "tokenizer.json: .*regular file"),
    "a link to nowhere": (lambda model: (model / "x.json").symlink_to("gone"), "x.json: .*regular file"),
    "a pipe": (lambda model: os.mkfifo(model / "chat_template.json"), "chat_template.json: .*regular file"),
    "only a pickle": (keep_only_a_pickle, "model: no weights: .*pytorch_model.bin"),
    "no weights": (weights(os.remove), "model: no weights: .*index.json$"),
    "weights above": (lambda model: shard(model, "../shard.safetensors"), "index.json: .*'../shard.safetensors'"),
    "weights anywhere": (lambda model: shard(model, "/shard.safetensors"), "index.json: .*'/shard.safetensors'"),
    "weights in a pickle": (lambda model: shard(model, "shard.bin"), "index.json: .*'shard.bin'"),
    "missing weights": (lambda model: shard(model, "none.safetensors"), "index.json: .*none.safetensors, .*missing"),
    "an index that is none": (
        lambda model: (shard(model, "shard.safetensors"), (model / "model.safetensors.index.json").write_text("{}")),
        "index.json: .*weight_map",
    ),
    "linked weights": (weights(link_out), "model.safetensors: .*regular file"),
    "truncated weights": (weights(truncate), "model.safetensors: damaged"),
    "a header too large": (weights(overwrite, b"\xff" * 7), "model.safetensors: damaged"),
    "a header that is none": (weights(overwrite, b"\x10\0\0\0\0\0\0\0not any JSON at all"),
                              "model.safetensors: damaged"),
}  # fmt: skip


def find_all(model: Path, *, trust_remote_code: bool = False) -> str:
    model_dir = find_model(str(model), revision=None, trust_remote_code=trust_remote_code)
    find_weights(str(model), model_dir)
    return model_dir


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_model_is_refused_by_name(case, model, marker):
    spoil, reason = HOSTILE[case]
    spoil(model)
    with pytest.raises(ValueError, match=reason) as refusal:
        find_all(model)
    assert "\n" not in str(refusal.value)
    assert not marker.exists()


def test_code_that_transformers_has_itself_is_named_and_not_run(model, marker, caplog):
    change_json(model / "config.json", auto_map=CUSTOM_CLASSES)
    change_json(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["custom_model.CustomModel", None]})
    with caplog.at_level("WARNING", logger="mini_trainer"):
        find_all(model)
    named = [record.getMessage().split(": ")[2].split()[0] for record in caplog.records]
    assert named == ["config.json", "tokenizer_config.json"]
    assert all("not run" in record.getMessage() for record in caplog.records)
    config = load_source(model).config
    assert type(config).__name__ == "LlamaConfig" and not hasattr(config, "auto_map")  # an export has no such code
    load_tokenizer(str(model)).save_pretrained(model / "saved")
    assert "auto_map" not in json.loads((model / "saved" / "tokenizer_config.json").read_text())
    assert not marker.exists()


def test_a_good_model_passes(model):
    assert find_all(model) == str(model)
    shard(model, "shard.safetensors")
    assert find_all(model) == str(model)


def test_a_run_in_place_of_a_model_is_refused_with_its_exports(model, tmp_path):
    run, export = tmp_path / "run", tmp_path / "run" / "hf_format" / "best"
    export.parent.mkdir(parents=True)
    model.rename(export)
    with pytest.raises(ValueError, match=f"--model-name-or-path {run}: .*exports: {export}$"):
        find_all(run)
    assert find_all(export) == str(export)


def test_loaders_run_nothing_even_unchecked(model, marker):
    ask_for_custom_model(model)
    change_json(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["custom_model.CustomModel", None]})
    with pytest.raises(ValueError, match=f"--model-name-or-path {model}: .*config.json"):
        load_source(model)
    load_tokenizer(str(model))  # a stock class takes the place of the custom one
    assert not marker.exists()


def test_what_trust_needs(model):
    with pytest.raises(ValueError, match=f"--trust-remote-code .*{model} .*no code"):
        find_all(model, trust_remote_code=True)
    with pytest.raises(ValueError, match=f"--model-revision main .*{model} "):
        find_model(str(model), revision="main", trust_remote_code=False)
    for revision in (None, "main", "0123456"):
        with pytest.raises(ValueError, match=f"--trust-remote-code .*--model-revision .*40 .*{revision}"):
            find_model("some/repo", revision=revision, trust_remote_code=True)


def test_a_model_on_the_hub(model, monkeypatch, tmp_path):
    """As the hub's cache holds it, without network: files are links to the repository's blobs, and to nowhere else."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=r"--model-name-or-path some/repo: .*hub: "):
        find_model("some/repo", revision=None, trust_remote_code=False)
    repo = tmp_path / "cache" / "models--some--repo"
    snapshot = repo / "snapshots" / COMMIT
    shutil.copytree(model, repo / "blobs")
    snapshot.mkdir(parents=True)
    for file in (repo / "blobs").iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    assert find_model("some/repo", revision=None, trust_remote_code=False) == str(snapshot)
    find_weights("some/repo", str(snapshot))
    with pytest.raises(ValueError, match=r"some/repo: .*--model-revision v2: "):
        find_model("some/repo", revision="v2", trust_remote_code=False)
    change_json(repo / "blobs" / "config.json", model_type="custom", auto_map=CUSTOM_CLASSES)
    with pytest.raises(ValueError, match=f"{snapshot}: .*--trust-remote-code"):
        find_model("some/repo", revision=COMMIT, trust_remote_code=False)
    assert find_model("some/repo", revision=COMMIT, trust_remote_code=True) == str(snapshot)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('touch ' ~ marker) }}",
        "{{ lipsum.__globals__['os'].system('touch ' ~ marker) }}",
        "{{ messages.__class__.__base__ }}{% include '/etc/passwd' %}",
        "{{ ('%s' | attr('format')).__globals__ }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(template, model, marker):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = f"{{% set marker = {str(marker)!r} %}}" + template
    with pytest.raises(ValueError, match="template"):
        ChatMasker(tokenizer).check_template()
    assert not marker.exists()


@pytest.fixture
def data(tmp_path) -> Path:
    return write_samples(tmp_path / "data.arrow", make_samples(8, vocab_size=VOCAB_SIZE))


def make_argv(model: Path, data: Path, **options: object) -> list[str]:
    return ["train.py", *flags(model_name_or_path=model, data_path=data, output_dir=model.parent / "run", max_steps=2,
                               batch_size=4, **options)]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoil", "program"),
    [(ask_for_custom_model, "train"), (keep_only_a_pickle, "train"), (ask_for_custom_model, "process_data")],
)
def test_programs_refuse(spoil, program, model, marker, data, tmp_path):
    spoil(model)
    (tmp_path / "chats.jsonl").write_text("{}\n")
    paths = flags(input_file=tmp_path / "chats.jsonl", output_file=tmp_path / "out.arrow", model_name_or_path=model)
    result = run_forked(0, *(make_argv(model, data) if program == "train" else ["process_data.py", *paths]))
    assert result.returncode == 2
    (error,) = (line for line in result.stderr.splitlines() if "error: " in line)
    assert error.startswith("error: ") and str(model) in error and "Traceback" not in result.stderr
    assert "config.json" in error or spoil is not ask_for_custom_model
    assert not marker.exists()


@pytest.mark.wide
@pytest.mark.slow
def test_training_never_renders_the_template_and_runs_code_that_is_trusted(model, marker, data):
    ask_for_custom_model(model)
    template = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    argv = make_argv(model, data, trust_remote_code=True)
    result = run([sys.executable, *argv], env={"HF_MODULES_CACHE": str(model.parent / "modules")})
    assert result.returncode == 0, result.stderr
    assert "warning: --trust-remote-code" in result.stderr
    assert marker.exists()
    (export,) = (model.parent / "run" / "hf_format").glob("samples_*")
    assert (export / "chat_template.jinja").read_text() == template
