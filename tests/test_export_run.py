"""mini-trainer export: a stopped run's checkpoint becomes the export that the run itself would have written."""

import filecmp
import json
import shutil
from pathlib import Path

import pytest
from forked import run_forked
from in_process import Unwatched, train_here
from small_runs import OPTIONS, copy_until, make_inputs

from mini_trainer.options import group_options
from mini_trainer.options.tools import ExportRunOptions
from mini_trainer.run.checkpointing import read_checkpoint
from mini_trainer.tools.export_run import export_run, restore_options
from mini_trainer.use.inference.loading import find_in_run

METHODS = {
    "full": dict(weight_average="ema", ema_decay=0.5, compute_dtype="bfloat16"),
    "lora": dict(lora=True, lora_rank=2),
    "osft": dict(osft=True, osft_unfreeze_rank_ratio=0.5),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, str]:
    return make_inputs(tmp_path_factory.mktemp("inputs"), "qwen3")


def export(world, run: Path, **options: object) -> str:
    control = Unwatched(hang_timeout=600, max_seconds=None)
    try:
        return export_run(group_options(ExportRunOptions, run=str(run), **options), world, control)
    finally:
        control.close()


def check_same_files(one: Path, other: Path) -> None:
    """The exports have the same files with the same content; a card names the run's directory."""
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir()) and len(names) > 5
    varying = ["README.md", "files.json", "manifest.json"]
    _, different, failed = filecmp.cmpfiles(one, other, [name for name in names if name not in varying], shallow=False)
    assert (different, failed) == ([], [])


@pytest.mark.parametrize("method", METHODS)
def test_the_export_is_the_one_that_the_run_would_have_written(method, inputs, world, tmp_path):
    every_step = dict(min_samples_per_checkpoint=8, max_steps=3)
    train_here(world, **inputs | OPTIONS | METHODS[method] | every_step | dict(output_dir=str(tmp_path / "run")))
    stopped = copy_until(tmp_path / "run", 2, tmp_path / "stopped")
    with pytest.raises(ValueError, match="is a run without an export yet: mini-trainer export"):
        find_in_run(str(stopped), flag="--model")
    said = export(world, stopped)
    exports = stopped / "hf_format"
    assert said == f"wrote the model of step 2 to {exports / 'samples_16'}"
    kinds = ["samples_16", *(["average_samples_16"] if method == "full" else [])]
    assert sorted(path.name for path in exports.iterdir()) == sorted([*kinds, "latest"])
    for kind in kinds:
        check_same_files(tmp_path / "run" / "hf_format" / kind, exports / kind)
    assert export(world, stopped) == f"{exports / 'samples_16'}: is already the model of step 2"
    assert find_in_run(str(stopped), flag="--model") == str(exports / "latest")
    # The link stays at a model of a later step than the newest checkpoint's.
    shutil.copytree(tmp_path / "run", tmp_path / "later", symlinks=True)
    shutil.rmtree(tmp_path / "later" / "checkpoints" / "step_3")
    assert "samples_24: is already a model of a later step" in export(world, tmp_path / "later")
    assert (tmp_path / "later" / "hf_format" / "latest").resolve().name == "samples_24"
    # The run continues as if nothing had happened.
    train_here(world, **inputs | OPTIONS | METHODS[method] | every_step | dict(output_dir=str(stopped)))
    check_same_files(tmp_path / "run" / "hf_format" / "samples_24", exports / "samples_24")


@pytest.mark.slow
def test_the_command_exports_on_any_number_of_ranks(inputs, world, tmp_path):
    options = inputs | OPTIONS | dict(output_dir=str(tmp_path / "run"), max_steps=2, micro_batch_grad_sync="last")
    train_here(world, **options)
    shutil.copytree(tmp_path / "run", tmp_path / "other", symlinks=True)
    shutil.rmtree(tmp_path / "other" / "hf_format")
    done = run_forked(2, "mini_trainer/tools/export_run.py", tmp_path / "other")
    assert done.returncode == 0, done.stderr
    assert "wrote the model of step 2" in done.stdout + done.stderr
    assert not (tmp_path / "other" / ".lock").exists()
    check_same_files(tmp_path / "run/hf_format/samples_16", tmp_path / "other/hf_format/samples_16")


def test_what_cannot_be_exported_is_refused(inputs, world, tmp_path):
    with pytest.raises(ValueError, match="is not the output directory of a run: it has no training_params"):
        export(world, tmp_path)
    run = tmp_path / "run"
    train_here(world, **inputs | OPTIONS | METHODS["lora"] | dict(output_dir=str(run), max_steps=1))
    shutil.rmtree(run / "hf_format")
    shutil.copytree(run, tmp_path / "empty")
    shutil.rmtree(tmp_path / "empty" / "checkpoints")
    with pytest.raises(ValueError, match="has no checkpoint to export from: start its command again"):
        export(world, tmp_path / "empty")
    # A model's code runs only if the command says so again.
    checkpoint = read_checkpoint(run / "checkpoints" / "step_1")
    checkpoint.state["options"]["trust_remote_code"] = True
    with pytest.raises(ValueError, match="was trained with --trust-remote-code: give it here as well"):
        restore_options(checkpoint, run, trust_remote_code=False)
    assert restore_options(checkpoint, run, trust_remote_code=True).model.trust_remote_code
    # An adapter's base that is another one now.
    config = Path(inputs["model_name_or_path"], "config.json")
    before = config.read_text()
    config.write_text(json.dumps(json.loads(before) | {"rms_norm_eps": 1e-3}))
    try:
        with pytest.raises(Exception, match="was made with another model than what is there now"):
            export(world, run)
    finally:
        config.write_text(before)
