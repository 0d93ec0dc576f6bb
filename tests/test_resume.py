"""A resumed run is the uninterrupted one, and a checkpoint that cannot be trusted is named and never used."""

import itertools
import json
import os
import re
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from breadth import long, wide
from forked import run_forked, succeed
from in_process import train_forked, train_here, train_on, train_once
from processes import ROOT, flags
from safetensors.torch import save_file
from small_runs import NUM_SAMPLES, OPTIONS, check_same, copy_until, load_checkpoint, make_inputs, read_rows
from tiny_data import flip_bit, make_samples, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, save_model

from mini_trainer.data.stores.contents import write_json, write_manifest
from mini_trainer.data.stores.disk import put_in_place, remove
from mini_trainer.distributed.ending import RunError
from mini_trainer.distributed.watch import RunControl
from mini_trainer.options.reading import hash_file
from mini_trainer.options.tools import VerifyOptions
from mini_trainer.run.checkpoint_files import TensorReader
from mini_trainer.run.checkpointing import Checkpointer, NoValidCheckpoint, fill
from mini_trainer.run.model_card import read_rows as read_card_rows
from mini_trainer.run.record import read_ends
from mini_trainer.run.training_log import MetricsFile
from mini_trainer.tools.verify import verify

MODEL = "llama_tied_bias"


@pytest.fixture
def start(inputs, world, caplog):
    """Trains in this process; returns the console's lines of this start."""

    def run(output_dir: Path, **changes) -> list[str]:
        caplog.clear()
        with caplog.at_level("INFO", logger="mini_trainer"):
            train_here(world, **(inputs | OPTIONS | dict(output_dir=str(output_dir)) | changes))
        return caplog.messages

    return run


@pytest.fixture(scope="module")
def finished(inputs, world, tmp_path_factory) -> Path:
    """Six steps without interruption; their checkpoints and the last one's export are there."""
    return train_once(tmp_path_factory, world, **inputs | OPTIONS, max_steps=6)


@pytest.mark.parametrize(
    ("step", "is_async"),  # at the last step an export is due
    [(1, False), (5, True), (6, False), wide(1, True), wide(3, False), wide(3, True), wide(5, False)],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(step, is_async, start, finished, tmp_path):
    output_dir = copy_until(finished, step, tmp_path / "run")
    messages = start(output_dir, max_steps=6, async_checkpoint=is_async)
    assert messages[0].startswith(
        f"resuming from {output_dir}/checkpoints/step_{step}: {step} steps, {8 * step} samples"
    )
    check_same(finished, output_dir, step=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "layouts"),
    [wide("qwen3", (4, 2, 1, 4)), ("mixtral", (4, 1))],  # 4 ranks shard mixtral's experts along another dimension
)
def test_a_run_moves_between_numbers_of_ranks(family, layouts, world, tmp_path):
    inputs = make_inputs(tmp_path, family) | dict(learning_rate=1e-3)  # more, and routing multiplies rounding errors
    train_here(world, **(OPTIONS | inputs | dict(output_dir=str(tmp_path / "one"), max_steps=2 * len(layouts))))
    for i, num_ranks in enumerate(layouts):
        changes = dict(output_dir=tmp_path / "many", max_steps=2 * (i + 1), max_tokens_per_gpu=41)
        train_on(num_ranks, world, **(OPTIONS | inputs | changes))
    one, many = read_rows(tmp_path / "one"), read_rows(tmp_path / "many")
    for row, other in zip(one, many, strict=True):
        assert other["loss"] == pytest.approx(row["loss"], rel=2e-6)
        assert other["grad_norm"] == pytest.approx(row["grad_norm"], rel=2e-5)
        for name in ("num_samples", "num_total_tokens", "num_loss_counted_tokens", "total_tokens_accumulated"):
            assert other[name] == row[name]


