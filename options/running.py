"""The options of a run: its end, what it writes, and how it uses the machine."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class EndOptions:
    """When the run ends."""

    max_steps: int | None = None
    """Stop after this many optimizer steps. With no max-* option the run has no end."""
    max_epochs: int | None = None
    """Stop at the first step at which every sample has been drawn this many times."""
    max_samples: int | None = None
    """Stop at the first step at which this many samples have been trained."""
    max_tokens: int | None = None
    """Stop at the first step at which this many tokens (trained or masked) have been read."""
    max_time: str | None = None
    """Stop, to be started again, after the step in which this time since the start has passed: minutes, or H:MM:SS."""
    start_timeout: int = 600
    """End the run if not all ranks have arrived at its start after this many seconds. Missing ranks are reported every
    30 seconds."""
    hang_timeout: int = 600
    """End the run, with every rank's stacks in output-dir/errors, when a rank gives no sign of life or does not move on
    for this many seconds. Must be more than the longest step takes; the first step, loading and saving have an hour."""

    @property
    def is_given(self) -> bool:
        """Whether a run by these options ends by itself."""
        return any(end is not None for end in (self.max_steps, self.max_epochs, self.max_samples, self.max_tokens))


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """What the run can be resumed from."""

    checkpoint_every_steps: int | None = None
    """Write a checkpoint to resume from each time this many steps have been taken, and after the last one."""
    checkpoint_every_minutes: float | None = 30.0
    """Write a checkpoint to resume from when the last one, or the start, is this long ago; None: never by the clock."""
    keep_checkpoints: int = 2
    """Checkpoints to keep, the newest ones."""
    async_checkpoint: bool = False
    """Train on while a copy of the state in CPU memory is written."""
    resume: str = "auto"
    """What to go on from. auto: the newest valid checkpoint of output-dir, if there is any; strict: the newest, which
    has to be valid; none: nothing, in a new directory; or a checkpoint's directory."""
    allow_changed_options: bool = False
    """Go on from a checkpoint although data, model or options are no longer those it was made with; recorded."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The trained model, in the Hugging Face format."""

    min_samples_per_checkpoint: int | None = None
    """Export the model each time another this many samples have been trained."""
    checkpoint_at_epoch: bool = False
    """Export the model at the first step that completes an epoch."""
    save_final_checkpoint: bool = True
    """Export the model at the end of the run."""
    export_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of exported weights."""
    keep_exports: int | None = None
    """Exports to keep, the newest ones, beside hf_format/best; None: all."""
    export_name: str | None = None
    """Name in hf_format that every export has, each in the place of the one before, such as last; None: samples_N."""

    check_export: bool = False
    """Load each export back, as anyone would, and end the run if it does not compute what the trained model does."""

    @property
    def on_the_way(self) -> bool:
        """Whether the model is exported before the run's end."""
        return self.checkpoint_at_epoch or self.min_samples_per_checkpoint is not None


@dataclass(frozen=True, kw_only=True)
class TrackingOptions:
    """Who is told of the run beside the metrics files (docs/tracking.md)."""

    track: tuple[Literal["wandb", "tensorboard", "mlflow", "trackio"], ...] = ()
    """Trackers to send all metrics to (pip install wandb, and so on). Each reads its own environment variables, such
    as WANDB_MODE and MLFLOW_TRACKING_URI."""
    track_project: str | None = None
    """Project, or MLflow's experiment; None: what the tracker's environment says, else mini_trainer."""
    track_name: str | None = None
    """The run's name there; None: that of output-dir."""


@dataclass(frozen=True, kw_only=True)
class HubOptions:
    """Exports on the Hugging Face hub (docs/tracking.md)."""

    push_to_hub: str | None = None
    """Repository to upload exports to, in the background: NAME, or OWNER/NAME. Made if it is not there."""
    hub_private: bool = False
    """Make it a private one."""


@dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """How a rank computes, and what it keeps in memory meanwhile."""

    compute_dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto"
    """Data type of forward and backward; auto: bfloat16 on CUDA, float32 on CPU. See also --master-weights. float16 is
    refused: it needs loss scaling."""
    attention: Literal["auto", "flash_attn", "varlen", "sdpa", "eager"] = "auto"
    """Attention over packed sequences: the flash-attn package, torch's varlen (CUDA), or SDPA / plain matrix
    products one sequence at a time. auto: the fastest one that this machine and this model allow."""
    activation_checkpointing: Literal["none", "selective", "full", "auto"] = "full"
    """full: keep only each block's input and recompute the rest in backward; least memory, about a third slower.
    selective: keep the outputs of matrix products and attention too, and recompute only what is cheap. auto: what
    recomputes least of those that have room for micro-batches of max-tokens-per-gpu, measured at the start."""
    tiled_mlp: bool = False
    """Compute MLPs, experts and norms a part of the row at a time, and again in backward: for rows so long that what a
    single block holds is the most. Their forward is computed once more. Not with --compile."""
    offload_activations: bool = False
    """Move the inputs that full activation checkpointing keeps of each block to CPU memory until backward, while the
    GPU computes: tokens x hidden size x blocks numbers in compute-dtype on each rank. Needs a GPU."""
    memory_budget_gb: float | None = None
    """Memory in GiB of one GPU, or for one process on CPU, that auto and --dry-run count with; by default what this
    machine has. A run on CPU that is given one returns freed memory at once, which takes time, to stay within it."""
    compile: bool = False
    """torch.compile each block, once for all numbers of tokens; the first step takes a minute or more longer."""
    float8: bool = False
    """Compute the blocks' linear layers in fp8 (Hopper or newer; pip install torchao): faster, and less exact. Only
    with --compile, which makes one kernel of a cast, is there much to gain."""
    use_liger_kernels: bool = False
    """Use liger-kernel's Triton kernels for norms, MLPs and rotary embeddings (CUDA; pip install liger-kernel)."""


@dataclass(frozen=True, kw_only=True)
class ShardingOptions:
    """What is divided over the ranks, and what travels between them."""

    sharding: Literal["full", "hybrid"] = "full"
    """full: weights, gradients and optimizer state are divided over all ranks. hybrid: over the ranks of a node, and
    every node holds a copy of all of it: more memory, and between nodes only gradients travel, once a step."""
    shard_size: int | None = None
    """hybrid only: ranks that share one copy of the model, if not those of a node."""
    reshard_after_forward: Literal["auto", "always", "never"] = "auto"
    """Free a layer's gathered weights after its forward pass, and gather them again for backward. auto: all but the
    last, which backward begins with; never: less communication, and memory for the whole model in compute-dtype."""
    prefetch_blocks: int = 1
    """Blocks whose weights are gathered while one computes, forward and backward. More of them hide more of a network
    that is slow at times, and take memory for their weights in compute-dtype."""
    micro_batch_grad_sync: Literal["every", "last"] = "every"
    """Sum gradients over ranks after every micro-batch, or once a step, after the last one: less communication, and
    memory for the whole model's gradients in float32 on every rank."""
    context_parallel: int | None = None
    """Divide each packed row over this many consecutive ranks, which attend for a part of the heads each: samples so
    many times as long have room. A row has at most so many times --max-tokens-per-gpu tokens."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimizer state in CPU memory, where the optimizer then runs; each layer's weights
    travel to the GPU when they are used. Slow: for models that do not fit otherwise."""


@dataclass(frozen=True, kw_only=True)
class ProfilingOptions:
    """Where the time goes (docs/performance.md)."""

    profile_steps: str | None = None
    """Steps to record with torch.profiler, the first and the last one (10:13): a Chrome trace a rank and a table of the
    slowest operations in output-dir/profile. The other steps are as fast as without."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What a run would need, before it is started."""

    dry_run: bool = False
    """Train and write nothing: print what the run would need and take, and every problem that is found."""
    plan_world_size: int | None = None
    """--dry-run only: plan for this many GPUs (or processes on CPU) from this one process."""
    plan_device: str | None = None
    """--dry-run only: plan for GPUs of this name (H100, A100, L4, ...) from a machine that has none."""
    print_config: bool = False
    """Train nothing: print every option's value, as YAML that --config takes."""
