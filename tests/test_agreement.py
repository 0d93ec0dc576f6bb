"""Ranks that would not do the same end together at the start, with what differs; late ranks are named."""

import copy
import hashlib
import json
import random
import re
import shutil
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from breadth import wide
from data_runs import tokenize_rows
from forked import run_forked, succeed
from processes import ENV, ROOT, flags, free_port, torchrun_node
from safetensors.torch import save_file
from tiny_data import make_samples, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, change_json, save_model, save_tokenizer
from tiny_pairs import write_pairs
from transformers import AutoTokenizer

import mini_trainer
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed import agreement as program
from mini_trainer.distributed.agreement import (
    Account,
    describe_differences,
    find_kinds,
    fingerprint_code,
    hash_groups,
    list_versions,
)
from mini_trainer.distributed.meeting import describe_missing
from mini_trainer.distributed.messages import MOST_RUNS, describe_ranks
from mini_trainer.options import (
    TrainOptions,
    flag_name,
    flatten_options,
    group_options,
    list_differing_options,
    list_facts,
    list_identifying_options,
)
from mini_trainer.run.start import open_inputs
from mini_trainer.run.start_checks import describe_data, describe_inputs, describe_start
from mini_trainer.sampler import RunPosition

NUM_RANKS = 1024


def read_ranks(text: str) -> set[int]:
    """The ranks that a message names: "rank 3", "ranks 0-7, 9"."""
    found = re.fullmatch(r"ranks? ([\d, -]+)", text)
    runs = [[int(end) for end in run.split("-")] for run in found[1].split(", ")]
    return {rank for run in runs for rank in range(run[0], run[-1] + 1)}


def test_ranks_are_named_in_runs():
    for seed in range(50):
        ranks = sorted(random.Random(seed).sample(range(60), 1 + seed % 30))
        text = describe_ranks(ranks)
        if " and " not in text:
            assert read_ranks(text) == set(ranks)
    assert describe_ranks([3]) == "rank 3"
    assert describe_ranks([0, 1, 2, 9]) == "ranks 0-2, 9"
    assert describe_ranks(range(0, 100, 2)).endswith(f" and {50 - MOST_RUNS} more")


@pytest.mark.parametrize("seed", range(8))
def test_of_a_thousand_ranks_every_difference_is_named_with_its_values_and_ranks(seed):
    """The oracle is a plain loop over all ranks."""
    chance = random.Random(seed)
    odd = {chance.randrange(NUM_RANKS): {"--seed": "7"}}
    if seed % 2:
        first = chance.randrange(0, NUM_RANKS - 8)
        odd |= {rank: {"--learning-rate": "0.05", "--seed": "42"} for rank in range(first, first + 8)}
    common = {"--seed": "42", "--learning-rate": "0.01", "--batch-size": "8"}
    entries = [{"options": common | odd.get(rank, {}), "code": {"torch": "2.13"}} for rank in range(NUM_RANKS)]
    kinds = find_kinds([hash_groups(groups) for groups in entries])
    assert sorted(rank for ranks in kinds.values() for rank in ranks) == list(range(NUM_RANKS))
    message = describe_differences([Account(rank, f"node{rank // 8}", entries[rank]) for rank in kinds], kinds)
    for group, names in (("options", common), ("code", {"torch": ""})):
        for name in names:
            values: dict[str, set[int]] = {}
            for rank, groups in enumerate(entries):
                values.setdefault(groups[group][name], set()).add(rank)
            line = re.search(rf"\n  {group}: {name}: (.*)", message)
            assert (line is not None) == (len(values) > 1)
            if line is not None:
                told = [
                    re.fullmatch(r"(\S+) on (ranks? [\d, -]+) \(.*?(node\d+)\)", part) for part in line[1].split("; ")
                ]
                assert {part[1]: read_ranks(part[2]) for part in told} == values
                assert {part[3] for part in told} == {f"node{min(ranks) // 8}" for ranks in values.values()}