@pytest.mark.slow
def test_two_ranks_resume_bit_for_bit(inputs, tmp_path):
    for name, max_steps in (("whole", 5), ("parts", 2), ("parts", 5)):
        train_on(2, None, **(inputs | OPTIONS | dict(output_dir=tmp_path / name, max_steps=max_steps)))
    shutil.rmtree(tmp_path / "parts" / "hf_format" / "samples_16")  # the export at the end of the first part
    check_same(tmp_path / "whole", tmp_path / "parts", step=5)


def test_a_directory_is_replaced_without_a_moment_in_which_it_is_not_there(tmp_path, monkeypatch):
    target, seen, stop = tmp_path / "last", [], threading.Event()
    (tmp_path / "last").mkdir()
    (target / "n").write_text("0")
    watcher = threading.Thread(target=lambda: [seen.append(target.exists()) for _ in iter(stop.is_set, True)])
    watcher.start()
    for i in range(1, 200):
        (tmp_path / "aside").mkdir()
        (tmp_path / "aside" / "n").write_text(str(i))
        put_in_place(tmp_path / "aside", target)
    stop.set()
    watcher.join()
    assert len(seen) > 10 and all(seen) and (target / "n").read_text() == "199"
    monkeypatch.setattr("mini_trainer.data.stores.disk.exchange", lambda first, second: False)  # another system
    (tmp_path / "aside").mkdir()
    put_in_place(tmp_path / "aside", target)
    assert [path.name for path in tmp_path.iterdir()] == ["last"] and not list(target.iterdir())


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


