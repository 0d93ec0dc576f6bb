"""Problems with what few runs choose: rows to tokenize, preferences, a teacher, the use of the machine, a method,
images, trackers, and places of exports."""

import re
from collections.abc import Iterator

from mini_trainer.options import TrainOptions, flag_name
from mini_trainer.options.objectives import OBJECTIVES
from mini_trainer.options.problems.finding import complete_rows, list_changed, list_given, list_row_sources
from mini_trainer.options.urls import WRITABLE, find_url_faults, is_url, split_scheme


def find_preference_problems(options: TrainOptions) -> Iterator[str]:
    """Options that are only for some preference losses."""
    o = options.preference
    if "preference_loss" not in OBJECTIVES[options.classification.objective].options:
        return
    loss = f"--preference-loss {o.preference_loss}"
    if o.preference_gamma is not None and o.preference_loss != "simpo":
        yield f"--preference-gamma has no effect with {loss}"
    smoothing = options.classification.label_smoothing
    if smoothing and o.preference_loss != "dpo":
        yield f"--label-smoothing has no effect with {loss}"
    elif smoothing >= 0.5:
        yield f"--label-smoothing {smoothing}: must be below 0.5 with {loss}, for half of all pairs is no data"
    if o.preference_loss in ("simpo", "orpo") and o.reference_model is not None:
        yield f"--reference-model: no effect with {loss}, which has no reference"


def find_teacher_problems(options: TrainOptions) -> Iterator[str]:
    """Options that teachers and token weights cannot be used with."""
    o, objective = options.teacher, options.classification
    weighting = objective.loss_weighting
    if weighting is not None and objective.label_smoothing:
        yield f"--loss-weighting {weighting}: weighs only the target's loss, and cannot be used with --label-smoothing"
    if o.teacher_weight is None:
        return
    if options.keep.keep:
        yield "--keep and --teacher-weight both compare the model with another one: give only one of them"
    for name, value in (("label_smoothing", objective.label_smoothing), ("loss_weighting", weighting)):
        if value:
            yield f"{flag_name(name)}: cannot be used with --teacher-weight, which determines the loss"
    if o.teacher_model == "self":
        yield "--teacher-model self: is no longer a teacher: give --keep, or the start's own directory"
    if o.teacher_model is None and o.teacher_divergence != "forward-kl":
        yield (
            f"--teacher-divergence {o.teacher_divergence} needs the teacher's probability of each token that the"
            " model prefers, which files do not have: give --teacher-model"
        )
    if o.teacher_model is not None and "teacher_scores" in list_changed(o):
        yield "--teacher-scores and --teacher-model both choose the teacher: give only one of them"


def find_format_problems(options: TrainOptions) -> list[str]:
    """Problems with row formats that do not match the objective."""
    objective, rows, has_rows = options.classification.objective, options.rows, bool(list_row_sources(options.rows))
    wanted = OBJECTIVES[objective].row_format
    if wanted is None:
        fitting = [f"--objective {name}" for name, facts in OBJECTIVES.items() if facts.row_format == rows.format]
        useless = f"--format {rows.format} has no effect on --objective {objective}: give {' or '.join(fitting)}"
        return [useless] if rows.format is not None and fitting else []
    or_pairs = ", or of --format preference with --feedback-from-pairs" if wanted == "feedback" else ""
    needs = f"--objective {objective} needs rows of --format {wanted}{or_pairs}"
    if has_rows and rows.mock_data is not None:
        return [f"{needs}: --mock-data has none"]
    makes = "feedback" if rows.feedback_from_pairs else complete_rows(rows, objective).format
    return [needs] if has_rows and makes != wanted else []


def find_compute_problems(options: TrainOptions) -> list[str]:
    """Problems with computation, sharding, and "auto" values."""
    problems, compute, sharding, osft = [], options.compute, options.sharding, options.osft.osft
    flag = f"--context-parallel {sharding.context_parallel}"
    if sharding.context_parallel is not None and options.validation.sample_prompts is not None:
        problems.append(f"{flag}: not with --sample-prompts, whose answers need whole sequences: give only one of them")
    if sharding.context_parallel is not None and compute.compile:
        problems.append(f"{flag}: not with --compile, with which it has not been tested: give only one of them")
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
    has_use = not {"auto", None}.isdisjoint((options.data.max_tokens_per_gpu, compute.activation_checkpointing))
    if compute.memory_budget_gb is not None and not has_use and not options.plan.dry_run:
        problems.append(
            "--memory-budget-gb has no effect without --max-tokens-per-gpu auto, --activation-checkpointing auto or"
            " --dry-run"
        )
    if compute.kernels in ("fused", "auto") and compute.compile:
        problems.append(
            f"--kernels {compute.kernels} (--use-liger-kernels) cannot be used with --compile, which writes kernels for"
            " the same operations: give only one of them"
        )
    if compute.tiled_mlp and compute.compile:
        problems.append("--tiled-mlp cannot be used with --compile, which compiles whole blocks: give only one of them")
    if compute.offload_activations and compute.activation_checkpointing not in ("full", None):
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


