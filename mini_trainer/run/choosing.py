"""Choice of a run's objective and method from its options."""

import logging
from dataclasses import asdict
from pathlib import Path

from mini_trainer.data.columns.base import CAUSAL_LM, VISION
from mini_trainer.data.rows.rows import IMPLEMENTED_ROWS
from mini_trainer.data.tokenized.mixture import WEIGHED_BY
from mini_trainer.data.tokenized.reader import read_sidecar
from mini_trainer.distributed.devices import DTYPES
from mini_trainer.model.activation_checkpointing import MODES
from mini_trainer.model.attention import BACKENDS
from mini_trainer.model.method import Full, Method
from mini_trainer.model.methods.lora import BASE_QUANTIZATIONS, LORA_EXPORTS, LoRA
from mini_trainer.model.methods.osft_subspaces import BASES
from mini_trainer.model.optim.averages import AVERAGES
from mini_trainer.model.optim.muon import SCALES
from mini_trainer.model.optim.optimizers import OPTIMIZERS
from mini_trainer.model.optim.rates import SCHEDULES
from mini_trainer.model.sharding import KEEPING, RESHARDING
from mini_trainer.objectives.divergences import FROM_LOGITS, FROM_TOP
from mini_trainer.objectives.embedding_noise import EmbeddingNoise
from mini_trainer.objectives.families.router_loss import ROUTER_LOSSES
from mini_trainer.objectives.families.vision import FREEZABLE
from mini_trainer.objectives.preference_losses import LOSSES as PREFERENCE_LOSSES
from mini_trainer.objectives.specs import OBJECTIVE_SPECS, ObjectiveSettings
from mini_trainer.objectives.teachers import TAUGHT
from mini_trainer.objectives.token_loss import WEIGHTINGS
from mini_trainer.options import PRESETS, DataOptions, TrainOptions, VisionOptions, flag_name
from mini_trainer.options.choices import Implemented
from mini_trainer.osft import ALLOCATIONS, OSFT
from mini_trainer.run.tracker_packages import PACKAGES

IMPLEMENTED: Implemented = IMPLEMENTED_ROWS | {
    "activation_checkpointing": ("auto", *MODES),
    "attention": ("auto", *BACKENDS),
    "base_quantization": BASE_QUANTIZATIONS,
    "callback_errors": ("stop", "log"),
    "compute_dtype": ("auto", *DTYPES),
    "data_weights_by": WEIGHED_BY,
    "export_dtype": DTYPES,
    "freeze": FREEZABLE,
    "loss_weighting": WEIGHTINGS,
    "logging_level": logging.getLevelNamesMapping(),
    "lora_export": LORA_EXPORTS,
    "lr_scheduler": SCHEDULES,
    "master_weights": DTYPES,
    "max_tokens_per_gpu": ("auto",),
    "micro_batch_grad_sync": ("every", "last"),
    "muon_scale": SCALES,
    "objective": OBJECTIVE_SPECS,
    "optimizer": OPTIMIZERS,
    "osft_basis": BASES,
    "osft_rank_allocation": ALLOCATIONS,
    "preference_loss": PREFERENCE_LOSSES,
    "preset": PRESETS,
    "reshard_after_backward": KEEPING,
    "reshard_after_forward": RESHARDING,
    "router_loss_over": ROUTER_LOSSES,
    "sharding": ("full", "hybrid"),
    "weight_average": ("none", *AVERAGES),
    "teacher_divergence": {*FROM_TOP, *FROM_LOGITS},
    "track": PACKAGES,
}


def choose_objective(options: TrainOptions) -> str:
    """Name of the objective: --objective; for language modelling it also depends on images and teachers."""
    name = options.classification.objective
    if name == CAUSAL_LM and has_images(options.data):
        if options.sharding.context_parallel is not None:
            raise ValueError(
                "--context-parallel: not supported with images, whose tokens cannot be split over ranks; remove the"
                " option, or tokenize the data without process_data.py --images"
            )
        if options.teacher.teacher_weight:
            raise ValueError("--teacher-weight: not with images, which score-data does not read; leave it out")
        return VISION
    default = VisionOptions()
    if name == CAUSAL_LM and options.vision != default:
        given = [key for key, value in asdict(options.vision).items() if value != getattr(default, key)]
        raise ValueError(
            f"{', '.join(map(flag_name, given))}: no effect on data without images (process_data.py --images)"
        )
    return TAUGHT if options.teacher.teacher_weight else name


def choose_settings(options: TrainOptions) -> ObjectiveSettings:
    """The options of objectives and model families."""
    seed, alpha = options.data.seed, options.optimization.neftune_alpha
    return ObjectiveSettings(
        options.classification,
        options.vision,
        options.preference,
        options.teacher,
        options.optimization.router_aux_loss,
        options.optimization.router_loss_over,
        None if alpha is None else EmbeddingNoise(alpha, seed=seed),
        head_seed=seed,
    )


def has_images(options: DataOptions) -> bool:
    """Whether the data was made for vision-language models; an unreadable sidecar is reported when data is opened."""
    try:
        sidecar = read_sidecar(options.data_path[0]) if options.data_path else None
    except ValueError:
        return False
    return sidecar is not None and sidecar.get("objective") == VISION


def choose_method(options: TrainOptions) -> Method:
    """Makes the method that the options select."""
    if options.osft.osft:
        return OSFT(options.osft)
    if options.lora.lora:
        return LoRA(options.lora, seed=options.data.seed)
    return Full()


def choose_adapter_method(adapter: Path, *, flag: str) -> Method:
    """Makes the method that inserts a trained adapter into its model; ValueError, naming `flag`, if it is unusable."""
    return LoRA.from_adapter(adapter, flag=flag)