WEIGHTS = "rank_00000.safetensors"
DAMAGES = {
    "truncated": (WEIGHTS, truncate, " bytes "),
    "flipped bit": (WEIGHTS, flip_bit, "SHA-256"),
    "no weights": (WEIGHTS, Path.unlink, "missing"),
    "link": (WEIGHTS, lambda path: (path.rename(path.parent.parent / "elsewhere"), path.symlink_to("../elsewhere")),
             "regular file"),
    "changed state": ("state.json", lambda path: path.write_text(path.read_text().replace(": 6", ": 7", 1)), "SHA-256"),
    "stray file": (".metadata", lambda path: path.write_bytes(b"cos\nsystem\n(S'false'\ntR."), "not belong"),
    "no manifest": ("manifest.json", Path.unlink, "missing"),
    "manifest is a pipe": ("manifest.json", lambda path: (path.unlink(), os.mkfifo(path)), "regular file"),
    "torn manifest": ("manifest.json", truncate, "damaged"),
    "changed manifest": ("manifest.json", lambda path: path.write_text(path.read_text().replace("F32", "F64", 1)),
                         "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(damage, start, finished, tmp_path):
    name, spoil, reason = DAMAGES[damage]
    output_dir = copy_until(finished, 5, tmp_path / "run")
    spoil(output_dir / "checkpoints" / "step_5" / name)
    with pytest.raises(NoValidCheckpoint, match=rf"--resume strict: \S*step_5 .*{name} .*{reason}"):
        start(output_dir, max_steps=6, resume="strict")
    with pytest.raises(NoValidCheckpoint, match=rf"--resume \S*step_5: .*{name} .*{reason}"):
        start(output_dir, max_steps=6, resume=str(output_dir / "checkpoints" / "step_5"))


SET_ASIDE = ("flipped bit", "manifest is a pipe")  # the two ways in which damage is noticed: by content, and before it


@pytest.mark.parametrize("damage", [name if name in SET_ASIDE else wide(name) for name in DAMAGES])
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_it_taken(damage, start, finished, tmp_path):
    name, spoil, reason = DAMAGES[damage]
    output_dir = copy_until(finished, 5, tmp_path / "run")
    spoil(output_dir / "checkpoints" / "step_5" / name)
    messages = start(output_dir, max_steps=6)
    assert name in messages[0] and reason in messages[0] and messages[0].endswith(" damaged_step_5")
    assert messages[1].startswith(f"resuming from {output_dir}/checkpoints/step_4")
    check_same(finished, output_dir, step=6)


def test_a_checkpoint_under_the_name_of_another_step_is_set_aside(start, finished, tmp_path):
    output_dir = copy_until(finished, 3, tmp_path / "run")
    (output_dir / "checkpoints" / "step_3").rename(output_dir / "checkpoints" / "step_5")
    (output_dir / "checkpoints" / "damaged_step_5").mkdir()  # an earlier one
    messages = start(output_dir, max_steps=6)
    assert re.search(r"state\.json .*step 3, .*step_5; .*damaged_step_5_1$", messages[0])
    check_same(finished, output_dir, step=6)


def test_a_file_under_the_name_of_a_checkpoint_is_set_aside(start, finished, tmp_path):
    output_dir = copy_until(finished, 3, tmp_path / "run")
    (output_dir / "checkpoints" / "step_9").touch()
    assert re.search(r"step_9 .*manifest\.json .*damaged_step_9$", start(output_dir, max_steps=3)[0])


def forge(directory: Path, **state: object) -> dict:
    """Changes a checkpoint's state and removes its manifest, which the forger, too, can write; returns that."""
    manifest = json.loads((directory / "manifest.json").read_text())
    del manifest["sha256"]
    (directory / "manifest.json").unlink()
    content = json.loads((directory / "state.json").read_text()) | state
    (directory / "state.json").unlink()
    manifest["files"]["state.json"] = write_json(directory / "state.json", content)
    return manifest


FORGED_FILES = {"../../../etc/passwd": {"size": 1, "sha256": ""}, "state.json": {"size": 1, "sha256": ""}}


@pytest.mark.parametrize(
    ("state", "changes"),
    [
        *((dict(position=position), {}) for position in (None, dict(step="1"), dict(step=-1), dict(steps=1), [1, 2])),
        ({}, dict(files=FORGED_FILES)),
        *(({}, dict(num_shards=number)) for number in (0, 2)),
    ],
)
def test_a_state_or_a_manifest_that_was_forged_is_refused(state, changes, start, finished, tmp_path):
    output_dir = copy_until(finished, 1, tmp_path / "run")
    directory = output_dir / "checkpoints" / "step_1"
    write_manifest(directory, forge(directory, **state) | changes)
    with pytest.raises(NoValidCheckpoint, match="only damaged_step_1;"):
        start(output_dir, max_steps=6)


def write_shards(directory: Path, whole: torch.Tensor, num_shards: int) -> TensorReader:
    """A checkpoint of one tensor, divided over ranks as FSDP2 does."""
    directory.mkdir()
    parts = [*whole.chunk(num_shards), *[whole[:0]] * num_shards][:num_shards]
    for rank, part in enumerate(parts):
        save_file({"x": part.clone()}, directory / f"rank_{rank:05}.safetensors")
    position = dict(step=1, num_samples=8, num_tokens=9, num_in_step=0)
    write_json(directory / "state.json", dict(position=position, identity={}))
    layout = dict(num_shards=num_shards, tensors={"x": dict(shape=list(whole.shape), dtype="F32", dim=0)})
    files = {path.name: hash_file(path) for path in directory.iterdir()}
    write_manifest(directory, dict(format=1, **layout, files=files))
    return TensorReader(directory, layout)


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4, 6])  # of 5 rows: also uneven and empty shards
def test_any_part_of_a_tensor_is_read_from_shards_of_which_each_is_verified(num_shards, world, tmp_path):
    whole = torch.rand(5, 3)
    reader = write_shards(tmp_path / "step_1", whole, num_shards)
    for low, high in itertools.combinations(range(6), 2):
        found = torch.full((high - low, 2), torch.nan)
        reader.read(found, "x", (low, 1))
        assert torch.equal(found, whole[low:high, 1:])
    checkpointer = Checkpointer(tmp_path, world=world, num_kept=1, is_async=False)
    opened = checkpointer.open(tmp_path / "step_1")
    (tmp_path / "step_1").rename(tmp_path / "before")
    write_shards(tmp_path / "step_1", whole.fill_(torch.nan), num_shards)
    with pytest.raises(NoValidCheckpoint, match="replaced"):
        checkpointer.verify_origin(opened)
    with pytest.raises(ValueError, match="x has 15 NaN"):
        fill(torch.empty(5, 3), "x", checkpointer.open(tmp_path / "step_1").open_tensors())
    for shard in (tmp_path / "before").glob("rank_*"):
        flip_bit(shard)
        with pytest.raises(NoValidCheckpoint, match=f"before: .*{shard.name}.* SHA-256"):
            checkpointer.open(tmp_path / "before")
        flip_bit(shard)
    flip_bit(tmp_path / "before" / "state.json")
    with pytest.raises(ValueError, match=r"^1 damaged"):
        verify(VerifyOptions(path=(str(tmp_path / "before"),)))
    checkpointer.close()


