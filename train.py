"""Fine-tunes a causal language model: FSDP2, padding-free, every global batch packed into balanced micro-batches.

On one node, and in one process:

    torchrun --nproc-per-node=8 train.py --model-name-or-path M --data-path O --output-dir D
    python train.py --config recipes/gsm8k_tiny.yaml --output-dir D

The script reads top to bottom: what is refused early, the model, the loop.
"""

from training_args import (
    INTERRUPTED,
    SECONDS_TO_BE_ENDED,
    TrainOptions,
    check_model_path,
    exit_with_message,
    parse_options,
)

if __name__ == "__main__":
    options = parse_options(TrainOptions)  # before the heavy imports: --help and typos answer at once

import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from chat_masking import fingerprint_tokenizer
from checkpointing import export_model
from model_setup import build_model, check_model, load_config, load_generation_config
from optimization import build_optimizer, clip_gradients, learning_rate_at, local_gradients
from packed_attention import check_rope
from process_group import World, call_on_rank0, init_world, log, setup_logging
from sampler import Batch, TokenizedData, count_steps, iterate_batches, pack_samples, prefetch, read_sidecar
from training_log import (
    StepSums,
    TrainingLog,
    check_output_dir,
    count_flops,
    create_output_dir,
    describe_run,
    measure_step,
    peak_flops,
    reduce_step,
)


