"""The options of every script, in groups: one frozen dataclass a concern, each option declared once.

An option's name is its flag and its YAML key, in whatever group it stands; no two groups have one of the same name. A
function takes the group that it needs. Imports nothing heavy, so that `--help` and a mistyped flag answer at once.
"""

import dataclasses
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_origin

# Schedules that fall towards the end of the run, so the end has to be known.
SCHEDULES_WITH_END = ("linear", "cosine", "cosine_with_restarts", "polynomial", "wsd")

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model is trained."""

    model_name_or_path: str
    """Model directory or hub name, Hugging Face format."""
    model_revision: str | None = None
    """Of a model on the hub: branch, tag or commit; its main branch if not given."""
    trust_remote_code: bool = False
    """Run the code that the model brings along. Of a model on the hub only with the commit as --model-revision."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What it is trained on, and how much of that at a time."""

    data_path: tuple[str, ...] = ()
    """Tokenized data sets written by process_data.py: .arrow, .parquet or .jsonl. Or give rows, by --input-file,
    --input-dataset or --mock-data."""
    data_weights: tuple[float, ...] = ()
    """Of several data sets, how much is drawn of each beside the others, such as 7 3; none: as much as they hold, so
    that an epoch has every sample once."""
    data_weights_by: Literal["samples", "tokens"] = "samples"
    """What the weights count: the samples that are drawn, or their tokens."""
    batch_size: int = 128
    """Samples per optimizer step, over all ranks."""
    max_tokens_per_gpu: int | Literal["auto"] = 8192
    """Most tokens in one micro-batch on one rank; sets the memory that activations need. auto: measured at the start,
    the largest that leaves a margin."""
    drop_overlong: bool = False
    """Drop (and count) samples longer than max-tokens-per-gpu instead of refusing to start."""
    seed: int = 42
    """Seed of the sample order and of dropout."""
    subset: str | None = None
    """Use only so many samples of each data set (10), or this share of them (1%), drawn at random; also of validation
    sets."""


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Rows that are tokenized: where they are, what they hold, and how they become samples (docs/data.md)."""

    input_file: tuple[str, ...] = ()
    """Files or directories of rows: .jsonl, .json, .csv, .tsv, .parquet or .txt, also compressed (.gz, .zst)."""
    input_dataset: str | None = None
    """In place of files, a data set of the hub, NAME or NAME:CONFIG, read as it comes; or a local folder of the
    datasets library."""
    split: str | None = None
    """Of --input-dataset: which of its splits; train if not given."""
    revision: str | None = None
    """Of --input-dataset on the hub: branch, tag or commit; its main branch if not given."""
    mock_data: int | None = None
    """In place of rows, this many samples of random tokens, for trying how fast a model trains."""
    mock_length: int | None = None
    """Tokens of each of them; 2048 if not given."""
    format: Literal["messages", "sharegpt", "alpaca", "completion", "document", "classification"] | None = None
    """What the rows of every file are; None: each file's first row shows it, unless they are for classification."""
    messages_field: str | None = None
    """Where a row has its messages, if not in messages: a column or key, with dots for one in another (chat.turns)."""
    prompt_field: str | None = None
    """Where a row has its prompt, if not in prompt."""
    completion_field: str | None = None
    """Where a row has its completion, if not in completion or generation."""
    text_field: str | None = None
    """The column or key of the text: of a document, or what is classified, there also the list of words or the
    chat."""
    ignore_columns: tuple[str, ...] = ()
    """Columns, or keys of messages (messages.KEY), to ignore although they change what should be learned, such as
    score, label or rejected. Otherwise a file is refused if it has such a column and its format does not read it."""
    images: bool = False
    """Rows may have images: the model's own processor says how many tokens each one is (docs/vision.md). Needs the
    package pillow; transformers' processors import torch where it is installed."""
    allow_downloads: bool = False
    """With --images: fetch those whose rows give an address; the data set holds what was fetched."""
    chat_template: str | None = None
    """Template to use instead of the model's: chatml, llama3, zephyr, or a Jinja file. Saved, with the tokens it
    needs, in the tokenizer directory beside the output, which training uses."""
    add_special_tokens: tuple[str, ...] = ()
    """Special tokens to add to the vocabulary; saved in the same directory."""
    allow_missing_stop_token: bool = False
    """Train even if fewer than half of the rows train a stop token, because the chat template writes none after a
    conversation's last turn or after any turn. The model may not learn to stop."""
    append_stop_token: bool = False
    """If the chat template writes no stop token after a conversation's last turn, append and train the one that ends
    earlier turns, or else the tokenizer's eos_token."""
    thinking_prefix: Literal["as-rendered", "train-as-prompted"] = "as-rendered"
    """If the template's generation prompt has words that rows lack, such as <think>: as-rendered trains answers as the
    template renders rows; train-as-prompted trains the last answer of each row after the prompt's own words, beginning
    with the text that closes the reasoning."""
    strict_reasoning: bool = False
    """Refuse rows in which the chat template leaves out the reasoning of a trained answer, instead of counting them."""
    max_sample_num_tokens: int | None = None
    """Drop (and count) samples with more tokens than this."""
    truncate: bool = False
    """Classification: cut what is longer than --max-sample-num-tokens, and count it, instead of dropping it."""
    text_pair_field: str | None = None
    """Classification: the column or key of a second text; text_pair if not given, in rows that have it."""
    label_field: str | None = None
    """Classification: the column or key of the label, or of the words' labels; label or labels if not given."""
    label_separator: str | None = None
    """Classification: what stands between several labels in one text, such as ; in a table."""
    label_type: Literal["single", "multi", "regression"] | None = None
    """Classification: one label of several, several at once, or a number to predict; None: as the labels look."""
    label_names: tuple[str, ...] = ()
    """Classification: the labels, in the order of their classes; if not given, all that occur, sorted."""
    labels_from: str | None = None
    """Classification: a data set of this script, or its sidecar, whose labels these rows have, too, as a validation
    set has its training set's."""
    block_size: int | None = None
    """Documents only: cut their stream into blocks of this many tokens."""
    validation_share: float | None = None
    """Write about this share of the rows to a second data set, OUTPUT.validation.ENDING. A row's content alone decides
    where it goes."""
    skip_invalid: bool = False
    """Write rows that cannot be used beside the output and go on, instead of stopping."""
    num_proc: int = os.cpu_count() or 1
    """Worker processes that tokenize."""


