"""The README.md of an export, in the hub's format, with its loss curve: facts about the run and nothing else.

Written from the run's records: training_params.json and the metrics files. Only the last part of paths is included,
since cards are meant to be published.
"""

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from huggingface_hub import ModelCardData
from transformers import AutoModelForImageTextToText

from lifecycle.inputs import RunInputs
from lifecycle.record import read_params
from lifecycle.training_log import METRICS_FILE, VALIDATION_FILE, format_metric
from options import TrainOptions, iterate_fields
from pretrained.files import name_model
from pretrained.text_tower import is_multimodal
from sampler import RunPosition

CARD_FILE, CURVE_FILE = "README.md", "loss_curve.svg"
MAX_POINTS = 300  # maximum points of the curve; each is the mean of equally many steps
WIDTH, HEIGHT, MARGIN = 720, 360, 56  # pixels
LIBRARIES = {"finetune": "transformers", "adapter": "peft"}  # by an export's relation to its base model
NOT_TOLD = ("output_dir", "config", "model_name_or_path", "model_revision", "data_path", "validation_data_path",
            "continue_from", "track", "track_project", "track_name", "push_to_hub", "hub_private")  # fmt: skip


def make_card(output_dir: Path, options: TrainOptions, inputs: RunInputs, position: RunPosition) -> dict[str, str]:
    """Texts of README.md and the curve's file, by name, for the model at `position`."""
    params = read_params(output_dir)
    steps = list(read_rows(output_dir / METRICS_FILE, position.step))
    validations = list(read_rows(output_dir / VALIDATION_FILE, position.step))
    parts = [
        f"---\n{describe_head(options, inputs).to_yaml()}\n---",
        f"# {output_dir.absolute().name}, after {position.num_samples:,} samples",
        describe_training(options, inputs, params, position),
        "## Data\n\n" + "\n".join(describe_data(inputs, params)),
        "## Losses\n\n" + describe_losses(steps, validations, list(inputs.objective.metrics)),
        "## Options\n\nThose that differ from their defaults:\n\n" + table(("option", "value"), list_options(options)),
        "## Versions\n\n" + table(("", ""), list(params["versions"].items())),
    ]
    files = {CARD_FILE: "\n\n".join(parts) + "\n"}
    return files | ({CURVE_FILE: draw_curve(steps, validations)} if steps else {})


def read_rows(path: Path, last_step: int) -> Iterator[dict[str, Any]]:
    """Yields the rows of a metrics file up to `last_step`; none if there is no file."""
    if path.exists():
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                if row["step"] <= last_step:
                    yield row


def is_on_hub(options: TrainOptions) -> bool:
    return not Path(options.model.model_name_or_path).exists()


def describe_head(options: TrainOptions, inputs: RunInputs) -> ModelCardData:
    """The card's metadata. It names the base model only if that is on the hub, which would look for it."""
    config, method = inputs.config, inputs.method
    base = dict(base_model=options.model.model_name_or_path) if is_on_hub(options) else {}
    if base:
        base["base_model_relation"] = method.relation
    sees_images = is_multimodal(config) and type(config) in AutoModelForImageTextToText._model_mapping
    return ModelCardData(
        **base,
        library_name=LIBRARIES[method.relation],
        pipeline_tag="image-text-to-text" if sees_images else inputs.objective.pipeline_tag,
        tags=["mini_trainer", *method.tags],
    )


def describe_training(options: TrainOptions, inputs: RunInputs, params: dict[str, Any], position: RunPosition) -> str:
    base = f"`{name_model(options.model.model_name_or_path)}`"
    if options.model.model_revision is not None:
        base += f", revision `{options.model.model_revision}`"
    commit = f", commit `{params['git_commit']}`" if params["git_commit"] else ""
    rows = [
        ("base model", f"{base}, fingerprint `{params['identity']['model']}`"),
        ("objective", inputs.objective.title),
        ("method", inputs.method.title),
        ("steps", f"{position.step:,} of {options.data.batch_size:,} samples"),
        ("samples", f"{position.num_samples:,}"),
        ("tokens", f"{position.num_tokens:,}, trained and masked"),
        ("ranks", f"{params['world_size']} x {params['device']}"),
        *describe_origin(inputs),
        ("starts", f"{len(params['starts'])}, the first {params['starts'][0]['started']}"),
    ]
    return f"Trained by mini_trainer{commit}.\n\n" + table(("", ""), rows)


def describe_origin(inputs: RunInputs) -> list[tuple[str, str]]:
    """A row for a run that continues another one, in which the base model trained before."""
    origin = inputs.origin
    if origin is None:
        return []
    return [("trained before", f"{origin.num_steps:,} steps in other runs, to the checkpoint `{origin.digest}`")]


