"""mini-trainer export: a stopped run's checkpoint becomes the export that the run itself would have written.

hf_format/latest links to the newest export, also after older ones were removed.
"""

import filecmp
import json
import os
import shutil
from collections.abc import Collection
from pathlib import Path

import pytest
from forked import succeed
from huggingface_hub import ModelCard
from in_process import Unwatched, train_here
from small_runs import OPTIONS, copy_until, make_inputs
from tiny_data import make_samples, write_samples
from tiny_models import VOCAB_SIZE
from tiny_vision import make_rows, save_vision_model, tokenize

from mini_trainer.api.launch import list_exports
from mini_trainer.data.stores.disk import link_beside
from mini_trainer.options import group_options
from mini_trainer.options.tools import ExportRunOptions
from mini_trainer.run.checkpointing import read_checkpoint
from mini_trainer.tools.export_run import export_run, restore_options
from mini_trainer.use.inference.loading import find_in_run

METHODS = {
    "full": dict(weight_average="ema", average_over=8, compute_dtype="bfloat16"),
    "lora": dict(lora=True, lora_rank=2),
    "osft": dict(osft=True, osft_unfreeze_rank_ratio=0.5),
    "images": dict(freeze="nothing"),
}
CARD = ("README.md", "manifest.json")  # which count the run's starts
VALIDATION = dict(validate_every_steps=1)  # at every checkpoint, with exports of the best model


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, str]:
    inputs = make_inputs(tmp_path_factory.mktemp("inputs"), "qwen3")
    Path(inputs["model_name_or_path"], "README.md").write_text("---\nlicense: mit\n---\n")
    return inputs


@pytest.fixture(scope="module")
def held_out(tmp_path_factory) -> tuple[str]:
    rows = make_samples(5, vocab_size=VOCAB_SIZE, seed=3)
    return (str(write_samples(tmp_path_factory.mktemp("held out") / "held_out.arrow", rows)),)


def make_pictured(root: Path) -> dict[str, object]:
    """A model that sees, with its data set, which it is also validated on."""
    model = save_vision_model(root, "llava")
    data = str(tokenize(make_rows(root), model, root))
    return dict(
        model_name_or_path=str(model), data_path=data, validation_data_path=("training-data",), max_tokens_per_gpu=512
    )


def export(world, run: Path, **options: object) -> str:
    control = Unwatched(hang_timeout=600, max_seconds=None)
    try:
        return export_run(group_options(ExportRunOptions, run=str(run), **options), world, control)
    finally:
        control.close()


def check_same_files(one: Path, other: Path, *, but: Collection[str] = ()) -> None:
    """The exports, of runs whose directories have the same name, have the same files with the same content."""
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir()) and len(names) > 5
    _, different, failed = filecmp.cmpfiles(one, other, set(names) - set(but), shallow=False)
    assert (different, failed) == ([], [])


@pytest.mark.parametrize("method", METHODS)
def test_the_export_is_the_one_that_the_run_would_have_written(method, inputs, held_out, world, tmp_path):
    """Also where the checkpoint's step was validated, and the held-out data is gone."""
    given = inputs | OPTIONS | VALIDATION | dict(validation_data_path=held_out)
    if method == "images":
        given |= make_pictured(tmp_path)
    given |= METHODS[method] | dict(min_samples_per_checkpoint=8, max_steps=3, check_export=True)
    train_here(world, **given | dict(output_dir=str(tmp_path / "run")))
    stopped = copy_until(tmp_path / "run", 2, tmp_path / "stopped" / "run")
    with pytest.raises(ValueError, match="is a run without an export yet: mini-trainer export"):
        find_in_run(str(stopped), flag="--model")
    moved = [Path(path).rename(f"{path}.moved") for path in held_out if method != "images"]
    said = export(world, stopped)
    for path in moved:
        path.rename(path.with_suffix(""))
    exports = stopped / "hf_format"
    assert said == f"wrote the model of step 2 to {exports / 'samples_16'}"
    kinds = ["samples_16", *(["average_samples_16"] if method == "full" else [])]
    assert sorted(path.name for path in exports.iterdir()) == sorted([*kinds, "latest"])
    for kind in kinds:
        check_same_files(tmp_path / "run" / "hf_format" / kind, exports / kind)
    card = ModelCard.load(exports / "samples_16" / "README.md")
    validations = map(json.loads, (stopped / "validation_metrics_0.jsonl").read_text().splitlines())
    (measured,) = [row for row in validations if row["step"] == 2]
    (result, *_) = card.data.eval_results
    assert (result.metric_value, card.data.license) == (measured["loss"], None if method == "images" else "mit")
    assert result.dataset_name == ("data" if method == "images" else "held_out")
    assert export(world, stopped) == f"{exports / 'samples_16'}: is already the model of step 2"
    assert find_in_run(str(stopped), flag="--model") == str(exports / "latest")
    # The link stays at a model of a later step than the newest checkpoint's.
    shutil.copytree(tmp_path / "run", tmp_path / "later", symlinks=True)
    shutil.rmtree(tmp_path / "later" / "checkpoints" / "step_3")
    assert "samples_24: is already a model of a later step" in export(world, tmp_path / "later")
    assert (tmp_path / "later" / "hf_format" / "latest").resolve().name == "samples_24"
    # The run continues as if nothing had happened.
    train_here(world, **given | dict(output_dir=str(stopped)))
    check_same_files(tmp_path / "run" / "hf_format" / "samples_24", exports / "samples_24", but=CARD)


