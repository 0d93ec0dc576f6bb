"""Options of a run: its end, its outputs, and its use of the machine."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from mini_trainer.options.doors import ATTENTION, CHECKPOINTING, DTYPES, KEEPING, KERNELS, RESHARDING, TRACKERS
from mini_trainer.options.fields import option, parse_duration, parse_machine, parse_steps

MOST_SECONDS = 10 * 24 * 3600  # of a timeout: 10 days; torch's clocks overflow at far larger ones


@dataclass(frozen=True, kw_only=True)
class EndOptions:
    """When the run ends."""

    max_steps: int | None = option(None, at_least=1)
    """Stop after this many optimizer steps. Without any --max-* option --max-epochs is chosen
    (docs/tasks/learning_rate.md), or the run has no end if it exports on the way."""
    max_epochs: int | None = option(None, at_least=1)
    """Stop after the step in which every sample has been drawn this many times."""
    max_samples: int | None = option(None, at_least=1)
    """Stop after the step in which this many samples have been trained on."""
    max_tokens: int | None = option(None, at_least=1)
    """Stop after the step in which this many tokens (trained or masked) have been processed."""
    max_time: str | None = option(None, parse=parse_duration)
    """Stop with a checkpoint after the step in which this time limit is reached: minutes, or H:MM:SS."""
    start_timeout: int = option(600, at_least=1, at_most=MOST_SECONDS)
    """End the run if not all ranks have joined after this many seconds. Missing ranks are reported every 30 seconds."""
    hang_timeout: int = option(600, at_least=1, at_most=MOST_SECONDS)
    """End the run, with every rank's stack traces in OUTPUT_DIR/errors, if a rank is silent or makes no progress for
    this many seconds. Must exceed the longest step; the first step, loading and saving have six times as much
    (docs/tasks/hangs.md)."""

    @property
    def is_given(self) -> bool:
        """Whether the options set an end of the run."""
        return any(end is not None for end in (self.max_steps, self.max_epochs, self.max_samples, self.max_tokens))


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Checkpoints and resuming."""

    checkpoint_every_steps: int | None = option(None, at_least=1)
    """Number of steps between checkpoints; another one follows the last step."""
    checkpoint_every_minutes: float | None = option(30.0, above=0)
    """Minutes between checkpoints; None turns them off."""
    keep_checkpoints: int = option(2, at_least=1)
    """Number of newest checkpoints to keep."""
    async_checkpoint: bool = False
    """Write checkpoints from a copy of the state in CPU memory while training continues."""
    resume: str = option("auto", may_differ=True)
    """Checkpoint to resume from. auto: the newest valid one in OUTPUT_DIR, if any; strict: the newest, which must be
    valid; none: start from scratch, in a new directory; or a checkpoint's directory."""
    continue_from: str | None = option(None, may_differ=True)
    """Directory of another run's checkpoint: start a new run with its weights, optimizer state and place in the
    learning-rate schedule (docs/reference/running.md)."""
    allow_changed_options: bool = False
    """Resume from a checkpoint even if data, model or options have changed since; the changes are recorded."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Exports: the trained model in the Hugging Face format."""

    min_samples_per_checkpoint: int | None = option(None, at_least=1)
    """Number of samples between exports."""
    checkpoint_at_epoch: bool = False
    """Export the model at the end of each epoch."""
    save_final_checkpoint: bool = True
    """Export the model at the end of the run."""
    export_dtype: Literal[*DTYPES] = "bfloat16"
    """Data type of exported weights."""
    keep_exports: int | None = option(None, at_least=1)
    """Number of newest exports to keep, in addition to hf_format/best; None: all. hf_format/latest links to the newest.
    """
    upload_to: str | None = None
    """URL (s3:// or gs://) below which each export is copied to its own directory, in the background
    (docs/tasks/tracking.md)."""
    check_export: bool = False
    """Load each export back as a user would, and end the run if it answers otherwise than the trained model."""

    @property
    def on_the_way(self) -> bool:
        """Whether the model is exported before the end of the run."""
        return self.checkpoint_at_epoch or self.min_samples_per_checkpoint is not None


@dataclass(frozen=True, kw_only=True)
class TrackingOptions:
    """Experiment trackers (docs/tasks/tracking.md)."""

    has_switch: ClassVar = True

    track: tuple[Literal[*TRACKERS], ...] = ()
    """Experiment trackers that receive all metrics (pip install wandb, and so on). Each reads its own environment
    variables, such as WANDB_PROJECT and MLFLOW_TRACKING_URI."""


