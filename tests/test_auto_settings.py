"""--max-tokens-per-gpu auto: all ranks take the same micro-batch, it has room, and the run is that of a fixed cap."""

import json
import platform
import re
import sys
from pathlib import Path

import pytest
import torch
from forked import run_forked
from in_process import train_forked, train_here
from processes import ROOT, flags, run, torchrun
from safetensors.torch import load_file
from small_runs import make_inputs
from tiny_data import read_lines

from mini_trainer.model.sharding import choose_resharding, is_worth_measuring
from mini_trainer.options import ShardingOptions, TrainOptions, group_options
from mini_trainer.options.doors import CHECKPOINTING
from mini_trainer.run import auto_settings
from mini_trainer.run.auto_settings import TOKEN_MULTIPLE, MemoryCounter, Probe, Room, extrapolate, find_largest
from mini_trainer.run.start import open_inputs
from mini_trainer.sampler import RunPosition

WHEN = ("forward", "backward")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict:
    return make_inputs(tmp_path_factory.mktemp("inputs"), "qwen3", num_samples=60) | dict(
        batch_size=16, learning_rate=1e-2, max_steps=4, export_dtype="float32", activation_checkpointing="none",
        checkpoint_every_steps=2,
    )  # fmt: skip


def outcome(output_dir: Path) -> tuple[list, dict[str, torch.Tensor], dict]:
    """Losses and gradient norms, weights, and training_params.json."""
    rows = read_lines(output_dir / "training_metrics_0.jsonl")
    (export,) = output_dir.glob("hf_format/samples_*/model.safetensors")
    return (
        [(row["loss"], row["grad_norm"], row["grad_accum"]) for row in rows],
        load_file(export),
        json.loads((output_dir / "training_params.json").read_text()),
    )


def check_same(a: Path, b: Path) -> None:
    (steps, weights, _), (other_steps, other_weights, _) = outcome(a), outcome(b)
    assert steps == other_steps and len(steps) == 4
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_what_has_room_is_on_the_line_through_the_last_probes():
    limit, fixed, slope = 10_010_000, 2_000_000, 1_000
    probes = [
        Probe(tokens, 0, excess_bytes=fixed + slope * tokens - limit, activation_bytes=500 + slope * tokens)
        for tokens in (500, 1_000, 2_000)
    ]
    assert find_largest(probes[:1], least=500, most=20_000) == 1_000
    nearly_full = Probe(500, 0, excess_bytes=-100_000, activation_bytes=500_000)  # twice as much has no room
    assert find_largest([nearly_full], least=500, most=20_000) == 600
    assert find_largest(probes, least=500, most=20_000) == 8_000 // TOKEN_MULTIPLE * TOKEN_MULTIPLE
    assert find_largest(probes, least=500, most=3_000) == 3_000
    assert find_largest(probes, least=8_005, most=20_000) == 8_005  # which has room, though a multiple has not
    assert find_largest(probes, least=8_011, most=20_000) == 8_010  # too little
    probes.append(Probe(9_000, 0, excess_bytes=990_000, activation_bytes=0))
    assert find_largest(probes, least=500, most=20_000) == 8_000 // TOKEN_MULTIPLE * TOKEN_MULTIPLE
    too_large = Probe(9_000, 0, excess_bytes=990_000, activation_bytes=0, bytes_per_token=slope)  # shows it by itself
    assert find_largest([too_large], least=500, most=9_000) == 8_000 // TOKEN_MULTIPLE * TOKEN_MULTIPLE


@pytest.mark.wide
def test_a_resumed_run_keeps_the_choice(inputs, world, tmp_path):
    cap = dict(max_tokens_per_gpu="auto", memory_budget_gb=1000.0)
    train_here(world, **inputs, **cap, output_dir=str(tmp_path / "whole"))
    params = outcome(tmp_path / "whole")[2]
    chosen = params["auto_settings"]["max_tokens_per_gpu"]
    assert params["options"]["max_tokens_per_gpu"] == chosen > 0
    tokens = [probe["tokens"] for probe in params["auto_settings"]["probes"]["none"]]
    assert tokens == sorted(set(tokens))
    train_here(world, **inputs | dict(max_steps=2, save_final_checkpoint=False, min_samples_per_checkpoint=1000), **cap,
               output_dir=str(tmp_path / "resumed"))  # fmt: skip
    train_here(world, **inputs, **cap, output_dir=str(tmp_path / "resumed"))
    starts = outcome(tmp_path / "resumed")[2]["starts"]
    assert starts[0]["auto_settings"] == starts[1]["auto_settings"]
    check_same(tmp_path / "whole", tmp_path / "resumed")
    train_here(world, **inputs | dict(max_steps=5), **cap | dict(memory_budget_gb=500.0),
               output_dir=str(tmp_path / "resumed"))  # fmt: skip
    last = json.loads((tmp_path / "resumed" / "training_params.json").read_text())["auto_settings"]
    assert last["given"]["memory_budget_gb"] == 500 and last["probes"] != starts[0]["auto_settings"]["probes"]


