"""Files for clusters: of the schema that they are for, with options that the scripts take."""

import re
import shlex
import subprocess
import sys
import tomllib

import pytest
import yaml
from heavy import need
from program import ROOT, list_sources

from mini_trainer.options import TrainOptions
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import ProcessDataOptions

CLUSTERS = ROOT / "examples" / "clusters"


def test_the_train_job_is_one_of_kubeflows_and_its_command_one_of_ours():
    manifest = yaml.safe_load((CLUSTERS / "kubeflow.yaml").read_text())
    read = need("kubeflow_trainer_api.models").TrainerV1alpha1TrainJob.from_dict(manifest)
    assert read.to_dict() == manifest  # what Kubeflow does not know would be missing
    trainer = manifest["spec"]["trainer"]
    assert trainer["command"] == ["torchrun", "/opt/mini_trainer/train.py"]
    assert "WORKDIR /opt/mini_trainer" in (CLUSTERS / "Dockerfile").read_text()
    assert parse_options(TrainOptions, trainer["args"]).output_dir.startswith("/shared/")


def test_the_image_s_user_has_a_number_and_may_write_to_the_volume():
    user, group = re.search(r"^USER (\d+):(\d+)$", (CLUSTERS / "Dockerfile").read_text(), re.MULTILINE).groups()
    manifest = yaml.safe_load((CLUSTERS / "kubeflow.yaml").read_text())
    (patch,) = manifest["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    context = job["template"]["spec"]["template"]["spec"]["securityContext"]
    assert context["runAsNonRoot"] and context["fsGroup"] == int(group) and int(user) > 0


def test_skypilots_task_starts_training_with_options_that_there_are():
    task = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
    words = shlex.split(task["run"])
    options = parse_options(TrainOptions, words[words.index("train.py") + 1 :])
    ((bucket, mount),) = task["file_mounts"].items()
    # A bucket without a cache cannot hold a run, and one with a cache only that of one node (run/preflight.py).
    assert (mount["mode"], task["num_nodes"]) == ("MOUNT_CACHED", 1)
    assert options.output_dir.startswith(bucket) and all(path.startswith(bucket) for path in options.data.data_path)


def test_the_image_installs_the_dependencies_of_the_extras_and_has_every_file_of_the_package():
    """Its command for the list of requirements, run as the shell in the image would."""
    text = (CLUSTERS / "Dockerfile").read_text()
    arguments = dict(re.findall(r"ARG (\w+)=(.*)", text))
    (program,) = re.findall(r'python -c "(.*?)" >', text, flags=re.DOTALL)
    for given in (arguments["EXTRAS"], "lora", ""):
        code = program.replace("\\\n", "").replace("${EXTRAS}", given)
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        extras = [project["optional-dependencies"][name] for name in given.split(",") if name]
        assert done.stdout.split("\n")[:-1] == sum(extras, project["dependencies"])
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    files = {name.partition("/")[0] for name in list_sources()}
    assert {"mini_trainer", "train.py"} <= files and not files & set(ignored)


@pytest.mark.parametrize("name", [path.name for path in CLUSTERS.glob("*.sbatch")])
def test_a_job_that_is_requeued_keeps_its_output(name):
    lines = (CLUSTERS / name).read_text().splitlines()
    assert {"#SBATCH --requeue", "#SBATCH --open-mode=append"} <= set(lines)


def test_a_task_of_the_array_makes_its_part(tmp_path):
    """The script as bash runs it, with a python that shows its words."""
    stub = tmp_path / "python"
    stub.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    stub.chmod(0o755)
    words = ["--input-file", "rows", "--output-file", "o.arrow", "--model-name-or-path", "m"]
    found = {}
    for name, given in (("first", {"SLURM_ARRAY_TASK_COUNT": "8"}), ("again", {"NUM_PARTS": "8"})):
        task = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "3", "SLURM_CPUS_PER_TASK": "5"}
        script = ["bash", str(CLUSTERS / "tokenize_array.sbatch"), *words]
        done = subprocess.run(script, env=task | given, capture_output=True, text=True, check=True)
        program, *shown = done.stdout.splitlines()
        assert program == "process_data.py"
        found[name] = parse_options(ProcessDataOptions, shown)
    assert found["first"] == found["again"]
    assert (found["first"].shard, found["first"].rows.num_proc) == ("3/8", 5)
