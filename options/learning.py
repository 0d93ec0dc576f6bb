"""The options of what is learned, and how: model, objective, optimizer, method."""

from dataclasses import dataclass
from typing import Literal

# Schedules that fall towards the end of the run, so the end has to be known.
SCHEDULES_WITH_END = ("linear", "cosine", "cosine_with_restarts", "polynomial", "wsd")


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
