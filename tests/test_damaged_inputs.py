"""Files and directories that are not what they should be: refused by name, in one line, or cleaned up."""

import os
import re
import shutil
import socket
import subprocess
from itertools import combinations, pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from breadth import long, wide
from forked import ForkedJob
from in_process import print_plan, train_here, train_once
from processes import flags
from refusals import refuse
from safetensors.torch import load_file, save_file
from sklearn.utils.class_weight import compute_class_weight
from small_runs import OPTIONS
from tiny_classifiers import CLASSIFIERS, make_class_samples, save_classifier, write_classified
from tiny_data import make_samples, write_samples
from tiny_models import VOCAB_SIZE

from mini_trainer.data.columns.base import DataTask
from mini_trainer.data.rows.files import find_sources
from mini_trainer.data.rows.labelled import read_known_labels
from mini_trainer.data.rows.parts import Part, read_results, write_part
from mini_trainer.data.rows.report import Totals
from mini_trainer.data.rows.rows import ChunkResult
from mini_trainer.data.rows.split import SideResult
from mini_trainer.data.stores.disk import check_output_dir, remove_directory, remove_leftovers, written_aside
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData, read_sidecar
from mini_trainer.distributed.ending import ExitCode, describe_error
from mini_trainer.model.methods.lora_layers import list_others
from mini_trainer.model.stored_tensors import check_finite
from mini_trainer.objectives.classes import choose_class_weights
from mini_trainer.options.command_line import find_config
from mini_trainer.options.option_files import read_yaml
from mini_trainer.run.checkpoint_files import chunk_range, find_shards
from mini_trainer.run.checkpointing import group_state
from mini_trainer.tools.verify import find_records
from mini_trainer.use.evaluation.harness import read_config

HOST = socket.gethostname()
DEEP = "[" * 100_000


def train_refused(world, inputs: dict, output_dir: Path, **options: object) -> str:
    with pytest.raises((ValueError, OSError)) as error:
        train_here(world, **(OPTIONS | dict(max_steps=1) | inputs | dict(output_dir=str(output_dir)) | options))
    assert "\n" not in str(error.value)
    return str(error.value)


# Data.


def test_data_without_a_trained_token_is_refused(inputs, world, tmp_path):
    short = [(ids, [-100] * len(ids)) for ids, _ in make_samples(8, vocab_size=VOCAB_SIZE, max_len=20)]
    none = str(write_samples(tmp_path / "none.arrow", short))
    only_long = str(write_samples(tmp_path / "only_long.arrow", [*short, ([5] * 60, [-100] + [5] * 59)]))
    for *paths, options in (
        (none, {}),
        (inputs["data_path"], none, {}),
        (only_long, dict(max_tokens_per_gpu=40, drop_overlong=True)),
        (only_long, dict(subset="2", seed=0)),
    ):
        message = train_refused(world, inputs, tmp_path / "run", data_path=tuple(paths), **options)
        assert re.search(f"--data-path {paths[-1]}: its (\\d+ kept )?samples have no trained tokens", message)
    assert not (tmp_path / "run" / "training_params.json").exists()


@pytest.mark.parametrize("of_tokens", [False, True])
@pytest.mark.parametrize("weights", [(), (2, 1)])
def test_balanced_weights_are_scikit_learns_of_the_samples_that_are_drawn(of_tokens, weights, tmp_path):
    model = save_classifier(CLASSIFIERS["bert"], tmp_path / "model", of_tokens=of_tokens, num_labels=3)
    sources, targets = [], []
    for name, count in (("a", 30), ("b", 30)):
        samples = make_class_samples(count, of_tokens=of_tokens, seed=len(sources))
        sources.append(TokenizedData(write_classified(tmp_path / f"{name}.arrow", samples, model, of_tokens=of_tokens)))
        targets.append([own for _, own, _ in samples])
    data = Mixture(sources, weights=weights)
    data.fit_to(25, drop_overlong=True)
    data.take_subset(12, seed=0)
    times = weights or (1, 1)  # each set keeps 12, so that weights are how often a sample is drawn
    drawn = [targets[i][row] for i, source in enumerate(sources) for row in source.kept for _ in range(times[i])]
    classes = np.concatenate(drawn)
    expected = compute_class_weight("balanced", classes=np.arange(3), y=classes[classes >= 0])
    found = choose_class_weights(("balanced",), data.task, data.count_labels)
    assert found == pytest.approx(expected, rel=1e-12)