@dataclass(frozen=True, kw_only=True)
class CallbackOptions:
    """Callbacks: your own code at a run's events (docs/reference/callbacks.md)."""

    has_switch: ClassVar = True

    callbacks: tuple[str, ...] = ()
    """Classes derived from mini_trainer.Callback, as package.module:Class. Modules are found like installed ones, on
    PYTHONPATH, or in the current directory. An exception ends the run with a checkpoint and exit code 1."""


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """Exports on the Hugging Face hub (docs/tasks/tracking.md)."""

    has_switch: ClassVar = True

    push_to_hub: str | None = None
    """Repository to upload exports to, in the background: NAME or OWNER/NAME; created if missing, as public or private
    as its owner's settings say."""


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """Data type, attention, kernels and memory of each rank."""

    compute_dtype: Literal["auto", *DTYPES] = "auto"
    """Data type of forward and backward; auto: bfloat16 on CUDA, float32 on CPU. See also --master-weights. float16 is
    refused: it needs loss scaling."""
    attention: Literal["auto", *ATTENTION] = "auto"
    """Attention over packed sequences: the flash-attn package, torch's varlen (CUDA), varlen by the kernels of
    FlashAttention 3 (Hopper), or SDPA or plain matrix products, one sequence at a time. auto: the fastest one that the
    machine and the model support, except varlen_fa3."""
    activation_checkpointing: Literal[*CHECKPOINTING, "auto"] | None = None
    """full: keep only each block's input and recompute the rest in backward; least memory, about a third slower.
    selective: also keep the outputs of matrix products and attention. auto: the fastest mode that fits micro-batches of
    --max-tokens-per-gpu, measured at the start. Default: auto on CUDA, full on CPUs and with --compile or
    --offload-activations."""
    tiled_mlp: bool = False
    """Compute MLPs, experts and norms in tiles of the row, and recompute them in backward: for rows so long that a
    single block's activations dominate memory. Costs another forward pass of these layers. Not with --compile."""
    offload_activations: bool = False
    """Offload the block inputs kept by full activation checkpointing to CPU memory until backward, overlapped with
    computation. Takes tokens x hidden size x blocks values in compute-dtype on each rank. Needs a GPU."""
    memory_budget_gb: float | None = option(None, above=0)
    """Memory in GiB of one GPU, or of one process on CPU, for auto and --dry-run. Default: the machine's. On CPU, a run
    with a budget returns freed memory at once to stay within it, which takes time."""
    compile: bool = False
    """torch.compile each block, once for all sequence lengths, and compare it with the uncompiled one. The start takes
    a minute or more longer, less when the code is cached."""
    float8: bool = option(False, decides="numbers")
    """Compute the blocks' linear layers in fp8 (Hopper or newer; pip install torchao): faster, less accurate. Gains
    little without --compile, which fuses the casts."""
    kernels: Literal["auto", *KERNELS] | None = None
    """fused: norms, gated MLPs, rotary embeddings and sums by fused Triton kernels (CUDA; pip install liger-kernel),
    where the model's own code computes the same; also as --use-liger-kernels. eager: that code. auto: fused, where it
    is faster, measured at the start. Default: auto on CUDA, eager on CPUs and with --compile."""


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """Sharding over ranks, and communication between them."""

    sharding: Literal["full", "hybrid"] = "full"
    """full: shard weights, gradients and optimizer state over all ranks. hybrid: shard within a node and replicate over
    nodes: more memory, but nodes exchange only gradients, once per step."""
    shard_size: int | None = option(None, only_with=("sharding", ("hybrid",)), at_least=1)
    """hybrid only: number of ranks that share one copy of the model. Default: the ranks of a node."""
    reshard_after_forward: Literal[*RESHARDING] = "auto"
    """Free a layer's gathered weights after forward and gather them again for backward. never: less communication, but
    memory for the whole model in compute-dtype. auto: never if there is memory for it, which GPUs measure at the start,
    CPUs only for --max-tokens-per-gpu auto and --activation-checkpointing auto; otherwise all layers except the last.
    One rank with memory for it runs without FSDP2."""
    reshard_after_backward: Literal[*KEEPING] = "auto"
    """Free gathered weights after the backward of each micro-batch and gather them again for the next one. never: only
    after the last one of a step, at the same price. auto: as in --reshard-after-forward; always without such a
    measurement."""
    prefetch_blocks: int = option(1, at_least=1)
    """Number of blocks whose weights are prefetched, in forward and backward. More hide a slower network, but take
    memory for their weights in compute-dtype."""
    micro_batch_grad_sync: Literal["every", "last"] = "every"
    """Reduce gradients over ranks after every micro-batch, or only after the last of a step: less communication, but
    memory for the whole model's gradients in float32 on every rank."""
    context_parallel: int | None = option(None, at_least=2)
    """Split each packed row over this many consecutive ranks, which each compute attention for part of the heads, so
    that rows and samples can be this many times --max-tokens-per-gpu long."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in CPU memory and run the optimizer there; weights are copied to the
    GPU layer by layer. Slow: for models that do not fit otherwise."""


@dataclass(frozen=True, kw_only=True)
class ProfilingOptions:
    """Profiling (docs/reference/tuning.md)."""

    profile_steps: str | None = option(None, parse=parse_steps)
    """First and last step to profile with torch.profiler (10:13): a Chrome trace per rank and a table of the slowest
    operations in OUTPUT_DIR/profile. Other steps are not slowed down."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Dry runs: estimates before starting a run."""

    dry_run: bool = False
    """Dry run: estimate memory, time and disk, and report all problems; trains and writes nothing."""
    plan_for: str | None = option(None, parse=parse_machine, needs="dry_run")
    """--dry-run only: plan for this many processes, of this machine (8) or with GPUs of this name (8xH100; A100, L4,
    RTX 4090, ...), from this one process."""
    print_config: bool = False
    """Print the value of every option as YAML for --config, and exit."""
