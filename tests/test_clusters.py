"""Files for clusters: of the schema that they are for, with options that the scripts take."""

import shlex
from pathlib import Path

import yaml
from heavy import need

from command_line import parse_options
from options import TrainOptions

CLUSTERS = Path(__file__).parent.parent / "clusters"


def test_the_train_job_is_one_of_kubeflows_and_its_command_one_of_ours():
    manifest = yaml.safe_load((CLUSTERS / "kubeflow.yaml").read_text())
    read = need("kubeflow_trainer_api.models").TrainerV1alpha1TrainJob.from_dict(manifest)
    assert read.to_dict() == manifest  # what Kubeflow does not know would be missing
    trainer = manifest["spec"]["trainer"]
    assert trainer["command"] == ["torchrun", "/opt/mini_trainer/train.py"]
    assert "WORKDIR /opt/mini_trainer" in (CLUSTERS / "Dockerfile").read_text()
    assert parse_options(TrainOptions, trainer["args"]).output_dir.startswith("/shared/")


def test_skypilots_task_starts_training_with_options_that_there_are():
    task = yaml.safe_load((CLUSTERS / "skypilot.yaml").read_text())
    words = shlex.split(task["run"])
    options = parse_options(TrainOptions, words[words.index("train.py") + 1 :])
    (bucket,) = task["file_mounts"]
    assert options.output_dir.startswith(bucket) and all(path.startswith(bucket) for path in options.data.data_path)
