"""All options of train.py, presets, and the options that identify a run."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from mini_trainer.options import data as of_data
from mini_trainer.options import learning, running
from mini_trainer.options.data import DATA_CACHE_DIR, TRAINING_DATA, DataOptions, RowOptions, ValidationOptions
from mini_trainer.options.fields import Options, flatten_options, iterate_fields, list_facts, option, replace_options
from mini_trainer.options.urls import is_url

SELF = "self"  # in place of a data set: the samples that the model has drawn

# Values that presets set for options not given by flags or YAML.
PRESETS: dict[str, dict[str, Any]] = {
    "sanity": {
        "subset": "10",
        "batch_size": 5,
        "max_steps": 2,
        "validation_data_path": TRAINING_DATA,
        "export_best": False,
        "check_export": True,
    },
    "toy": {"subset": "1%", "max_steps": 100},
    "full": {},
}


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Fine-tune a language model or a classifier: chats or tokenized data in, a Hugging Face model out."""

    first: ClassVar = (  # what a first run needs: `--help` alone shows these
        *("model_name_or_path", "input_file", "validation_share", "data_path", "validation_data_path", "output_dir"),
        *("config", "preset", "dry_run", "max_epochs", "max_steps", "batch_size", "max_tokens_per_gpu"),
        *("learning_rate", "lr_scheduler", "num_warmup_steps", "lora", "osft", "checkpoint_every_minutes", "resume"),
    )

    output_dir: str = option(may_differ=True)
    """Directory for metrics, options, checkpoints and exports: new, empty, or this run's own, to resume it."""
    config: tuple[str, ...] = option((), may_differ=True)
    """YAML files with any of these options; later files override earlier ones, and flags override all. ${NAME} in a
    value is an environment variable: HOME, USER, SCRATCH, TMPDIR or SLURM_*."""
    logging_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = option("INFO", may_differ=True)
    """Log level of rank 0; WARNING suppresses the step lines."""
    preset: Literal[*PRESETS] | None = option(None, may_differ=True)
    """Defaults for other options. sanity: 10 samples, 2 steps, a validation, an export that is loaded back; toy: 1 % of
    the data, at most 100 steps; full: no changes."""
    data_cache_dir: str = option(DATA_CACHE_DIR, may_differ=True)
    """Cache directory for tokenized rows, by their content, and for copies of data sets at URLs. Must be visible to
    every node, unless all data is named by --data-path and the like, without --keep."""
    skip_verification: bool = False
    """Use models, data sets and scores without comparing their files to the hashes recorded when they were written."""
    model: learning.ModelOptions
    data: DataOptions = field(default_factory=DataOptions)
    rows: RowOptions = field(default_factory=RowOptions)
    classification: learning.ClassificationOptions = field(default_factory=learning.ClassificationOptions)
    preference: learning.PreferenceOptions = field(default_factory=learning.PreferenceOptions)
    teacher: learning.TeacherOptions = field(default_factory=learning.TeacherOptions)
    keep: learning.KeepOptions = field(default_factory=learning.KeepOptions)
    vision: learning.VisionOptions = field(default_factory=learning.VisionOptions)
    validation: ValidationOptions = field(default_factory=ValidationOptions)
    optimization: learning.OptimizationOptions = field(default_factory=learning.OptimizationOptions)
    end: running.EndOptions = field(default_factory=running.EndOptions)
    checkpoints: running.CheckpointOptions = field(default_factory=running.CheckpointOptions)
    exports: running.ExportOptions = field(default_factory=running.ExportOptions)
    tracking: running.TrackingOptions = field(default_factory=running.TrackingOptions)
    callbacks: running.CallbackOptions = field(default_factory=running.CallbackOptions)
    hub: running.HubOptions = field(default_factory=running.HubOptions)
    osft: learning.OSFTOptions = field(default_factory=learning.OSFTOptions)
    lora: learning.LoRAOptions = field(default_factory=learning.LoRAOptions)
    compute: running.ComputeOptions = field(default_factory=running.ComputeOptions)
    sharding: running.ShardingOptions = field(default_factory=running.ShardingOptions)
    profiling: running.ProfilingOptions = field(default_factory=running.ProfilingOptions)
    plan: running.PlanOptions = field(default_factory=running.PlanOptions)

    @property
    def chooses_end(self) -> bool:
        """Whether the run's end is chosen by its data: nothing else would end it, or export what it learns."""
        return self.classification.objective == "causal-lm" and not (self.end.is_given or self.exports.on_the_way)


def fill_unset(options: Options, device: str) -> Options:
    """The options with values for those left out whose default depends on the type of device: measured on CUDA, unless
    another option needs to know the value in advance."""
    values, is_cuda = flatten_options(options), device == "cuda"
    needs_mode = values["compile"] or values["offload_activations"]
    defaults = dict(
        activation_checkpointing="auto" if is_cuda and not needs_mode else "full",
        max_tokens_per_gpu="auto" if is_cuda and not values["drop_overlong"] else of_data.MAX_TOKENS,
        kernels="auto" if is_cuda and not values["compile"] else "eager",
    )
    return replace_options(options, **{name: value for name, value in defaults.items() if values[name] is None})


# Options that exclude each other: a given one replaces the preset's.
EXCLUSIVE = (frozenset({"batch_size", "batch_tokens"}), frozenset({"validation_data_path", "validation_share"}))


def list_preset_values(preset: str | None, given: Collection[str]) -> dict[str, Any]:
    """Values that `preset` sets for options that are neither `given` nor excluded by one that is."""
    settled = set(given).union(*(group for group in EXCLUSIVE if not group.isdisjoint(given)))
    return {name: value for name, value in PRESETS.get(preset, {}).items() if name not in settled}


def list_data_sets(options: TrainOptions) -> dict[str, tuple[str, ...]]:
    """The tokenized data sets that the options name, by option."""
    values = flatten_options(options)
    named = {name: values[name] for name, facts in list_facts(TrainOptions).items() if facts.names_data}
    return {name: (value,) if isinstance(value, str) else tuple(value or ()) for name, value in named.items()}


def names_raw_data(options: TrainOptions) -> bool:
    """Whether the options may name rows to tokenize, a model's own samples, or data sets at URLs, in place of local
    data sets."""
    rows, named = options.rows, list_data_sets(options)
    paths = [path for paths in named.values() for path in paths]
    may_be_rows = any(not path.endswith(".arrow") for path in options.keep.keep) or SELF in paths
    return bool(rows.input_file or rows.input_dataset or rows.mock_data) or may_be_rows or any(map(is_url, paths))


def list_deciding_options(*kinds: str) -> list[str]:
    """Options, except for paths, that decide one of these (`Facts.decides`)."""
    facts = list_facts(TrainOptions)
    return [name for name, each in facts.items() if each.decides in kinds and not each.is_path]


def list_identifying_options() -> list[str]:
    """Options that determine what a run computes; the others may change between starts."""
    return list_deciding_options("numbers", "state", "method")


def list_differing_options() -> list[str]:
    """Options that may differ between the ranks of a run: paths, whose contents are compared instead or which only
    rank 0 reads, and options that do not change the numbers."""
    return [name for name, each in list_facts(TrainOptions).items() if each.is_path or each.may_differ]


def list_defaults() -> dict[str, Any]:
    """Defaults of all identifying options."""
    defaults = {option.name: option.default for option, _ in iterate_fields(TrainOptions)}
    return {name: defaults[name] for name in list_identifying_options()}