@dataclass(frozen=True, kw_only=True)
class ValidationOptions:
    """Whether it learns: losses on data that it is not trained on (docs/validation.md)."""

    validation_data_path: tuple[str, ...] = ()
    """Tokenized data sets to measure the model on, before the first step, after the last, and as the next two say."""
    validate_every_steps: int | None = None
    """Measure each time this many steps have been taken."""
    validate_at_epoch: bool = False
    """Measure at the first step that completes an epoch."""
    validate_training_data: bool = False
    """Measure on the training data, too."""
    export_best: bool = True
    """Export the model to hf_format/best whenever its validation is the best so far, by --best-metric."""
    best_metric: str = "loss"
    """What tells the best model, and when to stop: loss, perplexity or token_accuracy; of classifiers loss, accuracy,
    precision, recall, f1, f1_weighted or matthews; of regression loss, mse, mae, pearson or spearman."""
    write_predictions: bool = False
    """Classifiers: write what each validation predicts to output-dir/predictions_samples_N.jsonl."""
    early_stopping_patience: int | None = None
    """End the run when this many validations in a row have not been better than the best."""

    @property
    def is_asked(self) -> bool:
        """Whether the model is measured at all."""
        return bool(self.validation_data_path) or self.validate_training_data


@dataclass(frozen=True, kw_only=True)
class ClassificationOptions:
    """What is learned: language, or classes (docs/classification.md)."""

    objective: Literal["causal-lm", "sequence-classification", "token-classification"] = "causal-lm"
    """What the model learns, on data that process_data.py made for it."""
    class_weights: tuple[str, ...] = ()
    """Classifiers: what each class counts in the loss, a number for each in the order of the labels; balanced: the
    rarer, the more."""
    label_smoothing: float = 0.0
    """This share of each target is spread over all classes, of language models over the whole vocabulary. Their
    validations measure without it."""