def test_a_run_with_an_option_that_is_gone_is_resumed(start, finished, tmp_path):
    """--export-name, whose exports had that name."""
    output_dir = copy_until(finished, 3, tmp_path / "run")
    (output_dir / "hf_format" / "last").mkdir(parents=True)
    (output_dir / "hf_format" / "latest").symlink_to("last")
    directory, params = output_dir / "checkpoints" / "step_3", output_dir / "training_params.json"
    recorded = json.loads(params.read_text())
    options = recorded["options"] | dict(export_name="last")
    params.write_text(json.dumps(recorded | dict(options=options)))
    write_manifest(directory, forge(directory, options=options))
    start(output_dir, max_steps=6)
    shutil.rmtree(output_dir / "hf_format" / "last")
    check_same(finished, output_dir, step=6)
    assert (output_dir / "hf_format" / "latest").samefile(output_dir / "hf_format" / "samples_48")


def test_a_run_whose_checkpoints_are_all_damaged_never_starts_from_zero(start, finished, tmp_path):
    output_dir = copy_until(finished, 2, tmp_path / "run")
    for step in (1, 2):
        flip_bit(output_dir / "checkpoints" / f"step_{step}" / WEIGHTS)
    for _ in range(2):
        with pytest.raises(NoValidCheckpoint, match="only damaged_step_1, damaged_step_2;"):
            start(output_dir, max_steps=6)


CHANGES = {
    "data": dict(drop_overlong=True, max_tokens_per_gpu=38),
    "seed": dict(seed=1),
    "batch-size": dict(batch_size=9),
    "learning-rate": dict(learning_rate=2e-2),
    "number of steps": dict(max_steps=7),
    "compute-dtype": dict(compute_dtype="bfloat16"),
    "weight-decay": dict(weight_decay=0.0),
}


@pytest.fixture(scope="module")
def decaying(inputs, world, tmp_path_factory) -> Path:
    output_dir = tmp_path_factory.mktemp("decaying") / "run"
    options = OPTIONS | dict(lr_scheduler="linear", max_steps=2, output_dir=str(output_dir))
    train_here(world, **(inputs | options))
    shutil.rmtree(output_dir / "checkpoints" / "step_2")
    return output_dir


@pytest.mark.parametrize("changed", CHANGES)
def test_a_changed_run_is_refused_by_name_and_recorded_where_it_is_allowed(changed, start, decaying, tmp_path):
    output_dir = shutil.copytree(decaying, tmp_path / "run")
    options = dict(lr_scheduler="linear", max_steps=2) | CHANGES[changed]
    with pytest.raises(ValueError, match=f"step_1 .*other {changed}"):
        start(output_dir, **options)
    start(output_dir, **options, allow_changed_options=True)
    params = json.loads((output_dir / "training_params.json").read_text())
    assert [len(start["changed_options"]) for start in params["starts"]] == [0, 1]
    assert params["changed_options"][0].startswith(changed)


