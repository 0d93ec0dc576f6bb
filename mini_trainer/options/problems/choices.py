"""Problems with what few runs choose: preferences, a teacher, a method, images, trackers, and places of exports."""

import re

from mini_trainer.options import (
    CallbackOptions,
    ExportOptions,
    HubOptions,
    OSFTOptions,
    TeacherOptions,
    TrainOptions,
    VisionOptions,
    flag_name,
)
from mini_trainer.options.doors import FROM_LOGITS, FROM_TOP
from mini_trainer.options.objectives import OBJECTIVES
from mini_trainer.options.problems.finding import list_changed, list_given
from mini_trainer.options.urls import find_target_faults, is_url, split_scheme


def find_signal_problems(options: TrainOptions) -> list[str]:
    """Problems with the training signal."""
    return [*find_preference_problems(options), *find_teacher_problems(options)]


def find_preference_problems(options: TrainOptions) -> list[str]:
    """Options that are only for some preference losses."""
    o, problems = options.preference, []
    if "preference_loss" not in OBJECTIVES[options.classification.objective].options:
        return problems
    loss = f"--preference-loss {o.preference_loss}"
    if o.preference_gamma is not None and o.preference_loss != "simpo":
        problems.append(f"--preference-gamma has no effect with {loss}")
    smoothing = options.classification.label_smoothing
    if smoothing and o.preference_loss != "dpo":
        problems.append(f"--label-smoothing has no effect with {loss}")
    elif smoothing >= 0.5:
        problems.append(
            f"--label-smoothing {smoothing}: must be below 0.5 with {loss}, for half of all pairs is no data"
        )
    if o.preference_loss in ("simpo", "orpo") and o.reference_model is not None:
        problems.append(f"--reference-model: no effect with {loss}, which has no reference")
    return problems


def find_teacher_problems(options: TrainOptions) -> list[str]:
    """Options that teachers and token weights cannot be used with."""
    o, objective = options.teacher, options.classification
    problems, weighting = [], objective.loss_weighting
    if weighting is not None and objective.label_smoothing:
        problems.append(
            f"--loss-weighting {weighting}: weighs only the target's loss, and cannot be used with --label-smoothing"
        )
    if not o.teacher_weight:
        return problems
    if not all(0 <= weight <= 1 for weight in o.teacher_weight):
        problems.append(f"--teacher-weight {' '.join(map(str, o.teacher_weight))}: must be from 0 to 1")
    num_sets = max(1, len(options.data.data_path))
    if len(o.teacher_weight) not in (1, num_sets):
        sets = "a single data set" if num_sets == 1 else f"the {num_sets} data sets of --data-path"
        problems.append(
            f"--teacher-weight: {len(o.teacher_weight)} numbers for {sets}: give one for all of them, or one for each"
        )
    for name, value in (("label_smoothing", objective.label_smoothing), ("loss_weighting", weighting)):
        if value:
            problems.append(f"{flag_name(name)}: cannot be used with --teacher-weight, which determines the loss")
    problems += find_unpaired(o.teacher_data, num_sets)
    if o.teacher_model == "self" and options.sharding.reshard_after_backward == "never":
        problems.append(
            "--reshard-after-backward never has no effect with --teacher-model self, whose weights replace the"
            " gathered ones before every micro-batch: leave it out"
        )
    if o.teacher_data and options.sharding.context_parallel is not None:
        problems.append(
            "--teacher-data cannot be used with --context-parallel: score the data with score-data --teacher-data"
        )
    return problems + find_teacher_source_problems(o)


def find_unpaired(teacher_data: tuple[str, ...], num_sets: int) -> list[str]:
    if not teacher_data or len(teacher_data) == num_sets:
        return []
    return [f"--teacher-data: {len(teacher_data)} for {num_sets} data sets of --data-path"]


def find_teacher_source_problems(o: TeacherOptions) -> list[str]:
    """Divergences that this kind of teacher does not have."""
    problems = []
    if o.teacher_model is None:
        if o.teacher_divergence not in FROM_TOP:
            problems.append(
                f"--teacher-divergence {o.teacher_divergence} needs the teacher's probability of each token that the"
                " model prefers, which files do not have: give --teacher-model"
            )
        if o.teacher_data:
            problems.append(
                "--teacher-data needs --teacher-model: give one, or score the data with score-data --teacher-data"
            )
        return problems
    if o.teacher_divergence not in FROM_LOGITS:
        problems.append(
            f"--teacher-divergence {o.teacher_divergence}: --teacher-model computes the whole distribution: give"
            " forward-kl"
        )
    if "teacher_scores" in list_changed(o):
        problems.append("--teacher-scores and --teacher-model both choose the teacher: give only one of them")
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
