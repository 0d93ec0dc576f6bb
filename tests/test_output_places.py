"""Outputs of all programs: a file where a directory has to be is refused at once, and missing directories are made."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from evaluations import evaluate_here
from refusals import read_refusal
from small_runs import make_inputs
from tiny_data import write_jsonl

from mini_trainer.distributed.ending import RunError
from mini_trainer.distributed.world import World
from mini_trainer.generate import generate
from mini_trainer.options import group_options, tools
from mini_trainer.process_data import process_data
from mini_trainer.run import stages
from mini_trainer.tools.continual import continual
from mini_trainer.tools.export_gguf import export_gguf
from mini_trainer.tools.import_config import import_config
from mini_trainer.tools.merge_adapter import merge_adapter
from mini_trainer.tools.plot_metrics import plot_metrics

METRICS = '{"step": 1, "loss": 2.0, "total_samples": 4, "total_tokens": 40, "lr": 0.1}\n'


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> dict[str, str]:
    """Inputs by name: a model, rows, prompts, a run, another trainer's file."""
    root = tmp_path_factory.mktemp("inputs")
    inputs = make_inputs(root, "qwen3")
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    write_jsonl(root / "rows.jsonl", [{"messages": turns}] * 4)
    write_jsonl(root / "prompts.jsonl", [{"question": "Hi", "answer": "Ho"}])
    (root / "run").mkdir()
    (root / "run" / "training_metrics_0.jsonl").write_text(METRICS)
    data = {"datasets": [{"path": str(root / "rows.jsonl"), "type": "chat_template"}]}
    (root / "axolotl.yaml").write_text(yaml.safe_dump(data | {"base_model": inputs["model_name_or_path"]}))
    return {path.name: str(path) for path in root.iterdir()}


def call(name: str, given: dict[str, str], place: Path, world: World) -> None:
    """Runs a program that writes below `place`."""
    model = given["model"]
    rows = dict(input_file=(given["rows.jsonl"],), model_name_or_path=model, preview=0)

    def make_data(**outputs: str) -> None:
        process_data(group_options(tools.ProcessDataOptions, **rows, **outputs))

    calls: dict[str, Callable[[], object]] = {
        "evaluate": lambda: evaluate_here(world, place, model=model, data=given["data.arrow"]),
        "process-data": lambda: make_data(output_file=str(place / "d.arrow")),
        "process-data --shard": lambda: make_data(output_file=str(place / "d.arrow"), shard="1/2"),
        "process-data --preview-html": lambda: make_data(
            output_file=given["rows.jsonl"] + ".arrow", preview_html=str(place / "p.html")
        ),
        "generate": lambda: generate(
            group_options(
                tools.GenerateOptions, model=model, prompts=given["prompts.jsonl"], output=str(place / "a.jsonl"),
                max_new_tokens=1,
            ),
            world,
        ),
        "import-config": lambda: import_config(
            tools.ImportConfigOptions(config_file=given["axolotl.yaml"], output_dir=str(place))
        ),
        "plot-metrics": lambda: plot_metrics(tools.PlotOptions(runs=(given["run"],), output=str(place / "c.html"))),
    }  # fmt: skip
    calls[name]()


WRITERS = (
    *("evaluate", "process-data", "process-data --shard", "process-data --preview-html", "generate"),
    *("import-config", "plot-metrics"),
)


@pytest.mark.parametrize("name", WRITERS)
def test_programs_make_missing_directories_and_refuse_files_in_their_place(name, given, world, tmp_path):
    (tmp_path / "file").touch()
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        message = read_refusal(lambda place=place: call(name, given, place, world))
        assert message.startswith(f"--{'preview-html' if 'html' in name else 'output'}")
        assert message.endswith(f": {tmp_path / 'file'} is a file, not a directory")
    call(name, given, tmp_path / "new" / "newer", world)
    assert any((tmp_path / "new" / "newer").iterdir())


def test_what_cannot_be_made_is_refused_before_its_inputs_are_read(world, tmp_path):
    (tmp_path / "file").touch()
    place, is_file = tmp_path / "file" / "x", r": DIR/file is a file, not a directory"
    merged = tools.MergeAdapterOptions(adapter="gone", output_dir=str(place))
    for fail, option in (
        (lambda: merge_adapter(merged, world), "--output-dir DIR/file/x"),
        (lambda: stages.wait_for_lock(place), "output_dir: DIR/file/x"),
        (lambda: stages.wait_for_lock(tmp_path / "file"), "output_dir: DIR/file"),
        (
            lambda: continual(tools.ContinualOptions(paths=("a", "b"), compare=True, output=f"{place}.html")),
            "--output DIR/file/x.html",
        ),
    ):
        assert read_refusal(fail, folder=tmp_path) == option + is_file
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match=r"^--output .*file/x\.gguf: .*file is a file"):
        export_gguf(tools.ExportGgufOptions(model_name_or_path=str(tmp_path / "model"), output=f"{place}.gguf"))


def test_a_stage_that_failed_or_had_other_options_is_done(tmp_path, monkeypatch):
    outcomes = [(0, ""), (1, "broken")]
    monkeypatch.setattr(stages, "stop_at_sigterm", lambda: None)
    monkeypatch.setattr(stages.Runner, "start", lambda runner, words, log: outcomes.pop())
    runner = stages.Runner(tmp_path, num_processes=1)
    one, other = (stages.Stage(program="generate", folder=tmp_path / "a", options={"seed": i}) for i in range(2))
    with pytest.raises(RunError, match=r"^broken\n"):
        runner.run(one)
    assert not one.is_done
    runner.run(one)
    assert one.is_done
    with pytest.raises(ValueError, match="was run with other options before"):
        runner.run(other)
    runner.lock.release()
