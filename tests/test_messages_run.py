"""The whole texts of messages of mini_trainer/run; other tests look for what they name."""

import contextlib
import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from refusals import read_words

from mini_trainer import Callback
from mini_trainer.data.stores.disk import make_aside, naming_failed_writes
from mini_trainer.distributed.ending import RunError
from mini_trainer.options import HubOptions, TrainOptions, group_options
from mini_trainer.run import checkpointing
from mini_trainer.run.callbacks import explain_stop, load_callbacks
from mini_trainer.run.checkpointing import Checkpointer, NoValidCheckpoint
from mini_trainer.run.hooks import check_callback
from mini_trainer.run.identity import check_continues, check_same_run, check_unused
from mini_trainer.run.inputs import Errors
from mini_trainer.run.origin import read_origin
from mini_trainer.run.start_checks import check_schedule, find_oddities
from mini_trainer.run.trackers import TrackedRun, Trackers
from mini_trainer.run.training_log import MetricsFile
from mini_trainer.run.uploads import REGULAR, Hub, Uploads
from mini_trainer.run.validation import start_progress

STEP_1 = Path("step_1")
BEFORE, NOW = {"seed": 42, "lora": False}, {"seed": 7, "lora": True}


def make_options(path: Path, **more: object) -> TrainOptions:
    return group_options(TrainOptions, output_dir=str(path), model_name_or_path="m", data_path="d", **more)


def change(*, allow: bool) -> None:
    check_same_run(STEP_1, {"identity": BEFORE}, NOW, allow_changes=allow, needs_model=False)


def use_directory(path: Path, *, resume: str = "auto", **params: object) -> None:
    """Starts where another run, with these parameters, or other files are."""
    (path / "other.txt").touch()
    if params:
        params = dict(options={}, identity=BEFORE, starts=[], versions={}, finished=None) | params
        (path / "training_params.json").write_text(json.dumps(params))
    check_unused(path, resume, NOW, data_paths=(), cache_dir="elsewhere")


def resume_from(path: Path, patch: pytest.MonkeyPatch, resume: str) -> None:
    patch.setattr(checkpointing, "call_on_rank0", lambda world, function: function())
    with contextlib.closing(Checkpointer(path, world=None, num_kept=1, is_async=False)) as checkpointer:
        checkpointer.choose(resume)


def resume_from_damaged(path: Path, patch: pytest.MonkeyPatch, resume: str) -> None:
    for step in (1, 2):
        (path / f"step_{step}").mkdir()
    resume_from(path, patch, resume)


