"""Which models that see train exactly: every family, tiny, with its processor; written to results/vision_families.txt.

    OMP_NUM_THREADS=1 nice python benchmarks/vision_families.py
    OMP_NUM_THREADS=1 nice python benchmarks/vision_families.py --types llava gemma3

Of each family a random model is saved with a tokenizer and what prepares its images; process_data.py tokenizes 6 rows
with 0 to 3 images in one or two turns; the model is built as train.py builds it, all of it trains, and passes the check
at the start. In fp32 compared are: loss and every gradient of all rows packed with transformers' own forward and
backward over one row at a time; the packed loss with ours over one row at a time; an export's tensors, loaded by
AutoModelForImageTextToText, with those that it was made from; and the rows as the processor beside the export tokenizes
them. Other types of AutoModelForImageTextToText have no processor here: of these is said what refuses them, if anything
does. Some processors need the packages torchvision and num2words. With `--types` nothing is written.
"""

import contextlib
import functools
import io
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import paths
import pyarrow as pa
import torch
from architectures import compare, describe, judge_apart, make_parser, make_tiny_model
from architectures_multimodal import CHANGES, SIZES, export, find_fault
from harness import describe_versions, make_options
from tiny_vision import VISION_MODELS, make_rows, save_vision_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from mini_trainer.data.columns.base import IGNORED
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.world import init_world
from mini_trainer.model.build import build_model
from mini_trainer.model.check import check_model
from mini_trainer.model.config import ModelSource, load_config
from mini_trainer.model.method import Full
from mini_trainer.model.sharding import reshard
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.families.vision import VisionLanguageFamily, VisionLanguageRowModel
from mini_trainer.objectives.next_tokens import VisionLanguage
from mini_trainer.options import group_options
from mini_trainer.options.problems.finding import is_installed
from mini_trainer.options.tools import ProcessDataOptions
from mini_trainer.process_data import process_data

RESULTS = paths.ROOT / "benchmarks/results/vision_families.txt"
HEADINGS = ("family", "type", "exact", "packed = alone", "export reloads", "processor", "")


@dataclass(frozen=True)
class Judged:
    """What became of a family: an answer for each column, and the numbers or the reason."""

    exact: str
    alone: str = "-"
    export: str = "-"
    processor: str = "-"
    detail: str = ""


def tokenize(model_dir: Path, directory: Path, name: str) -> TokenizedData:
    output = directory / f"{name}.arrow"
    given = dict(input_file=str(directory / "rows.jsonl"), output_file=str(output), num_proc=1, images=True, preview=0)
    with contextlib.redirect_stdout(io.StringIO()):
        process_data(group_options(ProcessDataOptions, model_name_or_path=str(model_dir), **given))
    return TokenizedData(output)


def run_own(model_dir: Path, objective: VisionLanguage, rows: TokenizedData) -> tuple[Tensor, dict[str, Tensor]]:
    """transformers' summed loss and gradients, over one row after the other."""
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32).eval()
    row_model, loss_sum = VisionLanguageRowModel(model), torch.zeros(())
    for row in range(len(rows.lengths)):
        micro_batch = objective.pack([rows.read(row)])
        logits, targets = row_model.run_own(micro_batch).logits[0], micro_batch.targets.labels
        loss_sum += torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    loss_sum.backward()
    return loss_sum.detach(), find_gradients(model)


def find_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    """Zeros where there are none: of what no image reaches."""
    return {
        name: torch.zeros(param.shape) if param.grad is None else getattr(param.grad, "full_tensor", param.grad.clone)()
        for name, param in model.named_parameters()
    }