def train(options: TrainOptions, world: World) -> None:
    """The run, from the files it reads to the last export."""
    # What can be refused is refused before anything large is loaded.
    log.info(describe_run(options, world))
    output_dir = Path(options.output_dir)
    call_on_rank0(world, lambda: check_output_dir(output_dir))
    data = TokenizedData(options.data_path)
    num_dropped = data.fit_to(options.max_tokens_per_gpu, drop_overlong=options.drop_overlong)
    check_model_path(options.model_name_or_path)
    config = load_config(options.model_name_or_path)
    check_rope(config, longest=int(data.lengths[data.kept].max()))
    generation_config = load_generation_config(options.model_name_or_path, config)
    sidecar = read_sidecar(options.data_path, num_samples=len(data.lengths))
    tokenizer, config.vocab_size = choose_tokenizer(options, sidecar, vocab_size=config.vocab_size)
    if sidecar is not None and sidecar.get("tokenizer_dir") and sidecar.get("stop_token_id") is not None:
        config.eos_token_id = generation_config.eos_token_id = sidecar["stop_token_id"]  # of the data's chat template
    if options.use_liger_kernels and data.has_weights:
        raise ValueError("--use-liger-kernels: liger-kernel's loss cannot weight tokens, and the data has loss_weights")
    num_steps = count_steps(
        data,
        batch_size=options.batch_size,
        seed=options.seed,
        max_steps=options.max_steps,
        max_epochs=options.max_epochs,
        max_samples=options.max_samples,
        max_tokens=options.max_tokens,
    )
    if options.batch_size > len(data.kept):
        log.warning(
            f"warning: --batch-size {options.batch_size}: each step draws the {len(data.kept)} samples repeatedly"
        )
    if num_steps is not None and options.num_warmup_steps >= num_steps:
        log.warning(
            f"warning: --num-warmup-steps {options.num_warmup_steps}: the run ends before its peak learning rate"
        )
    log.info(
        f"data: {len(data.kept):,} samples, {data.lengths[data.kept].sum(dtype=np.int64):,} tokens;"
        f" {num_dropped:,} dropped, longer than --max-tokens-per-gpu\n"
        f"run: {'no end' if num_steps is None else f'{num_steps:,} steps'} of {options.batch_size} samples"
    )

    # The model.
    on_cuda = world.device.type == "cuda"
    auto_dtype = "bfloat16" if on_cuda else "float32"
    compute_dtype = getattr(torch, auto_dtype if options.compute_dtype == "auto" else options.compute_dtype)
    model = build_model(
        options.model_name_or_path,
        config,
        world=world,
        compute_dtype=compute_dtype,
        attention=options.attention,
        activation_checkpointing=options.activation_checkpointing,
        compile=options.compile,
        use_liger_kernels=options.use_liger_kernels,
    )
    check_model(model, pack_samples, device=world.device)
    log.info(
        f"model: {config.model_type}, {sum(p.numel() for p in model.parameters()):,} parameters;"
        f" {str(compute_dtype).removeprefix('torch.')} compute, {model.backend} attention,"
        f" {'liger' if options.use_liger_kernels else 'chunked'} loss,"
        f" {options.activation_checkpointing} activation checkpointing"
        f"{', compiled blocks' if options.compile else ''}; packing and loss agree with the model's own forward pass"
    )
    optimizer = build_optimizer(
        model,
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        betas=(options.adam_beta1, options.adam_beta2),
        eps=options.adam_eps,
    )
    flops = count_flops(model.model, config)
    device_flops = peak_flops(world.device, compute_dtype)

    # The loop.
    call_on_rank0(world, lambda: create_output_dir(output_dir, options, world))
    batches = iterate_batches(
        data,
        batch_size=options.batch_size,
        seed=options.seed,
        num_steps=num_steps,
        max_tokens_per_gpu=options.max_tokens_per_gpu,
        attention_cost=flops.attention_cost,
        rank=world.rank,
        world_size=world.world_size,
        vocab_size=config.vocab_size,
        pin_memory=on_cuda,
    )
    training_log = TrainingLog(output_dir, is_rank0=world.rank == 0, num_steps=num_steps)
    num_tokens = 0
    step_end = time.monotonic()
    for batch in prefetch(batches):
        step_start = time.monotonic()
        torch.manual_seed(derive_seed(options.seed, batch.step, world.rank))  # dropout
        losses = []
        for micro_batch in batch.micro_batches:
            loss_sum = model(micro_batch.to(world.device))
            (loss_sum / max(1, batch.num_loss_tokens)).backward()  # FSDP sums over ranks: see apply_fsdp
            losses.append(loss_sum.detach())

        gradients = local_gradients(model)
        sums = reduce_step(losses, gradients, device=world.device, data_wait_seconds=step_start - step_end)
        if not sums.finite:
            raise ValueError(describe_bad_step(batch, sums, options.data_path))
        lr = learning_rate_at(
            batch.step,
            scheduler=options.lr_scheduler,
            peak=options.learning_rate,
            num_warmup_steps=options.num_warmup_steps,
            num_steps=num_steps,
            num_decay_steps=options.num_decay_steps,
            min_lr_ratio=options.min_lr_ratio or 0.0,
        )
        clip_gradients(gradients, grad_norm=sums.grad_norm, max_grad_norm=options.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad()

        num_tokens += int(batch.lengths.sum())
        num_samples = (batch.step + 1) * options.batch_size
        step_end = time.monotonic()
        training_log.write(
            measure_step(
                batch,
                sums,
                lr=lr,
                seconds=step_end - step_start,
                num_samples=num_samples,
                num_tokens=num_tokens,
                epoch_length=len(data.kept),
                max_tokens_per_gpu=options.max_tokens_per_gpu,
                flops=flops,
                peak_flops=device_flops,
            )
        )
        is_last = batch.step + 1 == num_steps
        if is_export_due(options, num_samples=num_samples, epoch_length=len(data.kept), is_last=is_last):
            export_model(
                model.model,
                output_dir / "hf_format" / f"samples_{num_samples}",
                world=world,
                generation_config=generation_config,
                tokenizer=tokenizer,
                dtype=getattr(torch, options.export_dtype),
            )
            step_end = time.monotonic()
    training_log.close()


def choose_tokenizer(
    options: TrainOptions, sidecar: dict[str, Any] | None, *, vocab_size: int
) -> tuple[PreTrainedTokenizerBase, int]:
    """The tokenizer that made the data, and how many embeddings the model needs for it.

    It is the model's, or one saved beside the data that extends the model's; ValueError if it is any other. Every
    export carries it.
    """
    model_tokenizer = tokenizer = load_tokenizer(options.model_name_or_path)
    if sidecar is None:
        log.warning(f"warning: no {options.data_path}.meta.json: cannot tell whether the data fits this tokenizer")
        return tokenizer, vocab_size
    if sidecar.get("tokenizer_dir") is not None:
        tokenizer_dir = Path(options.data_path).parent / sidecar["tokenizer_dir"]
        if not tokenizer_dir.is_dir():
            raise ValueError(
                f"--data-path {options.data_path}: the directory {tokenizer_dir} with its tokenizer is missing: copy it"
                " beside the data, or tokenize the data again with process_data.py"
            )
        tokenizer = load_tokenizer(str(tokenizer_dir))
        if len(tokenizer) > vocab_size:
            grown = -(-len(tokenizer) // 64) * 64
            log.info(
                f"vocabulary: {vocab_size} rows grow to {grown} for {len(tokenizer)} tokens, each new one the mean"
            )
            vocab_size = grown
    extends = model_tokenizer.get_vocab().items() <= tokenizer.get_vocab().items()
    if not extends or sidecar["tokenizer_fingerprint"] != fingerprint_tokenizer(tokenizer):
        raise ValueError(
            f"--data-path {options.data_path} was made with another tokenizer than --model-name-or-path's:"
            " tokenize the data again with process_data.py and this model"
        )
    if sidecar["max_token_id"] >= vocab_size:
        raise ValueError(
            f"--data-path {options.data_path} holds token id {sidecar['max_token_id']}, beyond the {vocab_size} rows of"
            " the model's embedding"
        )
    return tokenizer, vocab_size


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model-name-or-path {path}: no usable tokenizer: {error}") from None


def derive_seed(seed: int, step: int, rank: int) -> int:
    """One seed for each (seed, step, rank), so that there is no generator state to keep."""
    return int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0])


