"""Callbacks of the Python API that the run's processes cannot import: objects, and classes of scripts and functions."""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import MappingProxyType

import pytest
from processes import ENV
from tiny_data import make_samples, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer

from mini_trainer.api.errors import BadInputError
from mini_trainer.api.sent_callbacks import send_callbacks, write_modules
from mini_trainer.api.trainer_callbacks import is_trainer_callback
from mini_trainer.callbacks import TrainerCallback, TrainingContext, deserialize_callback, serialize_callback
from mini_trainer.run.hooks import Answer, Callback, StartedRun

BOUND = 2


class Base(Callback):
    def on_checkpoint(self, path):
        return Answer.STOP


class Counting(Base):
    """With attributes of its own, and names of its module."""

    def __init__(self, name: str, *, seen: list):
        self.name, self.seen = name, seen

    def on_step(self, metrics):
        self.seen.append(metrics["step"])
        return Answer.SAVE if len(self.seen) > BOUND else None


class Recorder(TrainerCallback):
    """Writes down what is called, and with which context."""

    def __init__(self, calls: list | None = None):
        self.calls = [] if calls is None else calls

    def on_train_begin(self, context):
        self.calls.append((context.hook_name, context.step, context.epoch))

    on_epoch_begin = on_step_begin = on_log = on_step_end = on_epoch_end = on_train_begin

    async def on_evaluate(self, context):
        self.calls.append((context.hook_name, context.val_metrics["val_loss"]))

    def on_save(self, context):
        self.calls.append((context.hook_name, context.checkpoint_path))

    def on_train_end(self, context):
        raise RuntimeError("ignored")


