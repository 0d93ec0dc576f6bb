"""Start-up: programs import what they use, after their options are read, and the collector does not scan imports."""

import gc
import json

import pytest
from processes import ROOT, flags, run_and_list
from start_up import PROGRAMS

from mini_trainer.distributed.process import pause_collector, resume_collector, without_collector

MODEL = "qwen3"

# Libraries that a text model's first step does not need, nor its tokenizer, nor an answer.
UNUSED = {
    *("bitsandbytes", "datasets", "liger_kernel", "matplotlib", "mlflow", "pandas", "peft", "tensorboard", "torchao"),
    *("torch._inductor.compile_fx", "trl", "vllm", "wandb"),
}
SLOW = {"datasets", "numba", "numpy", "pandas", "pyarrow", "scipy", "sympy", "tokenizers", "torch", "transformers"}
# Modules that no other program needs.
OWN = {
    f"mini_trainer.{name}"
    for name in ("continual.experiment", "use.evaluation.results", "tools.importers.conversion",
                 "use.inference.prompts", "run.start", "tools.sweep.search", "api.launch")
}  # fmt: skip
MOST_COLLECTIONS = 2  # of all objects; without a pause there are eight in train.py


def find_loaded(found: dict, names: set[str]) -> set[str]:
    modules = set(found["modules"])
    assert {"json", "sys"} <= modules
    return names & modules


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_imports_nothing_slow(program, tmp_path):
    found = run_and_list(tmp_path / "report.json", program, "--help")
    assert not find_loaded(found, SLOW | OWN)


def test_every_program_is_among_those_measured():
    scripts = {path.relative_to(ROOT).as_posix() for path in [*ROOT.glob("*.py"), *ROOT.glob("mini_trainer/**/*.py")]}
    assert {path for path in scripts if "parse_options(" in (ROOT / path).read_text()} == {
        *PROGRAMS,
        "mini_trainer/__main__.py",
        "mini_trainer/options/command_line.py",
        "mini_trainer/tools/slurm_job.py",
    }


@pytest.mark.long
@pytest.mark.slow
def test_a_first_step_imports_only_what_it_uses(inputs, tmp_path):
    words = flags(**inputs, output_dir=tmp_path / "run", batch_size=8, max_tokens_per_gpu=64, learning_rate=1e-3,
                  max_steps=1)  # fmt: skip
    found = run_and_list(tmp_path / "report.json", "train.py", *words)
    unused = OWN - {"mini_trainer.run.start"} | {"mini_trainer.data.packers.images", "mini_trainer.run.plan.planner"}
    assert not find_loaded(found, UNUSED | unused)
    used = {"mini_trainer.data.packers.texts", "torch", "mini_trainer.run.start"}
    assert find_loaded(found, used) == used
    assert found["full_collections"] <= MOST_COLLECTIONS and found["collects"]


@pytest.mark.long
@pytest.mark.slow
def test_a_tokenized_row_and_an_answer_import_only_what_they_use(inputs, tmp_path):
    chat, report = tmp_path / "chat.jsonl", tmp_path / "report.json"
    chat.write_text(json.dumps({"messages": [{"role": r, "content": "a b"} for r in ("user", "assistant")]}))
    model = inputs["model_name_or_path"]
    words = flags(input_file=chat, output_file=tmp_path / "data.arrow", model_name_or_path=model)
    found = run_and_list(report, "process_data.py", *words, "--chat-template", "chatml")
    # transformers' tokenizers import torch, which this program does not.
    assert not find_loaded(
        found, UNUSED | OWN | {"mini_trainer.model.build", "numba", "scipy", "sympy", "torch.distributed.tensor"}
    )
    assert found["collects"]
    words = flags(model=model, prompts=chat, output=tmp_path / "answers.jsonl", max_new_tokens=1)
    found = run_and_list(report, "generate.py", *words)
    others = ("data.tokenized.reader", "model.optim.optimizers", "model.scoring.data_scores")
    unused = {f"mini_trainer.{name}" for name in others} | OWN - {"mini_trainer.data.rows.prompts"}
    assert not find_loaded(found, UNUSED | unused | {"numba"})
    assert found["full_collections"] <= MOST_COLLECTIONS and found["collects"]


def test_a_pause_within_a_pause_ends_with_the_outer_one():
    assert gc.isenabled()
    with without_collector():
        with without_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_what_was_made_during_a_pause_is_never_scanned():
    num_frozen = gc.get_freeze_count()
    pause_collector()
    made = [[] for _ in range(10_000)]
    assert not gc.isenabled()
    resume_collector()
    assert gc.isenabled() and gc.get_freeze_count() >= num_frozen + len(made)
