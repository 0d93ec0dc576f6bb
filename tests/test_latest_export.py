"""hf_format/latest links to the newest export, also after older ones were removed."""

import os
from pathlib import Path

from in_process import train_here
from small_runs import OPTIONS, copy_until

from mini_trainer.api.launch import list_exports
from mini_trainer.data.stores.disk import link_beside
from mini_trainer.use.evaluation.models import find_exports

MODEL = "qwen3"


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
    assert list_exports(tmp_path / "run") == listed == find_exports(tmp_path / "run")
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
