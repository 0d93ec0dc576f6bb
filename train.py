"""Fine-tunes a causal language model: FSDP2, padding-free, every global batch packed into balanced micro-batches.

On one node, and in one process:

    torchrun --nproc-per-node=8 train.py --model-name-or-path M --data-path O --output-dir D
    python train.py --config recipes/gsm8k_tiny.yaml --output-dir D

The script reads top to bottom: what is refused early, the model, the loop.
"""

import os

from command_line import parse_options
from options import TrainOptions, flatten_options, parse_duration
from ranks.ending import ExitCode, RunError, leave
from ranks.monitor import Flag, RunControl, stop_reason

if __name__ == "__main__":
    options = parse_options(TrainOptions)  # before the heavy imports: --help and typos answer at once
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # torch reads it when it is imported
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # no micro-batch is as long as the last
    if options.plan.dry_run:
        from plan.planner import plan_run

        leave(plan_run(options))
    control = RunControl(hang_timeout=options.end.hang_timeout, max_seconds=parse_duration(options.end.max_time))
    control.start()

import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from disk import remove_leftovers
from lifecycle.checkpoint_files import has_checkpoints
from lifecycle.checkpointing import Checkpointer, export_model
from lifecycle.record import check_output_dir, check_same_run, check_unused, record_end, record_start
from lifecycle.start import build_run_model, is_export_due, open_inputs
from lifecycle.training_log import (
    TrainingLog,
    count_flops,
    describe_bad_step,
    describe_micro_batch,
    describe_run,
    measure_step,
    peak_flops,
    reduce_step,
)
from model.build import set_gradient_sync
from model.files import find_weights
from optim.optimizers import build_optimizer, clip_gradients, learning_rate_at, local_gradients, set_step
from osft import find_osft_layers, measure_leak, project_gradients, project_updates
from plan.auto_settings import settle_auto_options
from ranks.ending import log
from ranks.world import World, call_on_rank0, connect_lifeline, init_world, setup_logging
from sampler import RunPosition, collect_garbage_between, derive_seed, iterate_batches, prefetch