@dataclass(frozen=True, kw_only=True)
class VisionOptions:
    """Of data with images (docs/vision.md)."""

    freeze: tuple[Literal["vision", "projector", "language", "nothing"], ...] = ("vision",)
    """Parts of a model that sees which stay as they are; nothing: all of it trains."""
    max_image_tokens_per_gpu: int | None = None
    """Most patches of images in one micro-batch on one rank, counted as they enter the vision tower, whose memory they
    set. None: as many as --max-tokens-per-gpu lets in."""


@dataclass(frozen=True, kw_only=True)
class OptimizationOptions:
    """How gradients become weights."""

    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw8bit: AdamW that keeps its moments in 8 bits, a quarter of their memory; slightly other steps."""
    master_weights: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: hold weights, and gradients between micro-batches, in half the memory, and round every update up or
    down at random so that small ones are not lost; noisier."""
    learning_rate: float = 1e-5
    """Peak learning rate."""
    num_warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    warmup_ratio: float | None = None
    """In place of a number, the share of the run's steps over which it rises."""
    lr_scheduler: Literal[
        "constant_with_warmup",
        "constant",
        "linear",
        "cosine",
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
        "wsd",
    ] = "constant_with_warmup"
    """Shape of the learning rate after warm-up, as transformers defines them. wsd: warm-up, stable, decay."""
    num_cycles: int | None = None
    """cosine_with_restarts only: how often it falls from the peak."""
    lr_power: float | None = None
    """polynomial only: the power with which it falls; 1 (linear) if not given."""
    num_decay_steps: int | None = None
    """wsd only: length of the final decay in steps; 10 % of the run if not given."""
    min_lr_ratio: float | None = None
    """Final learning rate as a share of the peak, for schedules that decay; 0 if not given."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay; norms and biases are never decayed."""
    adam_beta1: float = 0.9
    """AdamW's decay of the first moment."""
    adam_beta2: float = 0.95
    """AdamW's decay of the second moment."""
    adam_eps: float = 1e-8
    """AdamW's epsilon."""
    router_aux_loss: float | None = None
    """Mixtures of experts: how much the loss that keeps experts evenly used counts (router_aux_loss_coef); None: as the
    model's config says, which is 0 unless it has output_router_logits."""
    neftune_alpha: float | None = None
    """NEFTune: while training, add noise to each sample's embeddings, uniform up to this / sqrt(its tokens x hidden
    size); 5 to 15 are usual."""
    max_grad_norm: float | None = 1.0
    """Clip the gradient's global norm to this; None: no clipping."""

    @property
    def needs_end(self) -> bool:
        """Whether the learning rate depends on how many steps the run has."""
        return self.lr_scheduler in SCHEDULES_WITH_END or self.warmup_ratio is not None


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
class OSFTOptions:
    """Continual learning (docs/osft.md)."""

    osft: bool = False
    """Orthogonal subspace fine-tuning: keep each weight's most important directions exactly, train the rest
    (docs/osft.md)."""
    osft_unfreeze_rank_ratio: float | None = None
    """Share of each layer's directions that trains, from 0 to 1; the others are kept."""
    osft_target_patterns: tuple[str, ...] = ()
    """Parts of the names of the layers to constrain, such as q_proj or mlp; none: every linear layer of the blocks."""
    osft_train_others: bool = False
    """Train embeddings, norms, biases and head too. What the kept directions protect, these can still change."""
    osft_cache_dir: str = "~/.cache/mini_trainer/osft"
    """Where decompositions are kept for the next start, by the weights' hash."""
    osft_basis: Literal["weights", "activations"] = "weights"
    """What tells the directions to keep: the weights' singular vectors, or the inputs that the layers see on the data
    of earlier tasks."""
    osft_calibration_data: str | None = None
    """Tokenized data set of what must be remembered; a sample of it is read once."""
    osft_statistics: str | None = None
    """File of the earlier tasks' statistics, in place of their data; those of --osft-calibration-data are added."""
    osft_keep_energy: float | None = None
    """activations only: keep as many directions of each layer as carry this share of its inputs' energy, instead of
    --osft-unfreeze-rank-ratio."""
    osft_rank_allocation: Literal["uniform", "importance"] = "uniform"
    """importance: blocks that change their input less keep more, by the statistics; R is then the mean."""