def test_ranks_that_all_differ_are_counted_and_agreeing_ones_are_one_kind():
    entries = [{"data": {"size": str(rank)}} for rank in range(NUM_RANKS)]
    kinds = find_kinds([hash_groups(groups) for groups in entries])
    message = describe_differences([Account(rank, "here", entries[rank]) for rank in range(4)], kinds)
    assert f"ranks 4-{NUM_RANKS - 1}" in message
    assert len(message) < 1000
    assert find_kinds([hash_groups(entries[0])] * NUM_RANKS) == {0: list(range(NUM_RANKS))}


def test_missing_ranks_are_named_with_the_hosts_that_are_known():
    present = [rank for rank in range(NUM_RANKS) if rank // 8 != 2 and rank != 1003]
    arrived = "".join(f"{rank} node{rank // 8}\n" for rank in present)
    text = describe_missing(arrived, NUM_RANKS, 8)
    assert re.findall(r"ranks? [\d-]+|node ?\d+|9 of 1024", text) == [
        "ranks 16-23", "node 2", "rank 1003", "node125", "9 of 1024"
    ]  # fmt: skip
    assert "120 more nodes" in describe_missing("", NUM_RANKS, 8)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("agreement")
    save_tokenizer(save_model(FAMILIES["llama"], root / "model"))
    samples = make_samples(20, vocab_size=VOCAB_SIZE)
    write_samples(root / "data.arrow", samples)
    write_samples(root / "reversed.arrow", samples[::-1])
    write_samples(root / "other.arrow", make_samples(20, vocab_size=VOCAB_SIZE, seed=1))
    return root


def describe(root: Path, world, **options: object) -> dict[str, str]:
    """What a rank with these options would send to the others, as one mapping."""
    given = dict(model_name_or_path=str(root / "model"), data_path=str(root / "data.arrow"), max_steps=2)
    given |= dict(output_dir=str(root / "run"), max_tokens_per_gpu=64)
    made = group_options(TrainOptions, **given | options)
    inputs = open_inputs(made, device=world.device, world_size=1, start=RunPosition())
    inputs.errors.raise_all()
    groups = describe_start(flatten_options(made), world) | describe_inputs(inputs, verifies=True)
    return {f"{group}: {name}": value for group, items in groups.items() for name, value in items.items()}


def list_differences(first: dict[str, str], second: dict[str, str]) -> set[str]:
    return {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)}


def test_every_option_is_compared_or_listed_as_free():
    free, facts = list_differing_options(), list_facts(TrainOptions)
    compared = {flag_name(name) for name in facts} - set(map(flag_name, free))
    assert {flag_name(name) for name in list_identifying_options()} <= compared
    assert {"--max-steps", "--subset", "--data-weights", "--context-parallel", "--max-tokens-per-gpu"} <= compared
    assert {name for name, each in facts.items() if each.is_path} <= set(free)
    docs = (ROOT / "docs" / "reference" / "running.md").read_text()
    assert [name for name in free if f"`{flag_name(name)}`" not in docs] == []


def test_the_same_content_in_other_places_agrees(root, world, tmp_path):
    shutil.copytree(root / "model", tmp_path / "model")
    shutil.copy(root / "data.arrow", tmp_path / "copy.arrow")
    (tmp_path / "model" / "model.safetensors").unlink()  # only rank 0 reads the weights
    there = dict(model_name_or_path=str(tmp_path / "model"), data_path=str(tmp_path / "copy.arrow"))
    there |= dict(output_dir=str(tmp_path / "run"), osft_cache_dir="there", num_proc=3, logging_level="ERROR")
    assert list_differences(describe(root, world), describe(root, world, **there)) == set()


