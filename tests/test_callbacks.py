"""Callbacks: the order of their calls, their answers on all ranks, their errors, and what cannot be one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from forked import run_forked, succeed
from in_process import end_here, print_plan, train_once
from processes import ENV, ROOT, flags
from scripted_callbacks import SCRIPT, OnAllRanks, Scripted, read_calls, read_metrics
from small_runs import OPTIONS, TIMES, check_same

from mini_trainer import Callback, TorchrunArgs, TrainingArgs, run_training
from mini_trainer.api.commands import make_environment, make_train_words
from mini_trainer.api.errors import BadInputError
from mini_trainer.distributed.ending import ExitCode, RunError
from mini_trainer.run.callbacks import load_callbacks
from mini_trainer.run.hooks import FOLDERS, HOOKS, NAMES_ELSEWHERE, check_callback

MODEL = "llama_tied_bias"
STEPS = 4
SCRIPTED, ON_ALL = "scripted_callbacks:Scripted", "scripted_callbacks:OnAllRanks"
UNMAKEABLE = "scripted_callbacks:Unmakeable"
BASE = OPTIONS | dict(max_steps=STEPS, checkpoint_every_steps=2, save_final_checkpoint=False)
RUN_TIMES = {*TIMES, "mfu", "seconds"}


@pytest.fixture
def play(inputs, world, tmp_path, monkeypatch):
    """Trains on one rank with a callback that plays `script`; returns the output directory, exit code and reason."""

    def start(script: dict[str, object], name: str = "run", **changes) -> tuple[Path, ExitCode, str]:
        monkeypatch.setenv(SCRIPT, json.dumps(script))
        output_dir = tmp_path / name
        options = inputs | BASE | dict(output_dir=str(output_dir), callbacks=(SCRIPTED,)) | changes
        code, reason, _ = end_here(world, **options)
        return output_dir, code, reason

    return start


@pytest.fixture(scope="module")
def undisturbed(inputs, world, tmp_path_factory) -> Path:
    """A run without callbacks."""
    return train_once(tmp_path_factory, world, **inputs | BASE)


def list_checkpoints(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").glob("step_*")}


def without_times(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key not in RUN_TIMES} for row in rows]


def test_the_order_of_calls_on_two_ranks(inputs, tmp_path):
    validated = dict(validation_data_path=inputs["data_path"], validate_every_steps=3, save_final_checkpoint=True)
    run = tmp_path / "run"
    options = inputs | BASE | validated | dict(output_dir=run, callbacks=(ON_ALL,))
    succeed(2, "train.py", *flags(**options), env={SCRIPT: json.dumps({"step 1, rank 1": ["EXPORT"]})})
    expected = [
        "start 0/4", "validation 0", "step 1", "step 2", "checkpoint step_2", "export samples_16", "step 3",
        "validation 3", "export best", "step 4", "validation 4", "export best", "checkpoint step_4",
        "export samples_32", "end None",
    ]  # fmt: skip
    assert read_calls(run) == read_calls(run, rank=1) == expected
    for kind, name in (("step", "training"), ("validation", "validation")):
        lines = list(map(json.loads, (run / f"{name}_metrics_0.jsonl").read_text().splitlines()))
        assert read_metrics(run, kind) == lines  # a callback that empties what it receives changes no file
        assert without_times(read_metrics(run, kind, rank=1)) == without_times(lines)


def test_a_stop_that_is_asked_for_ends_the_next_step_and_the_resumed_run_is_the_same(play, undisturbed):
    run, code, reason = play({"step 2": ["STOP"]})
    assert code == ExitCode.STOPPED_BY_USER
    assert re.fullmatch(rf"stopped after step 3: .*\({SCRIPTED}, on_step after step 2\); saved", reason)
    assert read_calls(run)[-3:] == ["step 3", "checkpoint step_3", "end a callback"]
    assert play({})[1:] == (ExitCode.DONE, "done")
    assert read_calls(run)[-4:] == ["start 3/4", "step 4", "checkpoint step_4", "end None"]
    check_same(undisturbed, run, step=STEPS, has_exports=False)


def test_a_checkpoint_and_an_export_are_made_once_after_the_next_step(play, undisturbed, caplog):
    script = {"start 0/4": ["EXPORT"], "step 2": ["SAVE", "EXPORT"], "checkpoint step_4": ["CONTINUE"]}
    run, code, _ = play(script | {"step 4": ["EXPORT", "STOP"]})
    assert code == ExitCode.DONE
    assert read_calls(run) == [
        "start 0/4", "step 1", "export samples_8", "step 2", "checkpoint step_2", "step 3", "checkpoint step_3",
        "export samples_24", "step 4", "checkpoint step_4", "end None",
    ]  # fmt: skip
    (late,) = [message for message in caplog.messages if message.startswith("warning: too late")]
    assert f"{SCRIPTED}, on_step after step 4 asked for EXPORT" in late and "STOP" not in caplog.text
    check_same(undisturbed, run, step=STEPS, has_exports=False)


def test_checkpoints_written_in_the_background_are_complete_when_callbacks_hear_of_them(play):
    run, _, _ = play({}, async_checkpoint=True, checkpoint_every_steps=1)
    checkpoints = [call for call in read_calls(run) if call.startswith("checkpoint")]
    assert checkpoints == [f"checkpoint step_{step}" for step in range(1, STEPS + 1)]


@pytest.mark.parametrize(
    ("doing", "error"),
    [
        ("raise", "LookupError: scripted in step 1"),
        ("exit", "SystemExit: 3"),
        ("return a text", "TypeError: a hook returned 'SAVE'"),
    ],
)
def test_an_error_ends_the_run_with_a_checkpoint_and_the_resumed_run_is_the_same(
    doing, error, play, undisturbed, caplog
):
    run, code, reason = play({"step 1": doing}, checkpoint_every_steps=STEPS)
    assert code == ExitCode.FAILED
    assert re.fullmatch(rf"stopped after step 2: .*\({SCRIPTED}, on_step after step 1: {error}.*; saved", reason)
    assert read_calls(run) == ["start 0/4", "step 1"]  # what has raised is not called again
    assert list_checkpoints(run) == {"step_2"}
    assert "Traceback" in caplog.text and f"{SCRIPTED}, on_step after step 1 raised" in caplog.text
    assert play({}, checkpoint_every_steps=STEPS, callbacks=())[1] == ExitCode.DONE
    check_same(undisturbed, run, step=STEPS, has_exports=False)


def test_an_error_at_the_start_trains_nothing_and_one_at_the_end_is_no_success(play, inputs, tmp_path):
    with pytest.raises(RunError, match=rf"{SCRIPTED}, on_start after step 0: LookupError") as raised:
        play({"start 0/4": "raise"}, "start")
    assert raised.value.code == ExitCode.FAILED and read_calls(tmp_path / "start") == ["start 0/4"]
    for call in ("end None", "checkpoint step_4"):
        with pytest.raises(
            RunError, match=rf"done.*\({SCRIPTED}, on_{call.split()[0]} after step 4: LookupError"
        ) as raised:
            play({call: "raise"}, call)
        assert raised.value.code == ExitCode.FAILED
        assert json.loads((tmp_path / call / "training_params.json").read_text())["finished"] is not None


def test_an_error_of_another_rank_ends_all_ranks_and_names_it(inputs, tmp_path):
    options = inputs | BASE | dict(output_dir=tmp_path / "run", callbacks=(SCRIPTED, ON_ALL))
    done = run_forked(2, "train.py", *flags(**options), env={SCRIPT: json.dumps({"step 2, rank 1": "raise"})})
    told = rf"^error: stopped after step 3: .*\(rank 1: {ON_ALL}, on_step after step 2: LookupError"
    assert done.returncode == 1 and re.search(told, done.stderr, re.MULTILINE)
    assert json.loads((tmp_path / "run" / "exit.json").read_text())["code"] == ExitCode.FAILED
    assert list_checkpoints(tmp_path / "run") == {"step_2", "step_3"}


MODULE = """
from mini_trainer import Callback
class Good(Callback):
    def on_step(self, metrics): pass
    class Inner(Callback):
        def on_end(self, reason): pass
