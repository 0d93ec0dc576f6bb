"""Classifiers of sequences and of tokens, on encoders and decoders (see `objectives.objective.Objective`)."""

import copy
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from chat.labels import IGNORED
from objectives.class_loss import ClassLoss, choose_class_weights
from objectives.class_packing import cut_lengths, make_idle_classified, pack_classified
from objectives.class_scores import METRICS, describe_prediction, summarize_classes
from objectives.columns import CountLabels, Sample, Task, check_task
from objectives.embedding_noise import EmbeddingNoise
from objectives.micro_batch import MicroBatch
from objectives.packed_classifier import PackedClassifier
from objectives.text_tower import LeftOut, find_base
from options import ClassificationOptions

PROBLEM_TYPES = {  # as transformers' configs call them
    "single": "single_label_classification",
    "multi": "multi_label_classification",
    "regression": "regression",
}


class Classification:
    """The objective of classifiers (see `objectives.objective.Objective`).

    Invariant: `task` and `loss` are there once `open_data` has been called, `pad_token_id` after `use_tokenizer`.
    """

    keeps_unused = False  # such as a language model's head

    def __init__(self, options: ClassificationOptions, *, seed: int | None, noise: EmbeddingNoise | None = None):
        """`seed`: of a head that the model's files do not have; None: they must have it."""
        self.options, self.seed, self.noise, self.name = options, seed, noise, options.objective
        self.of_tokens = options.objective == "token-classification"
        self.peft_task = "TOKEN_CLS" if self.of_tokens else "SEQ_CLS"
        self.auto_class = AutoModelForTokenClassification if self.of_tokens else AutoModelForSequenceClassification
        self.row_group = None  # a class is of a whole sequence
        self.task: Task | None = None
        self.loss: ClassLoss | None = None
        self.pad_token_id: int | None = None

    # What is trained on.

    def open_data(self, task: Task, count_labels: CountLabels) -> None:
        check_task(task, self.name)
        self.task, smoothing = task, self.options.label_smoothing
        if smoothing and task.label_type != "single":
            raise ValueError(
                f"--label-smoothing {smoothing} has no effect on this data: its targets are not one class of several"
                f" each ({task.label_type}): leave it out"
            )
        weights = choose_class_weights(self.options.class_weights, task, count_labels)
        self.loss = ClassLoss(task.label_type, weights, smoothing)

    def use_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.pad_token_id = tokenizer.pad_token_id

    # The model.

    def check_config(self, config: PreTrainedConfig, *, trust_remote_code: bool) -> str | None:
        is_custom = trust_remote_code and self.auto_class.__name__ in (getattr(config, "auto_map", None) or {})
        if type(config) not in self.auto_class._model_mapping and not is_custom:
            return f"model type {config.model_type!r} has no {self.name} in transformers"
        if type(config.get_text_config(decoder=True)) is not type(config) and not is_custom:
            return (
                f"model type {config.model_type!r} is more than a text model (it has several configs in one), and"
                " classifiers train on text alone: give its text model, saved as a model of its own"
            )
        return None

    def make_model(self, config: PreTrainedConfig, *, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
        write_labels(config, self.task)
        return self.auto_class.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)

    def load_model(
        self, model_dir: str, *, dtype: torch.dtype, trust_remote_code: bool
    ) -> tuple[PreTrainedModel, dict[str, Any]]:
        return self.auto_class.from_pretrained(
            model_dir,
            num_labels=self.task.num_labels,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the report says it, and the head begins anew
            trust_remote_code=trust_remote_code,
        )

    def leave_out(self, model: PreTrainedModel) -> LeftOut:
        return LeftOut()

    def list_foreign(self, config: PreTrainedConfig) -> dict[int, str]:
        return {}

    def find_head(self, model: PreTrainedModel) -> list[str]:
        """All with weights that stands beside the base model, and what the base has for it (BERT's pooler)."""
        base, pooler = find_base(model), getattr(find_base(model), "pooler", None)
        parts = [child for child in model.children() if child is not base] + [pooler]
        return [name for name, module in model.named_modules() if module in parts and list(module.parameters())]

    def find_tower_layers(self, model: PreTrainedModel) -> list[str]:
        return []

    def make_missing(self, model: PreTrainedModel, names: Iterable[str]) -> dict[str, Tensor]:
        """Parameters of a head that the model's files do not have, as transformers initializes them."""
        if self.seed is None:
            return {}
        shell, head = copy.deepcopy(model).to("meta"), self.find_head(model)
        digest = hashlib.sha256(f"{self.seed} {' '.join(head)}".encode()).digest()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            for name in head:
                for module in shell.get_submodule(name).modules():
                    for key, param in module.named_parameters(recurse=False):
                        module.register_parameter(key, nn.Parameter(torch.zeros(param.shape)))
                    shell._init_weights(module)
            shell._init_weights(shell)  # ModernBERT's initializes its head as a whole
        made = {f"{name}.{key}": p for name in head for key, p in shell.get_submodule(name).named_parameters()}
        return {name: made[name].detach() for name in names if name in made}

    def wrap(
        self, model: PreTrainedModel, *, backend: str, compute_dtype: torch.dtype, fuses_loss: bool
    ) -> PackedClassifier:
        if self.pad_token_id is not None and self.pad_token_id < model.config.vocab_size:
            model.config.pad_token_id = self.pad_token_id  # as an export has it: decoders look for it
        packed_model = PackedClassifier(
            model, backend=backend, compute_dtype=compute_dtype, loss=self.loss, of_tokens=self.of_tokens
        )
        if self.noise is not None:
            self.noise.attach(packed_model)
        return packed_model

    # Samples.

    def pack(self, samples: Sequence[Sample], *, sources: np.ndarray | None = None, num_sources: int = 1) -> MicroBatch:
        num_values = 1 if self.task.label_type == "single" else self.task.num_labels
        return pack_classified(
            samples,
            num_values=None if self.of_tokens else num_values,
            sources=sources,
            num_sources=num_sources,
        )

    def make_idle_sample(self) -> Sample:
        return make_idle_classified(of_tokens=self.of_tokens)

    def make_check_sample(self, token_ids: np.ndarray) -> Sample:
        return token_ids, self.make_targets(token_ids), None

    def make_probe(self, num_tokens: int, num_trained: int, *, longest: int) -> MicroBatch:
        """Of tokens about `num_trained` have a class; every sequence has one."""
        samples = [self.make_check_sample(np.arange(length)) for length in cut_lengths(num_tokens, longest)]
        for _, targets, _ in samples if self.of_tokens else ():
            targets[-(-num_trained * len(targets) // num_tokens) :] = IGNORED
        return self.pack(samples)

    def make_targets(self, token_ids: np.ndarray) -> np.ndarray:
        """Some of these tokens, or one of all, that the model could be asked for."""
        num_labels = self.task.num_labels
        if self.of_tokens:
            return token_ids % num_labels
        if self.task.label_type == "single":
            return np.array([token_ids[0] % num_labels], dtype=np.float32)
        return (np.arange(num_labels) + token_ids[0]).astype(np.float32) % 2

    def measure_divisor(self, num_targets: int, samples: Iterable[Sample]) -> float:
        if self.loss.label_type != "single" or self.loss.weights is None:
            return num_targets
        weights = np.array(self.loss.weights)
        classes = np.concatenate([targets for _, targets, _ in samples]).astype(np.int64)
        return float(weights[classes[classes != IGNORED]].sum())

    # What a validation says.

    def list_metrics(self) -> dict[str, bool]:
        return METRICS[self.task.label_type]

    def summarize(self, sums: Tensor, predictions: Tensor | None) -> dict[str, Any]:
        loss_sum, divisor = sums.tolist()
        targets, logits = self.split_predictions(predictions)
        return {"loss": loss_sum / divisor} | summarize_classes(self.task, targets, logits)

    def describe_prediction(self, row: np.ndarray) -> dict[str, Any]:
        targets, logits = self.split_predictions(row[None])
        return describe_prediction(self.task, targets[0], logits[0])

    def split_predictions(self, rows: Any) -> tuple[np.ndarray, np.ndarray]:  # (N, K), (N, C)
        """Targets and logits, from what `PackedClassifier.score` says of each target."""
        num_labels = self.task.num_labels
        return np.asarray(rows)[:, :-num_labels], np.asarray(rows)[:, -num_labels:]


def write_labels(config: PreTrainedConfig, task: Task) -> None:
    """Makes `config` one of a model for the task: an export is loaded with the labels' names."""
    names = task.label_names or tuple(f"LABEL_{i}" for i in range(task.num_labels))
    config.id2label = dict(enumerate(names))
    config.label2id = {name: i for i, name in enumerate(names)}
    if task.objective == "sequence-classification":
        config.problem_type = PROBLEM_TYPES[task.label_type]
