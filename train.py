"""Fine-tunes a language model or a classifier: FSDP2, padding-free, global batches packed into balanced micro-batches.

On one node, and in one process:

    torchrun --nproc-per-node=8 train.py --model-name-or-path M --data-path O --output-dir D
    python train.py --config examples/recipes/gsm8k_tiny.yaml --output-dir D
    python train.py --model-name-or-path M --input-file chats.jsonl --output-dir D --max-epochs 1

The script reads top to bottom: what is refused early, the model, the loop.
"""

import os

from mini_trainer.distributed.ending import exit_process
from mini_trainer.distributed.process import check_tasks, pause_collector, resume_collector
from mini_trainer.distributed.watch import RunControl
from mini_trainer.options import TrainOptions, flatten_options, parse_duration, replace_options
from mini_trainer.options.command_line import parse_options

if __name__ == "__main__":
    options = parse_options(TrainOptions)  # before the heavy imports: --help and typos answer at once
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # torch reads it when it is imported
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # no micro-batch is as long as the last
    if options.plan.dry_run:
        from mini_trainer.run.plan.planner import plan_run

        exit_process(plan_run(options))
    from mini_trainer.run.preflight import begin

    begin(options)
    control = RunControl(hang_timeout=options.end.hang_timeout, max_seconds=parse_duration(options.end.max_time))
    control.start()
    pause_collector()

import functools
import time

import torch.distributed as dist

from mini_trainer.distributed.agreement import compare_ranks
from mini_trainer.distributed.devices import peak_flops
from mini_trainer.distributed.ending import ExitCode, log
from mini_trainer.distributed.lifeline import is_one_node
from mini_trainer.distributed.world import (
    World,
    call_on_each_node,
    call_on_rank0,
    connect_lifeline,
    divide_world,
    init_world,
    setup_logging,
)
from mini_trainer.model.flops import count_flops
from mini_trainer.model.optim.optimizers import build_optimizer, learning_rate_at
from mini_trainer.run.due import Calendar
from mini_trainer.run.end_report import describe_continuing, describe_result
from mini_trainer.run.exports import Exports
from mini_trainer.run.identity import describe_run
from mini_trainer.run.metrics import StepMeter
from mini_trainer.run.preflight import check_start
from mini_trainer.run.run_directory import RunDirectory
from mini_trainer.run.run_model import build_run_model, find_fewer_tokens, make_average, settle_auto_options
from mini_trainer.run.start import make_data_local, open_inputs, settle_by_device
from mini_trainer.run.start_checks import describe_inputs, describe_start
from mini_trainer.run.step import StepOptions, TrainState, train_step
from mini_trainer.run.validation import Validations
from mini_trainer.sampler import collect_garbage_between, pin_memory, prefetch


