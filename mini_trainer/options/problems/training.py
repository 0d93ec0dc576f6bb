"""Problems with train.py's options: data, optimization, methods, computation, reporting, and the end of a run."""

import math
import re
from dataclasses import replace

from mini_trainer.options import (
    CallbackOptions,
    ExportOptions,
    HubOptions,
    OSFTOptions,
    RowOptions,
    TrainOptions,
    VisionOptions,
    flag_name,
    list_data_sets,
)
from mini_trainer.options.doors import RANDOM_FORMATS, open_door
from mini_trainer.options.objectives import OBJECTIVES
from mini_trainer.options.problems.finding import list_changed, list_given, list_row_sources
from mini_trainer.options.problems.learning import find_objective_problems, find_optimization_problems
from mini_trainer.options.urls import find_target_faults, find_url_faults, hide_credentials, is_url, split_scheme

# Functions that find problems in these groups, once one of their options is given.
BY_GROUPS = {
    ("classification", "preference", "teacher"): "mini_trainer.options.problems.learning:find_signal_problems",
    ("osft", "lora", "vision"): "mini_trainer.options.problems.training:find_method_problems",
    ("tracking", "callbacks", "hub", "exports"): "mini_trainer.options.problems.training:find_reporting_problems",
}


def find_train_problems(options: TrainOptions) -> list[str]:
    """Options without effect beside others, and options that contradict each other."""
    problems = [
        *find_url_problems(options),
        *find_training_data_problems(options),
        *find_validation_problems(options),
        *find_objective_problems(options),
        *find_optimization_problems(options),
        *find_compute_problems(options),
        *find_ending_problems(options),
    ]
    for names, place in BY_GROUPS.items():
        if any(list_changed(getattr(options, name)) for name in names):
            problems += open_door(place)(options)
    return problems


def find_url_problems(options: TrainOptions) -> list[str]:
    """Problems with URLs: of data to read, and in place of local directories."""
    problems = [
        fault
        for name, paths in list_data_sets(options).items()
        for path in filter(is_url, paths)
        for fault in find_url_faults(path, flag=flag_name(name))
    ]
    if is_url(options.output_dir):
        problems.append(
            f"--output-dir {hide_credentials(options.output_dir)}: must be a local directory, for checkpoints stay"
            " local; give --upload-to a URL to copy exports to"
        )
    if is_url(options.data_cache_dir):
        problems.append(f"--data-cache-dir {hide_credentials(options.data_cache_dir)}: must be a local directory")
    return problems


def find_training_data_problems(options: TrainOptions) -> list[str]:
    """Problems with training data: none, several sources, or weights that do not match the data sets."""
    o, rows, weights = options.data, list_row_sources(options.rows), options.data.data_weights
    problems = []
    if list_changed(options.rows):
        from mini_trainer.options.problems.tools import find_row_problems

        problems += find_row_problems(complete_rows(options.rows, options.classification.objective))
    if not o.data_path and not rows:
        problems.append("no data is given: give --data-path, or rows with --input-file or --input-dataset")
    if o.data_path and rows:
        problems.append(f"--data-path and {rows[0]} both specify training data: give only one of them")
    if not rows and (given := list_changed(options.rows)):
        problems.append(f"{', '.join(map(flag_name, given))}: no effect without rows to tokenize (--input-file)")
    problems += find_format_problems(options, has_rows=bool(rows))
    if weights and o.data_path and len(weights) != len(o.data_path):
        problems.append(f"--data-weights: {len(weights)} numbers for the {len(o.data_path)} data sets of --data-path")
    if not all(0 < weight < math.inf for weight in weights):
        problems.append(f"--data-weights {' '.join(map(str, weights))}: must be above 0, and finite")
    if weights and len(o.data_path) <= 1:
        problems.append("--data-weights has no effect on a single data set: give several with --data-path")
    if o.batch_size is not None and o.batch_tokens is not None:
        problems.append(
            f"--batch-size {o.batch_size} and --batch-tokens {o.batch_tokens} both set the size of a step: give only"
            " one of them; --batch-size None overrides a file's"
        )
    return problems