def test_each_thing_that_a_rank_reads_is_compared(root, world, tmp_path):
    here = describe(root, world)
    data = "data: --data-path, data set 1, "
    for name in ("reversed", "other"):
        found = list_differences(here, describe(root, world, data_path=str(root / f"{name}.arrow")))
        assert f"{data}SHA-256 of sampled blocks" in found
    weighed = dict(data_path=(str(root / "data.arrow"), str(root / "other.arrow")))
    swapped = dict(data_path=weighed["data_path"][::-1])
    assert list_differences(describe(root, world, **weighed), describe(root, world, **swapped)) != set()
    validated = [
        describe(root, world, validation_data_path=str(root / f"{name}.arrow")) for name in ("reversed", "other")
    ]
    assert all(name.startswith("data: --validation-data-path") for name in list_differences(*validated))
    assert list_differences(*validated) != set()
    asked = []
    for text in ("a", "b"):
        (tmp_path / f"{text}.jsonl").write_text(json.dumps({"prompt": text}) + "\n")
        given = dict(validation_data_path=str(root / "data.arrow"), sample_prompts=str(tmp_path / f"{text}.jsonl"))
        asked.append(describe(root, world, **given))
    assert list_differences(*asked) == {"data: --sample-prompts"}
    osft = dict(osft=True, osft_unfreeze_rank_ratio=0.5, osft_basis="activations")
    remembered = [
        describe(root, world, **osft, osft_calibration_data=str(root / f"{name}.arrow")) for name in ("data", "other")
    ]
    assert list_differences(*remembered) == {"method: --osft-calibration-data"}


def test_each_setting_of_a_rank_is_compared(world, monkeypatch):
    def start(at=world, **options: object) -> dict[str, str]:
        made = group_options(TrainOptions, model_name_or_path="", output_dir="", **options)
        groups = describe_start(flatten_options(made), at)
        return {f"{group}: {name}": value for group, items in groups.items() for name, value in items.items()}

    here = start()
    for changes in (dict(learning_rate=0.5), dict(resume="none"), dict(continue_from="run"), dict(seed=7)):
        assert list_differences(here, start(**changes)) == {f"options: {flag_name(*changes)}"}
    assert start(resume="a", continue_from="c") == start(resume="b", continue_from="d")
    assert list_differences(here, start(replace(world, device=torch.device("meta")))) == {"environment: device"}
    for name in ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG",
                 "ATEN_CPU_CAPABILITY", "MKL_CBWR", "TORCHDYNAMO_DISABLE"):  # fmt: skip
        with monkeypatch.context() as context:
            context.setenv(name, "7")
            assert list_differences(here, start()) == {f"environment: {name}"}
    monkeypatch.setattr("platform.python_version", lambda: "2.7")
    assert list_differences(here, start()) == {"code: python"}


def test_each_fact_of_a_data_set_is_compared(root):
    data = TokenizedData(root / "data.arrow")
    data.sidecar = {"format": 1, "file": {"sha256": "a" * 64}, "tokenizer_dir": "here"}
    here = describe_data(data, is_verified=True)
    for change, name in (
        (dict(sidecar=data.sidecar | {"file": {"sha256": "b" * 64}}), "SHA-256 in the sidecar"),
        (dict(sidecar=data.sidecar | {"format": 2}), "other keys of the sidecar"),
        (dict(sidecar={**data.sidecar, "tokenizer_dir": None}), "other keys of the sidecar"),
        (dict(kept=data.kept[1:]), "samples"),
    ):
        other = copy.copy(data)
        vars(other).update(change)
        assert name in list_differences(here, describe_data(other, is_verified=True))
    moved = copy.copy(data)
    moved.sidecar = data.sidecar | {"versions": {}, "sources": [], "tokenizer_dir": "there"}
    assert describe_data(moved, is_verified=True) == here
    assert here["SHA-256"] == hashlib.sha256((root / "data.arrow").read_bytes()).hexdigest()[:16]