def train(options: TrainOptions, world: World, control: RunControl) -> tuple[ExitCode, str, str]:
    """The run, from the files it reads to the last export; returns exit code, message, and text below it."""
    # Check inputs before anything large is loaded.
    options = settle_by_device(options, world.device, world)
    run = RunDirectory(options.output_dir, options.checkpoints, world, control)
    log.info(describe_run(world))
    inputs = open_inputs(options, device=world.device, world_size=world.world_size, start=run.start, origin=run.origin)
    options = inputs.options
    for warning in inputs.warnings:
        log.warning(f"warning: {warning}")
    inputs.errors.raise_all()
    verifies = not options.skip_verification
    compare_ranks(world, lambda: describe_inputs(inputs, verifies=verifies))
    call_on_rank0(world, lambda: inputs.find_weights(verifies=verifies))
    if verifies:
        call_on_each_node(world, inputs.verify)
    run.claim(inputs, options.optimization)
    validations = Validations(options.validation, inputs, world, control, previous=run.previous.get("validation"))

    # The model, and the options that depend on it.
    step_options = StepOptions(options.data, options.compute, options.sharding, options.optimization)
    model = build_run_model(
        inputs, step_options, world, load_start=lambda model: run.load_start(model, inputs), progress=control.progress
    )
    optimizer = build_optimizer(model, options.optimization, seed=options.data.seed)
    average = make_average(model, options.optimization, end=inputs.last_step)
    state = TrainState(model, inputs.method, optimizer, world, inputs.num_steps_before, average)
    settled, run.auto_settings = settle_auto_options(
        state, inputs, step_options, start=run.start, previous=run.auto_settings, progress=control.progress
    )
    step_options = replace_options(step_options, **settled)
    inputs.values.update(settled)  # as they are recorded
    if run.auto_settings:
        control.marks.fewer_tokens = find_fewer_tokens(settled, inputs, world)
    run.restore(state)

    # The loop.
    num_steps = run.start.step if validations.has_learnt_enough else inputs.num_steps
    flops = count_flops(model.model)
    batches = inputs.open_batches(
        step_options.data, start=run.start, num_steps=num_steps, attention_cost=flops.attention_cost, world=world
    )
    if world.device.type == "cuda":
        batches = pin_memory(batches)
    position, due = run.start, None
    calendar = Calendar(options.validation, options.checkpoints, options.exports, len(inputs.data.kept))
    peak = peak_flops(world.device, inputs.compute_dtype)
    cap = step_options.data.max_tokens_per_gpu
    meter = StepMeter(calendar.epoch_length, cap, flops, peak, inputs.objective)
    training_log = run.open_log(inputs, options.tracking, num_validations=validations.num_done)
    rescue = functools.partial(run.rescue, validations.describe)
    exports = Exports(options.exports, options.hub, inputs, world, control, training_log, rescue=rescue)
    exports.check_room()
    if run.checkpoint and exports.is_missing(position, calendar, num_steps=num_steps):
        exports.write(state, position)
    if validations.is_missing_at(position):
        validations.measure(state, position, training_log, exports, cap=cap)
    run.start_loop()
    step_end = time.monotonic()
    for batch in run.profile(collect_garbage_between(prefetch(batches)), options.profiling.profile_steps):
        step_start = time.monotonic()
        lr = learning_rate_at(
            state.num_steps_before + batch.step, options.optimization, num_steps=inputs.schedule_steps
        )
        waited = step_start - step_end
        sums = train_step(
            state, batch, step_options, lr=lr, data_wait_seconds=waited, flags=run.flags, progress=control.progress
        )
        position = position.after(batch)
        due = calendar.find_due(position, num_steps=num_steps, flags=sums.flags)
        step_end = time.monotonic()
        metrics = meter.measure(batch, sums, position, lr=lr, seconds=step_end - step_start)
        own = state.method.measure(exports.dtype) if due.export else dict.fromkeys(state.method.metrics)
        training_log.write(metrics | own)
        if due.validation and validations.measure(state, position, training_log, exports, cap=cap):
            num_steps = position.step  # early stopping: this step was the last
            due = calendar.find_due(position, num_steps=num_steps, flags=sums.flags)
        control.step_done(position.step)
        run.finish_write(sums.flags)
        if due.checkpoint:
            run.save(state, position, validation=validations.describe())
        if due.export:
            exports.write(state, position, is_last=due.is_last)
        if due.is_last:
            break
        step_end = time.monotonic()
    stop = run.close(exports, stop=None if due is None else due.stop)
    if stop is not None:
        code, reason = stop
        how = describe_continuing(options.checkpoints.resume, options.output_dir)
        return code, f"stopped after step {position.step}: {reason}; saved", how
    message = validations.describe_end(position)
    return ExitCode.DONE, message, describe_result(message, exports, position, best_step=validations.best_step)


if __name__ == "__main__":
    resume_collector()
    setup_logging(options.logging_level)
    try:
        check_tasks()
        world = init_world(hang_timeout=options.end.hang_timeout, start_timeout=options.end.start_timeout)
        compare_ranks(
            world, lambda: describe_start(flatten_options(options), world)
        )  # first, also in a plan: --dry-run is compared
        connect_lifeline(world, control)
        world = divide_world(world, options.sharding)
        if not is_one_node():  # else `begin` has checked it
            call_on_rank0(world, lambda: check_start(options))
        options = make_data_local(options, world, control)
        code, message, afterword = train(options, world, control)
        dist.destroy_process_group()
    except BaseException as error:  # after any error, the other ranks end with this one
        control.fail(error)
    control.finish(code, message, afterword=afterword)
