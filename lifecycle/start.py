"""What a run and its plan have in common: the files they read, all that is refused early, and the model.

Takes the options as they are, as the scripts do.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from corpus.reader import TokenizedData, read_sidecar
from lifecycle.record import identify_run
from methods.osft_calibration import open_calibration_data, prepare_statistics
from model.attention import check_rope
from model.build import (
    PackedCausalLM,
    build_model,
    check_model,
    choose_tokenizer,
    load_config,
    load_generation_config,
)
from model.files import find_model
from objectives.micro_batch import pack_samples
from options import SCHEDULES_WITH_END, TrainOptions
from osft import OSFTSettings, Statistics, describe_osft, find_osft_layers
from plan.auto_settings import give_back_freed_memory, keeps_to_budget
from ranks.ending import log
from ranks.world import World
from sampler import RunPosition, count_steps

Result = TypeVar("Result")


@dataclass(frozen=True)
class RunInputs:
    """What a run reads before anything large is loaded; of a plan, None in the place of what cannot be read."""

    data: TokenizedData
    sidecar: dict[str, Any] | None
    model_dir: str
    config: PreTrainedConfig
    generation_config: GenerationConfig
    tokenizer: PreTrainedTokenizerBase
    calibration_data: TokenizedData | None
    max_tokens_per_gpu: int  # with auto, until the model is there to choose it: the longest sample's
    num_steps: int | None  # None: no end
    compute_dtype: torch.dtype

    def identify(self, options: TrainOptions) -> dict[str, Any]:
        """What decides the numbers of the run (see lifecycle.record)."""
        return identify_run(
            options,
            model_dir=self.model_dir,
            data=self.data,
            source=self.sidecar and self.sidecar.get("source"),
            tokenizer=self.tokenizer,
            compute_dtype=self.compute_dtype,
            num_steps=self.num_steps if options.optimization.lr_scheduler in SCHEDULES_WITH_END else None,
        )


def open_inputs(
    options: TrainOptions,
    *,
    device: torch.device,
    world_size: int,
    start: RunPosition,
    attempt: Callable[[Callable[[], Result]], Result] = lambda function: function(),
    warn: Callable[[str], None] = lambda text: log.warning(f"warning: {text}"),
) -> RunInputs:
    """Opens data, tokenizer and the model's config; raises ValueError for whatever does not fit together.

    `attempt` calls what may raise. A plan's keeps the error and returns None, and the rest is looked at without it.
    """
    trust = options.model.trust_remote_code
    max_tokens_per_gpu = options.data.max_tokens_per_gpu
    sidecar = num_dropped = num_steps = None
    if (data := attempt(lambda: TokenizedData(options.data.data_path))) is not None:
        if max_tokens_per_gpu == "auto":
            max_tokens_per_gpu = int(data.lengths.max())
        num_dropped = attempt(lambda: data.fit_to(max_tokens_per_gpu, drop_overlong=options.data.drop_overlong))
        sidecar = attempt(lambda: read_sidecar(options.data.data_path, num_samples=len(data.lengths)))
    model_dir = attempt(
        lambda: find_model(
            options.model.model_name_or_path, revision=options.model.model_revision, trust_remote_code=trust
        )
    )
    config = generation_config = tokenizer = calibration_data = None
    if model_dir is not None:
        config = attempt(lambda: load_config(model_dir, trust_remote_code=trust))
    if config is not None:
        generation_config = load_generation_config(model_dir, config)
    if config is not None and data is not None:
        attempt(lambda: check_rope(config, longest=data.longest))
        found = attempt(
            lambda: choose_tokenizer(
                model_dir, options.data.data_path, sidecar, vocab_size=config.vocab_size, trust_remote_code=trust
            )
        )
        tokenizer, config.vocab_size = found or (None, config.vocab_size)
        if sidecar is not None and sidecar.get("tokenizer_dir") and sidecar.get("stop_token_id") is not None:
            # The data's chat template decides what a turn ends with.
            config.eos_token_id = generation_config.eos_token_id = sidecar["stop_token_id"]
    if tokenizer is not None and options.osft.osft_calibration_data is not None:
        calibration_data = attempt(
            lambda: open_calibration_data(
                options.osft.osft_calibration_data, tokenizer, max_tokens_per_gpu=max_tokens_per_gpu
            )
        )
    if data is not None:
        num_steps = count_run_steps(options, data, start=start)
        if options.data.batch_size > len(data.kept):
            warn(f"--batch-size {options.data.batch_size}: each step draws the {len(data.kept)} samples repeatedly")
        log.info(
            f"data: {len(data.kept):,} samples, {data.lengths[data.kept].sum(dtype=np.int64):,} tokens;"
            f" {num_dropped or 0:,} dropped, longer than --max-tokens-per-gpu\n"
            f"run: {'no end' if num_steps is None else f'{num_steps:,} steps'} of {options.data.batch_size} samples"
            f"{'; nothing is left to train' if num_steps is not None and start.step >= num_steps else ''}"
        )
    if options.data.batch_size < world_size:
        warn(f"--batch-size {options.data.batch_size} is smaller than the {world_size} ranks: some have nothing to do")
    if num_steps is not None and options.optimization.num_warmup_steps >= num_steps:
        warn(
            f"--num-warmup-steps {options.optimization.num_warmup_steps}: the run of {num_steps} steps ends before its peak learning"
            " rate"
        )
    return RunInputs(
        data=data,
        sidecar=sidecar,
        model_dir=model_dir,
        config=config,
        generation_config=generation_config,
        tokenizer=tokenizer,
        calibration_data=calibration_data,
        max_tokens_per_gpu=max_tokens_per_gpu,
        num_steps=num_steps,
        compute_dtype=choose_compute_dtype(options, device),
    )


def count_run_steps(options: TrainOptions, data: TokenizedData, *, start: RunPosition) -> int | None:
    """The run's steps, those before `start` included; None: no end."""
    return count_steps(
        data,
        batch_size=options.data.batch_size,
        seed=options.data.seed,
        start=start,
        max_steps=options.end.max_steps,
        max_epochs=options.end.max_epochs,
        max_samples=options.end.max_samples,
        max_tokens=options.end.max_tokens,
    )