def test_too_little_memory_names_the_longest_sample(inputs, world, tmp_path):
    with pytest.raises(ValueError, match=r"--max-tokens-per-gpu auto: .* row \d+ of \S*data\.arrow"):
        train_here(world, **inputs, max_tokens_per_gpu="auto", memory_budget_gb=0.01, output_dir=str(tmp_path / "run"))


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")
def test_with_a_budget_freed_memory_is_given_back():
    code = """
import torch
from mini_trainer.distributed.devices import give_back_freed_memory, resident_memory
give_back_freed_memory()
torch.ones(5_000_000)  # a large block that is freed makes malloc keep smaller ones from then on
before = resident_memory()
blocks = [torch.ones(250_000) for _ in range(200)]
blocks = blocks[-1:]  # below which nothing can be given back
print((resident_memory() - before) / 2e8)
"""
    result = run([sys.executable, "-c", code])
    assert result.returncode == 0 and float(result.stdout) < 0.1, result.stderr


@pytest.mark.wide
@pytest.mark.slow
def test_two_ranks_agree_and_train_as_with_the_same_fixed_cap(inputs, tmp_path):
    inputs = inputs | dict(micro_batch_grad_sync="last")  # FSDP keeps gradients for itself
    cap = dict(max_tokens_per_gpu="auto", memory_budget_gb=1000)
    text = train_forked(2, **inputs, **cap, output_dir=tmp_path / "auto")
    chosen = outcome(tmp_path / "auto")[2]["auto_settings"]
    assert chosen["world_size"] == 2 and f"auto: --max-tokens-per-gpu {chosen['max_tokens_per_gpu']}" in text
    train_forked(2, **inputs, output_dir=tmp_path / "fixed", max_tokens_per_gpu=chosen["max_tokens_per_gpu"])
    check_same(tmp_path / "auto", tmp_path / "fixed")
    dry = flags(**inputs, **cap, output_dir=tmp_path / "dry", dry_run=True, plan_for="2")
    result = run_forked(0, "train.py", *dry)
    assert f"micro-batches of at most {chosen['max_tokens_per_gpu']:,} tokens" in result.stdout, result.stdout
    assert not (tmp_path / "dry").exists()


@pytest.mark.long
@pytest.mark.slow
def test_what_recomputes_least_and_has_room_is_taken(inputs, world, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "mini_trainer.run.auto_settings.resident_memory", lambda: 0
    )  # of which a tiny model is next to nothing
    monkeypatch.setattr("mini_trainer.run.auto_settings.PLENTY", 2)  # never: every probe is made
    goal, limit = 200, 2**60
    for name, mode, next_limit in (
        ("roomy", "none", lambda needed, activations: needed - 0.05 * activations),
        ("less", "selective", lambda needed, activations: needed - 0.05 * activations),
        ("least", "full", None),
    ):
        monkeypatch.setattr("mini_trainer.run.auto_settings.memory_limit", lambda *_, limit=limit: limit)
        train_here(world, **inputs | dict(max_tokens_per_gpu=goal, activation_checkpointing="auto"),
                   output_dir=str(tmp_path / name))  # fmt: skip
        params = outcome(tmp_path / name)[2]
        assert params["options"]["activation_checkpointing"] == mode
        check_same(tmp_path / name, tmp_path / "roomy")
        if next_limit is not None:
            probes = [Probe(**probe) for probe in params["auto_settings"]["probes"][mode]]
            limit = next_limit(extrapolate(probes, "bytes", goal), extrapolate(probes, "activation_bytes", goal))


