"""torchrun --nnodes MIN:MAX: machines leave and join, and each start of the ranks meets by itself."""

import json
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from breadth import long
from forked import succeed
from processes import ENV, ROOT, count_steps, flags, free_port, is_listening, list_children, name_node, wait_until
from small_runs import read_rows
from tiny_data import make_samples, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer

from mini_trainer.distributed.meeting import Start


def meet_all(store: dist.Store, world_size: int, *, order: list[int]) -> list[Start]:
    """The ranks of one start, which arrive in this order."""
    starts, threads = {}, []

    def arrive(rank: int) -> None:
        starts[rank] = Start(store, rank, world_size)
        assert starts[rank].is_complete(30)

    for rank in order:
        assert all(thread.is_alive() for thread in threads), "a rank did not wait for the others"
        threads.append(threading.Thread(target=arrive, args=(rank,)))
        threads[-1].start()
        threads[-1].join(0.3)
    for thread in threads:
        thread.join()
    return [starts[rank] for rank in range(world_size)]


@pytest.mark.parametrize("order", [[0, 1, 2], long([2, 1, 0])])
def test_each_start_in_one_store_waits_for_its_own_ranks(order):
    """The store is torchrun's, and stays there when torchrun starts the ranks again, on as many machines or others."""
    store = dist.HashStore()
    Start(store, 0, 3).is_complete(0.1)  # a start that its ranks did not live to complete
    found = [meet_all(store, 3, order=order), meet_all(store, 3, order=order), meet_all(store, 1, order=[0])]
    found.append(meet_all(store, 3, order=order))
    assert all(len({start.name for start in ranks}) == 1 for ranks in found)
    assert len({ranks[0].name for ranks in found}) == 4
    for number, ranks in enumerate(found):
        ranks[-1].store.set("value", str(number))
    assert [ranks[0].store.get("value").decode() for ranks in found] == ["0", "1", "2", "3"]


def read_world_sizes(output_dir: Path) -> list[int]:
    """The number of ranks in each start of the run."""
    path = output_dir / "training_params.json"
    return [start["world_size"] for start in json.loads(path.read_text())["starts"]] if path.exists() else []


@pytest.mark.slow
@pytest.mark.long
def test_a_machine_that_dies_and_returns_trains_on_with_the_losses_of_one_process(tmp_path):
    output_dir, log = tmp_path / "elastic", tmp_path / "log"
    options = dict(
        model_name_or_path=save_tokenizer(save_model(FAMILIES["qwen3"], tmp_path / "model")),
        data_path=write_samples(tmp_path / "data.arrow", make_samples(200, vocab_size=VOCAB_SIZE)),
        batch_size=100, max_tokens_per_gpu=1000, learning_rate=1e-3, lr_scheduler="constant", adam_eps=1e-6,
        checkpoint_every_steps=10,
    )  # fmt: skip
    wait_for = partial(wait_until, seconds=300, said=log.read_text)
    port = free_port()
    meeting = ["--nnodes=1:2", "--max-restarts=3", "--rdzv-conf=last_call_timeout=5", *name_node(2, port)[1:]]
    words = ["train", *meeting, *flags(**options, output_dir=output_dir, max_steps=100_000)]
    machines = []

    def add_machine() -> None:
        command = [sys.executable, "-m", "mini_trainer", *words]
        with log.open("a") as file:
            machines.append(subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=file, stderr=file))

    try:
        add_machine()
        wait_for(lambda: is_listening(port))  # the first one hosts the rendezvous, and stays
        add_machine()
        wait_for(lambda: read_world_sizes(output_dir) == [2] and count_steps(output_dir) > 20)
        for pid in (machines[1].pid, *list_children(machines[1].pid)):
            os.kill(pid, signal.SIGKILL)
        wait_for(lambda: read_world_sizes(output_dir) == [2, 1])
        add_machine()
        wait_for(lambda: read_world_sizes(output_dir) == [2, 1, 2])
        num_steps = count_steps(output_dir)
        wait_for(lambda: count_steps(output_dir) > num_steps + 10)
        (output_dir / "stop").touch()
        assert [machines[i].wait(60) for i in (0, 2)] == [10, 10], log.read_text()
    finally:
        for machine in machines:
            machine.kill()
    rows = read_rows(output_dir)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    succeed(0, "train.py", *flags(**options, output_dir=tmp_path / "plain", max_steps=len(rows)))
    expected = [row["loss"] for row in read_rows(tmp_path / "plain")]
    assert [row["loss"] for row in rows] == pytest.approx(expected, rel=1e-4)