def find_reporting_problems(options: TrainOptions) -> Iterator[str]:
    """Problems with trackers, callbacks, and places of exports."""
    track, callbacks = options.tracking.track, options.callbacks.callbacks
    yield from (f"--track {name}: given twice" for name in dict.fromkeys(track) if track.count(name) > 1)
    paths = dict.fromkeys(callbacks)
    yield from (f"--callbacks {path}: given twice" for path in paths if callbacks.count(path) > 1)
    form = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
    wrong = [path for path in paths if not re.fullmatch(f"{form}:{form}", path)]
    yield from (f"--callbacks {path}: must be package.module:Class, such as hooks:Notify" for path in wrong)
    name, part = options.hub.push_to_hub, r"[A-Za-z0-9_](?:[A-Za-z0-9_.\-]*[A-Za-z0-9_])?"
    if name is not None and (len(name) > 96 or not re.fullmatch(rf"(?:{part}/)?{part}", name)):
        yield f"--push-to-hub {name}: must be NAME or OWNER/NAME, of letters, digits, and -, _ or . inside"
    url = options.exports.upload_to
    if url is not None and not is_url(url):
        yield f"--upload-to {url}: must be a URL (s3://BUCKET/PATH or gs://BUCKET/PATH)"
    elif url is not None and split_scheme(url)[0] == "hf":
        yield f"--upload-to {url}: give the repository by --push-to-hub, which makes each export a commit"
    elif url is not None and (faults := find_url_faults(url, flag="--upload-to")):
        yield from faults
    elif url is not None and (scheme := split_scheme(url)[0]) not in WRITABLE:
        stores = "://, ".join(WRITABLE[:-1])
        yield f"--upload-to {url}: web servers cannot be written to: give {stores}:// or {WRITABLE[-1]}://, or a path"
    elif url is not None and not split_scheme(url)[1].strip("/"):
        yield f"--upload-to {url}: names no bucket: must be {scheme}://BUCKET/PATH"


# Settings that an adapter to continue from determines, so options must not set them.
LORA_ADAPTER_SAYS = ("rank", "alpha", "dropout", "target_modules", "use_dora", "modules_to_save")


def find_osft_problems(options: TrainOptions) -> Iterator[str]:
    """Problems with OSFT's options: without effect, or missing."""
    o = options.osft
    if not o.osft:
        return
    ratio, energy = o.osft_unfreeze_rank_ratio, o.osft_keep_energy
    uses_activations = o.osft_basis == "activations"
    has_statistics = o.osft_calibration_data is not None or o.osft_statistics is not None
    if ratio is None and (energy is None or not uses_activations):
        yield "--osft needs --osft-unfreeze-rank-ratio: the share of directions to train, from 0 to 1"
    if ratio == 0 and not o.osft_train_others:
        yield f"--osft-unfreeze-rank-ratio {ratio} without --osft-train-others trains nothing"
    if energy is not None and ratio is not None:
        yield "--osft-keep-energy and --osft-unfreeze-rank-ratio both set how much to keep: give only one"
    if uses_activations and not has_statistics:
        yield "--osft-basis activations needs --osft-calibration-data, --osft-statistics, or both"
    if has_statistics and not uses_activations:
        yield "--osft-calibration-data and --osft-statistics have no effect with --osft-basis weights"


def find_lora_problems(options: TrainOptions) -> Iterator[str]:
    """Problems with LoRA's options: without effect, or incompatible with others."""
    o = options.lora
    if not o.lora:
        return
    said = sorted(set(list_given(o)) & {flag_name(f"lora_{name}") for name in LORA_ADAPTER_SAYS})
    if o.lora_adapter is not None and said:
        yield f"{', '.join(said)}: no effect with --lora-adapter, which determines it"
    if options.osft.osft:
        yield "--lora and --osft are two training methods: give only one"
    if options.optimization.master_weights != "float32":
        yield (
            f"--master-weights {options.optimization.master_weights} has no effect with --lora: adapters are float32,"
            " and frozen weights are in --compute-dtype"
        )
    if options.compute.float8:
        yield "--float8 cannot be used with --lora: peft does not support adapters on fp8 layers"
    if o.base_quantization != "none" and o.lora_use_dora:
        yield f"--lora-use-dora cannot be used with --base-quantization {o.base_quantization}"


def find_vision_problems(options: TrainOptions) -> list[str]:
    """Problems with --freeze, alone or with LoRA and OSFT."""
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