def describe_data(inputs: RunInputs, params: dict[str, Any]) -> Iterator[str]:
    """Yields parts about each data set, and the digests of the files that it was made from, if known."""
    data = inputs.data
    rows = []
    for i, (name, source) in enumerate(zip(data.names, data.sources, strict=True)):
        tokens = int(source.lengths[source.kept].sum(dtype=np.int64))
        rows.append((f"`{name}`", f"{len(source.kept):,}", f"{tokens:,}", f"{data.shares[i]:.1%}"))
    yield table(("data set", "samples", "tokens", "share of samples drawn"), rows)
    yield f"\nFingerprint of all: `{params['identity']['data']}`."
    made_from = [made for sidecar in inputs.sidecars if sidecar for made in sidecar.get("sources", [])]
    if made_from:
        rows = [(f"`{PurePath(made['file']).name}`", f"`{made['sha256']}`") for made in made_from]
        yield "\n" + table(("made from", "SHA-256"), rows)
    if inputs.validation_data is not None:
        names = ", ".join(f"`{name}`" for name in inputs.validation_data.names)
        yield f"\nValidation data: {names}."


def describe_losses(steps: list[dict[str, Any]], validations: list[dict[str, Any]], metrics: list[str]) -> str:
    parts = [f"![training and validation loss]({CURVE_FILE})"] if steps else ["No step has been completed."]
    if steps:
        parts.append(f"The last step's training loss is {steps[-1]['loss']:.4f}; the first one's was"
                     f" {steps[0]['loss']:.4f}.")  # fmt: skip
    if validations:
        best = [row for row in validations if row["is_best"]][-1:] or [min(validations, key=lambda row: row["loss"])]
        names = [name for name in metrics if None not in (best[0].get(name), validations[-1].get(name))]
        rows = [(what, f"{row['step']:,}", *(format_metric(name, row[name]) for name in names))
                for what, row in (("best", best[0]), ("last", validations[-1]))]  # fmt: skip
        parts.append(table(("validation", "step", *(name.replace("_", " ") for name in names)), rows))
    return "\n\n".join(parts)


def list_options(options: TrainOptions) -> list[tuple[str, str]]:
    """Name and value of each option that differs from its default."""
    rows = []
    for option, group in iterate_fields(type(options)):
        value = getattr(options if group is None else getattr(options, group), option.name)
        if option.name not in NOT_TOLD and value != option.default:
            rows.append((f"`{option.name}`", f"`{json.dumps(shorten_paths(value))}`"))
    return rows


def shorten_paths(value: Any) -> Any:
    """Removes the directories from absolute paths."""
    if isinstance(value, tuple):
        return [shorten_paths(item) for item in value]
    return PurePath(value).name if isinstance(value, str) and PurePath(value).is_absolute() else value


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def draw_curve(steps: list[dict[str, Any]], validations: list[dict[str, Any]]) -> str:
    """Draws an SVG: training loss as a line, validation losses as points on a second line."""
    train = np.array([(row["step"], row["loss"]) for row in steps], dtype=np.float64)
    chunks = np.array_split(train, min(len(train), MAX_POINTS))
    train = np.array([chunk.mean(axis=0) for chunk in chunks])
    held_out = np.array([(row["step"], row["loss"]) for row in validations], dtype=np.float64).reshape(-1, 2)
    both = np.concatenate([train, held_out])
    both = both[np.isfinite(both).all(axis=1)]
    low, high = both.min(axis=0), both.max(axis=0)
    span = np.where(high > low, high - low, 1.0)
    size = np.array([WIDTH - 2 * MARGIN, HEIGHT - 2 * MARGIN])

    def place(points: np.ndarray) -> list[str]:
        shares = (points[np.isfinite(points).all(axis=1)] - low) / span
        return [f"{MARGIN + x * size[0]:.1f},{HEIGHT - MARGIN - y * size[1]:.1f}" for x, y in shares]

    bottom, right = HEIGHT - MARGIN, WIDTH - MARGIN
    labels = [(MARGIN - 6, bottom, "end", f"{low[1]:.3g}"), (MARGIN - 6, MARGIN, "end", f"{high[1]:.3g}"),
              (MARGIN, bottom + 18, "start", f"step {low[0]:,.0f}"),
              (right, bottom + 18, "end", f"step {high[0]:,.0f}"),
              (MARGIN, MARGIN - 20, "start", "loss: training (blue), validation (orange)")]  # fmt: skip
    points = place(held_out)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
            ' font-size="13">',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<path d="M{MARGIN},{MARGIN} V{bottom} H{right}" fill="none" stroke="#888"/>',
            f'<polyline points="{" ".join(place(train))}" fill="none" stroke="#2468b4" stroke-width="1.5"/>',
            f'<polyline points="{" ".join(points)}" fill="none" stroke="#d9730d" stroke-width="1.5"/>',
            *(
                f'<circle cx="{point.split(",")[0]}" cy="{point.split(",")[1]}" r="3" fill="#d9730d"/>'
                for point in points
            ),
            *(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>' for x, y, anchor, text in labels),
            "</svg>\n",
        ]
    )