@pytest.mark.parametrize(
    ("tokens", "seconds", "expected"),
    [
        ((1000,), (3.0,), "none"),  # all tokens have room: nothing else is tried
        ((100, 300, 900), (0.1, 0.31, 1.1), "none"),  # for each token
        ((100, 300, 900), (0.2, 0.3, 1.2), "selective"),
        ((100, 300, 900), (0.2, 0.6, 1.2), "full"),  # fixed costs of many small micro-batches
        ((0, 300, 900), (0.0, 0.6, 1.9), "selective"),  # nothing has room with the first
        ((0, 0, 0), (0.0, 0.0, 0.0), "full"),
    ],
)
def test_what_takes_least_time_for_a_token_is_taken(tokens, seconds, expected):
    rooms = {
        mode: Room(count, [Probe(count, 0, 0, 0, seconds=time)])
        for mode, count, time in zip(CHECKPOINTING, tokens, seconds, strict=False)
    }
    tried = []

    def find(mode: str) -> Room:
        tried.append(mode)
        return rooms[mode]

    mode, room = auto_settings.choose_mode(find, CHECKPOINTING, enough=1000, is_timed=True)
    assert (mode, room) == (expected, rooms[expected])
    assert tried == list(CHECKPOINTING[: len(tokens)])


def test_memory_that_was_freed_before_counts_when_it_is_taken_again():
    storage = torch.empty(1000).untyped_storage()  # as FSDP's gathered weights, first gathered in the start-up check
    storage.resize_(0)
    with MemoryCounter() as counter:
        storage.resize_(4000)
        assert counter.num_live == 4000
        storage.resize_(0)
    assert (counter.num_live, counter.num_peak) == (0, 4000)


def test_only_what_is_made_counts():
    weight = torch.ones(10, 5)  # already part of the process's memory when a probe begins
    with MemoryCounter() as counter:
        weight.t().mul_(2.0)
        assert counter.num_live == counter.num_peak == 0
        made = [(weight.t() @ weight).view(-1), torch.tensor([1.0, 2.0])]
        assert counter.num_live == sum(tensor.nbytes for tensor in made)
        assert counter.count(weight) is weight and counter.num_live == (50 + 25 + 2) * 4


@pytest.mark.parametrize(
    ("given", "left", "expected"),
    [
        ({}, 1000, ("never", "never")),
        ({}, 999, ("auto", "always")),
        (dict(reshard_after_forward="always"), 1000, (None, "never")),
        (dict(reshard_after_forward="never"), 0, (None, "never")),  # the peak has all weights
        (dict(reshard_after_forward="never"), -1, (None, "always")),
        (dict(reshard_after_backward="always"), 1000, ("never", None)),
        (dict(reshard_after_forward="always", reshard_after_backward="never"), 1000, (None, None)),
        ({}, None, ("auto", "always")),  # not measured
    ],
)
def test_weights_stay_gathered_where_all_of_them_have_room(given, left, expected):
    room = None if left is None else Room(100, [Probe(50, 0, 0, -left - 50), Probe(75, 0, 0, -left - 25)])
    sharding = ShardingOptions(**given)
    has_room = room is not None and auto_settings.has_room_gathered(room, sharding, weights_bytes=1000)
    chosen = choose_resharding(sharding, has_room=has_room)
    assert chosen == {f"reshard_after_{name}": v for name, v in zip(WHEN, expected, strict=True) if v is not None}


def test_a_single_rank_keeps_its_weights_and_others_only_what_was_measured():
    for is_whole, expected in ((True, ["never", "never"]), (False, ["auto", "always"])):
        unmeasured = choose_resharding(ShardingOptions(), has_room=is_whole)
        assert list(unmeasured.values()) == expected
        assert is_worth_measuring(unmeasured, torch.device("cuda")) == (not is_whole)
        assert not is_worth_measuring(unmeasured, torch.device("cpu"))


def test_room_for_weights_is_measured_with_a_fixed_number_of_tokens_on_a_gpu(inputs, world, tmp_path, monkeypatch):
    """On one rank under FSDP2, and with a CPU in the place of the GPU."""
    monkeypatch.setattr("mini_trainer.run.run_model.is_worth_measuring", lambda *_: True)
    monkeypatch.setattr("mini_trainer.run.auto_settings.memory_limit", lambda *_: 10**12)
    options = inputs | dict(max_tokens_per_gpu=64, reshard_after_backward="always", output_dir=str(tmp_path / "run"))
    train_here(world, **options)
    params = outcome(tmp_path / "run")[2]
    assert params["options"]["reshard_after_forward"] == params["auto_settings"]["reshard_after_forward"] == "never"
    assert params["options"]["max_tokens_per_gpu"] == 64


