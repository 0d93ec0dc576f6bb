"""Learning options: model, objective, optimizer, method."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from mini_trainer.options import doors
from mini_trainer.options.fields import option, parse_rate, parse_steps_or_share
from mini_trainer.options.objectives import OBJECTIVES
from mini_trainer.options.places import USUAL

MOST_RANK = 65_536  # of an adapter: wider than any layer that gets one
DEFAULT_LEARNING_RATE = 1e-5
SCHEDULES_WITH_END = tuple(doors.DECAYS)
SHAPED_SCHEDULES = ("cosine_with_restarts", "polynomial", "wsd")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model to train."""

    model_name_or_path: str = option(may_differ=True)
    """Model directory or hub name, Hugging Face format."""
    model_revision: str | None = None
    """Branch, tag or commit of a model on the hub. Default: its main branch."""
    trust_remote_code: bool = False
    """Run code that comes with the model; for a model on the hub only with a commit as --model-revision."""


@dataclass(frozen=True, kw_only=True)
class ClassificationOptions:
    """The objective: language modelling, classes (docs/reference/classification.md) or preferences."""

    decides: ClassVar = "numbers"

    objective: Literal[*OBJECTIVES] = "causal-lm"
    """Training objective; the data must have been tokenized for it. kto: on binary feedback; reward: a reward model, on
    preferences."""
    class_weights: tuple[str, ...] = ()
    """Classifiers: weight of each class in the loss, in the order of the labels; balanced: inversely proportional to
    its frequency."""
    loss_weighting: Literal[*doors.WEIGHTINGS] | None = None
    """Language models: weigh each token's loss by the model's own probabilities, as constants. dft: by the target's
    (arXiv 2508.05629); eaft: by the entropy of the 20 most probable tokens (arXiv 2601.02151)."""
    label_smoothing: float = option(0.0, at_least=0, below=1)
    """Share of each target spread over all classes, or over the vocabulary for language models, whose validations do
    not use it. Preferences, dpo only: share of pairs whose answers are assumed to be swapped (conservative DPO)."""


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions:
    """Learning from better and worse answers (docs/tasks/preferences.md)."""

    decides: ClassVar = "numbers"

    preference_loss: Literal["dpo", "ipo", "apo-zero", "simpo", "orpo"] = "dpo"
    """Loss of a pair. simpo and orpo need no reference model."""
    preference_beta: float | None = option(None, above=0)
    """Scale of rewards: larger values keep the model closer to its reference. orpo: weight of the odds ratio. Default:
    0.1; simpo: 2."""
    preference_gamma: float | None = None
    """simpo only: target margin between the rewards. Default: 0.5."""
    preference_nll_weight: float | None = option(None, at_least=0)
    """Weight of the chosen answers' negative log-likelihood per token, added to the loss (RPO). Default: 0; orpo: 1."""
    reference_model: str | None = option(None, is_path=True)
    """Directory or hub name of the reference model. Default: the model that the run starts with."""
    kto_weight_ratio: float = option(1.0, above=0)
    """kto only: weight of good answers' losses, relative to bad answers'."""
    reward_centering: float = option(0.0, at_least=0)
    """reward only: weight of the squared sum of a pair's rewards, which keeps their mean near 0; such as 0.01."""


@dataclass(frozen=True, kw_only=True)
class TeacherOptions:
    """Learning from a teacher's next-token distributions (docs/tasks/teachers.md)."""

    decides: ClassVar = "numbers"
    has_switch: ClassVar = True

    teacher_weight: float | None = option(None, at_least=0, at_most=1)
    """Weight of the divergence from the teacher, from 0 to 1; the cross-entropy gets the rest. Default: no teacher."""
    teacher_divergence: Literal[*doors.DIVERGENCES] = "forward-kl"
    """forward-kl: KL(teacher || model); with files, all tokens outside their top k form one bucket. reverse-kl
    and jsd need --teacher-model."""
    teacher_temperature: float = option(1.0, above=0)
    """Temperature of both distributions; must be that of the files."""
    teacher_scores: str = option("teacher", is_path=True)
    """Name of the teacher's files next to the data sets, as given to score-data --name."""
    teacher_model: str | None = option(None, is_path=True)
    """Directory or hub name of a teacher that reads each batch, instead of files."""