@pytest.mark.parametrize("changed", ["model", "tokenizer", "chat template", "data"])
def test_changed_inputs_are_refused_by_name(changed, start, decaying, inputs, tmp_path):
    output_dir = shutil.copytree(decaying, tmp_path / "run")
    model, data = tmp_path / "model", tmp_path / "data.arrow"
    shutil.copytree(inputs["model_name_or_path"], model)
    shutil.copy(inputs["data_path"], data)
    if changed == "model":
        save_model(FAMILIES["llama_tied_bias"], model, seed=1)
    elif changed == "tokenizer":
        tokenizer = json.loads((model / "tokenizer.json").read_text())
        tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | dict(id=VOCAB_SIZE - 1, content="<new>"))
        (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    elif changed == "chat template":
        (model / "chat_template.jinja").write_text("{{ messages }}")
    else:
        (ids, labels), *others = make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE)
        write_samples(data, [(ids[::-1], labels), *others])
    with pytest.raises(ValueError, match=f"step_1 .*other {changed}: "):
        start(output_dir, lr_scheduler="linear", max_steps=2, model_name_or_path=str(model), data_path=str(data))


def test_a_resumed_run_goes_on_with_the_average_of_all_steps(start, tmp_path):
    averaged = dict(weight_average="ema", average_over=2)
    start(tmp_path / "whole", max_steps=3, **averaged)
    resumed = copy_until(tmp_path / "whole", 2, tmp_path / "resumed")
    start(resumed, max_steps=3, **averaged)
    check_same(tmp_path / "whole", resumed, step=3)


