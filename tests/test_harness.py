"""EleutherAI's harness: tasks from files, what they depend on, and what is refused."""

import json
import re

import pytest
from evaluations import evaluate_here, write_task
from heavy import need
from tiny_models import FAMILIES, save_model, save_tokenizer

from mini_trainer.continual.experiment import find_harness_problems
from mini_trainer.continual.settings import SetSettings
from mini_trainer.distributed.ending import RunError
from mini_trainer.use.evaluation.harness import describe_task_file

need("lm_eval")


def test_what_a_task_depends_on_is_known_by_content(tmp_path):
    """Every file that the harness reads for the task changes its description, and no other does."""
    file = write_task(tmp_path / "lm", name="one", file="one.yaml")
    with file.open("a") as opened:
        opened.write("process_docs: !function scripts.clean.drop\n")
    (tmp_path / "lm" / "scripts").mkdir()
    module = tmp_path / "lm" / "scripts" / "clean.py"
    module.write_text("def drop(docs):\n    return docs\n")
    before = describe_task_file(file)
    (tmp_path / "lm" / "unrelated.yaml").write_text("task: other\n")
    assert before["name"] == "one" and describe_task_file(file) == before
    for path in (file, module, tmp_path / "lm" / "common.yml", tmp_path / "lm" / "rows.jsonl"):
        path.write_text(path.read_text() + "\n")
        after = describe_task_file(file)
        assert after != before, path
        before = after


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("group: all\ntask: [a, b]\n", "is a group: name the files"),
        ("doc_to_text: x\n", "names no 'task'"),
        ("- a\n", "'key: value'"),
        ("task: [a\n", "line 2: .*valid YAML"),
        ("task: a\ndoc_to_text: !unknown x\n", "'!unknown'"),
        ("include: [sub.yaml]\n", r"sub\.yaml: line 1: .*alias"),
        ("include: x.yaml\n", "includes itself"),
        ("include: none.yaml\n", r"none\.yaml: "),
    ],
)
def test_files_that_define_no_task_are_refused(text, reason, world, model, tmp_path):
    (tmp_path / "x.yaml").write_text(text)
    (tmp_path / "sub.yaml").write_text("task: &a [*a]\n")
    with pytest.raises(ValueError, match=f"--lm-eval .*{reason}"):
        evaluate_here(world, tmp_path / "out", model=str(model), lm_eval=str(tmp_path / "x.yaml"))


def test_unknown_tasks_are_refused_before_a_model_is_looked_for(world, tmp_path):
    reason = r"--lm-eval gsm9k: not a task or group of lm_eval [\d.]+; did you mean gsm8k\b"
    with pytest.raises(ValueError, match=reason):
        evaluate_here(world, tmp_path / "out", model="no/such", lm_eval="gsm9k")
    (problem,) = find_harness_problems([SetSettings(name=name, lm_eval=name) for name in ("gsm8k", "gsm9k")])
    assert re.match(reason.replace("--lm-eval", "lm_eval:"), problem)


def test_answers_are_not_kept_for_another_chat_template(world, model, tmp_path):
    tokenizer = save_tokenizer(save_model(FAMILIES["llama"], tmp_path / "model"))
    (tmp_path / "task.jsonl").write_text(json.dumps(dict(question="Hi", answer="Ho")) + "\n")
    options = dict(model=str(tokenizer), task=str(tmp_path / "task.jsonl"), max_new_tokens=2)
    evaluate_here(world, tmp_path / "out", **options)
    template = tokenizer / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "ASSISTANT"))
    with pytest.raises(RunError, match=r"other settings .*chat_template"):
        evaluate_here(world, tmp_path / "out", **options)