@pytest.mark.slow
def test_the_command_exports_on_any_number_of_ranks(inputs, held_out, world, tmp_path):
    options = inputs | OPTIONS | VALIDATION | dict(validation_data_path=held_out, output_dir=str(tmp_path / "run"))
    options |= dict(max_steps=2, micro_batch_grad_sync="last")
    train_here(world, **options)
    other = shutil.copytree(tmp_path / "run", tmp_path / "other" / "run", symlinks=True)
    shutil.rmtree(other / "hf_format")
    done = succeed(2, "mini_trainer/tools/export_run.py", other)
    assert "wrote the model of step 2" in done.stdout + done.stderr
    assert not (other / ".lock").exists()
    check_same_files(tmp_path / "run/hf_format/samples_16", other / "hf_format/samples_16")


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


def test_where_the_model_of_a_finished_run_is_stays_unsaid(inputs, world, tmp_path):
    run = tmp_path / "run"
    train_here(world, **inputs | OPTIONS | METHODS["lora"] | dict(output_dir=str(run), max_steps=1))
    shutil.rmtree(run / "checkpoints")
    (model,) = (run / "hf_format").glob("samples_*")
    said = f"nothing to do: {model} is the run's newest model, and no checkpoint is of a later step"
    assert export(world, run) == said


def train(inputs, world, output_dir: Path, **changes: object) -> Path:
    """Trains three steps, and exports the model after each; returns the exports' directory."""
    options = OPTIONS | dict(max_steps=3, min_samples_per_checkpoint=8, keep_exports=2, output_dir=str(output_dir))
    train_here(world, **inputs | options | changes)
    return output_dir / "hf_format"


def test_it_is_the_newest_export_also_after_a_resume(inputs, world, tmp_path):
    exports = train(inputs, world, tmp_path / "run")
    link = exports / "latest"
    assert os.readlink(link) == "samples_24" and (link / "model.safetensors").is_file()
    assert sorted(path.name for path in exports.iterdir()) == ["latest", "samples_16", "samples_24"]
    # Programs that list exports have each of them once.
    listed = [exports / "samples_16", exports / "samples_24"]
    assert list_exports(tmp_path / "run") == listed
    # A kill between an export and its link; then one that left a link half made.
    os.unlink(link)
    os.symlink("samples_16", exports / ".writing_latest")
    train(inputs, world, tmp_path / "run")
    assert os.readlink(link) == "samples_24" and not list(exports.glob(".*"))
    # A resume from an earlier step writes newer ones.
    again = train(inputs, world, copy_until(tmp_path / "run", 1, tmp_path / "again"), max_steps=2)
    assert os.readlink(again / "latest") == "samples_16"


def test_the_best_export_is_not_what_it_leads_to(inputs, world, tmp_path):
    validated = dict(validation_data_path=inputs["data_path"], export_best=True, keep_exports=1)
    exports = train(inputs, world, tmp_path / "run", **validated)
    assert os.readlink(exports / "latest") == "samples_24"
    assert sorted(path.name for path in exports.iterdir()) == ["best", "latest", "samples_24"]


def test_a_directory_of_that_name_is_kept_and_reported(inputs, world, tmp_path, caplog):
    exports = train(inputs, world, tmp_path / "run", max_steps=1)
    (exports / "latest").unlink()
    (exports / "samples_8").rename(exports / "latest")
    caplog.clear()
    train(inputs, world, tmp_path / "run", max_steps=1)
    assert not (exports / "latest").is_symlink()
    assert "latest does not lead to samples_8: something else" in caplog.text


def test_a_link_changes_where_it_leads_in_one_step(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        link_beside(tmp_path / name, "latest")
        assert (tmp_path / "latest").samefile(tmp_path / name)
    (tmp_path / "b").rmdir()  # it leads nowhere
    link_beside(tmp_path / "a", "latest")
    assert (tmp_path / "latest").samefile(tmp_path / "a") and len(list(tmp_path.iterdir())) == 2