def test_minutes_between_checkpoints_are_counted_from_the_last_one(start, tmp_path, monkeypatch):
    clock = SimpleNamespace(monotonic=itertools.count(step=25).__next__)  # each look takes 25 seconds
    monkeypatch.setattr("mini_trainer.run.run_directory.time", clock)
    start(tmp_path / "run", max_steps=9, checkpoint_every_steps=None, checkpoint_every_minutes=1)
    steps = [int(path.name.removeprefix("step_")) for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert sorted(steps) == [3, 6, 9]


def test_what_does_not_change_the_numbers_may_change(start, finished, tmp_path):
    output_dir = copy_until(finished, 3, tmp_path / "run")
    start(output_dir, max_steps=6, activation_checkpointing="none", keep_checkpoints=1)
    assert read_rows(output_dir) == read_rows(finished)


def test_the_newest_valid_checkpoints_are_kept_and_nothing_else(start, finished, tmp_path):
    output_dir = copy_until(finished, 3, tmp_path / "run")
    truncate(output_dir / "checkpoints" / "step_2" / WEIGHTS)  # not counted, but left for whoever wants to look
    (output_dir / "checkpoints" / ".writing_step_9").mkdir()
    start(output_dir, max_steps=4, keep_checkpoints=3)
    names = sorted(path.name for path in (output_dir / "checkpoints").iterdir())
    assert names == ["step_1", "step_2", "step_3", "step_4"]
    start(output_dir, max_steps=5, keep_checkpoints=2)
    assert sorted(path.name for path in (output_dir / "checkpoints").iterdir()) == ["step_4", "step_5"]


def test_a_checkpoint_whose_removal_is_killed_is_never_taken_for_whole(start, finished, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def unlink(path: os.PathLike | str, **others: object) -> None:
        if "rank_" in str(path):
            killed.append(path)
            raise Killed
        real(path, **others)

    output_dir, killed, real = copy_until(finished, 3, tmp_path / "run"), [], os.unlink
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "unlink", unlink)
        start(output_dir, max_steps=6, keep_checkpoints=2)
    checkpoints = output_dir / "checkpoints"
    assert len(killed) == 1
    assert sorted(os.listdir(checkpoints)) == [".removing_step_2", "step_1", "step_3", "step_4"]
    assert start(output_dir, max_steps=6, keep_checkpoints=2)[0].startswith(f"resuming from {checkpoints}/step_4")
    assert sorted(os.listdir(checkpoints)) == ["step_5", "step_6"]
    check_same(finished, output_dir, step=6)


def test_another_run_is_written_into(start, finished, tmp_path):
    with pytest.raises(RunError, match=r"--output-dir \S*unfinished .*--resume none"):
        start(copy_until(finished, 2, tmp_path / "unfinished"), max_steps=6, resume="none")
    begun = copy_until(finished, 0, tmp_path / "begun")
    with pytest.raises(RunError, match=r"--output-dir \S*begun .*seed \(42 .* 7\)"):
        start(begun, max_steps=6, seed=7)
    assert start(begun, max_steps=6)[0].startswith("starting from step 0")
    check_same(finished, begun, step=6)


def test_a_new_directory_in_the_place_of_the_runs_is_written_into(tmp_path, monkeypatch):
    (run := tmp_path / "run").mkdir()
    control, looks, told = RunControl(hang_timeout=60, max_seconds=None), iter(range(5)), []
    control.files.own(run)
    assert control.files.find_loss() is None
    run.rename(tmp_path / "moved").with_name("run").mkdir()
    monkeypatch.setattr("mini_trainer.distributed.watch.time.sleep", lambda seconds: next(looks))
    monkeypatch.setattr(control.watch, "call", lambda report, cause: told.append(cause.message))
    control.watch.watch_files()
    assert len(told) == 1 and f"run was moved to {tmp_path / 'moved'} " in told[0]
    os.close(control.files.descriptor)


def test_a_checkpoint_of_any_name_is_taken_by_its_path_but_into_no_other_run(start, finished, tmp_path):
    with pytest.raises(NoValidCheckpoint, match=r"--resume \S*step_99: "):
        start(tmp_path / "other", max_steps=3, resume=str(finished / "checkpoints" / "step_99"))
    best = shutil.copytree(finished / "checkpoints" / "step_2", tmp_path / "best")
    messages = start(tmp_path / "other", max_steps=3, resume=str(best))
    assert messages[0].startswith(f"resuming from {best}: 2 steps")
    tensors = [load_checkpoint(path / "checkpoints" / "step_3") for path in (finished, tmp_path / "other")]
    assert all(torch.equal(value, tensors[1][name]) for name, value in tensors[0].items())
    with pytest.raises(ValueError, match=r"--resume \S*best: .*\(step_3\)"):
        start(tmp_path / "other", max_steps=6, resume=str(best))
    shutil.rmtree(tmp_path / "other" / "checkpoints")
    metrics = (tmp_path / "other" / "training_metrics_0.jsonl").read_bytes()
    with pytest.raises(RunError, match=r"--output-dir \S*other .*finished run"):
        start(tmp_path / "other", max_steps=6, resume=str(best))
    assert (tmp_path / "other" / "training_metrics_0.jsonl").read_bytes() == metrics


def test_halves_that_a_killed_start_left_are_no_other_run_and_go(start, finished, tmp_path):
    output_dir = tmp_path / "run"
    output_dir.mkdir()
    parts = (".training_params.json.host.12.part", ".trackers.json.host.12.part")
    for name in (".training_params.json", ".exit.json.host.123", "exit.json", *parts):
        (output_dir / name).write_text("{")
    start(output_dir, max_steps=6)
    assert not (output_dir / "exit.json").exists()
    check_same(finished, output_dir, step=6)
    (output_dir / "hf_format" / ".removing_samples_8").mkdir()
    (latest := output_dir / "hf_format" / "latest").unlink()
    start(output_dir, max_steps=6)
    assert latest.resolve().name == "samples_48"
    assert [path.name for path in (output_dir / "hf_format").glob("*samples_*")] == ["samples_48"]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, long(2)])