def receive(given: list, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list:
    """The objects that a run would make of callbacks."""
    sent = send_callbacks(given)
    write_modules(sent, folder)
    assert {path.stat().st_mode & 0o777 for path in folder.glob("*.py")} <= {0o600}, "others may change code that runs"
    monkeypatch.syspath_prepend(folder)
    made = []
    for one in sent:
        module, _, name = one.path.partition(":")
        sys.modules.pop(module, None)
        made.append(getattr(importlib.import_module(module), name)())
    return made


def test_an_object_arrives_with_its_attributes_and_its_class_s_name(tmp_path, monkeypatch):
    (made,) = receive([Counting("mine", seen=[1, 2])], tmp_path, monkeypatch)
    assert (type(made).__name__, made.name, made.seen, isinstance(made, Callback)) == ("Counting", "mine", [1, 2], True)
    assert (made.on_step({"step": 3}), made.seen, made.on_checkpoint(Path())) == (Answer.SAVE, [1, 2, 3], Answer.STOP)


def test_a_class_of_a_function_arrives_with_what_it_uses(tmp_path, monkeypatch):
    outside = 7

    class Inner(Base):
        def on_step(self, metrics) -> "NoSuchName":  # noqa: F821
            return json.dumps([math.floor(metrics["loss"]), BOUND, outside])

    (made,) = receive([Inner], tmp_path, monkeypatch)
    assert made.on_step({"loss": 3.5}) == "[3, 2, 7]" and made.on_checkpoint(Path()) is Answer.STOP


def test_a_class_that_processes_can_import_is_its_path_and_needs_no_module(tmp_path):
    sent = send_callbacks([Base, "package.module:Class"])
    assert [one.path for one in sent] == [f"{__name__}:Base", "package.module:Class"]
    assert write_modules(sent, tmp_path) is None and not list(tmp_path.iterdir())


class Unpicklable(Base):
    def __init__(self):
        self.lines = (line for line in "ab")


class Misspelt(TrainerCallback):
    def on_stpe_end(self, context): ...


class Inside(TrainerCallback):
    def on_before_forward(self, context): ...


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([Unpicklable()], "callbacks: Unpicklable: cannot be pickled .TypeError: cannot pickle .generator. object.: "),
        ([Misspelt()], "callbacks: Misspelt: on_stpe_end is not a hook of TrainerCallback"),
        ([Inside()], "callbacks: Inside: on_before_forward and on_after_backward are inside of a step"),
        ([object()], "is not derived from mini_trainer.Callback"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(given, message):
    with pytest.raises(BadInputError, match=message):
        send_callbacks(given)


def make_metrics(step: int, epoch: float) -> MappingProxyType:
    facts = dict(loss=2.0, lr=1e-3, grad_norm=1.0, total_samples_accumulated=8 * step, total_tokens_accumulated=64)
    return MappingProxyType(facts | dict(step=step, epoch=epoch))


def test_trainer_callbacks_hooks_come_in_their_order(tmp_path, monkeypatch):
    (made,) = receive([Recorder()], tmp_path, monkeypatch)
    options = dict(max_epochs=2, max_steps=None, max_tokens=None, model_name_or_path="m")
    made.on_start(StartedRun(tmp_path, options, first_step=0, num_steps=3, rank=1, world_size=2))
    assert made.on_all_ranks and not made.context.is_world_process_zero and made.context.training_mode == "epoch"
    for step, epoch in ((1, 0.67), (2, 1.33), (3, 2.0)):
        made.on_step(make_metrics(step, epoch))
    made.on_validation(MappingProxyType(dict(loss=1.5)))
    made.on_export(Path("hf_format/samples_24"))
    made.on_end(None)
    assert made.callback.calls == [
        *[(hook, 0, 0) for hook in ("on_train_begin", "on_epoch_begin", "on_step_begin")],
        *[("on_log", 1, 0), ("on_step_end", 1, 0), ("on_step_begin", 1, 0)],
        *[("on_log", 2, 0), ("on_step_end", 2, 0), ("on_epoch_end", 2, 0)],
        *[("on_epoch_begin", 2, 1), ("on_step_begin", 2, 1)],
        *[("on_log", 3, 1), ("on_step_end", 3, 1), ("on_epoch_end", 3, 1)],
        *[("on_evaluate", 1.5), ("on_save", "hf_format/samples_24")],
    ]


def test_a_trainer_callback_of_instructlab_is_known_without_importing_it():
    theirs = type("TrainerCallback", (), {"__module__": "instructlab.training.callbacks"})
    assert is_trainer_callback(type("Mine", (theirs,), {})) and is_trainer_callback(Recorder)
    assert not is_trainer_callback(theirs) and not is_trainer_callback(Base)


def test_a_trainer_callback_survives_red_hat_s_serialization():
    restored = deserialize_callback(serialize_callback(Recorder(calls=["lost"])))
    assert type(restored).__name__ == "Recorder" and restored.calls == []
    restored.on_log(TrainingContext(hook_name="on_log", step=4))
    assert restored.calls == [("on_log", 4, 0)]


SCRIPT = """
import json, sys
from pathlib import Path
from mini_trainer import Callback, TrainerCallback, TrainingArgs, run_training

PREFIX = "SAID"

def say(*words):
    print(PREFIX, json.dumps(words), flush=True)

class Ours(Callback):
    def __init__(self, name): self.name = name
    def on_step(self, metrics): say(self.name, metrics["step"])

class Theirs(TrainerCallback):
    def on_log(self, context): say(context.step, context.is_world_process_zero)

if __name__ == "__main__":
    run_training(training_args=TrainingArgs(**json.loads(sys.argv[1])), callbacks=[Ours("object"), Theirs])
"""


@pytest.mark.long
@pytest.mark.slow
def test_a_script_passes_objects_and_classes_of_its_own(tmp_path):
    save_model(FAMILIES["llama"], tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    write_samples(tmp_path / "data.arrow", make_samples(32, vocab_size=VOCAB_SIZE, max_len=40))
    (tmp_path / "script.py").write_text(SCRIPT)
    args = dict(model_path=str(tmp_path / "model"), data_path=str(tmp_path / "data.arrow"), max_steps=2,
                ckpt_output_dir=str(tmp_path / "run"), effective_batch_size=4, max_batch_len=512)  # fmt: skip
    words = [sys.executable, str(tmp_path / "script.py"), json.dumps(args)]
    done = subprocess.run(words, env=ENV, capture_output=True, text=True, timeout=240, check=False)
    said = [line for line in done.stdout.splitlines() if line.startswith("SAID")]
    assert said == ['SAID ["object", 1]', "SAID [1, true]", 'SAID ["object", 2]', "SAID [2, true]"], done.stdout