def test_multi_label_counts_are_those_of_the_kept_rows_and_weights_have_to_train_some_class(tmp_path):
    model = save_classifier(CLASSIFIERS["bert"], tmp_path / "model", num_labels=4)
    given = dict(label_type="multi", num_labels=4)
    samples = make_class_samples(30, **given)
    data = Mixture([TokenizedData(write_classified(tmp_path / "a.arrow", samples, model, **given))])
    data.take_subset(9, seed=1)
    counts, num_targets = data.count_labels()
    kept = np.array([samples[row][1] for row in data.kept])
    assert counts.tolist() == kept.sum(axis=0).tolist() and num_targets == 9
    balanced = choose_class_weights(("balanced",), data.task, data.count_labels)
    assert balanced == pytest.approx((kept == 0).sum(axis=0) / kept.sum(axis=0))
    task = DataTask("sequence-classification", "single", ("a", "b"), 2)
    with pytest.raises(ValueError, match=r"--class-weights 0 1: every class in the data has weight 0"):
        choose_class_weights(("0", "1"), task, lambda: (np.array([5.0, 0.0]), 5))


def test_a_part_of_which_one_token_changed_is_not_joined(tmp_path):
    part, ids = Part(tmp_path, 1, 1), np.arange(100, dtype=np.int32)
    write_part(part, [ChunkResult([SideResult(ids, Totals(0))], b"", [], 0)], dict)
    (read,) = read_results([part])
    np.testing.assert_array_equal(read.sides[0].samples, ids)
    content = part.rows.read_bytes()
    part.rows.write_bytes(content.replace(ids.tobytes(), ids[::-1].tobytes()))
    with pytest.raises(ValueError, match=r"part 1/1: .*\.rows is damaged \(its hash"):
        list(read_results([part]))


# YAML.

TENFOLD = [(b, f"[{', '.join([f'*{a}'] * 10)}]") for a, b in pairwise("abcdefg")]
LAUGHS = "a: &a [x, x]\n" + "".join(f"{name}: &{name} {value}\n" for name, value in TENFOLD)
MERGES = "a: &a {k: 1}\n" + "".join(f"{name}: &{name}\n  <<: {value}\n" for name, value in TENFOLD)
BAD_YAML = [
    ("seed: 1\n? [a, b]\n: 3\n", "line 2: .*key is a list"),
    ("? {a: b}\n: 3\n", "line 1: .*key is a mapping"),
    ("seed: " + "[" * 3000 + "]" * 3000, "line 1: .*nested"),
    ("".join(" " * i + "a:\n" for i in range(1200)), r"line \d+: .*nested"),
    (LAUGHS, "aliases .* 100,000"),
    (MERGES, "aliases .* 100,000"),
    ("a: &a [1, *a]\n", "line 1: .*anchor"),
    ("seed: !!timestamp 2024-13-45\n", "line 1: .*'2024-13-45'"),
    ("a: 1\nseed: " + "9" * 5000, "line 2: .*'999"),
    ("seed: *nope\n", "line 1: .*'nope'"),
    ("a: 1\na: 2\n", "line 2: .*repeated: a"),
    ("a: !!python/object/apply:os.getcwd []\n", r"line 1: .*os\.getcwd"),
    ("- a\n", "'key: value' .*list"),
]


