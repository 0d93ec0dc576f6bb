"""Merges models of one architecture, tensor by tensor: a weighted mean, or task vectors added to a base.

    python -m mini_trainer merge-models --model runs/a/hf_format/best runs/b/hf_format/best --output-dir mixed
    python -m mini_trainer merge-models --base base --model math code --weights 0.4 0.6 --output-dir mixed

Computes in fp32, a few rows of a tensor at a time: memory use is that of one written weight file, a few GB, for models
of any size. Config, tokenizer and dtypes are the first model's, and the other models' must be the same.
"""

from pathlib import Path

from mini_trainer.distributed.process import pause_collector, resume_collector
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import MergeModelsOptions

if __name__ == "__main__":
    options = parse_options(MergeModelsOptions)  # before the slow imports: --help and typos answer at once
    pause_collector()

from mini_trainer.data.stores.disk import check_place
from mini_trainer.data.stores.model_files import verify_weights
from mini_trainer.distributed.ending import ending_with_message
from mini_trainer.distributed.messages import say, say_note
from mini_trainer.model.merging import merge_into, open_models


def merge_models(options: MergeModelsOptions) -> None:
    """Writes the merged model; ValueError or OSError for user errors."""
    output_dir = Path(options.output_dir)
    if output_dir.exists():
        raise ValueError(f"--output-dir {output_dir}: already exists; choose a new one")
    check_place(output_dir.parent, named=f"--output-dir {output_dir}")
    models, base = open_models(options.model, options.base)
    if not options.skip_verification:
        for model in [*models, *([] if base is None else [base])]:
            verify_weights(str(model.directory), say_note)
    weights = options.weights or (1 / len(models),) * len(models)
    merge_into(output_dir, models, weights, base)
    parts = " + ".join(f"{weight:g} x {model.name}" for weight, model in zip(weights, models, strict=True))
    how = parts if base is None else f"{base.name} + the differences from it of {parts}"
    say(f"wrote {output_dir}: {how}")


if __name__ == "__main__":
    resume_collector()
    with ending_with_message(when_interrupted="interrupted; no output is left"):
        merge_models(options)
