"""Every export has a card that is true to its run, and can be pushed to the hub, whose troubles end no run."""

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
from card_usage import run_usage
from hub_standin import Hub
from huggingface_hub import ModelCard, ModelCardData
from in_process import train_here
from small_runs import OPTIONS, make_inputs
from tiny_data import make_samples, read_lines, write_samples
from tiny_models import VOCAB_SIZE
from tiny_vision import make_image, save_vision_model
from transformers import Gemma3TextConfig, LlamaConfig

from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.options import HubOptions, TrainOptions, flatten_options, group_options
from mini_trainer.run import uploads as hub_module
from mini_trainer.run.model_card import describe_data, describe_head, describe_readers, describe_usage
from mini_trainer.run.uploads import BEST, REGULAR, Uploads

METRICS = ("loss", "perplexity", "token_accuracy")
TOKEN = "hf_aTokenThatNobodyMaySee"


@pytest.fixture
def hub(monkeypatch):
    server = Hub()
    turn_on(monkeypatch, server.url)
    yield server
    server.close()


def turn_on(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """Lets the client speak to `url`, by the protocol for large files that needs no server of another kind."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
    monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.fixture(scope="module")
def pushed(world, tmp_path_factory) -> SimpleNamespace:
    """A run with three exports on the way and the best ones, which uploads them; and what the hub then has."""
    root = tmp_path_factory.mktemp("pushed")
    held_out = write_samples(root / "held_out.arrow", make_samples(5, vocab_size=VOCAB_SIZE, seed=3))
    options = make_inputs(root, "llama_tied_bias") | OPTIONS
    (root / "model" / "README.md").write_text("---\nlicense: mit\nlanguage: fr\n---\n# A base model\n")
    options |= dict(output_dir=str(root / "run"), max_steps=3, min_samples_per_checkpoint=8, validate_every_steps=1)
    options |= dict(validation_data_path=(str(held_out),), push_to_hub="a-model")
    server = Hub()
    with pytest.MonkeyPatch.context() as patch:
        turn_on(patch, server.url)
        train_here(world, **options)
    server.close()
    return SimpleNamespace(run=root / "run", hub=server, options=options)


def test_a_card_is_true_to_its_run(pushed):
    steps = read_lines(pushed.run / "training_metrics_0.jsonl")
    validations = read_lines(pushed.run / "validation_metrics_0.jsonl")
    identity = json.loads((pushed.run / "training_params.json").read_text())["identity"]
    for step in (1, 3):
        export = pushed.run / "hf_format" / f"samples_{8 * step}"
        card = ModelCard.load(export / "README.md")
        measured = next(row for row in validations if row["step"] == step)
        assert card.data.to_dict() == {
            "license": "mit", "library_name": "transformers", "pipeline_tag": "text-generation",
            "tags": ["mini_trainer"], "model-index": [{"name": "run", "results": [{
                "task": {"type": "text-generation"}, "dataset": {"name": "held_out", "type": "held_out"},
                "metrics": [{"type": name, "value": measured[name]} for name in METRICS],
            }]}],
        }  # fmt: skip
        assert f"after {8 * step} samples" in card.text
        assert f"{steps[0]['loss']:.4f} in the first step, {steps[step - 1]['loss']:.4f} in the last." in card.text
        assert f"| tokens | {steps[step - 1]['total_tokens_accumulated']:,}, trained and masked |" in card.text
        assert identity["data"] in card.text and identity["model"] in card.text and "| `data` | 20 |" in card.text
        assert "| `learning_rate` | `0.01` |" in card.text and "full fine-tuning" in card.text
        assert str(pushed.run.parent) not in card.text, "a path of this machine is told"
        assert "README.md" in json.loads((export / "manifest.json").read_text())["files"]
        assert f"| perplexity | {measured['perplexity']:.3f} |" in card.text
        assert "Validation data: `held_out`." in card.text


def test_a_card_has_the_licence_and_names_of_the_hub_that_are_known(pushed, monkeypatch, tmp_path):
    """The user's licence before the base model's, which may be anything; a base and a data set only on the hub."""
    base = pushed.run.parent / "model"
    inputs = SimpleNamespace(
        config=LlamaConfig(), method=SimpleNamespace(relation="adapter", tags=["lora"]), objective=CausalLM(),
        model_dir=str(base),
    )  # fmt: skip
    given = dict(data_path=("d",), output_dir="o", input_dataset="org/chats:small")

    def describe(model: str, **options: object) -> dict:
        options = group_options(TrainOptions, **given, model_name_or_path=model, **options)
        inputs.options = options
        return describe_head("run", inputs, flatten_options(options), {}).to_dict()

    card = describe("org/base")
    assert (card["base_model"], card["base_model_relation"]) == ("org/base", "adapter")
    assert (card["datasets"], card["license"]) == ("org/chats", "mit")
    card = describe(str(base))
    assert card["license"] == "mit" and "base_model" not in card
    for text, licence in {
        "": {}, "# No metadata": {}, "---\n[1\n---\n": {}, "---\nlicense: 7\n---\n": {},
        "---\nlicense: other\nlicense_name: qwen\nlicense_link: https://x.y/LICENSE\n---\n":
            dict(license="other", license_name="qwen", license_link="https://x.y/LICENSE"),
    }.items():  # fmt: skip
        inputs.model_dir = pushed.run.parent / "other"
        inputs.model_dir.mkdir(exist_ok=True)
        (inputs.model_dir / "README.md").write_text(text)
        assert {name: value for name, value in describe("org/base").items() if "license" in name} == licence
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    inputs.model_dir = "a-model"  # a directory without a card, which must not be taken for a name on the hub
    monkeypatch.setattr("huggingface_hub.repocard.hf_hub_download", pytest.fail)
    assert "license" not in describe("a-model")


def test_a_card_names_the_files_that_data_was_made_from_without_their_directories():
    source = SimpleNamespace(lengths=np.array([3, 4]), kept=np.array([1]))
    sidecar = dict(sources=[dict(file="/home/me/rows.jsonl", format="messages", sha256="ab12")])
    data = SimpleNamespace(names=["rows"], sources=[source], shares=[1.0])
    inputs = SimpleNamespace(data=data, sidecars=[sidecar])
    paths = ["/home/me/a/held.arrow", "/home/me/b/held.arrow"]  # which their stems cannot tell apart
    options = dict(data_path=[], validation_data_path=paths)
    text = "\n".join(describe_data(inputs, dict(identity=dict(data="cd34"), options=options)))
    assert "| `rows` | 1 | 4 | 100.0% |" in text and "| `rows.jsonl` | `ab12` |" in text and "/home" not in text
    assert "Validation data: `held.arrow`, `held.arrow`." in text


def test_a_card_hides_that_older_transformers_know_no_such_positions():
    rope = dict(rope_type="default", rope_theta=1e4)
    layers = dict(full_attention=rope, sliding_attention=rope | dict(rope_type="linear", factor=2.0))
    assert "transformers 5" in describe_readers(Gemma3TextConfig(rope_parameters=layers))
    assert describe_readers(Gemma3TextConfig()) == ""


def test_the_usage_in_a_card_runs(pushed, monkeypatch, capsys):
    """In the export's directory, as it is written; from the hub, by the repository's name."""
    run_usage(pushed.run / "hf_format" / "samples_24", monkeypatch)
    assert capsys.readouterr().out.strip()
    head = ModelCard.load(pushed.run / "hf_format" / "samples_24" / "README.md").data
    assert 'model="me/a-model"' in describe_usage(head, "me/a-model", has_template=True)
    assert 'model="."' in describe_usage(head, "a-model", has_template=True)


def test_a_model_that_sees_images_is_used_with_one(tmp_path, monkeypatch, capsys):
    path = save_vision_model(tmp_path, "llava")
    make_image(0).save(path / "picture.png")
    head = ModelCardData(pipeline_tag="image-text-to-text", library_name="transformers")
    code = describe_usage(head, None, has_template=True)
    (path / "README.md").write_text(f"```python\nfrom transformers import pipeline\n\n{code}\n```\n")
    run_usage(path, monkeypatch)
    assert "What is it?" in capsys.readouterr().out


def test_the_hub_has_every_export_and_the_best_apart(pushed):
    exports = pushed.run / "hf_format"
    assert list(pushed.hub.repos) == ["me/a-model"] and pushed.hub.private == {"me/a-model": False}
    branches = pushed.hub.repos["me/a-model"]
    for branch, directory in (("main", "samples_24"), ("best", "best")):
        files = {path.name: path.read_bytes() for path in (exports / directory).iterdir()}
        assert branches[branch] == files
    on_main = [message for _, branch, message in pushed.hub.commits if branch == "main"]
    assert on_main == [f"After step {step}, {8 * step} samples" for step in (1, 2, 3)]
    assert f"Bearer {TOKEN}" in pushed.hub.tokens and pushed.hub.tokens <= {f"Bearer {TOKEN}", ""}
    assert {path.name for path in exports.iterdir()} == {"best", "latest", *(f"samples_{n}" for n in (8, 16, 24))}
    found = [path for path in pushed.run.rglob("*") if path.is_file() and TOKEN.encode() in path.read_bytes()]
    assert found == []


@pytest.mark.parametrize("exports", ["adapter", "both"])
def test_an_adapters_card_says_so_and_how_it_is_used(exports, world, pushed, tmp_path, monkeypatch):
    options = {name: value for name, value in pushed.options.items() if name != "push_to_hub"}
    options |= dict(output_dir=str(tmp_path / "run"), max_steps=1, lora=True, lora_export=exports)
    train_here(world, **options)
    export = tmp_path / "run" / "hf_format" / "samples_8"
    card = ModelCard.load(export / "README.md")
    run_usage(export, monkeypatch)
    assert ("pip install peft" in card.text) is (exports == "adapter")
    assert ('GenerationConfig.from_pretrained(".")' in card.text) is (exports == "adapter")
    assert card.data.library_name == ("peft" if exports == "adapter" else "transformers")
    assert card.data.tags == ["mini_trainer", "lora"] and "| method | LoRA |" in card.text


# --- What goes wrong -----------------------------------------------------------------------------------------


@pytest.fixture
def export(tmp_path) -> Path:
    directory = tmp_path / "hf_format" / "samples_8"
    directory.mkdir(parents=True)
    (directory / "README.md").write_text("---\ntags:\n- a\n---\n")
    (directory / "model.safetensors").write_bytes(b"weights")
    return directory


def upload(export: Path, caplog: pytest.LogCaptureFixture, *, times: int = 1) -> list[str]:
    """Uploads `export` to me/x, as a run does; what it said."""
    caplog.clear()
    with caplog.at_level("INFO", logger="mini_trainer"):
        uploads = Uploads(hub_module.Hub(HubOptions(push_to_hub="me/x")))
        for i in range(times):
            uploads.add(export, kind=REGULAR, message=f"commit {i}")
        uploads.close(is_done=True)
    assert [path.name for path in export.parent.iterdir()] == ["samples_8"], "links are left"
    return caplog.messages


def test_a_server_in_trouble_is_asked_again(hub, export, caplog, monkeypatch):
    monkeypatch.setattr(hub_module, "SECONDS_TO_WAIT", (0.01, 0.01))
    hub.failures["commit"] = [500, 429]
    messages = upload(export, caplog)
    assert hub.repos["me/x"]["main"]["model.safetensors"] == b"weights"
    assert not [message for message in messages if message.startswith("warning")]


def test_weights_of_another_export_are_replaced_and_other_files_stay(hub, export, caplog):
    hub.repos["me/x"] = {"main": {"model-00001-of-00002.safetensors": b"old", "LICENSE": b"mine"}}
    upload(export, caplog)
    assert set(hub.repos["me/x"]["main"]) == {"LICENSE", "README.md", "model.safetensors"}


@pytest.mark.parametrize(
    ("trouble", "said"),
    [(dict(create=[401] * 9), "EXPORT ."), (dict(commit=[403] * 9), "samples_8 ."),
     (dict(preupload=[404] * 9), "samples_8 ."), (dict(commit=[501] * 9), "samples_8 ."),
     ("offline", "EXPORT ."), ("no token", "EXPORT ."), ("no network", "EXPORT .")],
)  # fmt: skip
def test_a_failed_upload_is_told_once_and_how_to_repeat_it(trouble, said, hub, export, caplog, monkeypatch):
    monkeypatch.setattr(hub_module, "SECONDS_TO_WAIT", (0.01, 0.01))
    if trouble == "offline":
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    elif trouble == "no token":
        hub.failures["create"] = [401] * 9
        monkeypatch.delenv("HF_TOKEN")
    elif trouble == "no network":
        hub.close()
    else:
        hub.failures |= trouble
    warnings = [message for message in upload(export, caplog, times=2) if message.startswith("warning")]
    assert len(warnings) == 2, warnings
    assert warnings[0].startswith("warning: --push-to-hub me/x: ") and warnings[0].endswith(said)
    assert warnings[1].startswith("warning: exports that were not uploaded to the hub: 2.")
    assert f"hf upload me/x {export} ." in warnings[1] and TOKEN not in "".join(warnings)


def test_the_end_waits_for_a_hub_that_hangs_no_longer_than_told(hub, export, caplog, monkeypatch):
    monkeypatch.setattr(hub_module, "SECONDS_TO_UPLOAD", 0.3)
    hanging = threading.Event()
    monkeypatch.setattr(hub_module.Hub, "upload", lambda self, upload: hanging.wait())
    uploads = Uploads(hub_module.Hub(HubOptions(push_to_hub="me/x")))
    uploads.add(export, kind=REGULAR, message="m")
    start = time.monotonic()
    uploads.close(is_done=True)
    assert time.monotonic() - start < 2 and f"hf upload me/x {export} ." in caplog.text
    hanging.set()


def test_of_the_best_only_the_newest_waits(hub, export, caplog, monkeypatch):
    started, go_on = threading.Event(), threading.Event()
    really_upload = hub_module.Hub.upload

    def wait_and_upload(self: hub_module.Hub, upload: object) -> str:
        started.set()
        go_on.wait(30)
        return really_upload(self, upload)

    monkeypatch.setattr(hub_module.Hub, "upload", wait_and_upload)
    uploads = Uploads(hub_module.Hub(HubOptions(push_to_hub="me/x")))
    for i in range(4):
        (export / "model.safetensors").unlink()
        (export / "model.safetensors").write_bytes(b"%d" % i)
        uploads.add(export, kind=BEST, message=f"best {i}")
        started.wait(30)
    go_on.set()
    uploads.close(is_done=True)
    assert [message for _, _, message in hub.commits] == ["best 0", "best 3"]
    assert hub.repos["me/x"]["best"]["model.safetensors"] == b"3"
