"""--check-export: an export is loaded back, as a user would, and its loss compared with the trained model's."""

from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from mini_trainer.distributed.devices import run_eagerly
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.model.check import draw_sequences
from mini_trainer.model.sharding import reshard
from mini_trainer.objectives.objective import Objective
from mini_trainer.objectives.packed_model import PackedModel
from mini_trainer.run.export import ExportParts

# Allowed difference of the losses, relative to the loss: weights are rounded when exported.
TOLERANCE_EXACT, TOLERANCE_ROUNDED = 1e-4, 3e-2


@torch.no_grad()
@run_eagerly()
def check_export(
    packed_model: PackedModel,
    export_dir: Path,
    parts: ExportParts,
    *,
    objective: Objective,
    world: World,
) -> None:
    """Loads the export on rank 0's CPU. ValueError on every rank if that fails, or if its loss over three short random
    sequences differs from the trained model's. All ranks call this."""
    sequences = draw_sequences(packed_model.model, np.random.default_rng(1))
    samples = [objective.make_check_sample(ids) for ids in sequences]
    packed_model.eval()
    trained_loss = packed_model(objective.pack(samples).to(world.device)).total.item()
    reshard(packed_model)
    packed_model.train()

    def compare() -> None:
        exported = PackedModel(load_back(export_dir, parts), objective, backend="eager", compute_dtype=torch.float32)
        loss = sum(exported.eval().reference(objective.pack([sample]))[1].item() for sample in samples)
        is_exact = parts.dtype == packed_model.compute_dtype == torch.float32
        rounding = TOLERANCE_EXACT if is_exact else TOLERANCE_ROUNDED
        allowed = max(rounding, parts.method.export_error) * max(abs(trained_loss), 1.0)
        if not abs(loss - trained_loss) <= allowed:
            raise ValueError(
                f"--check-export: {export_dir}, loaded back, has a loss of {loss:.6f} over {len(samples)} sequences,"
                f" but the trained model has {trained_loss:.6f} (allowed difference: {allowed:.1e}); do not use it"
            )
        log.info(f"export {export_dir.name}: loaded back, its loss matches the trained model's ({loss:.4f})")

    call_on_rank0(world, compare)


def load_back(export_dir: Path, parts: ExportParts) -> PreTrainedModel:
    try:
        return parts.method.load_export(export_dir, parts.source, parts.family)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:  # from transformers and peft
        raise ValueError(f"--check-export: {export_dir} cannot be loaded back: {error}") from None