@dataclass(frozen=True, kw_only=True)
class LoRAOptions:
    """Low-rank adapters (docs/lora.md)."""

    lora: bool = False
    """Train low-rank adapters of linear layers beside weights that stay as they are (docs/lora.md)."""
    lora_rank: int | None = None
    """Rank of the adapters; None: 16, or that of --lora-adapter."""
    lora_alpha: float | None = None
    """An adapter's product is multiplied by alpha / rank; None: twice the rank, or that of --lora-adapter."""
    lora_dropout: float = 0.0
    """Share of an adapter's inputs that is dropped in training."""
    lora_target_modules: tuple[str, ...] = ()
    """Layers with an adapter: names, their ends (q_proj), or patterns (layers.[0-3].*); none: every linear layer of
    the blocks, experts too."""
    lora_use_rslora: bool = False
    """Multiply by alpha / sqrt(rank), which suits high ranks."""
    lora_use_dora: bool = False
    """Train the length of each row of a weight beside its direction (DoRA)."""
    lora_modules_to_save: tuple[str, ...] = ()
    """Modules that train as a whole beside the adapters, such as embed_tokens or lm_head; saved with them."""
    lora_adapter: str | None = None
    """Adapter's directory to go on from; it says rank, alpha, and which layers."""
    lora_export: Literal["adapter", "merged", "both"] = "adapter"
    """What an export holds: the adapter for peft and vLLM, the model with the adapter added to its weights, or both,
    the adapter then in the folder adapter/ of the model's."""
    base_quantization: Literal["none", "nf4"] = "none"
    """nf4: hold the weights of the blocks' linear layers in 4 bits (QLoRA; pip install peft bitsandbytes)."""


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


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Fine-tune a causal language model or a classifier with FSDP2 on data written by process_data.py."""

    output_dir: str
    """Directory for metrics, options, checkpoints and exported models: new, empty, or this run's own, to go on."""
    config: tuple[str, ...] = ()
    """YAML files with any of these options: of several, the later ones win, and flags win over all. ${NAME} in a value
    is the environment's."""
    logging_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """What rank 0 prints; WARNING leaves out the step lines."""
    preset: Literal["sanity", "toy", "full"] | None = None
    """Values for options that are not given. sanity: 10 samples, 2 steps, a validation, an export that is loaded back;
    toy: 1 % of the data, at most 100 steps; full: none, all of it."""
    data_cache_dir: str = "~/.cache/mini_trainer/data"
    """Where rows are kept once they are tokenized, by their content, for the next start; every node must see it."""
    model: ModelOptions
    data: DataOptions = field(default_factory=DataOptions)
    rows: RowOptions = field(default_factory=RowOptions)
    classification: ClassificationOptions = field(default_factory=ClassificationOptions)
    vision: VisionOptions = field(default_factory=VisionOptions)
    validation: ValidationOptions = field(default_factory=ValidationOptions)
    optimization: OptimizationOptions = field(default_factory=OptimizationOptions)
    end: EndOptions = field(default_factory=EndOptions)
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    exports: ExportOptions = field(default_factory=ExportOptions)
    tracking: TrackingOptions = field(default_factory=TrackingOptions)
    hub: HubOptions = field(default_factory=HubOptions)
    osft: OSFTOptions = field(default_factory=OSFTOptions)
    lora: LoRAOptions = field(default_factory=LoRAOptions)
    compute: ComputeOptions = field(default_factory=ComputeOptions)
    sharding: ShardingOptions = field(default_factory=ShardingOptions)
    profiling: ProfilingOptions = field(default_factory=ProfilingOptions)
    plan: PlanOptions = field(default_factory=PlanOptions)


# By preset, the values of options that neither flags nor YAML give.
PRESETS: dict[str, dict[str, Any]] = {
    "sanity": {
        "subset": "10",
        "batch_size": 5,
        "max_steps": 2,
        "validate_training_data": True,
        "export_best": False,
        "check_export": True,
    },
    "toy": {"subset": "1%", "max_steps": 100},
    "full": {},
}

