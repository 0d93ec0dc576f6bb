"""A run in rounds is the run in one piece: each round has other data, and weights, moments and schedule continue."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from breadth import long
from in_process import print_plan, train_on
from small_runs import OPTIONS, load_checkpoint, make_inputs, read_rows
from tiny_data import make_samples, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer
from tiny_pairs import write_pairs

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.ending import ExitCode, RunError
from mini_trainer.distributed.world import World
from mini_trainer.run.checkpointing import NoValidCheckpoint
from mini_trainer.sampler import draw_samples

STEPS, BATCH_SIZE = 3, 4  # of each of two rounds
SIZE = STEPS * BATCH_SIZE
SHARED = OPTIONS | dict(batch_size=BATCH_SIZE, lr_scheduler="cosine", num_warmup_steps=2, schedule_steps=2 * STEPS)

METHODS = {
    "full": {},
    "bf16, 8 bits": dict(master_weights="bfloat16", optimizer="adamw8bit"),
    "lora": dict(lora=True, lora_dropout=0.2),
    "osft": dict(osft=True, osft_unfreeze_rank_ratio=0.5, osft_train_others=True),
    "2 ranks": dict(num_ranks=2),
}


def draw(path: Path, *, count: int) -> list[int]:
    """The first rows that a run draws, in their order."""
    return draw_samples(Mixture([TokenizedData(path)]), seed=42, start=0, count=count).tolist()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, str]:
    """A model, a data set, and the data sets of two rounds that draw the same samples in the same order."""
    root = tmp_path_factory.mktemp("inputs")
    inputs, samples = make_inputs(root, "llama"), make_samples(2 * SIZE, vocab_size=VOCAB_SIZE)
    drawn = draw(write_samples(root / "whole.arrow", samples), count=2 * SIZE)
    places = draw(write_samples(root / "any.arrow", samples[:SIZE]), count=SIZE)
    for part in range(2):
        rows = dict(zip(places, drawn[part * SIZE : (part + 1) * SIZE], strict=True))
        write_samples(root / f"part_{part}.arrow", [samples[rows[place]] for place in range(SIZE)])
    cache = dict(osft_cache_dir=str(root / "osft"))
    return inputs | dict(root=str(root)) | cache


def run(world: World, inputs: dict, output_dir: Path, data: str, *, num_ranks: int = 1, **changes: object) -> Path:
    root = Path(inputs["root"])
    own = {name: value for name, value in inputs.items() if name not in ("root", "osft_cache_dir")}
    own |= dict(osft_cache_dir=inputs["osft_cache_dir"]) if changes.get("osft") else {}
    options = SHARED | own | dict(data_path=str(root / f"{data}.arrow"), output_dir=output_dir) | changes
    train_on(num_ranks, world, **options)
    return output_dir


@pytest.fixture(scope="module")
def first(inputs, world, tmp_path_factory) -> Path:
    """The first round's last checkpoint."""
    output_dir = run(world, inputs, tmp_path_factory.mktemp("first") / "run", "part_0", max_steps=STEPS)
    return output_dir / "checkpoints" / f"step_{STEPS}"


@pytest.fixture(scope="module")
def second(inputs, world, first, tmp_path_factory) -> Path:
    """The directory of the second round."""
    output_dir = tmp_path_factory.mktemp("second") / "run"
    return run(world, inputs, output_dir, "part_1", max_steps=STEPS, continue_from=str(first))


def check_same_checkpoint(one: Path, other: Path) -> None:
    tensors, others = load_checkpoint(one), load_checkpoint(other)
    assert tensors.keys() == others.keys() and any(name.startswith("optimizer/") for name in tensors)
    assert all(torch.equal(value, others[name]) for name, value in tensors.items())


def check_rounds(whole: Path, rounds: list[Path]) -> None:
    """All numbers of the rounds' steps are those of the whole run, and so is the last checkpoint, to the bit."""
    names = ("loss", "grad_norm", "lr", "num_total_tokens", "num_loss_counted_tokens")
    rows, own = read_rows(whole), [row for path in rounds for row in read_rows(path)]
    for name in names:
        assert [row[name] for row in own] == [row[name] for row in rows]
    assert [row["step"] for row in own] == [*range(1, STEPS + 1)] * 2
    assert own[-1]["total_samples_accumulated"] == SIZE
    last = rounds[-1] / "checkpoints" / f"step_{STEPS}"
    check_same_checkpoint(whole / "checkpoints" / f"step_{2 * STEPS}", last)