class NeedsArguments(Good):
    def __init__(self, url): self.url = url
class Elsewhere(Callback):
    def on_step_end(self, context): pass
class Misspelt(Callback):
    def on_validated(self, metrics): pass
class Plain: pass
made = Good()
"""


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_hooks:Goood", "my_hooks.py has no Goood; .*Good[?]"),
        ("my_hooks:Good.Outer", "my_hooks.py has no Good.Outer"),
        ("my_hook:Good", "no module my_hook .*my_hooks[?]"),
        ("my_hooks.inner:Good", "no module my_hooks.inner"),
        ("my_hooks:Plain", "mini_trainer.Callback"),
        ("my_hooks:Callback", "no hook; .*on_start, "),
        ("my_hooks:made", "is an object: .*Good"),
        ("my_hooks:NeedsArguments", "constructor .*'url'"),
        ("my_hooks:Elsewhere", "on_step_end is on_step "),
        ("my_hooks:Misspelt", "on_validated is not a hook, .*on_validation[?]"),
        ("broken:Good", r"ModuleNotFoundError: .*'nowhere' \(.*broken\.py, line 1\)"),
        ("invalid:Good", r"SyntaxError: invalid syntax \(invalid\.py, line 1\)$"),
        ("leaves:Good", "SystemExit: 5"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_callback_is_refused_by_name(path, message, tmp_path, monkeypatch):
    for name, text in dict(my_hooks=MODULE, broken="import nowhere", invalid="class", leaves="exit(5)").items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ValueError, match=f"(?s)--callbacks my_hooks:Good.NoInner: .*--callbacks {path}: .*{message}"):
        load_callbacks(("my_hooks:Good", "my_hooks:Good.Inner", "my_hooks:Good.NoInner", path))
    for name in ("my_hooks", "leaves"):
        sys.modules.pop(name, None)


def test_a_callback_that_cannot_be_imported_ends_the_start_with_one_message(inputs, tmp_path):
    options = inputs | BASE | dict(output_dir=tmp_path / "run")
    done = run_forked(0, "train.py", *flags(**options, callbacks=("nowhere:Hook", "scripted_callbacks:Hook")))
    assert done.returncode == ExitCode.BAD_INPUT and not (tmp_path / "run").exists()
    assert "error: --callbacks nowhere:Hook: " in done.stderr
    assert "\n  --callbacks scripted_callbacks:Hook: " in done.stderr
    assert "Traceback" not in done.stderr and "model: " not in done.stderr  # the model is not loaded yet


@pytest.mark.long
def test_a_plan_reports_it_and_makes_no_object(inputs, elsewhere, play):
    options = inputs | BASE | dict(output_dir="unused")
    code, text = elsewhere(print_plan, options | dict(callbacks=("nowhere:Hook", UNMAKEABLE)))
    assert code == ExitCode.BAD_INPUT and "--callbacks nowhere:Hook: " in text
    assert elsewhere(print_plan, options | dict(callbacks=(UNMAKEABLE,)))[0] == ExitCode.DONE
    with pytest.raises(ValueError, match=f"--callbacks {UNMAKEABLE}: .*OSError: no disk .*, line"):
        play({}, callbacks=(UNMAKEABLE,))


@pytest.mark.long
@pytest.mark.slow
def test_modules_beside_a_callback_are_the_users_whatever_they_are_called(inputs, tmp_path):
    names = ("model", "options", "sampler", "train")
    for name in names:
        (tmp_path / f"{name}.py").write_text(f"THRESHOLD = '{name} of the user'\n")
    (tmp_path / "my_hooks.py").write_text(
        f"import {', '.join(names)}\nfrom mini_trainer import Callback, sampler as ours\n\n\nclass Good(Callback):\n"
        f"    def on_start(self, run):\n        print({', '.join(f'{name}.THRESHOLD' for name in names)}, ours.Batch)\n"
    )
    words = flags(**inputs | BASE | dict(output_dir="run", callbacks=("my_hooks:Good",), max_steps=1))
    command = [sys.executable, str(ROOT / "train.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert " ".join(f"{name} of the user" for name in names) + " <class 'mini_" in done.stdout


def test_names_of_other_trainers_lead_to_hooks_and_every_hook_of_theirs_is_refused():
    assert {name.split(",")[0] for name in NAMES_ELSEWHERE.values()} == {*HOOKS} - {"on_checkpoint"}
    more = ("on_epoch_begin", "on_step_begin", "on_before_forward", "on_after_backward", "on_pre_optimizer_step")
    for hook in (*NAMES_ELSEWHERE, *more, "on_optimizer_step"):
        with pytest.raises(ValueError, match=f"x: {hook} is "):
            check_callback(type("Theirs", (Callback,), {hook: lambda self, context: None}), "x")


NEEDED = dict(model_name_or_path="m", data_path="d.arrow", output_dir="o", process_data=False, max_steps=5)


def test_classes_reach_the_processes_of_the_python_api_by_their_paths():
    args = TrainingArgs(**NEEDED, callbacks=[Scripted, "a.b:C", OnAllRanks])
    assert make_train_words(args)[-4:] == ["--callbacks", SCRIPTED, "a.b:C", ON_ALL]
    assert str(ROOT / "tests" / "runs") in make_environment(args)[FOLDERS].split(os.pathsep)
    assert make_environment(TrainingArgs(**NEEDED, callbacks="a:B")) == {}
    assert "--callbacks" in make_train_words(TrainingArgs(**NEEDED, callbacks=Scripted))
    assert make_train_words(TrainingArgs(**NEEDED, callbacks=[])) == make_train_words(TrainingArgs(**NEEDED))


def test_what_is_no_callback_is_refused_and_callbacks_are_given_once():
    class Untyped:
        pass

    for given in (Untyped(), Untyped):
        with pytest.raises(BadInputError, match=r"mini_trainer\.Callback"):
            make_train_words(TrainingArgs(**NEEDED, callbacks=[given]))
    with pytest.raises(TypeError, match=r"callbacks .*training_args"):
        run_training(TorchrunArgs(), TrainingArgs(**NEEDED, callbacks=[Scripted]), callbacks=[Scripted])


@pytest.mark.long
@pytest.mark.slow
def test_a_callback_of_the_python_api_stops_its_run(inputs, tmp_path, monkeypatch):
    """The class is of a folder that only this process knows."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "stopping_hooks.py").write_text(
        "from mini_trainer import Answer, Callback\nclass Stopping(Callback):\n"
        "    def on_step(self, metrics):\n        return Answer.STOP\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "folder"))
    from stopping_hooks import Stopping

    args = TrainingArgs(**inputs, **BASE, output_dir=str(tmp_path / "run"), process_data=False)
    result = run_training(TorchrunArgs(), args, callbacks=[Stopping])
    assert (result.code, result.last_metrics["step"]) == (ExitCode.STOPPED_BY_USER, 2)
    assert "(stopping_hooks:Stopping, on_step after step 1)" in result.reason
