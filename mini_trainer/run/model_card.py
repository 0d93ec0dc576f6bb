"""The README.md of an export, in the hub's format: facts about the run and nothing else.

Written from the run's records: training_params.json and the metrics files. Only the last part of paths is included,
since cards are meant to be published.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers import AutoModelForImageTextToText, PreTrainedConfig

from mini_trainer.data.stores.model_files import CARD_FILE, name_model
from mini_trainer.data.stores.older_keys import add_older_keys
from mini_trainer.data.tokenized.by_row import sum_values
from mini_trainer.data.tokenized.mixture import name_sources
from mini_trainer.distributed.messages import hide_secrets
from mini_trainer.objectives.families.text_tower import is_multimodal
from mini_trainer.options import TrainOptions, iterate_fields, list_validation_data
from mini_trainer.options.reading import read_metrics, read_text
from mini_trainer.run.inputs import RunInputs
from mini_trainer.run.record import read_params, to_json
from mini_trainer.run.training_log import METRICS_FILE, VALIDATION_FILE, format_metric
from mini_trainer.sampler import RunPosition

LIBRARIES = {"finetune": "transformers", "adapter": "peft"}  # by an export's relation to its base model
NOT_TOLD = ("output_dir", "config", "model_name_or_path", "model_revision", "data_path", "validation_data_path",
            "continue_from", "track", "push_to_hub", "upload_to")  # fmt: skip
TEMPLATE = """---
{{ card_data }}
---

# {{ title }}

{{ training }}

## Usage

```python
{{ usage }}
```

## Data

{{ data }}

## Losses

{{ losses }}

## Options

Options that differ from their defaults:

{{ options }}

## Versions

{{ versions }}
"""
# Arguments of a pipeline by its task, and the part of its result to show; other tasks take a text.
CALLS = {
    "text-generation": '[{"role": "user", "content": "Hello"}], max_new_tokens=64)[0]["generated_text"][-1]["content"]',
    "image-text-to-text": 'text=[{"role": "user", "content": [{"type": "image", "path": "picture.png"},'
    ' {"type": "text", "text": "What is it?"}]}], max_new_tokens=64)',
}
TEXT = '"A text")'
COMPLETE = '"Hello", max_new_tokens=64)[0]["generated_text"]'  # by a model without a chat template


def make_card(inputs: RunInputs, position: RunPosition) -> str:
    """The text of README.md for the model at `position`."""
    output_dir = Path(inputs.values["output_dir"])
    params = read_params(output_dir)
    values = inputs.values | params["options"]  # as recorded: `mini-trainer export` leaves out some of them
    steps = list(read_rows(output_dir / METRICS_FILE, position.step))
    validations = list(read_rows(output_dir / VALIDATION_FILE, position.step))
    last = validations[-1] if validations and validations[-1]["step"] == position.step else {}
    measured = {name: last[name] for name in inputs.objective.metrics if last.get(name) is not None}
    head = describe_head(output_dir.absolute().name, inputs, values, measured)
    card = ModelCard.from_template(
        head,
        template_str=TEMPLATE,
        title=f"{head.model_name}, after {position.num_samples:,} samples",
        training=describe_training(inputs, params, position),
        usage=describe_usage(
            head, inputs.values["push_to_hub"], has_template=inputs.tokenizer.chat_template is not None
        ),
        data="\n".join(describe_data(inputs, params)),
        losses=describe_losses(steps, measured),
        options=table(("option", "value"), list_options(values)),
        versions=table(("", ""), list(params["versions"].items())) + describe_readers(inputs.config),
    )
    return hide_secrets(f"{card}\n")


def read_rows(path: Path, last_step: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of a metrics file up to `last_step`, but not damaged ones; none if there is no file."""
    return (row for _, _, row in read_metrics(path) if row is not None and row["step"] <= last_step)


def describe_head(name: str, inputs: RunInputs, values: Mapping[str, Any], measured: dict[str, float]) -> ModelCardData:
    """The card's metadata. Models and data sets are named only if they are on the hub, which would look for them."""
    config, method, base = inputs.config, inputs.method, inputs.options.model.model_name_or_path
    rows = values["input_dataset"]
    sees_images = is_multimodal(config) and type(config) in AutoModelForImageTextToText._model_mapping
    task = "image-text-to-text" if sees_images else inputs.objective.pipeline_tag
    held_out = ", ".join(name_validation_data(values)) if measured else ""
    results = [
        EvalResult(task_type=task, dataset_type=held_out, dataset_name=held_out, metric_type=metric, metric_value=value)
        for metric, value in measured.items()
        if math.isfinite(value)
    ]
    return ModelCardData(
        **({} if Path(base).exists() else dict(base_model=base, base_model_relation=method.relation)),
        **({} if rows is None or Path(rows).exists() else dict(datasets=rows.partition(":")[0])),
        **find_license(Path(inputs.model_dir)),
        library_name=LIBRARIES[method.relation],
        model_name=name,
        eval_results=results or None,
        pipeline_tag=task,
        tags=["mini_trainer", *method.tags],
    )