def resume_from_older(path: Path, patch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        (path / f"step_{step}").mkdir()
    patch.setattr(Checkpointer, "open", lambda self, path: SimpleNamespace(state={"position": {"step": 1}}))
    resume_from(path, patch, "step_1")


def write_where_there_is_no_room(path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    make_aside(path / "step_1", 1001, what="the checkpoint")


def fail_to_write(path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with naming_failed_writes(path / "a", parts=[path / "b"], needed_bytes=1234):
        raise OSError(errno.ENOSPC, "from a library")


def define(**members: object) -> None:
    check_callback(type("Mine", (Callback,), members), "hooks:Mine")


def fill_schedule(path: Path, patch: pytest.MonkeyPatch) -> None:
    check_schedule(SimpleNamespace(num_steps_before=3, num_steps=7), make_options(path, schedule_steps=6).optimization)


def warn_of_oddities(path: Path, patch: pytest.MonkeyPatch) -> str:
    batching = SimpleNamespace(mean_samples=8, flag="--batch-size 8")
    data = SimpleNamespace(kept=range(5), sources=[SimpleNamespace(path=Path("/data.arrow"))])
    inputs = SimpleNamespace(data=data, validation_data=data, batching=batching, warnings=[], num_steps=5,
                             num_steps_before=0, schedule_steps=5, values={"context_parallel": None})  # fmt: skip
    o = make_options(path, num_warmup_steps=9, save_final_checkpoint=False)
    find_oddities(inputs, o.optimization, o.end, o.validation, o.exports, num_rows=16)
    return "\n".join(inputs.warnings)


def change_validation_data(path: Path, patch: pytest.MonkeyPatch) -> None:
    before = dict(data="0", best_value=1.5, best_step=4)
    start_progress(SimpleNamespace(sources=[]), before, metric="loss")


def lose_metrics(path: Path, patch: pytest.MonkeyPatch) -> None:
    for name, damaged in (("training", "\n\n"), ("validation", "\n")):
        (path / f"{name}_metrics_0.jsonl").write_text('{"step": 1, "loss": 1.5}\n' + damaged)
    MetricsFile(path, first_step=3, num_validations=2).close()


def track_nowhere(path: Path, patch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError("no network")

    run = TrackedRun("name", path, 0, options={}, facts={})
    Trackers({"wandb": fail}, run).close()


def upload_nowhere(path: Path, patch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise ValueError("no token")

    patch.setattr(Hub, "prepare", fail)
    patch.setattr(Hub, "upload", fail)
    (path / "samples_8").mkdir()
    uploads = Uploads(Hub(HubOptions(push_to_hub="me/x")))
    uploads.add(path / "samples_8", kind=REGULAR, message="m")
    uploads.close(is_done=True)


# A name, the type of the error (None: the text is returned or logged), what leads to it, and the whole text.
ROWS = [
    ("changed options", ValueError, lambda path, patch: change(allow=False),
     "step_1 was made with other lora (False before, now True), seed (42 before, now 7): give the same ones,"
     " choose a new --output-dir, or pass --allow-changed-options to resume anyway"),
    ("options that cannot change", ValueError, lambda path, patch: change(allow=True),
     "step_1 was made with other lora (False before, now True): its content depends on them, so not even"
     " --allow-changed-options can change them: give the same ones, or start from an export in a new --output-dir"),
    ("continued with other options", ValueError,
     lambda path, patch: check_continues(STEP_1, {"identity": BEFORE}, NOW, needs_model=False),
     "--continue-from step_1: was made with other lora (False before, now True): a run with its weights and optimizer"
     " state needs the same ones: give them, or start from an export (--model-name-or-path)"),
    ("continued in its own directory", ValueError, lambda path, patch: read_origin(path / "checkpoints/step_1", path),
     "--continue-from DIR/checkpoints/step_1: is a checkpoint of --output-dir DIR, from which the same command resumes"
     " without --continue-from: choose a new --output-dir to start another run"),
    ("files of others", ValueError, lambda path, patch: use_directory(path),
     "--output-dir DIR is not an empty directory: name a new one, or remove that run"),
    ("finished run", ValueError, lambda path, patch: use_directory(path, finished="today"),
     "--output-dir DIR is not an empty directory: it holds a finished run: name a new one, or remove that run"),
    ("run that is not resumed", ValueError, lambda path, patch: use_directory(path, resume="none", finished=None),
     "--output-dir DIR is not an empty directory: it holds a run, which --resume none does not resume: name a new"
     " one, or remove that run"),
    ("another run", ValueError, lambda path, patch: use_directory(path, finished=None),
     "--output-dir DIR is not an empty directory: it holds a run without a checkpoint, and other lora (False before,"
     " now True), seed (42 before, now 7): name a new one, or remove that run"),
    ("damaged checkpoint", NoValidCheckpoint, lambda path, patch: resume_from_damaged(path, patch, "strict"),
     "--resume strict: DIR/step_2 is not valid: manifest.json is missing; --resume auto tries older ones"),
    ("damaged checkpoints", NoValidCheckpoint, lambda path, patch: resume_from_damaged(path, patch, "auto"),
     "DIR: no valid checkpoint is left, only damaged_step_1, damaged_step_2; to start from scratch, choose a new"
     " --output-dir"),
    ("newer checkpoints", ValueError, resume_from_older,
     "--resume step_1: DIR has newer checkpoints (step_3, step_2), which the next start would take for this run's:"
     " remove them, or choose a new --output-dir"),
    ("no room", OSError, write_where_there_is_no_room,
     "no room for the checkpoint DIR/step_1: it needs 1,001 bytes (and 67,108,864 to spare), the disk has 1,000 free;"
     " free some, or lower --keep-checkpoints"),
    ("full disk", OSError, fail_to_write,
     "cannot write DIR/a: No space left on device; it needs 1,234 bytes, the disk has 1,000 free"),
    ("several problems", ValueError, lambda path, patch: Errors([ValueError("a"), OSError("b")]).raise_all(),
     "2 problems:\n  - a\n  - b"),
    ("no module", ValueError, lambda path, patch: load_callbacks(["nowhere:Mine"]),
     "--callbacks nowhere:Mine: there is no module nowhere in the current directory, on PYTHONPATH or among the"
     " installed packages"),
    ("no callback", ValueError, lambda path, patch: check_callback(int, "hooks:Mine"),
     "hooks:Mine: is not derived from mini_trainer.Callback (docs/tasks/coming_from.md has the names of other trainers'"
     " hooks)"),
    ("another trainer's hook", ValueError, lambda path, patch: define(on_step_end=print),
     "hooks:Mine: on_step_end is on_step here; hooks are on_start, on_step, on_validation, on_checkpoint, on_export,"
     " on_end"),
    ("constructor", ValueError, lambda path, patch: define(on_step=print, __init__=lambda self, url: None),
     "hooks:Mine: its constructor needs arguments (missing a required argument: 'url'): derive a class whose"
     " constructor takes none, or read the environment or a file in it"),
    ("error at the end", RunError, lambda path, patch: explain_stop(None, ["hooks:Mine, on_end"], []),
     "the run is done, but there was an error in a callback (hooks:Mine, on_end)"),
    ("schedule", ValueError, fill_schedule,
     "--schedule-steps 6: the run's 7 steps, after 3 of the runs that it continues, are 10: raise it, or end the run"
     " earlier"),
    ("unlikely settings", None, warn_of_oddities,
     "--batch-size 8: each step draws the 5 samples repeatedly\n"
     "the run has only 5 optimizer updates, in which a model learns little; 30 or more are usual:"
     " --batch-size 1 or more data. Usual learning rates of full fine-tuning are 2e-6 to 2e-5, this run's is 1e-05\n"
     "--validation-data-path /data.arrow is also trained on: its loss says nothing about other data\n"
     "--batch-size 8: fewer samples a step than the 16 ranks: some of them will be idle\n"
     "--no-save-final-checkpoint: the trained model will not be exported\n"
     "--num-warmup-steps 9: the run of 5 steps ends before its peak learning rate"),
    ("other validation data", None, change_validation_data,
     "warning: the validation data has changed since the last start: the best loss so far (1.5, after step 4) is not"
     " comparable and is discarded"),
    ("lost metrics", None, lose_metrics,
     "warning: DIR/training_metrics_0.jsonl: lines 2-3 are damaged, or repeat earlier steps: removed\n"
     "warning: DIR/training_metrics_0.jsonl: the lines of steps 2-3 are missing\n"
     "warning: DIR/validation_metrics_0.jsonl: line 2 is damaged, or repeats an earlier step: removed\n"
     "warning: DIR/validation_metrics_0.jsonl: 1 of 2 validations before step 4 are missing"),
    ("tracker", None, track_nowhere,
     "warning: --track wandb: could not be started: OSError: no network; training continues, and everything is in the"
     " metrics files"),
    ("uploads", None, upload_nowhere,
     "warning: --push-to-hub me/x: cannot be used: no token; training continues. To upload later: hf upload me/x"
     " EXPORT .\n"
     "warning: exports that were not uploaded to the hub: 1. To upload them:\n  hf upload me/x DIR/samples_8 ."),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "call", "text"), [pytest.param(*row[1:], id=row[0]) for row in ROWS])
def test_whole_texts(kind, call, text, tmp_path, monkeypatch, caplog):
    caplog.set_level("WARNING", logger="mini_trainer")
    assert read_words(kind, lambda: call(tmp_path, monkeypatch), caplog, folder=tmp_path) == text