def test_auto_does_not_shorten_what_is_calibrated_or_scored(inputs, tmp_path):
    """On CPUs these have up to 8,192 tokens, also where no training sample is as long."""
    caps = []
    for given in (8192, "auto"):
        options = group_options(
            TrainOptions, **inputs | dict(max_tokens_per_gpu=given, output_dir=str(tmp_path / "run"))
        )
        opened = open_inputs(options, device=torch.device("cpu"), world_size=1, start=RunPosition())
        caps.append(opened.data_options.max_tokens_per_gpu)
    assert caps == [8192, 8192]


def test_both_can_be_auto(inputs, world, tmp_path):
    both = dict(max_tokens_per_gpu="auto", activation_checkpointing="auto", memory_budget_gb=1000.0)
    train_here(world, **inputs | both, output_dir=str(tmp_path / "auto"))
    params = outcome(tmp_path / "auto")[2]
    assert params["options"]["activation_checkpointing"] == "none"  # with which everything has room
    for settled in (params["options"], params["auto_settings"]):
        assert settled["reshard_after_forward"] == settled["reshard_after_backward"] == "never"
    cap = params["options"]["max_tokens_per_gpu"]
    train_here(world, **inputs | dict(max_tokens_per_gpu=cap), output_dir=str(tmp_path / "fixed"))
    fixed = outcome(tmp_path / "fixed")[2]["options"]
    assert (fixed["reshard_after_forward"], fixed["reshard_after_backward"]) == ("never", "never")
    check_same(tmp_path / "auto", tmp_path / "fixed")


WITHOUT_ROOM = """
import os, runpy
if os.environ.get("RANK", "0") == "{rank}" and ({is_hopeless} or "MINI_TRAINER_FEWER_TOKENS" not in os.environ):
    import torch
    step, calls = torch.optim.AdamW.step, []
    def fail_at_the_second(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory, injected")
        return step(*args, **kwargs)
    torch.optim.AdamW.step = fail_at_the_second
runpy.run_path("train.py", run_name="__main__")
"""


STARTING_OVER = """
import os, sys
from mini_trainer.distributed.ending import start_over
ends = os.pipe()
os.set_inheritable(ends[0], True)
def look(path, words):
    os.fstat(ends[0])  # OSError if it is closed: a thread of gloo's that waits on one ends the process
    print([os.get_inheritable(one) for one in (0, 1, 2, *ends)], os.environ["MINI_TRAINER_FEWER_TOKENS"])
    sys.stdout.flush()
    os._exit(0)
os.execv = look
start_over(64)
"""


def test_descriptors_close_before_the_threads_that_wait_on_them():
    done = run([sys.executable, "-c", STARTING_OVER])
    assert done.stdout.split("\n")[0] == "[True, True, True, False, False] 64", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "is_hopeless"), [(2, False), (0, True)])
def test_a_run_that_finds_no_room_starts_over_with_half_the_tokens_once(num_ranks, is_hopeless, inputs, tmp_path):
    script = tmp_path / "without_room.py"
    script.write_text(WITHOUT_ROOM.format(rank=num_ranks // 2, is_hopeless=is_hopeless))
    values = inputs | dict(max_tokens_per_gpu="auto", memory_budget_gb=100.0, output_dir=str(tmp_path / "run"))
    words = [script, *flags(**values)]
    command = torchrun(num_ranks, *words) if num_ranks else [sys.executable, *map(str, words)]
    done = run(command, env={"PYTHONPATH": str(ROOT)})
    outcome = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert done.stderr.count("starting over with --max-tokens-per-gpu") == 1, done.stderr
    assert (done.returncode, outcome["code"]) == ((9, 9) if is_hopeless else (0, 0)), done.stderr
    if not is_hopeless:
        params = json.loads((tmp_path / "run" / "training_params.json").read_text())
        half = int(re.search(r"starting over with --max-tokens-per-gpu (\d+)", done.stderr)[1])
        assert params["options"]["max_tokens_per_gpu"] == params["auto_settings"]["max_tokens_per_gpu"] == half
        assert len((tmp_path / "run" / "training_metrics_0.jsonl").read_text().splitlines()) == inputs["max_steps"]