def test_what_is_written_behind_the_training_is_the_state_at_the_save(num_ranks, inputs, tmp_path):
    """The write begins when two more steps have changed the weights."""
    options = inputs | OPTIONS | dict(checkpoint_every_steps=3, max_steps=5, save_final_checkpoint=False)
    runs = [tmp_path / name for name in ("at once", "behind")]
    train_forked(num_ranks, **options, output_dir=runs[0])
    worker, metrics = ROOT / "tests" / "workers" / "late_writes.py", runs[1] / "training_metrics_0.jsonl"
    argv = flags(**options, output_dir=runs[1], async_checkpoint=True)
    succeed(num_ranks, worker, metrics, 5, "train.py", *argv)
    expected, found = (load_checkpoint(run / "checkpoints" / "step_3") for run in runs)
    assert expected.keys() == found.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [long(False), True])
def test_a_write_that_fails_leaves_the_older_checkpoint_and_no_part(is_async, inputs, finished, tmp_path):
    output_dir = copy_until(finished, 2, tmp_path / "run")
    size = (output_dir / "checkpoints" / "step_2" / WEIGHTS).stat().st_size
    argv = flags(**(inputs | OPTIONS | dict(output_dir=output_dir, max_steps=6, async_checkpoint=is_async)))
    result = run_forked(2, ROOT / "tests" / "workers" / "limited.py", size // 2, "train.py", *argv)
    assert result.returncode == 1
    said = r"step_3: rank_00000\.safetensors: \[Errno 27\] File too large; .*[\d,]+ bytes, .*[\d,]+ free.* unchanged$"
    assert re.search(said, result.stderr, re.MULTILINE), result.stderr
    assert sorted(path.name for path in (output_dir / "checkpoints").iterdir()) == ["step_1", "step_2"]


def test_a_checkpoint_that_does_not_fit_on_the_disk_is_not_begun(start, finished, tmp_path, monkeypatch):
    output_dir = copy_until(finished, 2, tmp_path / "run")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=12_345))
    with pytest.raises(RunError, match=r"step_3: .* [\d,]+ bytes .* 12,345 free"):
        start(output_dir, max_steps=6)
    assert sorted(path.name for path in (output_dir / "checkpoints").iterdir()) == ["step_1", "step_2"]


METRICS = ("training_metrics_0.jsonl", "validation_metrics_0.jsonl")


def test_a_damaged_line_of_metrics_costs_itself_alone(start, tmp_path):
    """The run resumes, exports and ends; the lines behind the damaged ones are kept."""
    held_out = write_samples(tmp_path / "held_out.arrow", make_samples(4, vocab_size=VOCAB_SIZE, seed=1))
    given = dict(validation_data_path=(str(held_out),), validate_every_steps=1)
    run = tmp_path / "run"
    start(run, **given, max_steps=3)
    whole = [(run / name).read_bytes().splitlines(keepends=True) for name in METRICS]
    for name, lines in zip(METRICS, whole, strict=True):
        (run / name).write_bytes(b"".join([lines[0], b"\0" * 40 + b"\n", *lines[2:]]))
    said = "\n".join(start(run, **given, max_steps=4))
    for path, what in zip((run / name for name in METRICS), ("step 2 ", "1 of 4 validations"), strict=True):
        assert f"warning: {path}: line 2 " in said
        assert re.search(rf"^warning: {path}: .*{what}", said, re.MULTILINE)
    for name, lines in zip(METRICS, whole, strict=True):
        kept = (run / name).read_bytes().splitlines(keepends=True)
        assert kept[:-1] == [lines[0], *lines[2:]] and json.loads(kept[-1])["step"] == 4
    assert list((run / "hf_format").glob("samples_*/README.md"))


def test_the_last_steps_line_has_the_epochs_that_were_asked_for(start, tmp_path):
    """20 samples in batches of 8: the last one takes 4 of the next epoch, which its metrics count."""
    lines = [line for line in start(tmp_path / "run", max_epochs=3) if line.startswith("step ")]
    assert lines[-1].startswith("step 8/8  epoch 3.00  ")
    assert read_rows(tmp_path / "run")[-1]["epoch"] == 3.2


def make_lines(steps: Iterable[int]) -> list[bytes]:
    return [json.dumps({"step": step, "loss": 1.5}).encode() + b"\n" for step in steps]