def judge(family: str, directory: Path) -> Judged:
    """Makes the family's model, tokenizes, trains both ways, exports, and says what became of it."""
    model_dir = save_vision_model(directory, family)
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in make_rows(directory)))
    family, world = VisionLanguageFamily(TextFamily()), init_world()
    try:
        config = load_config(str(model_dir), family)
        objective = VisionLanguage(family.complete(config, None, trust_remote_code=False))
        rows = tokenize(model_dir, directory, "data")
        source = ModelSource(str(model_dir), config)
        compute = make_options(activation_checkpointing="none")
        packed_model = build_model(
            source, compute.compute, compute.sharding, objective=objective, method=Full(), world=world
        )
        check_model(packed_model, objective, world=world)
    except ValueError as error:
        return Judged("refused", detail=" ".join(str(error).replace(str(model_dir), "M").split())[:300])
    samples = [rows.read(row) for row in range(len(rows.lengths))]
    loss = packed_model(objective.pack(samples)).loss
    loss.backward()
    own_loss, own_gradients = run_own(model_dir, objective, rows)
    result = compare(loss.detach(), own_loss, find_gradients(packed_model.model), own_gradients)
    with torch.no_grad():
        alone = sum(packed_model(objective.pack([sample])).loss.item() for sample in samples)
    reshard(packed_model)
    is_alone = abs(loss.item() - alone) <= 1e-6 * abs(alone)
    export_dir = directory / "export"
    export(packed_model, source, objective.family, AutoTokenizer.from_pretrained(model_dir), export_dir, world)
    fault = find_fault(model_dir, export_dir)
    is_same = read_columns(tokenize(export_dir, directory, "again")) == read_columns(rows)
    return Judged(
        "yes" if result.outcome == "exact" else "no",
        "yes" if is_alone else "no",
        "yes" if fault is None else f"no: {fault}",
        "yes" if is_same else "no",
        result.detail,
    )


def read_columns(rows: TokenizedData) -> list[dict]:
    with pa.OSFile(str(rows.path)) as file:
        return pa.ipc.open_file(file).read_all().to_pylist()


def judge_other(model_type: str, directory: Path) -> Judged:
    """Of a type without a processor here: what refuses it before a processor is asked for."""
    family = VisionLanguageFamily(TextFamily())
    try:
        config = AutoConfig.for_model(model_type)
        if (reason := family.check_config(config, trust_remote_code=False)) is not None:
            return Judged("refused", detail=reason)
        _, model = make_tiny_model(
            model_type, AutoModelForImageTextToText, sizes=SIZES, changes=CHANGES.get(model_type)
        )
    except Exception as error:  # other people's models and configs may raise anything
        return Judged("not built", detail=describe(error))
    try:
        VisionLanguageRowModel(model)
    except ValueError as error:
        return Judged("refused", detail=str(error))
    return Judged("not tried", detail="no tiny processor here: goes through the check at the start")


def judge_quietly(name: str, directory: Path) -> Judged:
    os.chdir(paths.ROOT)
    try:
        return judge(name, directory) if name in VISION_MODELS else judge_other(name, directory)
    except Exception as error:
        return Judged("crashed", detail=describe(error))


def write_table(judged: dict[str, Judged], title: str) -> str:
    rows = [HEADINGS]
    for name, one in judged.items():
        model_type = VISION_MODELS[name].model_type if name in VISION_MODELS else name
        rows.append((name, model_type, one.exact, one.alone, one.export, one.processor, one.detail))
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS) - 1)]
    lines = [
        "  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]
    return "\n".join([title, "", *lines, ""])


def main() -> None:
    args = make_parser(__doc__, seconds=240.0).parse_args()
    torch.set_num_threads(1)
    set_verbosity_error()
    logging.disable(logging.WARNING)
    disable_progress_bar()
    known = {family.model_type for family in VISION_MODELS.values()}
    others = sorted(set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) - known)
    judged = {}
    for name in args.types or [*VISION_MODELS, *others]:
        found = judge_apart(functools.partial(judge_quietly, name), seconds=args.seconds)
        judged[name] = found if isinstance(found, Judged) else Judged(found.outcome, detail=found.detail)
        print(name, judged[name], flush=True)
    versions = describe_versions("transformers", "torch", "pillow", *filter(is_installed, ("torchvision", "num2words")))
    title = f"Models that see, {versions}, CPU, fp32: 6 rows with 0 to 3 images, packed, all of the model trains"
    if args.types is None:
        RESULTS.write_text(write_table(judged, title))
    print(write_table(judged, title))


if __name__ == "__main__":
    main()