@pytest.mark.parametrize("changed", ["config.json", "generation_config.json", "tokenizer_config.json", "chat template"])
def test_each_file_of_the_model_that_a_rank_reads_is_compared(changed, root, world, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(root / "model", model)
    if changed == "chat template":
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = "{{ messages }}"
        tokenizer.save_pretrained(model)
        expected = "model: tokenizer"
    else:
        changes = {"config.json": {"rms_norm_eps": 0.5}, "generation_config.json": {"top_k": 7}}
        change_json(model / changed, **changes.get(changed, {"pad_token": "a"}))
        expected = "model: tokenizer" if "tokenizer" in changed else f"model: --model-name-or-path, {changed}"
    found = list_differences(describe(root, world), describe(root, world, model_name_or_path=str(model)))
    assert found == {expected}


def test_of_an_adapter_every_rank_reads_the_config(root, world, tmp_path):
    for name, rank in (("a", 4), ("b", 8)):
        (tmp_path / name).mkdir()
        config = dict(peft_type="LORA", task_type="CAUSAL_LM", r=rank, lora_alpha=8, target_modules=["q_proj"])
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(config))
        save_file({}, tmp_path / name / "adapter_model.safetensors")
    found = [describe(root, world, lora=True, lora_adapter=str(tmp_path / name)) for name in ("a", "b")]
    assert list_differences(*found) == {"method: --lora-adapter, adapter_config.json"}


def test_of_a_reference_model_every_rank_reads_the_config_and_the_path_may_differ(root, world, tmp_path):
    write_pairs(tmp_path / "pairs.arrow", root / "model", size=8)
    for name, change in (("same", {}), ("other", {"rms_norm_eps": 0.5})):
        shutil.copytree(root / "model", tmp_path / name)
        change_json(tmp_path / name / "config.json", **change)

    def describe_with(**own: str) -> dict[str, str]:
        return describe(root, world, objective="preference", data_path=str(tmp_path / "pairs.arrow"), **own)

    first, same, other = (describe_with(reference_model=str(tmp_path / name)) for name in ("same", "same", "other"))
    shutil.move(tmp_path / "same", tmp_path / "moved")
    assert first == same == describe_with(reference_model=str(tmp_path / "moved"))
    assert list_differences(same, other) == {"model: --reference-model, config.json"}
    assert "model: --reference-model, config.json" in list_differences(same, describe_with())


# The sidecar's hash.


def tokenize(root: Path, output: Path, *, rows: list[int]) -> Path:
    source = output.with_suffix(".rows.jsonl")
    source.write_text("".join(json.dumps({"prompt": f"Count {n}.", "completion": f" {n}"}) + "\n" for n in rows))
    return tokenize_rows(root / "model", source, output)


def read_recorded(data: Path) -> dict:
    return json.loads(Path(f"{data}.meta.json").read_text())["file"]


@pytest.mark.parametrize("ending", ["arrow", "parquet", "jsonl"])
def test_the_sidecar_has_the_files_size_and_hash_which_the_order_of_rows_changes(ending, root, tmp_path):
    data = tokenize(root, tmp_path / f"a.{ending}", rows=list(range(30)))
    assert read_recorded(data) == dict(size=data.stat().st_size, sha256=hashlib.sha256(data.read_bytes()).hexdigest())
    again = tokenize(root, tmp_path / f"b.{ending}", rows=list(range(30)))
    assert read_recorded(again) == read_recorded(data)
    swapped = tokenize(root, tmp_path / f"c.{ending}", rows=[1, 0, *range(2, 30)])
    assert read_recorded(swapped)["sha256"] != read_recorded(data)["sha256"]


def test_a_data_set_without_a_recorded_hash_opens_and_one_of_another_size_does_not(root, tmp_path):
    data = tokenize(root, tmp_path / "a.arrow", rows=list(range(30)))
    other = tokenize(root, tmp_path / "b.arrow", rows=[*range(29), 29_000_000_000])
    sidecar = Path(f"{data}.meta.json")
    content = json.loads(sidecar.read_text())
    shutil.copy(other, data)
    with pytest.raises(ValueError, match=r"a\.arrow: [\d,]+ bytes.*a\.arrow\.meta\.json"):
        TokenizedData(data)
    del content["file"]  # as in one made by hand
    sidecar.write_text(json.dumps(content))
    assert len(TokenizedData(data).lengths) == 30