def describe_bad_step(batch: Batch, sums: StepSums, data_path: str) -> str:
    """Where a loss or gradient stopped being finite: step, ranks and rows of the data set."""
    bad = sums.bad_micro_batches or [(k, rank) for k, ranks in enumerate(batch.table) for rank in range(len(ranks))]
    rows = sorted(int(batch.sample_ids[i]) + 1 for k, rank in bad for i in batch.table[k][rank])
    shown = ", ".join(map(str, rows[:20])) + (f" and {len(rows) - 20} more" if len(rows) > 20 else "")
    return (
        f"step {batch.step + 1}: the {'loss' if sums.bad_micro_batches else 'gradient'} is not finite (loss"
        f" {sums.loss_sum}, grad_norm {sums.grad_norm}); stopped before the update. Rows of {data_path}: {shown}"
        f" (rank {', '.join(str(rank) for rank in sorted({rank for _, rank in bad}))})"
    )


def is_export_due(options: TrainOptions, *, num_samples: int, epoch_length: int, is_last: bool) -> bool:
    """Whether the step that brought the run to `num_samples` crossed one of the thresholds, or was the last."""

    def crossed(every: int) -> bool:
        return num_samples // every > (num_samples - options.batch_size) // every

    every = options.min_samples_per_checkpoint
    return (
        (is_last and options.save_final_checkpoint)
        or (every is not None and crossed(every))
        or (options.checkpoint_at_epoch and crossed(epoch_length))
    )


if __name__ == "__main__":
    setup_logging(options.logging_level)
    try:
        train(options, init_world())
        dist.destroy_process_group()
        exit_code = 0
    except (ValueError, OSError) as error:
        exit_with_message(str(error))
    except KeyboardInterrupt:
        exit_with_message("interrupted", code=INTERRUPTED)
    except Exception:
        time.sleep(SECONDS_TO_BE_ENDED)  # another rank's end breaks this one's connections: let it speak alone
        traceback.print_exc()
        exit_code = 1
    # Not sys.exit: a rank that failed must not wait for the others in an exit handler, and the interpreter's teardown
    # races with native threads (gloo, Arrow), which now and then aborts a run that is done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
