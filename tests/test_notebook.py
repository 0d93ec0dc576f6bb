"""The Python API in a notebook: a kernel runs the cells, and starts the run as its child; also those of examples/."""

import asyncio
import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from heavy import need
from processes import ENV, ROOT, is_alive, list_children
from tiny_data import make_samples, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer

from mini_trainer.distributed.ending import ExitCode

nbclient, nbformat = need("nbclient"), need("nbformat")
need("ipykernel")

ARGUMENTS = """
from mini_trainer import TorchrunArgs, TrainingArgs, run_training
torchrun_args = TorchrunArgs(nproc_per_node=1)
training_args = TrainingArgs(
    model_path="{folder}/model", data_path="{folder}/data.arrow", process_data=False, ckpt_output_dir="{folder}/run",
    effective_batch_size=4, max_batch_len=512, learning_rate=1e-3, max_steps=100_000,
)
"""
RUN = "run_training(torchrun_args, training_args)"
MISSPELT = "TrainingArgs(efective_batch_size=4)"


def interrupt_after_a_step(client: nbclient.NotebookClient, run: Path, processes: list[int]) -> None:
    """The button of a notebook, pressed when the run has made a step; notes the run's processes."""
    metrics, deadline = run / "training_metrics_0.jsonl", time.monotonic() + 400
    while not (metrics.exists() and metrics.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    processes += list_children(client.km.provisioner.pid)
    asyncio.run(client.km.interrupt_kernel())


@pytest.mark.wide
def test_a_run_in_a_notebook_streams_is_interrupted_and_says_what_is_wrong(tmp_path):
    save_model(FAMILIES["llama"], tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    write_samples(tmp_path / "data.arrow", make_samples(32, vocab_size=VOCAB_SIZE, max_len=40))
    sources = (ARGUMENTS.replace("{folder}", str(tmp_path)), RUN, MISSPELT)
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(cells=cells), timeout=500, kernel_name="python3", allow_errors=True
    )
    processes: list[int] = []
    button = threading.Thread(target=interrupt_after_a_step, args=(client, tmp_path / "run", processes))
    button.start()
    with client.setup_kernel(env=ENV):
        for index, cell in enumerate(cells):
            client.execute_cell(cell, index)
    button.join()
    printed = ["".join(out.get("text", "") for out in cell.outputs if out.output_type == "stream") for cell in cells]
    errors = [[out.ename for out in cell.outputs if out.output_type == "error"] for cell in cells]
    assert errors == [[], ["KeyboardInterrupt"], ["TypeError"]], printed
    assert printed[1] == (tmp_path / "run.console_node0.log").read_text() and "step" in printed[1]
    assert json.loads((tmp_path / "run/exit.json").read_text())["code"] == ExitCode.STOPPED_BY_USER
    assert len(processes) == 1 and not any(map(is_alive, processes))
    assert "efective_batch_size" in cells[2].outputs[-1].evalue


NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
SHORT = "look_at_your_masks"  # the others train


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=[pytest.mark.long] * (path.stem != SHORT)) for path in NOTEBOOKS]
)
def test_a_notebook_runs(path, tmp_path):
    """In a folder that looks like the repository to it, so that nothing is left behind."""
    here = tmp_path / "examples" / "notebooks"
    here.mkdir(parents=True)
    shutil.copytree(ROOT / "examples" / "quickstart", tmp_path / "examples" / "quickstart")
    env = ENV | {"HOME": str(tmp_path), "MPLCONFIGDIR": str(Path.home() / ".cache" / "matplotlib")}
    notebook, place = nbformat.read(path, as_version=4), {"metadata": {"path": here}}
    nbclient.NotebookClient(notebook, timeout=500, kernel_name="python3", resources=place).execute(env=env)
