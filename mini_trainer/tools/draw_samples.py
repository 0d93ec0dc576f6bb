"""Draws samples from a model, at temperature 1 and with nothing asked: what it knows, for train --keep self.

    python -m mini_trainer draw-samples --model-name-or-path M
    python -m mini_trainer draw-samples --model-name-or-path M --output-file drawn.jsonl --num-samples 1000
    python train.py --model-name-or-path M --keep drawn.jsonl ...

Chats begin where a user would begin, with and without the system line of the model's chat template, and have one
question and its answer, both by the model; texts begin with nothing. The drawn tokens have labels.
"""

from mini_trainer.distributed.process import pause_collector, resume_collector
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import DrawSamplesOptions

if __name__ == "__main__":
    options = parse_options(DrawSamplesOptions)  # before the heavy imports: --help and typos answer at once
    pause_collector()

import json
from collections import Counter
from pathlib import Path

import numpy as np

from mini_trainer.data.columns.base import IGNORED
from mini_trainer.data.stores.contents import sign
from mini_trainer.data.stores.disk import check_output, locked, make_parent, written_aside
from mini_trainer.data.stores.tokenizers import fingerprint_chat_template, fingerprint_tokenizer
from mini_trainer.data.tokenized.outputs import DataSetFiles
from mini_trainer.distributed.messages import say, show_progress
from mini_trainer.distributed.world import World, call_with_world
from mini_trainer.options.reading import hash_file
from mini_trainer.options.tools import EngineOptions, SamplingOptions
from mini_trainer.run.own_samples import describe_drawing, locate_samples
from mini_trainer.use.inference.drawing import Drawn, draw_samples
from mini_trainer.use.inference.hf_engine import HFEngine
from mini_trainer.use.inference.loading import FoundModel, check_answering, find_answering_model


def draw(o: DrawSamplesOptions, world: World) -> None:
    """Writes the samples; ValueError or OSError for user errors."""
    if world.world_size > 1:
        raise ValueError("draw-samples runs in one process, but torchrun has started several")
    path = locate_samples(o) if o.output_file is None else Path(o.output_file)
    check_output(path)
    make_parent(path)
    if o.output_file is not None:
        write_samples(path, o, world)
        return
    with locked(path.with_name(".lock")):
        if path.exists():
            say(f"{path}: there already, drawn by this model")
        else:
            write_samples(path, o, world)


def write_samples(path: Path, o: DrawSamplesOptions, world: World) -> None:
    model, revision, trusts = o.model_name_or_path, o.model_revision, o.trust_remote_code
    found = find_answering_model(model, revision=revision, trust_remote_code=trusts, flag="--model-name-or-path")
    check_answering(found)
    if not o.skip_verification:
        found.verify()
    sampling = SamplingOptions(max_new_tokens=o.max_new_tokens, temperature=1.0, seed=o.seed)
    engine = HFEngine(
        found, found.name, EngineOptions(dtype=o.dtype, batch_size=o.batch_size), sampling, device=world.device
    )
    samples = draw_samples(engine, o.num_samples, show=lambda batches: show_progress(batches, "drawing", unit="batch"))
    files, rows = DataSetFiles(path), [make_row(sample, found.tokenizer) for sample in samples]
    about = describe_samples(samples, found) | {"drawn_with": describe_drawing(o)}
    with written_aside(files.sidecar, path) as aside:  # in this order: samples that are there are complete
        aside[1].write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        aside[0].write_text(json.dumps(sign(about | {"file": hash_file(aside[1])}), indent=2) + "\n", encoding="utf-8")
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in about["kinds"].items())
    say(f"wrote {len(samples):,} samples ({kinds}; {about['num_loss_counted_tokens']:,} drawn tokens) to {path}")


def make_row(sample: Drawn, tokenizer) -> dict:
    """A row of a data set, with its text for people."""
    text = tokenizer.decode(sample.input_ids)
    labels = [token if drawn else IGNORED for token, drawn in zip(sample.input_ids, sample.is_drawn, strict=True)]
    return {"kind": sample.kind, "text": text, "input_ids": sample.input_ids, "labels": labels}


def describe_samples(samples: list[Drawn], found: FoundModel) -> dict:
    """The sidecar of the samples, as of a data set of process_data.py, and who drew them."""
    return {
        "tokenizer_fingerprint": fingerprint_tokenizer(found.tokenizer),
        "chat_template_fingerprint": fingerprint_chat_template(found.tokenizer),
        "num_samples": len(samples),
        "num_tokens": sum(len(sample.input_ids) for sample in samples),
        "num_loss_counted_tokens": sum(int(np.count_nonzero(sample.is_drawn[1:])) for sample in samples),
        "max_token_id": max(max(sample.input_ids) for sample in samples),
        "drawn_by": found.name,
        "kinds": dict(Counter(sample.kind for sample in samples)),
    }


if __name__ == "__main__":
    resume_collector()
    call_with_world(lambda world: draw(options, world))