@pytest.mark.parametrize(("text", "expected"), BAD_YAML, ids=range(len(BAD_YAML)))
def test_bad_yaml_gets_one_line_with_the_file(text, expected, tmp_path, capfd):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match=f"^--config run.yaml: .*{expected}") as error:
        read_yaml(tmp_path / "run.yaml", named="--config run.yaml")
    assert "\n" not in str(error.value)
    argv = flags(model_name_or_path="m", data_path="d.arrow", output_dir="o", config=tmp_path / "run.yaml")
    assert re.search(expected, refuse(argv, capfd))


def test_good_yaml_is_as_pyyaml_reads_it_and_dates_stay_texts(tmp_path):
    text = "a: &x {b: [1, 2.5, null, yes, text], c: {d: 1e3}}\nmore:\n  <<: *x\n  b: 3\nagain: *x\n"
    (tmp_path / "a.yaml").write_text(text + "on: 2024-13-45\nlimit: 1:30:00\n")
    expected = yaml.safe_load(text) | {True: "2024-13-45", "limit": "1:30:00"}
    assert read_yaml(tmp_path / "a.yaml", named="a") == expected


def test_yaml_of_the_harness_may_have_its_tag_and_is_checked_otherwise(tmp_path):
    (path := tmp_path / "task.yaml").write_text("task: x\nprocess_docs: !function utils.process\n")
    assert read_config(path) == ({"task": "x", "process_docs": {"!function": "utils.process"}}, [path])
    path.write_text(LAUGHS)
    with pytest.raises(ValueError, match=r"task\.yaml: line"):
        read_config(path)


def test_a_path_that_is_not_utf8_is_refused_also_if_a_directory_holds_it(capfd, tmp_path):
    path = os.fsdecode(b"caf\xe9")
    message = refuse(["--model-name-or-path", "m", "--data-path", path, "--output-dir", "o"], capfd)
    assert "caf\\udce9: not UTF-8" in message
    (tmp_path / f"{path}.jsonl").touch()
    with pytest.raises(ValueError) as error:
        find_sources([str(tmp_path)])
    code, message, _ = describe_error(error.value)
    assert code == ExitCode.BAD_INPUT and message.startswith(f"{tmp_path}/caf\\udce9.jsonl: not UTF-8 text; rename ")


@pytest.mark.parametrize("use", [find_config, find_sources, read_known_labels, check_output_dir, find_records])
def test_a_name_that_no_file_can_have_is_a_users_mistake(use, capfd):
    with pytest.raises((ValueError, OSError)) as error:
        use({find_config: "x" * 300, read_known_labels: "x" * 300, find_sources: ["x" * 300]}.get(use, Path("x" * 300)))
    code, message, trace = describe_error(error.value)
    assert code == ExitCode.BAD_INPUT and "name too long: 'xxx" in message and not trace
    assert "name too long: 'xxx" in refuse(["--config", "x" * 300], capfd)


# JSON, links and leftovers.


@pytest.mark.parametrize("text", ["[]", "3", "null", '"a"', "{}", '{"identity": []}', "{", DEEP])
def test_a_directory_whose_params_are_of_another_form_gets_one_message(text, inputs, world, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "training_params.json").write_text(text)
    message = train_refused(world, inputs, tmp_path / "run")
    assert message.startswith(f"--output-dir {tmp_path / 'run'} ") and "training_params.json" in message
    assert (tmp_path / "run" / "training_params.json").read_text() == text