def find_license(model_dir: Path) -> dict[str, str]:
    """The licence that the base model's card names, as metadata; empty if there is none."""
    try:
        base = ModelCard(read_text(model_dir / CARD_FILE), ignore_metadata_errors=True).data
    except (OSError, ValueError, yaml.YAMLError):  # no card, or one without metadata that can be read
        return {}
    named = {name: getattr(base, name, None) for name in ("license", "license_name", "license_link")}
    return {name: value for name, value in named.items() if isinstance(value, str)}


def describe_usage(head: ModelCardData, repository: str | None, *, has_template: bool) -> str:
    """Python that runs the model by transformers' pipeline: from the hub, or in the export's directory."""
    where = repository if repository is not None and "/" in repository else "."
    task = head.pipeline_tag
    call = COMPLETE if task == "text-generation" and not has_template else CALLS.get(task, TEXT)
    begin, end = f'model = pipeline("{task}", model="{where}")', f"print(model({call})"
    if head.library_name != "peft":
        return f"from transformers import pipeline\n\n{begin}\n{end}"
    if task not in CALLS:
        return f"from transformers import pipeline  # needs peft: pip install peft\n\n{begin}\n{end}"
    # A pipeline takes the base model's stop tokens.
    stops = f'model.model.generation_config = GenerationConfig.from_pretrained("{where}")'
    imports = "from transformers import GenerationConfig, pipeline  # needs peft: pip install peft"
    return f"{imports}\n\n{begin}\n{stops}\n{end}"


def describe_training(inputs: RunInputs, params: dict[str, Any], position: RunPosition) -> str:
    o, origin = inputs.options.model, inputs.origin
    before = origin and f"{origin.num_steps:,} steps in other runs, to the checkpoint `{origin.digest}`"
    base = f"`{name_model(o.model_name_or_path)}`"
    if o.model_revision is not None:
        base += f", revision `{o.model_revision}`"
    commit = f", commit `{params['git_commit']}`" if params["git_commit"] else ""
    rows = [
        ("base model", f"{base}, fingerprint `{params['identity']['model']}`"),
        ("objective", inputs.objective.title),
        ("method", inputs.method.title),
        ("steps", f"{position.step:,} of {inputs.batching}"),
        ("samples", f"{position.num_samples:,}"),
        ("tokens", f"{position.num_tokens:,}, trained and masked"),
        ("ranks", f"{params['world_size']} x {params['device']}"),
        *([("trained before", before)] if origin is not None else []),
        ("starts", f"{len(params['starts'])}, the first {params['starts'][0]['started']}"),
    ]
    return f"Trained by mini_trainer{commit}.\n\n" + table(("", ""), rows)


def describe_data(inputs: RunInputs, params: dict[str, Any]) -> Iterator[str]:
    """Yields parts about each data set, and the digests of the files that it was made from, if known."""
    data = inputs.data
    rows = []
    for i, (name, source) in enumerate(zip(data.names, data.sources, strict=True)):
        tokens = sum_values(source.lengths, source.kept)
        rows.append((f"`{shorten_paths(name)}`", f"{len(source.kept):,}", f"{tokens:,}", f"{data.shares[i]:.1%}"))
    yield table(("data set", "samples", "tokens", "share of samples drawn"), rows)
    yield f"\nFingerprint of all: `{params['identity']['data']}`."
    if made_from := [made for sidecar in inputs.sidecars if sidecar for made in sidecar.get("sources", [])]:
        rows = [(f"`{PurePath(made['file']).name}`", f"`{made['sha256']}`") for made in made_from]
        yield "\n" + table(("made from", "SHA-256"), rows)
    if names := name_validation_data(params["options"]):
        yield f"\nValidation data: {', '.join(f'`{name}`' for name in names)}."


def name_validation_data(values: Mapping[str, Any]) -> list[str]:
    """Names of the sets that the run validates on, by its options."""
    paths = list_validation_data(values["validation_data_path"], values["data_path"])
    return list(map(shorten_paths, name_sources(list(map(Path, paths)))))


def describe_readers(config: PreTrainedConfig) -> str:
    """A note for a model whose positions no older transformers can read; otherwise empty."""
    if add_older_keys(config.to_dict()):
        return ""
    return "\n\nNeeds transformers 5: versions before it know no such positions, and would answer otherwise."


def describe_losses(steps: list[dict[str, Any]], measured: dict[str, float]) -> str:
    if not steps:
        return "No step has been completed."
    parts = [f"Training loss: {steps[0]['loss']:.4f} in the first step, {steps[-1]['loss']:.4f} in the last."]
    if measured:
        rows = [(name.replace("_", " "), format_metric(name, value)) for name, value in measured.items()]
        parts.append(table(("validation", ""), rows))
    return "\n\n".join(parts)


def list_options(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and value of each option that differs from its default."""
    rows = []
    for option, _ in iterate_fields(TrainOptions):
        value = to_json(values[option.name])
        if option.name not in NOT_TOLD and value != to_json(option.default):
            rows.append((f"`{option.name}`", f"`{json.dumps(shorten_paths(value))}`"))
    return rows


def shorten_paths(value: Any) -> Any:
    """Removes the directories from absolute paths."""
    if isinstance(value, list):
        return [shorten_paths(item) for item in value]
    return PurePath(value).name if isinstance(value, str) and PurePath(value).is_absolute() else value


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
