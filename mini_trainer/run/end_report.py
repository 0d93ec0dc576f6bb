"""The last lines of a run: its results, and how to use or continue it."""

import logging
import shlex
from pathlib import Path

from mini_trainer.distributed.command import name_program
from mini_trainer.distributed.ending import log
from mini_trainer.run.exports import Exports
from mini_trainer.run.file_names import LATEST
from mini_trainer.run.record import describe_losses
from mini_trainer.sampler import RunPosition

PLAIN_ROLES = {"completion", "document"}  # of texts without a chat template


def describe_result(message: str, exports: Exports, position: RunPosition, *, best_step: int | None) -> str:
    """The last lines of a run that ended with `message`, for rank 0's console; empty for `--logging-level WARNING`.
    `best_step`: of the best validation so far."""
    if exports.world.rank > 0 or not log.isEnabledFor(logging.INFO):
        return ""
    output_dir = exports.output_dir
    losses = describe_losses(output_dir, position.step)
    result = ", ".join([f"{position.step:,} steps", *losses])
    said = f"{message}: {result}" if message == "done" else f"{message}\n{result}"
    lines = [*(f"warning: {warning}" for warning in exports.inputs.warnings), said]
    if exports.inputs.samples is not None:
        from mini_trainer.run.samples import describe_answers

        lines += describe_answers(exports.inputs.samples, output_dir)
    last_model, best_model = exports.path_of(position), exports.directory / "best"
    models = [(best_model, f"best model, after step {best_step}")] if best_step not in (None, position.step) else []
    models = [(path, name) for path, name in [*models, (last_model, "model after the last step")] if path.is_dir()]
    lines += [f"{name}: {path}" for path, name in models]
    if models:
        model, link = models[0][0], exports.directory / LATEST
        is_latest = model == last_model and link.is_dir() and link.samefile(model)
        lines += describe_trial(link if is_latest else model, exports)
    if losses:
        curves = quote(output_dir / "curves.html")
        lines.append(f"curves: {name_program('plot-metrics')} {quote(output_dir)} --output {curves}")
    return "\n".join(lines)


def describe_trial(model: Path, exports: Exports) -> list[str]:
    """The command that tries a model: a chat, or an evaluation if it generates no answers, has no chat template or saw
    only plain text. No line for data with images, which neither program reads."""
    inputs = exports.inputs
    if inputs.data.has_images:
        return []
    saw_chats = inputs.tokenizer.chat_template is not None and not (inputs.roles and inputs.roles <= PLAIN_ROLES)
    if inputs.objective.pipeline_tag == "text-generation" and saw_chats:
        return [f"try it: {name_program('chat')} {quote(model)}"]
    data = (inputs.validation_data or inputs.data).sources[0].path
    command, target = name_program("evaluate"), exports.output_dir / "evaluation"
    return [f"try it: {command} --model {quote(model)} --data {quote(data)} --output-dir {quote(target)}"]


def describe_continuing(resume: str, output_dir: str) -> str:
    """How to continue a stopped run, and the command that exports its model."""
    change = "" if resume in ("auto", "strict") else f", with --resume auto in place of {resume}"
    export = f"{name_program('export')} {quote(output_dir)}"
    return f"to continue: start the same command again{change}\nto export its model: {export}"


def quote(path: str | Path) -> str:
    return shlex.quote(str(path))