# What decides the numbers of a run: single options and whole groups, but for the places of files.
IDENTIFYING_OPTIONS = ("batch_size", "seed", "float8", "data_weights", "data_weights_by", "freeze")
IDENTIFYING_GROUPS = (OptimizationOptions, ClassificationOptions, OSFTOptions, LoRAOptions)
PLACES = ("osft_cache_dir", "osft_calibration_data", "osft_statistics", "lora_adapter", "lora_export")
# Options that may differ between the ranks of a run: places, whose contents are compared instead or which rank 0 alone
# reads, and options that do not change the numbers. (--resume may name different places.)
MAY_DIFFER = (
    *("osft_cache_dir", "osft_calibration_data", "osft_statistics", "lora_adapter"),
    *("model_name_or_path", "data_path", "validation_data_path", "input_file", "input_dataset", "chat_template"),
    *("labels_from", "data_cache_dir", "output_dir", "config", "preset", "logging_level", "num_proc", "resume"),
)
# Of a group like these a checkpoint holds what was made by its options: they cannot change with the run half done.
UNCHANGEABLE_GROUPS = (OSFTOptions, LoRAOptions)


@dataclass(frozen=True, kw_only=True)
class ProcessDataOptions:
    """Tokenize chats, completions or documents for training; of chats only the assistant's tokens are trained."""

    output_file: str
    """Tokenized data set to write; the ending chooses the format: .arrow, .parquet or .jsonl."""
    model_name_or_path: str
    """Model or tokenizer directory or hub name, for its tokenizer and chat template."""
    model_revision: str | None = None
    """Of a model on the hub: branch, tag or commit; its main branch if not given."""
    trust_remote_code: bool = False
    """Run the code that the model brings along. Of a model on the hub only with the commit as --model-revision."""
    config: tuple[str, ...] = ()
    """YAML files with any of these options: of several, the later ones win, and flags win over all. ${NAME} in a value
    is the environment's."""
    preview: int = 2
    """Samples to print at the end, trained tokens in colour, or in brackets where there is no terminal."""
    preview_html: str | None = None
    """Page to write, for a browser: the report, and samples to look through."""
    string_for_printing_masks: str | None = None
    """In samples printed, put this for each run of masked tokens instead of their text."""
    rows: RowOptions = field(default_factory=RowOptions)