def find_validation_problems(options: TrainOptions) -> list[str]:
    """Problems with validation options."""
    o = options.validation
    if not (o.validation_data_path or options.rows.validation_share):
        given = list_given(o)
        return [f"{', '.join(given)}: no effect without --validation-data-path"] if given else []
    if o.validation_data_path and options.rows.validation_share:
        return ["--validation-share and --validation-data-path both specify validation data: give only one of them"]
    if not re.fullmatch(r"[^:]+(:\d+(\.\d*)?(e-?\d+)?)?", o.best_metric):
        return [f"--best-metric {o.best_metric}: must be METRIC, or METRIC:D with a number D, such as loss:0.01"]
    if o.early_stopping_patience is not None and o.validate_every_steps is None and not o.validate_at_epoch:
        return ["--early-stopping-patience needs validations during the run: add --validate-every-steps or"
                " --validate-at-epoch"]  # fmt: skip
    return []


def find_format_problems(options: TrainOptions, *, has_rows: bool) -> list[str]:
    """Problems with row formats that do not match the objective."""
    objective, rows = options.classification.objective, options.rows
    wanted = OBJECTIVES[objective].row_format
    if wanted is None:
        fitting = [f"--objective {name}" for name, facts in OBJECTIVES.items() if facts.row_format == rows.format]
        useless = f"--format {rows.format} has no effect on --objective {objective}: give {' or '.join(fitting)}"
        return [useless] if rows.format is not None and fitting else []
    or_pairs = ", or of --format preference with --feedback-from-pairs" if wanted == "feedback" else ""
    needs = f"--objective {objective} needs rows of --format {wanted}{or_pairs}"
    if has_rows and rows.mock_data is not None and wanted not in RANDOM_FORMATS:
        return [f"{needs}: --mock-data has none"]
    makes = "feedback" if rows.feedback_from_pairs else complete_rows(rows, objective).format
    return [needs] if has_rows and makes != wanted else []


def complete_rows(rows: RowOptions, objective: str) -> RowOptions:
    """The options with the row format that the objective needs, unless one is given; None: any format of texts."""
    wanted = OBJECTIVES[objective].row_format
    if rows.format is not None or wanted is None:
        return rows
    return replace(rows, format="preference" if rows.feedback_from_pairs else wanted)


def find_compute_problems(options: TrainOptions) -> list[str]:
    """Problems with computation, sharding, and "auto" values."""
    problems, compute, sharding, osft = [], options.compute, options.sharding, options.osft.osft
    problems += find_sharing_problems(options)
    if sharding.cpu_offload and osft:
        problems.append("--cpu-offload cannot be used with --osft, whose projections run where the weights are")
    if compute.compute_dtype == "float16":
        problems.append(
            "--compute-dtype float16: its smallest number is 6e-8, so gradients become zero unless the loss is scaled,"
            " which is not implemented here: use bfloat16, or float32 on a device without it"
        )
    if compute.float8 and osft:
        problems.append("--float8 cannot be used with --osft, whose layers do not support fp8")
    if compute.float8 and compute.compute_dtype == "float32":
        problems.append("--float8 needs bfloat16 for everything not in fp8, given --compute-dtype float32")
    is_auto = options.data.max_tokens_per_gpu == "auto"
    if is_auto and options.data.drop_overlong:
        problems.append(
            "--drop-overlong has no effect with --max-tokens-per-gpu auto, which never goes below the longest sample:"
            " drop long samples with process_data.py --max-sample-num-tokens, or give a number"
        )
    has_use = is_auto or compute.activation_checkpointing == "auto" or options.plan.dry_run
    if compute.memory_budget_gb is not None and not has_use:
        problems.append(
            "--memory-budget-gb has no effect without --max-tokens-per-gpu auto, --activation-checkpointing auto or"
            " --dry-run"
        )
    if compute.use_liger_kernels and compute.compile:
        problems.append(
            "--use-liger-kernels cannot be used with --compile, which writes kernels for the same operations: give only"
            " one of them"
        )
    if compute.tiled_mlp and compute.compile:
        problems.append("--tiled-mlp cannot be used with --compile, which compiles whole blocks: give only one of them")
    if compute.offload_activations and compute.activation_checkpointing != "full":
        problems.append(
            "--offload-activations moves the block inputs that --activation-checkpointing full keeps, given"
            f" {compute.activation_checkpointing}: use full, or remove the option"
        )
    if compute.compile and compute.activation_checkpointing == "auto":
        problems.append(
            "--activation-checkpointing auto cannot be used with --compile, which needs to know the mode in advance:"
            " give none, selective or full"
        )
    return problems