def test_a_file_in_place_of_the_output_directory_is_refused(inputs, world, elsewhere, tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        reason = f"--output-dir {place}: {tmp_path / 'file'} is a file, not a directory"
        assert train_refused(world, inputs, place) == reason
        _, plan = elsewhere(print_plan, OPTIONS | inputs | dict(output_dir=str(place), max_steps=1))
        assert f"- {reason}\n" in plan


@pytest.mark.parametrize("text", ["[]", "3", "{", DEEP, '{"num_samples": "many"}', '{"sources": [1]}'])
def test_a_sidecar_of_another_form_is_named(text, tmp_path):
    (tmp_path / "data.arrow.meta.json").write_text(text)
    with pytest.raises(ValueError, match=r"data\.arrow\.meta\.json: "):
        read_sidecar(tmp_path / "data.arrow")


@pytest.fixture(scope="module")
def two_steps(inputs, world, tmp_path_factory) -> Path:
    return train_once(tmp_path_factory, world, **OPTIONS | inputs, max_steps=2)


DAMAGED = product(("manifest.json", "state.json", "training_params.json"), ("[]", "3", "{", DEEP))
ALWAYS = [("manifest.json", "{"), ("manifest.json", DEEP), ("state.json", "[]"), ("training_params.json", "[]")]


@pytest.mark.parametrize(("name", "text"), [case if case in ALWAYS else wide(*case) for case in DAMAGED])
def test_damaged_json_of_a_checkpoint_or_its_run(text, name, two_steps, inputs, world, tmp_path):
    given = OPTIONS | inputs | dict(output_dir=str(tmp_path / "run"))
    shutil.copytree(two_steps, tmp_path / "run")
    path = tmp_path / "run" / name if name.startswith("tr") else tmp_path / "run" / "checkpoints" / "step_2" / name
    path.write_text(text)
    train_here(world, **given, max_steps=3)  # from step 1, or with the run's earlier starts left out
    assert (tmp_path / "run" / "checkpoints" / "step_3").is_dir()
    assert (tmp_path / "run" / "checkpoints" / "damaged_step_2").is_dir() == (not name.startswith("tr"))


def test_links_in_place_of_checkpoints_are_refused_and_never_followed(two_steps, inputs, world, tmp_path):
    given = OPTIONS | inputs | dict(output_dir=str(tmp_path / "run"))
    shutil.copytree(two_steps, tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_2"
    shutil.move(checkpoint, tmp_path / "elsewhere")
    checkpoint.symlink_to(tmp_path / "elsewhere")
    message = train_refused(world, given, tmp_path / "run", max_steps=3)
    assert message.startswith(f"{checkpoint} ") and "symbolic link" in message
    checkpoint.unlink()
    shutil.copytree(tmp_path / "elsewhere", checkpoint)
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "manifest.json").symlink_to(tmp_path / "elsewhere" / "manifest.json")
    train_here(world, **given, max_steps=3)
    assert (checkpoint.parent / "damaged_step_2").is_dir()


def test_links_are_removed_and_what_they_lead_to_stays(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    for name in (".writing_step_3", "step_1"):
        (tmp_path / name).symlink_to(tmp_path / "other")
    remove_leftovers(tmp_path)
    remove_directory(tmp_path / "step_1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other"] and (tmp_path / "other" / "file").exists()


def test_parts_of_killed_processes_are_removed_and_those_of_others_stay(tmp_path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = [f".data[1].arrow.{HOST}.{pid}.part" for pid in (gone.pid, os.getppid(), "x")]
    names += [f".data[1].arrow.n2.{gone.pid}.part", f".other.{HOST}.{gone.pid}.part"]
    for name in names:
        (tmp_path / name).touch()
    with written_aside(tmp_path / "data[1].arrow") as (aside,):
        aside.touch()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == sorted([*names[1:], "data[1].arrow"])


# Weights.


def damage(path: Path, value: float) -> str:
    tensors = load_file(path)
    name = sorted(name for name, tensor in tensors.items() if tensor.ndim == 2)[-1]
    tensors[name][1, 1] = value
    save_file(tensors, path, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value, inputs, world, tmp_path):
    shutil.copytree(inputs["model_name_or_path"], tmp_path / "model")
    name = damage(tmp_path / "model" / "model.safetensors", value)
    message = train_refused(world, inputs | dict(model_name_or_path=str(tmp_path / "model")), tmp_path / "run")
    assert f"--model-name-or-path {tmp_path / 'model'}: {name} has 1 " in message


def test_an_adapter_that_is_not_finite_is_named(inputs, world, tmp_path):
    lora = dict(lora=True, lora_rank=2, lora_alpha=4.0, lora_export="adapter")
    train_here(world, **OPTIONS, **inputs, **lora, max_steps=1, output_dir=str(tmp_path / "run"))
    (adapter,) = (tmp_path / "run" / "hf_format").rglob("adapter_model.safetensors")
    name = damage(adapter, float("nan"))
    given = lora | dict(lora_adapter=str(adapter.parent), skip_verification=True)
    assert f"{name} has 1 NaN" in train_refused(world, inputs, tmp_path / "next", **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_only_what_is_not_finite_is_refused(dtype):
    check_finite(torch.full((70_000,), 400.0).to(dtype), "large", where="here")  # its sum is beyond float16
    with pytest.raises(ValueError, match=r"here: x has 1 NaN .* 3 "):
        check_finite(torch.tensor([1.0, float("nan"), 2.0]).to(dtype), "x", where="here")


# Names, looked up once.


def test_names_and_shards_are_found_as_by_looking_through_all():
    params = ["layers.1.q.weight", "q.weight", "layers.11.q.weight", "norm"]
    names = [f"optimizer/{key}/{name}" for name in params for key in ("step", "exp_avg", "exp_avg_sq")]
    found = group_state([*(f"model/{name}" for name in params), *names])
    for name in params:
        naive = [saved.split("/")[1] for saved in names if saved.endswith(f"/{name}")]
        assert found[name] == naive
    for size, num_shards in product((0, 1, 5, 8, 13), (1, 2, 3, 8)):
        for start, end in combinations(range(size + 1), 2):
            shards = find_shards({"dim": 0, "shape": [size]}, num_shards, [start], [end - start])
            ranges = [chunk_range(size, shard, num_shards) for shard in range(num_shards)]
            naive = [i for i, (low, high) in enumerate(ranges) if max(low, start) < min(high, end)]
            assert [i for i in shards if ranges[i][0] < ranges[i][1]] == naive


def test_modules_beside_the_chosen_ones():
    model = torch.nn.ModuleDict({"a": torch.nn.ModuleDict({"b": torch.nn.Linear(1, 1)}), "ab": torch.nn.Linear(1, 1)})
    model["c"] = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    names = [f"{name}." for name, _ in model.named_modules() if name]
    for chosen in (["a.b"], ["a"], ["ab", "c.1"], []):
        given = [f"{name}." for name in chosen]
        naive = [name[:-1] for name in names if not any(c.startswith(name) or name.startswith(c) for c in given)]
        assert list_others(model, chosen) == naive


# The output directory.


@pytest.mark.slow
@pytest.mark.parametrize("how", ["moved", wide("removed"), long("made anew")])
def test_a_directory_that_is_moved_or_removed_ends_the_run_and_is_not_made_anew(how, inputs, tmp_path):
    output_dir = tmp_path / "run"
    argv = ["train.py", *flags(**inputs, **(OPTIONS | dict(max_steps=100_000)), output_dir=output_dir)]
    job = ForkedJob(2, argv, output_dir)
    try:
        job.wait_for_step(3)
        os.rename(output_dir, tmp_path / "elsewhere")
        if how == "removed":
            shutil.rmtree(tmp_path / "elsewhere")
        if how == "made anew":
            output_dir.mkdir()
        job.wait_until_gone()
    finally:
        job.kill()
    # A run may look before its directory is removed.
    allowed = [f"moved to {tmp_path / 'elsewhere'}", *(["removed"] if how == "removed" else [])]
    log = job.log.read_text()
    errors = [line for line in log.splitlines() if line.startswith(f"error: --output-dir {output_dir} ")]
    assert any(what in line for what in allowed for line in errors)
    assert "Traceback" not in log
    assert not output_dir.exists() or list(output_dir.iterdir()) == []
