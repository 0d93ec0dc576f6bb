"""Problems with the options of OSFT, LoRA, and frozen parts of vision-language models."""

from mini_trainer.options import OSFTOptions, TrainOptions, VisionOptions, flag_name
from mini_trainer.options.problems.facts import list_given

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