@pytest.mark.parametrize("method", [name if name == "lora" else long(name) for name in METHODS])
def test_two_rounds_are_one_run_bit_for_bit(method, inputs, world, tmp_path):
    changes = METHODS[method]
    whole = run(world, inputs, tmp_path / "whole", "whole", max_steps=2 * STEPS, schedule_steps=None, **changes)
    one = run(world, inputs, tmp_path / "one", "part_0", max_steps=STEPS, **changes)
    origin = str(one / "checkpoints" / f"step_{STEPS}")
    two = run(world, inputs, tmp_path / "two", "part_1", max_steps=STEPS, continue_from=origin, **changes)
    check_rounds(whole, [one, two])
    assert [path.name for path in (two / "hf_format").glob("*samples_*")] == [f"samples_{SIZE}"]
    params = json.loads((two / "training_params.json").read_text())
    card = (two / "hf_format" / f"samples_{SIZE}" / "README.md").read_text() if method != "lora" else ""
    assert ("| trained before | 3 steps " in card) == (method != "lora")
    assert params["continued_from"] == origin and params["resumed_from"] is None and params["first_step"] == 0


@pytest.mark.long
def test_a_round_may_have_another_number_of_ranks(inputs, world, first, second, tmp_path):
    changes = dict(num_ranks=2, max_steps=STEPS, continue_from=str(first))
    two = run(world, inputs, tmp_path / "two", "part_1", **changes)
    for row, expected in zip(read_rows(two), read_rows(second), strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        assert row["lr"] == expected["lr"]


def test_a_third_round_counts_the_steps_of_both(inputs, world, second, tmp_path):
    origin, changes = second / "checkpoints" / "step_2", dict(lr_scheduler="linear", schedule_steps=10)
    third = run(world, inputs, tmp_path / "third", "whole", max_steps=4, continue_from=str(origin), **changes)
    decay = [(10 - step) / 8 for step in range(5, 9)]  # after 2 warm-up steps
    assert [row["lr"] for row in read_rows(third)] == pytest.approx([1e-2 * share for share in decay])


def test_a_killed_round_resumes_from_its_own_checkpoint(inputs, world, first, second, tmp_path, caplog):
    """It reads no weights of the first round again, which are damaged by then."""
    origin = shutil.copytree(first, tmp_path / "moved" / first.name)
    changes = dict(continue_from=str(origin), batch_size=BATCH_SIZE)
    two = run(world, inputs, tmp_path / "two", "part_1", max_steps=2, **changes)
    damage(origin)
    caplog.clear()
    with caplog.at_level("INFO", logger="mini_trainer"):
        run(world, inputs, two, "part_1", max_steps=STEPS, **changes)
    assert caplog.messages[0].startswith(f"resuming from {two}/checkpoints/step_2")
    assert any(re.match(rf"start: .*{re.escape(str(origin))}, .* 3 steps$", message) for message in caplog.messages)
    assert read_rows(two) == read_rows(second)
    check_same_checkpoint(*(path / "checkpoints" / f"step_{STEPS}" for path in (two, second)))
    with pytest.raises(ValueError, match=r"step_3 .*continue-from"):
        run(world, inputs, two, "part_1", max_steps=STEPS)
    with pytest.raises(ValueError, match=r"step_3 .*continue-from: .*not even"):
        run(world, inputs, two, "part_1", max_steps=STEPS, allow_changed_options=True)


def damage(checkpoint: Path) -> None:
    """Changes a byte of the weights."""
    with open(checkpoint / "rank_00000.safetensors", "r+b") as file:
        file.seek(-100, 2)
        byte = file.read(1)
        file.seek(-100, 2)
        file.write(bytes([byte[0] ^ 1]))


def test_data_learning_rate_and_model_directory_may_differ(inputs, world, first, tmp_path, caplog):
    """All weights are in the checkpoint: an export of the first round does as the model."""
    export = first.parent.parent / "hf_format" / f"samples_{SIZE}"
    changes = dict(learning_rate=1e-3, batch_size=2, lr_scheduler="constant", num_warmup_steps=0, schedule_steps=None)
    losses = []
    for name, model in {"start": inputs["model_name_or_path"], "export": str(export)}.items():
        with caplog.at_level("INFO", logger="mini_trainer"):
            own = run(
                world, inputs | dict(model_name_or_path=model), tmp_path / name, "data", max_steps=1,
                continue_from=str(first), **changes,
            )  # fmt: skip
        losses.append(read_rows(own)[0]["loss"])
    assert losses[0] == losses[1]
    assert any(re.match(r"schedule: .*step 1 .*step 4, .* 0\.001$", message) for message in caplog.messages)


def test_the_start_as_a_reference_is_the_checkpoint(inputs, world, first, tmp_path):
    pairs = write_pairs(tmp_path / "pairs.arrow", Path(inputs["model_name_or_path"]))
    changes = dict(objective="preference", data_path=str(pairs), learning_rate=0.0, weight_decay=0.0)
    for name, origin in (("plain", None), ("continued", str(first))):
        own = run(world, inputs, tmp_path / name, "whole", max_steps=1, continue_from=origin, **changes)
        assert read_rows(own)[0]["loss"] == pytest.approx(0.6931472, rel=1e-5)  # log 2: as likely as the reference


def test_wrong_checkpoints_are_refused_by_name(inputs, world, first, second, tmp_path):
    def refuse(error: str, origin: Path = first, kind: type = ValueError, **changes: object) -> None:
        with pytest.raises(kind, match=error):
            values = dict(max_steps=STEPS, continue_from=str(origin), output_dir=tmp_path / "run") | changes
            run(world, inputs, data="part_1", **values)

    refuse(r"--continue-from \S*run: .*manifest\.json", first.parent.parent, RunError)
    damaged = shutil.copytree(first, tmp_path / "damaged")
    damage(damaged)
    refuse(r"--continue-from \S*damaged: .*rank_00000.*SHA-256", damaged, NoValidCheckpoint)
    (damaged / "state.json").unlink()
    refuse(r"--continue-from \S*damaged: .*state\.json", damaged, RunError)
    refuse(r"step_3: .*checkpoint of --output-dir", first, RunError, output_dir=first.parent.parent)
    for name, changes in {
        r"lora \(False .*True\)": dict(lora=True),
        r"osft \(False .*True\)": METHODS["osft"],
        "optimizer": dict(optimizer="adamw8bit"),
        "master-weights": dict(master_weights="bfloat16"),
    }.items():
        refuse(rf"--continue-from \S*step_3: .*other {name}", **changes)
    own = str(second / "checkpoints" / "step_1")
    refuse(r"--resume \S*step_1: .*newer checkpoints", output_dir=second, resume=own)
    refuse(r"--schedule-steps 6: .* 4 steps, after 3 .* 7: ", max_steps=4)
    other = FAMILIES["llama"].from_dict(FAMILIES["llama"].to_dict() | dict(num_hidden_layers=1, intermediate_size=56))
    model = save_tokenizer(save_model(other, tmp_path / "other"))
    refuse(r"step_3: .*mlp\.gate_proj\.weight .*\[56, 32\].*\[48, 32\]", model_name_or_path=str(model))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_adapters_belong_to_their_model(inputs, world, tmp_path):
    one = run(world, inputs, tmp_path / "one", "part_0", max_steps=1, lora=True)
    other = save_tokenizer(save_model(FAMILIES["llama"], tmp_path / "other", seed=5))
    with pytest.raises(ValueError, match=r"--continue-from \S*step_1: .*other model: "):
        run(
            world, inputs | dict(model_name_or_path=str(other)), tmp_path / "run", "part_1", max_steps=1, lora=True,
            continue_from=str(one / "checkpoints" / "step_1"),
        )  # fmt: skip


def test_a_schedule_that_the_first_run_does_not_fit_in_is_refused(inputs, world, tmp_path):
    with pytest.raises(ValueError, match=r"--schedule-steps 6: .* 7 steps "):
        run(world, inputs, tmp_path / "run", "part_0", max_steps=7)


@pytest.mark.long
def test_a_plan_says_where_the_run_begins(inputs, first, tmp_path, elsewhere):
    values = SHARED | {name: inputs[name] for name in ("model_name_or_path", "data_path")}
    values |= dict(output_dir=str(tmp_path / "run"), max_steps=STEPS, dry_run=True, continue_from=str(first))
    code, text = elsewhere(print_plan, values)
    assert code == ExitCode.DONE
    assert re.search(rf"^start: .*{re.escape(str(first))}, .* 3 steps$", text, re.MULTILINE)
    assert re.search(r"^schedule: .*step 1 .*step 4 of 6, .* 0\.00853553$", text, re.MULTILINE)
    code, text = elsewhere(print_plan, values | dict(optimizer="adamw8bit"))
    assert code == ExitCode.BAD_INPUT and re.search(r"optimizer \(adamw .* adamw8bit\)", text)
