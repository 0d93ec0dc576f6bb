"""Choice of a run's objective and method from its options."""

from dataclasses import asdict
from pathlib import Path

from mini_trainer.data.columns.base import CAUSAL_LM, VISION
from mini_trainer.data.tokenized.reader import read_sidecar
from mini_trainer.model.method import Full, Method
from mini_trainer.objectives.objective import ObjectiveSettings
from mini_trainer.options import DataOptions, TrainOptions, VisionOptions, flag_name
from mini_trainer.options.doors import METHODS
from mini_trainer.options.objectives import TAUGHT


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
            raise ValueError(
                "--teacher-weight cannot be used with images, which score-data does not read; leave it out"
            )
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
    seed, noise = options.data.seed, None
    if options.optimization.neftune_alpha is not None:
        from mini_trainer.objectives.objective import EmbeddingNoise

        noise = EmbeddingNoise(options.optimization.neftune_alpha, seed=seed)
    return ObjectiveSettings(
        options.classification,
        options.vision,
        options.preference,
        options.teacher,
        options.optimization.router_aux_loss,
        options.optimization.router_loss_over,
        noise,
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
    for name in METHODS:
        group = getattr(options, name)
        if getattr(group, name):
            return METHODS[name].make(group, seed=options.data.seed)
    return Full()


def choose_adapter_method(adapter: Path, *, flag: str) -> Method:
    """Makes the method that inserts a trained adapter into its model; ValueError, naming `flag`, if it is unusable."""
    return METHODS["lora"].from_adapter(adapter, flag=flag)