@dataclass(frozen=True, kw_only=True)
class KeepOptions:
    """Keeping what the model knows (docs/tasks/keep_knowledge.md)."""

    decides: ClassVar = "numbers"
    has_switch: ClassVar = True

    keep: tuple[str, ...] = option((), is_path=True, names_data=True)
    """Samples of what the model knows, on which its next-token distributions stay as they are at the start while it
    learns the others: data sets of process_data.py, or rows; self: samples that it has drawn (mini-trainer
    draw-samples, which mini-trainer train runs)."""
    keep_share: float = option(0.33, above=0, at_most=100)
    """Such samples in each step, as a share of --batch-size, or their tokens as one of --batch-tokens; in addition to
    these."""
    keep_weight: float = option(1.0, above=0)
    """Weight of KL(start || model), a mean over their trained tokens, which is added to the loss."""


@dataclass(frozen=True, kw_only=True)
class VisionOptions:
    """Vision-language models (docs/reference/vision.md)."""

    freeze: tuple[Literal[*doors.FREEZABLE], ...] = option(("vision",), decides="state")
    """Parts of a vision-language model to freeze; nothing: train all of it."""
    max_image_tokens_per_gpu: int | None = option(None, at_least=1)
    """Maximum number of image patches in a micro-batch on one rank, counted as they enter the vision tower; determines
    its memory. Default: limited by --max-tokens-per-gpu alone."""


@dataclass(frozen=True, kw_only=True)
class OptimizationOptions:
    """Optimizer, learning rate schedule and regularization."""

    decides: ClassVar = "numbers"

    optimizer: Literal[*doors.OPTIMIZERS] = option("adamw", decides="state")
    """adamw8bit: AdamW with 8-bit moments, which take a quarter of the memory; its steps differ slightly. muon: Muon
    for the blocks' matrices, AdamW for all else."""
    master_weights: Literal["float32", "bfloat16"] = option("float32", decides="state")
    """bfloat16: halve the memory of weights, and of gradients between micro-batches, with stochastic rounding of
    updates, so that small ones are not lost; noisier."""
    learning_rate: float | None = option(None, at_least=0, at_most=1)
    """Peak learning rate. Default: on the command line chosen by method and model size
    (docs/tasks/learning_rate.md), else 1e-5."""
    num_warmup_steps: int | float = option(0, at_least=0, parse=parse_steps_or_share)
    """Number of linear warm-up steps; below 1: their share of the run's steps, such as 0.03."""
    lr_scheduler: Literal[*doors.SCHEDULES] = "constant_with_warmup"
    """Shape of the learning rate after warm-up, as transformers defines them. wsd: warm-up, stable, decay."""
    schedule_steps: int | None = option(None, at_least=1)
    """Number of steps of the schedule, where several runs share it (--continue-from). Default: those of the run."""
    lr_shape: float | None = option(None, above=0, only_with=("lr_scheduler", SHAPED_SCHEDULES))
    """cosine_with_restarts: number of cycles; polynomial: power of the decay; wsd: number of steps of the final decay.
    Default: 1; wsd: 10 % of the run."""
    min_lr_ratio: float | None = option(None, at_least=0, at_most=1, only_with=("lr_scheduler", SCHEDULES_WITH_END))
    """Final learning rate as a share of the peak, for schedules that decay. Default: 0."""
    weight_decay: float = option(0.0, at_least=0)
    """AdamW's decoupled weight decay, of matrices, embeddings and convolutions: not of norms, biases and scales."""
    adam_beta1: float = option(0.9, at_least=0, below=1)
    """AdamW's decay of the first moment."""
    adam_beta2: float = option(0.95, at_least=0, below=1)
    """AdamW's decay of the second moment."""
    adam_eps: float = option(1e-8, above=0)
    """AdamW's epsilon."""
    learning_rate_for: tuple[str, ...] = option((), parse=parse_rate)
    """Peak learning rate, weight decay or both of parameters by their names, as PATTERN=RATE ('lm_head*=1e-6'),
    PATTERN=:DECAY or PATTERN=RATE:DECAY; the first match counts. The schedule is the same."""
    weight_average: Literal["none", "ema", "tail"] = "none"
    """Keep an fp32 average of the trained weights, and export it as average_NAME. ema: exponential, from the start,
    validated beside the model; tail: the mean of the weights after each of the last steps."""
    average_over: int | None = option(None, at_least=1, only_with=("weight_average", ("ema", "tail")))
    """ema: number of samples after which a step's share in the average has halved; tail: number of last steps to
    average over."""
    router_aux_loss: float | None = option(None, at_least=0)
    """Mixtures of experts: weight of the load-balancing loss (router_aux_loss_coef). Default: the model config's, or 0
    without output_router_logits."""
    router_loss_over: Literal["sequence", "global-batch"] = "sequence"
    """Tokens over which the load-balancing loss is computed. sequence: each sequence by itself; global-batch: all
    tokens of a step, so that experts may specialize on some samples; costs a forward pass."""
    max_grad_norm: float | None = option(1.0, above=0)
    """Maximum global gradient norm; None: no clipping."""

    @property
    def peak_rate(self) -> float:
        return DEFAULT_LEARNING_RATE if self.learning_rate is None else self.learning_rate

    @property
    def needs_end(self) -> bool:
        """Whether the learning rate depends on the schedule's number of steps."""
        return self.lr_scheduler in SCHEDULES_WITH_END or 0 < self.num_warmup_steps < 1