def find_sharing_problems(options: TrainOptions) -> list[str]:
    """Problems with options that do not work with --context-parallel."""
    num_sharing = options.sharding.context_parallel
    if num_sharing is None:
        return []
    reasons = []
    if options.validation.sample_prompts is not None:
        reasons.append("not with --sample-prompts, whose answers need whole sequences")
    if options.compute.compile:
        reasons.append("not with --compile, with which it has not been tested")
    return [f"--context-parallel {num_sharing}: {reason}: give only one of them" for reason in reasons]


def find_ending_problems(options: TrainOptions) -> list[str]:
    """Problems with checkpoints, exports and dry runs."""
    problems, exports = [], options.exports
    if options.checkpoints.allow_changed_options and options.checkpoints.resume == "none":
        problems.append("--allow-changed-options has no effect with --resume none: nothing is resumed")
    resume = options.checkpoints.resume
    if options.checkpoints.continue_from is not None and resume not in ("auto", "strict", "none"):
        problems.append(
            f"--continue-from and --resume {resume} both name a checkpoint to start from: --resume continues the same"
            " run, --continue-from starts a new one: give only one of them"
        )
    if not exports.on_the_way and not options.end.is_given:
        problems.append(
            "the run has no end, so the trained model would never be written: add --max-epochs, --max-steps,"
            " --max-samples or --max-tokens; or, for a run that is stopped by hand, --min-samples-per-checkpoint or"
            " --checkpoint-at-epoch"
        )
    return problems


def find_reporting_problems(options: TrainOptions) -> list[str]:
    """Problems with trackers, callbacks, and places of exports."""
    track = options.tracking.track
    return [
        *(f"--track {name}: given twice" for name in dict.fromkeys(track) if track.count(name) > 1),
        *find_callback_problems(options.callbacks),
        *find_hub_problems(options.hub),
        *find_upload_problems(options.exports),
    ]


def find_callback_problems(o: CallbackOptions) -> list[str]:
    """Problems with callbacks: given twice, or not an import path."""
    paths = dict.fromkeys(o.callbacks)
    problems = [f"--callbacks {path}: given twice" for path in paths if o.callbacks.count(path) > 1]
    form = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
    wrong = [path for path in paths if not re.fullmatch(f"{form}:{form}", path)]
    return problems + [f"--callbacks {path}: must be package.module:Class, such as hooks:Notify" for path in wrong]


def find_hub_problems(o: HubOptions) -> list[str]:
    """An invalid repository name."""
    if o.push_to_hub is None:
        return []
    part = r"[A-Za-z0-9_](?:[A-Za-z0-9_.\-]*[A-Za-z0-9_])?"
    if len(o.push_to_hub) > 96 or not re.fullmatch(rf"(?:{part}/)?{part}", o.push_to_hub):
        return [f"--push-to-hub {o.push_to_hub}: must be NAME or OWNER/NAME, of letters, digits, and -, _ or . inside"]
    return []


