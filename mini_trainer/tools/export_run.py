"""Exports a run's model from its newest valid checkpoint, without training any further.

    python -m mini_trainer export runs/chats
    torchrun --nproc-per-node=8 -m mini_trainer.tools.export_run runs/chats

For a run that was stopped before its end. The export is the one that the run would have written after that step, in
its hf_format. A large model is shared by the ranks of torchrun.
"""

from pathlib import Path

from mini_trainer.distributed.process import pause_collector, resume_collector
from mini_trainer.distributed.watch import RunControl
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import ExportRunOptions

TIMEOUT = 600  # seconds, as a run has by default

if __name__ == "__main__":
    options = parse_options(ExportRunOptions)  # before the slow imports: --help and typos answer at once
    control = RunControl(hang_timeout=TIMEOUT, max_seconds=None)
    control.start()
    pause_collector()

import torch.distributed as dist

from mini_trainer.distributed.ending import ExitCode
from mini_trainer.distributed.world import (
    World,
    call_on_each_node,
    call_on_rank0,
    connect_lifeline,
    divide_world,
    init_world,
    setup_logging,
)
from mini_trainer.model.optim.optimizers import build_optimizer
from mini_trainer.options import (
    ComputeOptions,
    HubOptions,
    OptimizationOptions,
    ShardingOptions,
    TrainOptions,
    flatten_options,
    group_options,
    list_types,
)
from mini_trainer.run.checkpointing import Checkpoint, Checkpointer
from mini_trainer.run.exports import Exports, list_numbers
from mini_trainer.run.file_names import EXPORTS_DIR, PARAMS_FILE
from mini_trainer.run.identity import identify_run
from mini_trainer.run.inputs import RunInputs
from mini_trainer.run.preflight import check_runs
from mini_trainer.run.record import OF_METHOD
from mini_trainer.run.run_model import build_run_model, make_average
from mini_trainer.run.start import make_data_local, open_inputs
from mini_trainer.run.step import StepOptions, TrainState
from mini_trainer.run.training_log import TrainingLog
from mini_trainer.sampler import RunPosition

# Recorded options that neither decide the model nor may act again.
LEFT_OUT = {
    **flatten_options(ComputeOptions(activation_checkpointing="none")),
    **flatten_options(ShardingOptions()),
    **flatten_options(HubOptions()),
    **dict.fromkeys(("validation_data_path", "callbacks", "track"), ()),
    **dict.fromkeys(("upload_to", "keep_exports", "continue_from", "profile_steps", "sample_prompts"), None),
    **dict.fromkeys(("config", "preset"), None),
    **dict(resume="auto", trust_remote_code=False),
}
KEPT = ("compute_dtype", "attention")  # of the computation


def export_run(options: ExportRunOptions, world: World, control: RunControl) -> str:
    """Writes the export and returns a line about it; ValueError or OSError for what cannot be done."""
    run = Path(options.run)
    if not (run / PARAMS_FILE).is_file():
        raise ValueError(f"{run}: is not the output directory of a run: it has no {PARAMS_FILE}")
    call_on_rank0(world, lambda: control.files.lock_directory(run))
    checkpointer = Checkpointer(run / "checkpoints", world=world, num_kept=1, is_async=False)
    checkpoint = checkpointer.choose("auto")
    newest = call_on_rank0(world, lambda: max(list_numbers(run / EXPORTS_DIR), default=0))
    export = run / EXPORTS_DIR / f"samples_{newest}"
    if checkpoint is None:
        if newest:
            return f"nothing to do: {export} is the run's newest model, and no checkpoint is of a later step"
        raise ValueError(f"{run}: has no checkpoint to export from: start its command again")
    start = RunPosition(**checkpoint.state["position"])
    if newest > start.num_samples:
        return f"{export}: is already a model of a later step than the newest checkpoint's, {start.step:,}"
    trained = restore_options(checkpoint, run, trust_remote_code=options.trust_remote_code)
    written = flatten_options(trained) | {"save_final_checkpoint": True}
    call_on_rank0(world, lambda: check_runs(run, [(written, 1)], flag=""))
    world = divide_world(world, trained.sharding)
    trained = make_data_local(trained, world, control)
    inputs = open_inputs(trained, device=world.device, world_size=world.world_size, start=start)
    inputs.errors.raise_all()
    verifies = not trained.skip_verification
    call_on_rank0(world, lambda: inputs.find_weights(verifies=verifies))
    if verifies:
        call_on_each_node(world, inputs.verify)
    call_on_rank0(world, lambda: check_made_with(checkpoint, inputs, trained.optimization))
    exports = Exports(trained.exports, trained.hub, inputs, world, control, TrainingLog([]))
    if call_on_rank0(world, lambda: exports.find(start)):
        return f"{exports.path_of(start)}: is already the model of step {start.step:,}"
    step_options = StepOptions(trained.data, trained.compute, trained.sharding, trained.optimization)
    exports.write(load_state(checkpointer, checkpoint, inputs, step_options, world), start)
    return f"wrote the model of step {start.step:,} to {exports.path_of(start)}"


def restore_options(checkpoint: Checkpoint, run: Path, *, trust_remote_code: bool) -> TrainOptions:
    """The options that the checkpoint's run was started with, as far as they decide its model."""
    recorded = {name: tuple(value) if isinstance(value, list) else value for name, value in
                checkpoint.state["options"].items()}  # fmt: skip
    if recorded["trust_remote_code"] and not trust_remote_code:
        raise ValueError(
            f"{run}: was trained with --trust-remote-code: give it here as well, to run the code that comes with its"
            " model"
        )
    known = {name: recorded[name] for name in list_types(TrainOptions).keys() & recorded}
    known |= LEFT_OUT | {name: recorded[name] for name in KEPT}
    return group_options(TrainOptions, **known | {"output_dir": str(run), "trust_remote_code": trust_remote_code})


def check_made_with(checkpoint: Checkpoint, inputs: RunInputs, optimization: OptimizationOptions) -> None:
    """ValueError if the base model or the tokenizer is no longer the one that the run was started with."""
    before, now = checkpoint.state["identity"], identify_run(inputs, optimization)
    names = ["tokenizer", "chat template", OF_METHOD, *([] if inputs.method.saves_frozen else ["model"])]
    if changed := [name for name in names if before[name] != now[name]]:
        raise ValueError(f"{checkpoint.path}: was made with another {', '.join(changed)} than what is there now")


def load_state(
    checkpointer: Checkpointer, checkpoint: Checkpoint, inputs: RunInputs, options: StepOptions, world: World
) -> TrainState:
    """The checkpoint's weights, and their average if there is one. The optimizer, which takes no step, is empty."""
    model = build_run_model(inputs, options, world, only_measures=True)
    checkpointer.load_weights(checkpoint, model, inputs.method)
    if (average := make_average(model, options.optimization, end=inputs.last_step)) is not None:
        checkpointer.load_average(checkpoint, average)
    optimizer = build_optimizer(model, options.optimization, seed=options.data.seed)
    return TrainState(model, inputs.method, optimizer, world, checkpoint.state.get("num_steps_before", 0), average)


if __name__ == "__main__":
    resume_collector()
    setup_logging("WARNING")
    try:
        world = init_world()
        connect_lifeline(world, control)
        message = export_run(options, world, control)
        dist.destroy_process_group()
    except BaseException as error:
        control.fail(error)
    control.finish(ExitCode.DONE, "done", afterword=message)