@pytest.mark.parametrize(
    "damaged", [b"\0\0\n", b'{"step": 2, "lo{"step": 3}\n', b"{}\n", b"[3]\n", b'{"step": "4", "loss": 1}\n', b"\n"]
)
def test_metrics_files_keep_what_parses(damaged, tmp_path, caplog):
    lines, path = make_lines(range(1, 10)), tmp_path / METRICS[0]
    path.write_bytes(b"".join([*lines[:2], damaged, *lines[3:6], lines[5], *lines[6:], lines[0][:9]]))
    with caplog.at_level("WARNING", logger="mini_trainer"):
        MetricsFile(tmp_path, first_step=8, num_validations=0).close()
    assert path.read_bytes() == b"".join([*lines[:2], *lines[3:8]])
    removed, missing = caplog.messages
    assert removed.startswith(f"warning: {path}: lines 3, 7 ")
    assert missing.startswith(f"warning: {path}: ") and "step 3 " in missing
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_validations_after_the_checkpoint_are_removed_by_their_number_and_step(tmp_path, caplog):
    """A checkpoint is written after the validation of its step, or before."""
    lines, path = make_lines([0, 2, 4, 6]), tmp_path / METRICS[1]
    for damaged, num_validations, kept in (([], 3, 3), ([], 2, 2), ([1], 3, 3), ([1], 2, 2), ([], 0, 0)):
        content = [b"\0\n" if i in damaged else line for i, line in enumerate(lines)]
        path.write_bytes(b"".join(content))
        MetricsFile(tmp_path, first_step=4, num_validations=num_validations).close()
        assert path.read_bytes() == b"".join(line for line in content[:kept] if line != b"\0\n")


def test_readers_of_metrics_leave_damaged_lines_out(tmp_path):
    lines, path = make_lines([1, 2, 3]), tmp_path / METRICS[0]
    path.write_bytes(b"".join([lines[0], b"\0\n", lines[1], b"[]\n", lines[2], b"x\n"]))
    assert [row["step"] for row in read_card_rows(path, 2)] == [1, 2]
    assert read_ends(path) == ({"step": 1, "loss": 1.5}, {})


@pytest.mark.parametrize("place", ["cache", "cache/of/osft", "."])
def test_a_cache_of_osft_inside_of_the_output_directory_is_no_other_run(place, start, tmp_path):
    """A directory that a start leaves if it is killed before it writes its options."""
    given = dict(osft=True, osft_unfreeze_rank_ratio=0.5, osft_cache_dir=str(tmp_path / "run" / place), max_steps=1)
    start(run := tmp_path / "run", **given)
    for path in [path for path in run.iterdir() if path.name not in ("cache", ".lock") and len(path.stem) != 64]:
        remove(path)
    (notes := run / "other.txt").touch()
    with pytest.raises(RunError, match=f"--output-dir {run} .*other.txt"):
        start(run, **given)
    notes.unlink()
    assert any("0 matrices" in line for line in start(run, **given))


@pytest.mark.parametrize("place", ["_internal_data_processing", "tokenized/train", "."])
def test_data_inside_of_the_output_directory_is_no_other_run(place, start, tmp_path):
    """As training_hub has it; a file that is not the data's is still refused."""
    run = tmp_path / "run"
    (run / place).mkdir(parents=True)
    names = [f"data{part}.arrow" for part in ("", ".validation")]
    data = [write_samples(run / place / name, make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE)) for name in names]
    given = dict(data_path=(str(data[0]),), validation_data_path=(str(data[1]),), max_steps=1)
    other = run / place / "other.txt" if place == "." else run / "other.txt"
    other.write_text("of another program")
    with pytest.raises(RunError, match=f"--output-dir {run} .*other.txt"):
        start(run, **given)
    other.unlink()
    start(run, **given)
    before = read_rows(run)
    start(run, **given | dict(max_steps=2))
    assert len(read_rows(run)) == 2 and read_rows(run)[0] == before[0] and data[0].exists()