def find_upload_problems(o: ExportOptions) -> list[str]:
    """Problems with the URL to upload exports to."""
    if o.upload_to is None:
        return []
    if not is_url(o.upload_to):
        return [f"--upload-to {o.upload_to}: must be a URL (s3://BUCKET/PATH or gs://BUCKET/PATH)"]
    if split_scheme(o.upload_to)[0] == "hf":
        return [f"--upload-to {o.upload_to}: give the repository by --push-to-hub, which makes each export a commit"]
    return find_target_faults(o.upload_to, flag="--upload-to")


# Settings that an adapter to continue from determines, so options must not set them.
LORA_ADAPTER_SAYS = ("rank", "alpha", "dropout", "target_modules", "use_dora", "modules_to_save")


def find_method_problems(options: TrainOptions) -> list[str]:
    """Problems with the training method."""
    return [*find_osft_problems(options.osft), *find_lora_problems(options), *find_vision_problems(options)]


def find_osft_problems(o: OSFTOptions) -> list[str]:
    """Problems with OSFT's options: without effect, or missing."""
    if not o.osft:
        return []
    problems = []
    ratio, energy = o.osft_unfreeze_rank_ratio, o.osft_keep_energy
    uses_activations = o.osft_basis == "activations"
    has_statistics = o.osft_calibration_data is not None or o.osft_statistics is not None
    if ratio is None and (energy is None or not uses_activations):
        problems.append("--osft needs --osft-unfreeze-rank-ratio: the share of directions to train, from 0 to 1")
    if ratio == 0 and not o.osft_train_others:
        problems.append(f"--osft-unfreeze-rank-ratio {ratio} without --osft-train-others trains nothing")
    if energy is not None and ratio is not None:
        problems.append("--osft-keep-energy and --osft-unfreeze-rank-ratio both set how much to keep: give only one")
    if uses_activations and not has_statistics:
        problems.append("--osft-basis activations needs --osft-calibration-data, --osft-statistics, or both")
    if has_statistics and not uses_activations:
        problems.append("--osft-calibration-data and --osft-statistics have no effect with --osft-basis weights")
    return problems


def find_lora_problems(options: TrainOptions) -> list[str]:
    """Problems with LoRA's options: without effect, or incompatible with others."""
    problems, o = [], options.lora
    if not o.lora:
        return []
    said = sorted(set(list_given(o)) & {flag_name(f"lora_{name}") for name in LORA_ADAPTER_SAYS})
    if o.lora_adapter is not None and said:
        problems.append(f"{', '.join(said)}: no effect with --lora-adapter, which determines it")
    if options.osft.osft:
        problems.append("--lora and --osft are two training methods: give only one")
    if options.optimization.master_weights != "float32":
        problems.append(
            f"--master-weights {options.optimization.master_weights} has no effect with --lora: adapters are float32,"
            " and frozen weights are in --compute-dtype"
        )
    if options.compute.float8:
        problems.append("--float8 cannot be used with --lora: peft does not support adapters on fp8 layers")
    if o.base_quantization != "none" and o.lora_use_dora:
        problems.append(f"--lora-use-dora cannot be used with --base-quantization {o.base_quantization}")
    return problems


def find_vision_problems(options: TrainOptions) -> list[str]:
    """Problems with --freeze, alone or with LoRA and OSFT."""
    if options.vision == VisionOptions():
        return []
    frozen = options.vision.freeze
    if "nothing" in frozen and len(frozen) > 1:
        return [f"--freeze {' '.join(frozen)}: nothing cannot be combined with other parts"]
    flag, lora, osft = f"--freeze {' '.join(frozen)}", options.lora, options.osft
    if lora.lora and not lora.lora_target_modules and lora.lora_adapter is None:
        return [f"{flag}: with --lora it restricts --lora-target-modules, which is not given"]
    if osft.osft and "language" in frozen:
        return [f"{flag}: --osft trains the language model"]
    if osft.osft and not osft.osft_train_others:
        return [f"{flag}: no effect with --osft unless --osft-train-others makes other parameters trainable"]
    return []