def build_run_model(
    options: TrainOptions, inputs: RunInputs, world: World, *, progress: Callable[[str], None]
) -> PackedCausalLM:
    """The sharded model, constrained if the options say so, after its self-checks; `progress` hears of a long start."""
    if keeps_to_budget(options) and world.device.type == "cpu":
        give_back_freed_memory()
    build = functools.partial(
        build_model,
        inputs.model_dir,
        inputs.config,
        trust_remote_code=options.model.trust_remote_code,
        world=world,
        compute_dtype=inputs.compute_dtype,
        weights_dtype=getattr(torch, options.optimization.master_weights),
        attention=options.compute.attention,
        activation_checkpointing=options.compute.activation_checkpointing,
        compile=options.compute.compile,
        use_liger_kernels=options.compute.use_liger_kernels,
        float8=options.compute.float8,
        reshard_after_forward=options.sharding.reshard_after_forward,
        prefetch_blocks=options.sharding.prefetch_blocks,
        cpu_offload=options.sharding.cpu_offload,
        progress=progress,
    )
    statistics = None
    if options.osft.osft_statistics is not None or inputs.calibration_data is not None:
        statistics = prepare_statistics(
            options.osft.osft_statistics and Path(options.osft.osft_statistics),
            inputs.calibration_data,
            build,
            seed=options.data.seed,
            max_tokens_per_gpu=inputs.max_tokens_per_gpu,
            world=world,
        )
    model = build(osft=make_osft_settings(options, statistics))
    check_model(model, pack_samples, device=world.device)
    log.info(
        f"model: {inputs.config.model_type}, {sum(p.numel() for p in model.parameters()):,} parameters;"
        f" {str(inputs.compute_dtype).removeprefix('torch.')} compute, {model.backend} attention,"
        f" {options.compute.activation_checkpointing} activation checkpointing"
        f"{', liger kernels' if options.compute.use_liger_kernels else ''}{', compiled blocks' if options.compute.compile else ''}"
        f"{describe_osft(find_osft_layers(model))};"
        " packing and loss agree with the model's own forward pass"
    )
    return model


def make_osft_settings(options: TrainOptions, statistics: Statistics | None = None) -> OSFTSettings | None:
    """What the options say of OSFT; None without it."""
    if not options.osft.osft:
        return None
    return OSFTSettings(
        unfreeze_rank_ratio=options.osft.osft_unfreeze_rank_ratio,
        target_patterns=options.osft.osft_target_patterns,
        train_others=options.osft.osft_train_others,
        cache_dir=options.osft.osft_cache_dir,
        basis=options.osft.osft_basis,
        keep_energy=options.osft.osft_keep_energy,
        allocation=options.osft.osft_rank_allocation,
        statistics=statistics,
    )


def choose_compute_dtype(options: TrainOptions, device: torch.device) -> torch.dtype:
    auto = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, auto if options.compute.compute_dtype == "auto" else options.compute.compute_dtype)


def is_export_due(options: TrainOptions, position: RunPosition, *, epoch_length: int, is_last: bool) -> bool:
    """Whether the step that brought the run to `position` crossed one of the thresholds, or was the last."""

    def crossed(every: int) -> bool:
        return position.num_samples // every > (position.num_samples - options.data.batch_size) // every

    every = options.exports.min_samples_per_checkpoint
    return (
        (is_last and options.exports.save_final_checkpoint)
        or (every is not None and crossed(every))
        or (options.exports.checkpoint_at_epoch and crossed(epoch_length))
    )
