"""Runs training_hub, InstructLab's README and Red Hat's tests, as they come from the package index, on this package.

    tox -e clients

CLIENT_SOURCES names a folder with their source distributions (README.md).
"""

import dataclasses
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from processes import ROOT
from tiny_data import write_counting_chats
from tiny_models import FAMILIES, save_model, save_tokenizer

import mini_trainer
from mini_trainer import TorchrunArgs, TrainingArgs

SOURCES = Path(os.environ.get("CLIENT_SOURCES", ROOT / "tests" / "clients" / "sources"))
ARGUMENTS = "model_path='model', max_tokens_per_gpu=512, max_seq_len=300, learning_rate=1e-3, effective_batch_size=8"
HEAD = """
from training_hub import TrainingHubCallback

class Logger(TrainingHubCallback):
    def on_log(self, context):
        print("LOGGED", context.step, context.loss is not None, flush=True)

    def on_save(self, context):
        print("SAVED", context.metrics["checkpoint_path"], flush=True)
"""
OSFT = f"""
    from training_hub import osft

    osft({ARGUMENTS}, data_path="chats.jsonl", ckpt_output_dir="run", unfreeze_rank_ratio=0.3, num_epochs=2, seed=7,
         callbacks=[Logger()], enable_jit_checkpoint=True, beta1=0.8, beta2=0.9, eps=1e-6, lr_scheduler="cosine",
         validation_split=0.25, validate_at_final=True, train_dtype="float32", save_dtype="bfloat16")
"""
OSFT_IN_BLOCKS = f"""
    from training_hub import osft

    osft({ARGUMENTS}, data_path="docs.jsonl", ckpt_output_dir="run", unfreeze_rank_ratio=0.3, is_pretraining=True,
         block_size=32, callbacks=[Logger()])
"""
OUR_NAMES = """
import instructlab.training
import mini_trainer

for name in ("run_training", "TorchrunArgs", "TrainingArgs", "PretrainingConfig"):
    setattr(instructlab.training, name, getattr(mini_trainer, name))
"""
SFT = f"""
    from training_hub import sft

    sft({ARGUMENTS}, data_path="chats.jsonl", ckpt_output_dir="run", num_epochs=2, callbacks=[Logger()],
        accelerate_full_state_at_epoch=True, checkpoint_at_epoch=True, save_samples=0, beta1=0.9, beta2=0.95)
"""


def unpack(distribution: str, folder: Path) -> Path:
    """The one source distribution of this name, unpacked."""
    (archive,) = SOURCES.glob(f"{distribution}-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


def run(words: list[str], folder: Path, *, seconds: int = 500) -> str:
    """What a process prints that is started in `folder`; it must end well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def run_tests(path: str, folder: Path, *more: str) -> int:
    """The number of tests that have passed; none may fail."""
    said = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", path, *more], folder)
    print(said.splitlines()[-1])
    return int(re.search(r"(\d+) passed", said)[1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(FAMILIES["llama"], tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    write_counting_chats(tmp_path / "chats.jsonl")
    rows = ['{"document": "' + " ".join(map(str, range(i, i + 30))) + '"}\n' for i in range(30)]
    (tmp_path / "docs.jsonl").write_text("".join(rows))
    return tmp_path


def test_what_they_import_is_this_package(tmp_path):
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("rhai-innovation-mini-trainer")
    script = "import training_hub.adapters.mini_trainer as there; print(there.TrainerCallback.__module__)"
    assert "mini_trainer.api.trainer_callbacks" in run(["-c", script], tmp_path)
    assert Path(mini_trainer.__file__).parent.parent == ROOT


def test_training_hubs_own_tests_pass(tmp_path):
    assert run_tests("tests", unpack("training_hub", tmp_path)) >= 270


@pytest.mark.parametrize(
    ("head", "call"),
    [(HEAD, OSFT), (HEAD, OSFT_IN_BLOCKS), (OUR_NAMES + HEAD, SFT)],
    ids=["osft", "osft_in_blocks", "sft"],
)
def test_an_entry_point_of_training_hub_trains(head, call, folder):
    (folder / "script.py").write_text(f'{head}\nif __name__ == "__main__":\n{call}')
    said = run(["script.py"], folder)
    steps = [line for line in said.splitlines() if line.startswith("LOGGED")]
    assert steps and steps == [f"LOGGED {step + 1} True" for step in range(len(steps))]
    exports = sorted((folder / "run" / "hf_format").glob("samples_*"))
    assert exports and f"SAVED {exports[-1].relative_to(folder)}" in said.replace(f"{folder}/", "")


def test_instructlabs_readme_has_no_field_and_no_example_that_is_unknown_here(tmp_path):
    readme = (unpack("instructlab_training", tmp_path) / "README.md").read_text()
    table = re.search(r"^### `TrainingArgs`\n(.*?)(?=^#)", readme, re.M | re.S)[1]
    fields = set(re.findall(r"^\| (\w+) \|", table, re.M)) - {"Field"}
    assert len(fields) > 15 and fields <= {field.name for field in dataclasses.fields(TrainingArgs)}
    examples = re.findall(r"^```python\n(from instructlab\.training import .*?)^```", readme, re.M | re.S)
    complete = [example for example in examples if "run_training(" not in example]
    assert len(complete) >= 2
    for example in complete:
        exec(
            example.replace("from instructlab.training import", "from mini_trainer import"),
            {"TorchrunArgs": TorchrunArgs},
        )


def test_red_hats_tests_of_the_packer_pass(tmp_path):
    source = unpack("rhai_innovation_mini_trainer", tmp_path)
    (tmp_path / "alone").mkdir()
    (source / "tests" / "test_batch_lengths_to_minibatches.py").rename(tmp_path / "alone" / "test_packer.py")
    # It wants any table for samples above the cap, which would not fit on a GPU: here they are refused.
    refused = "test_packer.py::TestBatchLengthsToMinibatches::test_sequences_exceeding_max_tokens"
    assert run_tests("test_packer.py", tmp_path / "alone", f"--deselect={refused}") == 13