# Real ranks.


def run_differing(root: Path, tmp_path: Path, first: list[str], second: list[str], **common: object) -> str:
    """What two ranks print of which each has words of its own; both must have failed."""
    given = dict(model_name_or_path=root / "model", output_dir=tmp_path / "run", max_tokens_per_gpu=64) | common
    result = run_forked(
        2, "tests/workers/by_rank.py", "train.py", *flags(**given), ",", *first, ",", *second, timeout=120
    )
    assert result.returncode != 0, result.stderr
    assert not (tmp_path / "run" / "training_metrics_0.jsonl").exists()
    return result.stderr


def check_told(stderr: str, *differences: str) -> None:
    """Every rank has printed the same message with these lines."""
    host = socket.gethostname()
    for prefix in (r"^error: ", r"^(?:\[rank 1\] error|error: rank 1 on \S+): "):
        found = re.search(rf"{prefix}(.*?running\.md.*?)$", stderr, re.MULTILINE | re.DOTALL)
        assert found is not None, stderr
        for difference in differences:
            name, first, second = difference.split("|")
            assert f"{name}: {first} on rank 0 ({host}); {second} on rank 1 ({host})" in found[1], stderr


@pytest.mark.slow
def test_ranks_with_other_options_end_at_once(root, tmp_path):
    first = flags(seed=42, learning_rate=1e-2, batch_size=8, max_steps=2)
    second = flags(seed=7, learning_rate=5e-2, batch_size=4, max_steps=5, context_parallel=2)
    stderr = run_differing(root, tmp_path, first, second, data_path=root / "data.arrow")
    check_told(stderr, "--seed|42|7", "--learning-rate|0.01|0.05", "--batch-size|8|4", "--max-steps|2|5",
               "--context-parallel|None|2")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("planning_rank", [wide(0), 1])
def test_a_rank_that_only_plans_ends_all_at_once(planning_rank, root, tmp_path):
    own = [",", *["--dry-run"] * (planning_rank == 0), ",", *["--dry-run"] * (planning_rank == 1)]
    words = flags(model_name_or_path=root / "model", data_path=root / "data.arrow", output_dir=tmp_path / "run")
    words += flags(max_steps=1, max_tokens_per_gpu=64)
    result = run_forked(2, "tests/workers/by_rank.py", "train.py", *words, *own, timeout=60)
    assert result.returncode != 0
    values = [str(rank == planning_rank) for rank in range(2)]
    host = socket.gethostname()
    told = f"--dry-run: {values[0]} on rank 0 ({host}); {values[1]} on rank 1 ({host})"
    assert (result.stdout + result.stderr).count(told) == 2, result.stdout + result.stderr


@pytest.mark.slow
def test_a_mistyped_flag_of_one_rank_is_told_once(root, tmp_path):
    stderr = run_differing(root, tmp_path, [], ["--sed", "7"], data_path=root / "data.arrow", max_steps=1)
    (line,) = [line for line in stderr.splitlines() if re.search(r"--sed\b", line)]
    assert line.startswith("[rank 1] error: ") and "--seed" in line, stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reversed", wide("other"), "nothing"])
def test_ranks_with_other_data_end_at_once(name, root, tmp_path):
    words = [["--data-path", str(root / f"{name}.arrow")] for name in ("data", name)]
    stderr = run_differing(root, tmp_path, *words, max_steps=2, batch_size=8)
    if name == "nothing":  # which one rank notices before there is anything to compare
        assert f"error: rank 1 on {socket.gethostname()}: --data-path {root / 'nothing.arrow'}: " in stderr
        return
    check_told(stderr)
    assert re.search(r"data: --data-path, data set 1, SHA-256 of sampled blocks: \w{16} on rank 0", stderr)