def train(options: TrainOptions, world: World, control: RunControl) -> tuple[ExitCode, str]:
    """The run, from the files it reads to the last export; returns how it ended."""
    # What can be refused is refused before anything large is loaded.
    output_dir = Path(options.output_dir)
    call_on_rank0(world, lambda: control.lock(output_dir))
    call_on_rank0(world, lambda: check_output_dir(output_dir))
    checkpointer = Checkpointer(
        output_dir / "checkpoints",
        world=world,
        num_kept=options.checkpoints.keep_checkpoints,
        is_async=options.checkpoints.async_checkpoint,
    )
    if call_on_rank0(world, lambda: has_checkpoints(checkpointer.directory)):
        control.own(output_dir)
    checkpoint = checkpointer.choose(options.checkpoints.resume)
    is_own = checkpoint is not None and checkpoint.path.absolute().parent == checkpointer.directory.absolute()
    start = RunPosition(**checkpoint.state["position"]) if checkpoint else RunPosition()
    log.info(f"resuming from {checkpoint.path}: {start}" if checkpoint else f"starting from step 0 in {output_dir}")
    log.info(describe_run(options, world))
    inputs = open_inputs(options, device=world.device, world_size=world.world_size, start=start)
    data, config, num_steps = inputs.data, inputs.config, inputs.num_steps
    call_on_rank0(world, lambda: find_weights(options.model.model_name_or_path, inputs.model_dir))
    identity = call_on_rank0(world, lambda: inputs.identify(options))
    changes = []
    if not is_own:
        call_on_rank0(world, lambda: check_unused(output_dir, identity, resume=options.checkpoints.resume))
        control.own(output_dir)
    if checkpoint is not None:
        changes = check_same_run(checkpoint, identity, allow_changes=options.checkpoints.allow_changed_options)
    exports_dir = output_dir / "hf_format"
    call_on_rank0(world, lambda: remove_leftovers(exports_dir))

    # The model.
    model = build_run_model(options, inputs, world, progress=control.progress)
    osft_layers = find_osft_layers(model)  # none without --osft
    optimizer = build_optimizer(
        model,
        optimizer=options.optimization.optimizer,
        learning_rate=options.optimization.learning_rate,
        weight_decay=options.optimization.weight_decay,
        betas=(options.optimization.adam_beta1, options.optimization.adam_beta2),
        eps=options.optimization.adam_eps,
        seed=options.data.seed,
    )
    options, auto_settings = settle_auto_options(
        options,
        model,
        optimizer,
        data,
        start=start,
        previous=checkpoint and checkpoint.state.get("auto_settings"),
        world=world,
        progress=control.progress,
    )
    flops = count_flops(model.model, config)
    device_flops = peak_flops(world.device, inputs.compute_dtype)

    # The loop.
    if checkpoint is not None:
        checkpointer.load(checkpoint, model, optimizer)
    call_on_rank0(
        world,
        lambda: record_start(
            output_dir,
            options,
            world,
            identity=identity,
            resumed_from=checkpoint and checkpoint.path,
            first_step=start.step,
            changes=changes,
            auto_settings=auto_settings,
        ),
    )
    batches = iterate_batches(
        data,
        batch_size=options.data.batch_size,
        seed=options.data.seed,
        start=start,
        num_steps=num_steps,
        max_tokens_per_gpu=options.data.max_tokens_per_gpu,
        attention_cost=flops.attention_cost,
        rank=world.rank,
        world_size=world.world_size,
        vocab_size=config.vocab_size,
        pin_memory=world.device.type == "cuda",
    )
    training_log = TrainingLog(output_dir, is_rank0=world.rank == 0, first_step=start.step, num_steps=num_steps)
    position, stop = start, None

    def is_due_now() -> bool:
        return is_export_due(options, position, epoch_length=len(data.kept), is_last=position.step == num_steps)

    def export_if_due() -> None:
        is_due = is_due_now()
        export_dir = exports_dir / f"samples_{position.num_samples}"
        if is_due and not (position == start and call_on_rank0(world, export_dir.exists)):
            with control.slow(f"the export after step {position.step}"):
                export_model(
                    model.model,
                    export_dir,
                    world=world,
                    generation_config=inputs.generation_config,
                    tokenizer=inputs.tokenizer,
                    dtype=getattr(torch, options.exports.export_dtype),
                )

    if checkpoint is not None:
        export_if_due()  # unless the run got that far before it ended
    last_save = step_end = time.monotonic()
    seconds_between_saves = 60 * (options.checkpoints.checkpoint_every_minutes or float("inf"))
    control.start_loop(steps_done=start.step)
    for batch in collect_garbage_between(prefetch(batches)):
        step_start = time.monotonic()
        torch.manual_seed(derive_seed(options.data.seed, batch.step, world.rank))  # dropout
        losses = []
        for k, micro_batch in enumerate(batch.micro_batches):
            control.progress(describe_micro_batch(batch, k))
            set_gradient_sync(model, options.sharding.micro_batch_grad_sync, is_last=k + 1 == len(batch.micro_batches))
            loss_sum = model(micro_batch.to(world.device))
            (loss_sum / max(1, batch.num_loss_tokens)).backward()  # FSDP sums over ranks: see apply_fsdp
            losses.append(loss_sum.detach())

        flags = control.flags() | (Flag.CHECKPOINT_UNDER_WAY if checkpointer.is_writing else 0)
        if world.rank == 0 and time.monotonic() - last_save > seconds_between_saves:
            flags |= Flag.CHECKPOINT_DUE
        project_gradients(osft_layers)
        sums = reduce_step(
            losses,
            local_gradients(model),
            device=world.device,
            num_shards=world.num_shards,
            data_wait_seconds=step_start - step_end,
            flags=flags,
        )
        if not sums.finite:
            raise RunError(ExitCode.NON_FINITE, describe_bad_step(batch, sums, options.data.data_path))
        lr = learning_rate_at(
            batch.step,
            scheduler=options.optimization.lr_scheduler,
            peak=options.optimization.learning_rate,
            num_warmup_steps=options.optimization.num_warmup_steps,
            num_steps=num_steps,
            num_decay_steps=options.optimization.num_decay_steps,
            min_lr_ratio=options.optimization.min_lr_ratio or 0.0,
        )
        clip_gradients(
            local_gradients(model), grad_norm=sums.grad_norm, max_grad_norm=options.optimization.max_grad_norm
        )
        set_step(optimizer, step=batch.step, learning_rate=lr)
        optimizer.step()
        project_updates(osft_layers)
        optimizer.zero_grad()

        position = RunPosition(
            step=batch.step + 1,
            num_samples=position.num_samples + options.data.batch_size,
            num_tokens=position.num_tokens + int(batch.lengths.sum()),
        )
        step_end = time.monotonic()
        training_log.write(
            measure_step(
                batch,
                sums,
                lr=lr,
                seconds=step_end - step_start,
                num_samples=position.num_samples,
                num_tokens=position.num_tokens,
                epoch_length=len(data.kept),
                max_tokens_per_gpu=options.data.max_tokens_per_gpu,
                flops=flops,
                peak_flops=device_flops,
                osft_leak=measure_leak(osft_layers) if options.osft.osft and is_due_now() else None,
            )
        )
        control.step_done(position.step)
        is_last = position.step == num_steps
        stop = None if is_last else stop_reason(sums.flags)
        if not sums.flags & Flag.CHECKPOINT_UNDER_WAY:
            checkpointer.finish()
        every = options.checkpoints.checkpoint_every_steps
        is_due = every is not None and (position.step % every == 0 or is_last)
        if is_due or stop is not None or sums.flags & Flag.CHECKPOINT_DUE:
            training_log.flush_to_disk()
            state = {
                "position": asdict(position),
                "identity": identity,
                "options": flatten_options(options),
                "changed": changes,
            }
            state["auto_settings"] = auto_settings
            with control.slow(f"the checkpoint after step {position.step}"):
                checkpointer.save(model, optimizer, step=position.step, state=state)
            last_save = time.monotonic()
        export_if_due()
        if stop is not None:
            break
        step_end = time.monotonic()
    with control.slow("the last checkpoint"):
        checkpointer.finish()
    training_log.close()
    if stop is not None:
        code, reason = stop
        return code, f"stopped after step {position.step}: {reason}; saved"
    call_on_rank0(world, lambda: record_end(output_dir))
    return ExitCode.DONE, "done"


if __name__ == "__main__":
    setup_logging(options.logging_level)
    try:
        world = init_world(options.sharding, hang_timeout=options.end.hang_timeout)
        connect_lifeline(world, control)
        code, message = train(options, world, control)
        dist.destroy_process_group()
    except BaseException as error:  # whatever it is, the other ranks end with this one
        control.fail(error)
    control.finish(code, message)