@dataclass(frozen=True, kw_only=True)
class OSFTOptions:
    """Continual learning (docs/reference/osft.md)."""

    decides: ClassVar = "method"
    has_switch: ClassVar = True

    osft: bool = False
    """Orthogonal subspace fine-tuning: keep each weight's most important directions exactly, train the rest
    (docs/reference/osft.md)."""
    osft_unfreeze_rank_ratio: float | None = option(None, at_least=0, at_most=1)
    """Share of each layer's directions to train, from 0 to 1; the others are kept."""
    osft_target_patterns: tuple[str, ...] = ()
    """Layers to constrain, by parts of their names, such as q_proj or mlp. Default: all linear layers of the blocks."""
    osft_train_others: bool = False
    """Train embeddings, norms, biases and head too, which can still change what the kept directions protect."""
    osft_cache_dir: str = option(f"{USUAL}/osft", is_path=True)
    """Cache directory for decompositions, by the hash of the weights."""
    osft_basis: Literal["weights", "activations"] = "weights"
    """Directions to keep: the weights' singular vectors, for which no data are needed, or the principal directions of
    the layers' inputs on earlier tasks' data, with which less is forgotten."""
    osft_calibration_data: str | None = option(None, is_path=True, names_data=True)
    """Tokenized data set of earlier tasks, or self, as for --keep; a sample of it is read once."""
    osft_statistics: str | None = option(None, is_path=True)
    """File of the earlier tasks' statistics, instead of their data; those of --osft-calibration-data are added."""
    osft_keep_energy: float | None = option(None, above=0, at_most=1, only_with=("osft_basis", ("activations",)))
    """activations only: keep the directions that carry this share of each layer's input energy, instead of
    --osft-unfreeze-rank-ratio."""
    osft_bases: str | None = option(None, is_path=True)
    """Sequences of tasks: osft/bases.safetensors of the export that this run starts from, or new for the first task.
    All directions kept by earlier runs stay exactly as they are, and exports hold them with this run's."""


@dataclass(frozen=True, kw_only=True)
class LoRAOptions:
    """Low-rank adapters (docs/tasks/lora.md)."""

    decides: ClassVar = "method"
    has_switch: ClassVar = True

    lora: bool = False
    """Train low-rank adapters of linear layers and freeze the model's weights (docs/tasks/lora.md)."""
    lora_rank: int | None = option(None, at_least=1, at_most=MOST_RANK)
    """Rank of the adapters. Default: 16, or that of --lora-adapter."""
    lora_alpha: float | None = option(None, above=0)
    """Adapters are scaled by alpha / rank. Default: twice the rank, or that of --lora-adapter."""
    lora_dropout: float = option(0.0, at_least=0, below=1)
    """Dropout of the adapters' inputs."""
    lora_target_modules: tuple[str, ...] = ()
    """Layers to adapt: names, their endings (q_proj), or patterns (layers.[0-3].*). Default: all linear layers of the
    blocks, experts included."""
    lora_use_dora: bool = False
    """DoRA: also train the magnitude of each row of a weight."""
    lora_modules_to_save: tuple[str, ...] = ()
    """Modules to train in full and save with the adapters, such as embed_tokens or lm_head."""
    lora_adapter: str | None = option(None, is_path=True)
    """Directory of an adapter to continue from, which determines rank, alpha and layers."""
    lora_export: Literal[*doors.LORA_EXPORTS] = option("adapter", decides="nothing")
    """Content of an export: the adapter, for peft and vLLM; the model with the adapter merged into its weights; or
    both, with the adapter in the subdirectory adapter/."""
    base_quantization: Literal[*doors.BASE_QUANTIZATIONS] = "none"
    """nf4: hold the blocks' linear layers and experts in 4 bits (QLoRA; pip install peft bitsandbytes)."""