@pytest.mark.slow
def test_a_rank_that_is_late_is_named_and_ends_the_run(root, tmp_path):
    common = dict(data_path=root / "data.arrow", max_steps=2, start_timeout=4)
    stderr = run_differing(root, tmp_path, [], ["sleep=100"], **common)
    where = f"rank 1 ({socket.gethostname()}) (1 of 2 ranks missing)"
    assert re.search(rf"^\[rank 0\] .*{re.escape(where)}, .*--start-timeout 4$", stderr, re.MULTILINE), stderr
    assert re.search(rf"^error: {re.escape(where)} .* 4 s \(--start-timeout\)", stderr, re.MULTILINE), stderr


def test_a_line_of_code_and_a_library_of_another_version_differ(tmp_path, monkeypatch):
    here, versions = fingerprint_code(), dict(list_versions())
    shutil.copytree(ROOT / "mini_trainer", tmp_path / "mini_trainer")
    for path in (*ROOT.glob("*.py"), ROOT / "pyproject.toml"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(program, "ROOT", tmp_path)
    monkeypatch.setattr(mini_trainer, "__file__", str(tmp_path / "mini_trainer" / "__init__.py"))
    assert fingerprint_code() == here
    with (tmp_path / "sampler.py").open("a") as file:
        file.write("# another version\n")
    assert fingerprint_code() != here
    write_metadata(tmp_path, "numba", "99.0")
    monkeypatch.syspath_prepend(tmp_path)
    assert dict(list_versions()) == versions | {"numba": "99.0"} != versions


def write_metadata(folder: Path, name: str, version: str) -> None:
    metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.wide
@pytest.mark.slow
def test_a_node_with_other_code_libraries_and_config_is_named_on_both(root, tmp_path):
    """Two torchruns: the second one's checkout has a comment more, and its Python another release of numba."""
    ignored = shutil.ignore_patterns(".git", ".venv", "results", "__pycache__", "docs")
    there = Path(shutil.copytree(ROOT, tmp_path / "there", ignore=ignored))
    with (there / "sampler.py").open("a") as file:
        file.write("# another version\n")
    write_metadata(there, "numba", "99.0")
    options = flags(
        model_name_or_path=root / "model", data_path=root / "data.arrow", output_dir=tmp_path / "run", max_steps=2
    )
    command = torchrun_node(2, free_port(), "train.py", *options)
    agents = [
        subprocess.Popen(command, cwd=folder, env=ENV | {"PYTHONPATH": str(folder)}, stderr=subprocess.PIPE, text=True)
        for folder in (ROOT, there)
    ]
    for agent in agents:
        _, stderr = agent.communicate(timeout=200)
        assert agent.returncode != 0
        assert re.search(r"\n  code: mini_trainer: \w{16} on rank \d \(.*\); \w{16} on rank \d", stderr), stderr
        assert re.search(r"\n  code: numba: [\d.]+ on rank \d \(.*\); [\d.]+ on rank \d", stderr)
        assert "99.0" in stderr


@pytest.mark.long
@pytest.mark.slow
def test_ranks_start_under_a_low_soft_limit_of_open_files(root, tmp_path):
    train = ["train.py", *flags(model_name_or_path=root / "model", data_path=root / "data.arrow", max_steps=1)]
    succeed(4, "tests/workers/few_files.py", "26", "1024", *train, "--output-dir", tmp_path / "soft", timeout=120)


@pytest.mark.long
@pytest.mark.slow
def test_a_plan_of_ranks_with_other_options_says_so(root, tmp_path):
    words = flags(model_name_or_path=root / "model", data_path=root / "data.arrow", output_dir=tmp_path / "run")
    own = [",", "--batch-size", "8", ",", "--batch-size", "4"]
    result = run_forked(2, "tests/workers/by_rank.py", "train.py", *words, "--max-steps", "1", "--dry-run", *own)
    assert result.returncode != 0
    assert "options: --batch-size: 8 on rank 0" in result.stdout, result.stderr