@dataclass(frozen=True, kw_only=True)
class MergeAdapterOptions:
    """Add a LoRA adapter to the weights of its model, and write a model like any other."""

    adapter: str
    """Directory of the adapter, as peft writes it."""
    output_dir: str
    """Directory to write, which must not be there."""
    model_name_or_path: str | None = None
    """The model that the adapter belongs to; None: the one that the adapter names."""
    model_revision: str | None = None
    """Of a model on the hub: branch, tag or commit; None: the adapter's, or the main branch."""
    trust_remote_code: bool = False
    """Run the code that the model brings along. Of a model on the hub only with the commit as --model-revision."""
    config: tuple[str, ...] = ()
    """YAML files with any of these options: of several, the later ones win, and flags win over all. ${NAME} in a value
    is the environment's."""
    export_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of the weights that are written."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What computes the answers."""

    engine: Literal["hf", "vllm", "openai"] = "hf"
    """hf: transformers, on this machine; vllm: the package of that name (pip install vllm); openai: a server that
    speaks its protocol, such as those of vLLM, SGLang or llama.cpp."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Data type to compute in; auto: the one that the weights are stored in."""
    batch_size: int = 32
    """hf: the most prompts that are answered at once."""
    base_url: str | None = None
    """openai: address of the server, such as http://localhost:8000/v1."""
    api_key_env: str = "OPENAI_API_KEY"
    """openai: environment variable that holds the key; servers of one's own often need none."""
    concurrency: int = 16
    """openai: requests that are under way at once."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How an answer's tokens are chosen."""

    max_new_tokens: int = 512
    """Longest answer, in tokens."""
    temperature: float = 0.0
    """0: always the likeliest token; above, drawn at random, the more so the higher."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together have this share of the probability."""
    top_k: int | None = None
    """Draw from this many of the likeliest tokens."""
    num_samples: int = 1
    """Answers to each prompt."""
    seed: int = 0
    """Seed of what is drawn. An answer depends on it, on the prompt's place and on its own number, not on what else is
    in its batch."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Ask a model: prompts from files, or a chat in the terminal."""

    model: str
    """Directory of a model, an export or an adapter, or a name on the hub; openai: the model's name at the server."""
    adapter: str | None = None
    """Directory of a LoRA adapter to put onto the model, as peft writes it."""
    model_revision: str | None = None
    """Of a model on the hub: branch, tag or commit; its main branch if not given."""
    trust_remote_code: bool = False
    """Run the code that the model brings along. Of a model on the hub only with the commit as --model-revision."""
    prompts: tuple[str, ...] = ()
    """Files or directories of prompts: rows as process_data.py reads them, or lines of text (.txt). None: a chat in
    the terminal."""
    output: str | None = None
    """File to write the answers to: .jsonl."""
    format: Literal["messages", "sharegpt", "alpaca", "completion", "document"] | None = None
    """What the rows of every file are; None: each row shows it."""
    config: str | None = None
    """YAML file with any of these options; flags win over it."""
    engines: EngineOptions = field(default_factory=EngineOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Measure models, one beside the other: losses on tokenized sets, answers to tasks, EleutherAI's harness."""

    output_dir: str
    """Directory for results.json, the samples of each model, and the page. What is there already is not computed
    again."""
    model: tuple[str, ...] = ()
    """Directories of models, exports or adapters, or names on the hub; the first is what others are compared with."""
    run: str | None = None
    """Output directory of train.py: all its exports, beside the models of --model."""
    data: tuple[str, ...] = ()
    """Tokenized data sets written by process_data.py: loss, perplexity and token accuracy; of classifiers macro F1,
    accuracy and loss."""
    task: tuple[str, ...] = ()
    """Files of prompts with references: the last answer of a chat, completion, answer, or choices with the right
    one's number."""
    lm_eval: tuple[str, ...] = ()
    """Tasks of EleutherAI's harness, by name or YAML file (pip install lm_eval)."""
    metrics: tuple[str, ...] = ()
    """Measures of the answers: exact_match, normalised_match, contains, number, token_f1, label, rouge_1, rouge_2,
    rouge_l, bleu, chrf; none: those that suit the references. Choices are always measured by their likelihood."""
    model_revision: str | None = None
    """Of a model on the hub: branch, tag or commit; its main branch if not given."""
    trust_remote_code: bool = False
    """Run the code that the models bring along. Of a model on the hub only with the commit as --model-revision."""
    format: Literal["messages", "sharegpt", "alpaca", "completion", "document"] | None = None
    """What the rows of every task are; None: each row shows it."""
    max_tokens_per_gpu: int = 8192
    """Tokens that are scored at once in --data."""
    num_resamples: int = 10_000
    """Draws of the bootstrap intervals and of the permutation tests."""
    config: str | None = None
    """YAML file with any of these options; flags win over it."""
    engines: EngineOptions = field(default_factory=EngineOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)


@dataclass(frozen=True, kw_only=True)
class MergeModelsOptions:
    """Mix models of one architecture, tensor by tensor, in fp32."""

    model: tuple[str, ...]
    """Directories of two models or more; config, tokenizer and data types are the first one's."""
    output_dir: str
    """Directory to write, which must not be there."""
    weights: tuple[float, ...] = ()
    """How much each model counts. Without --base they sum to 1; none: each counts as much."""
    base: str | None = None
    """Directory of the model that the others were trained from: what is written is it, plus the weighted sum of their
    differences from it (task vectors)."""
    config: str | None = None
    """YAML file with any of these options; flags win over it."""


@dataclass(frozen=True, kw_only=True)
class ImportConfigOptions:
    """Turn another trainer's configuration into files for process_data.py and train.py."""

    config_file: str
    """Axolotl's YAML, LLaMA-Factory's, or TRL's."""
    output_dir: str = "."
    """Directory for data.yaml and train.yaml."""
    num_gpus: int = 1
    """GPUs of the run, to turn samples per GPU into samples per step."""
    tokenized_data: tuple[str, ...] = ()
    """Your data sets, written by process_data.py. Their lengths turn batches of packs into batches of samples, and
    epochs that are not whole into samples."""
    trainer: Literal["axolotl", "llama-factory", "trl"] | None = None
    """Whose the file is; None: its keys show it."""


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """Draw the curves of training runs, laid over each other: a page for a browser, or a picture for papers."""

    runs: tuple[str, ...]
    """Output directories of train.py, of runs that have ended or go on."""
    output: str | None = None
    """File to write: .html, a page that needs no network; .png, .svg or .pdf, a picture."""
    follow: bool = False
    """Serve the page to browsers of this machine until Ctrl-C, and keep it up to date while runs go on."""
    port: int | None = None
    """Port of --follow; 8765 if not given."""
    smoothing: int | None = None
    """Steps over which noisy curves are averaged, 1 for none; on the page that is where its slider stands at first. By
    default what suits the longest run."""


def list_identifying_options() -> list[str]:
    """The options that decide what a run computes; the others may change from start to start."""
    return [*IDENTIFYING_OPTIONS, *list_group_options(IDENTIFYING_GROUPS)]


def list_unchangeable_options() -> list[str]:
    """Those of them that even --allow-changed-options cannot change."""
    return list_group_options(UNCHANGEABLE_GROUPS)


def list_group_options(groups: tuple[type, ...]) -> list[str]:
    """The options of `groups`, but for places of files and what is made of the result."""
    names = [option.name for group in groups for option in dataclasses.fields(group)]
    return [name for name in names if name not in PLACES]


def iterate_fields(options_class: type) -> Iterator[tuple[dataclasses.Field, str | None]]:
    """Every option's field, in the order of --help, with the name of its group; None for those in no group."""
    for entry in dataclasses.fields(options_class):
        if dataclasses.is_dataclass(entry.type):
            yield from ((option, entry.name) for option in dataclasses.fields(entry.type))
        else:
            yield entry, None


def list_types(options_class: type) -> dict[str, Any]:
    """The type of every option by its name."""
    return {option.name: option.type for option, _ in iterate_fields(options_class)}


def flatten_options(options: Any) -> dict[str, Any]:
    """The value of every option by its name."""
    return {
        option.name: getattr(options if group is None else getattr(options, group), option.name)
        for option, group in iterate_fields(type(options))
    }


def list_defaults() -> dict[str, Any]:
    """The default of every identifying option that has one."""
    defaults = {option.name: option.default for option, _ in iterate_fields(TrainOptions)}
    return {name: defaults[name] for name in list_identifying_options()}


def group_options(options_class: type[Options], **values: Any) -> Options:
    """Options from values by name, the others at their defaults. TypeError for a name that no option has.

    Of an option that takes several values, one that stands alone is taken for a tuple of it.
    """
    groups: dict[str, dict[str, Any]] = {}
    for option, group in iterate_fields(options_class):
        if option.name in values:
            value = values.pop(option.name)
            is_alone = get_origin(option.type) is tuple and not isinstance(value, (tuple, list))
            groups.setdefault(group, {})[option.name] = (value,) if is_alone else value
    if values:
        raise TypeError(f"no options: {', '.join(values)}")
    types = {entry.name: entry.type for entry in dataclasses.fields(options_class)}
    grouped = {group: types[group](**chosen) for group, chosen in groups.items() if group is not None}
    return options_class(**groups.get(None, {}), **grouped)


def replace_options(options: Options, **changes: Any) -> Options:
    """The same options with some values changed, by name."""
    return group_options(type(options), **(flatten_options(options) | changes))


def parse_duration(text: str | None) -> float | None:
    """Seconds in '90' or '0.5' (minutes) or '1:30:00' (hours, minutes, seconds); None where there is no limit."""
    if text is None:
        return None
    try:
        if clock := re.fullmatch(r"(\d+):([0-5]\d):([0-5]\d)", text):
            hours, minutes, rest = map(int, clock.groups())
            seconds = 3600.0 * hours + 60 * minutes + rest
        else:
            seconds = 60 * float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise ValueError(f"{text}: must be minutes (90) above 0, or hours, minutes and seconds (1:30:00)")
    return seconds


def parse_steps(text: str) -> tuple[int, int]:
    """First and last step, counted from 1, in '10:13' or '10'; ValueError if it is neither."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(f"{text}: must be a step (10), or the first and the last one (10:13), counted from 1")
    return first, last


def parse_subset(text: str) -> int | float:
    """A number of samples in '10', a share of them in '1%'; ValueError if it is neither."""
    try:
        if not text.endswith("%"):
            if (count := int(text)) >= 1:
                return count
        elif 0 < (share := float(text[:-1]) / 100) <= 1:
            return share
    except ValueError:
        pass
    raise ValueError(f"{text}: must be a number of samples (10), or a share of them above 0 and up to 100% (1%)")


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")
