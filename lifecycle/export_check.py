"""--check-export: an export loaded back as anyone would, and its loss compared with that of the model that trained."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from lifecycle.export import ExportParts
from methods.lora_files import add_adapter
from methods.lora_settings import ADAPTER_CONFIG
from model.check import draw_sequences
from model.sharding import reshard
from objectives.objective import Objective
from objectives.packed_model import PackedModel
from ranks.ending import log
from ranks.world import World, call_on_rank0

# How far the losses may be apart, relative to the loss: weights are rounded when they are exported.
TOLERANCE_EXACT, TOLERANCE_ROUNDED, TOLERANCE_4_BITS = 1e-4, 3e-2, 2e-1


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def check_export(
    packed_model: PackedModel,
    export_dir: Path,
    parts: ExportParts,
    *,
    objective: Objective,
    world: World,
    is_packed: bool,
) -> None:
    """Loads the export on rank 0's CPU. ValueError on every rank if it cannot be, or if its loss over three short
    random sequences is another than the trained model's. All ranks call this. `is_packed`: its base is in 4 bits."""
    sequences = draw_sequences(packed_model.model, np.random.default_rng(1))
    samples = [objective.make_check_sample(ids) for ids in sequences]
    packed_model.eval()
    trained_loss = packed_model(objective.pack(samples).to(world.device)).item()
    trained_loss += sum(extra.item() for extra in packed_model.extra_losses.values())
    reshard(packed_model)
    packed_model.train()

    def compare() -> None:
        model = load_export(export_dir, parts)
        exported = PackedModel(model, objective, backend="eager", compute_dtype=torch.float32).eval()
        loss = sum(exported.reference(objective.pack([sample]))[1].item() for sample in samples)
        allowed = choose_tolerance(packed_model, parts, is_packed=is_packed) * max(abs(trained_loss), 1.0)
        if not abs(loss - trained_loss) <= allowed:
            raise ValueError(
                f"--check-export: {export_dir}, loaded back, has a loss of {loss:.6f} over {len(samples)} sequences,"
                f" and the model that trained {trained_loss:.6f} (allowed: {allowed:.1e} apart); it is not to be used"
            )
        log.info(f"export {export_dir.name}: loaded back, its loss is the trained model's ({loss:.4f})")

    call_on_rank0(world, compare)


def load_export(export_dir: Path, parts: ExportParts) -> PreTrainedModel:
    """The exported model in float32; an adapter on the weights that it was trained beside."""
    is_adapter = (export_dir / ADAPTER_CONFIG).is_file()
    directory = parts.source.directory if is_adapter else str(export_dir)
    trust = parts.source.trust_remote_code
    try:
        model, report = parts.family.load_model(directory, dtype=torch.float32, trust_remote_code=trust)
        if not is_adapter and (missing := list_missing(report)):
            raise ValueError(f"it lacks weights: {', '.join(missing)}")
        if is_adapter:
            model = add_adapter(model, export_dir).merge_and_unload()
    except (
        OSError,
        ValueError,
        RuntimeError,
        KeyError,
        SafetensorError,
    ) as error:  # whatever transformers and peft raise
        raise ValueError(f"--check-export: {export_dir} cannot be loaded back: {error}") from None
    return model


def list_missing(report: dict[str, Any]) -> list[str]:
    """Weights that the files do not have, or of another size, by transformers' report."""
    return sorted(map(str, [*report.get("missing_keys", ()), *report.get("mismatched_keys", ())]))


def choose_tolerance(packed_model: PackedModel, parts: ExportParts, *, is_packed: bool) -> float:
    if is_packed:
        return TOLERANCE_4_BITS
    is_exact = parts.dtype == packed_model.compute_dtype == torch.float32
    return TOLERANCE_EXACT if is_exact else TOLERANCE_ROUNDED
