"""A run's inputs: data, tokenizer, the model's config, objective and method; and the errors found in them."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from mini_trainer.data.columns.base import COLUMNS
from mini_trainer.data.stores.model_files import find_weights, verify_weights
from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import verify_data
from mini_trainer.model.config import ModelSource
from mini_trainer.model.method import Method
from mini_trainer.objectives.families.family import Family
from mini_trainer.objectives.objective import Objective
from mini_trainer.options import DataOptions, TrainOptions
from mini_trainer.run.checkpointing import Checkpoint
from mini_trainer.sampler import Batch, Batching, RunPosition, draw_batches, iterate_batches

if TYPE_CHECKING:
    from mini_trainer.model.scoring.score_files import ScoreFile
    from mini_trainer.run.callbacks import Classes
    from mini_trainer.run.old_stream import OldStream
    from mini_trainer.run.samples import Samples

Result = TypeVar("Result")

REFERENCE_MODEL, TEACHER_MODEL = "--reference-model", "--teacher-model"


class Errors(list[ValueError | OSError]):
    """The errors found in a run's inputs."""

    def attempt(self, function: Callable[[], Result]) -> Result | None:
        """Returns the function's result, or None if it raises an error, which is added."""
        try:
            return function()
        except (ValueError, OSError) as error:
            self.append(error)
            return None

    def raise_all(self) -> None:
        """Raises the only error, or a ValueError that lists all errors; does nothing without errors."""
        if len(self) == 1:
            raise self[0]
        if self:
            listed = "".join(f"\n  - {error}" for error in self)
            raise ValueError(f"{len(self)} problems:{listed}")


@dataclass
class RunInputs:
    """A run's inputs that are read before anything large is loaded; None for those that cannot be read.
    Invariant: `errors` explains everything that is None or does not fit. A run starts only without errors."""

    family: Family  # complete once there is a tokenizer
    method: Method
    data_options: DataOptions  # with a number for max_tokens_per_gpu: if "auto", 8,192, or the longest sample's
    options: TrainOptions  # with values for what the data and the model's size choose
    compute_dtype: torch.dtype
    chosen: str = ""  # these values, for the line about the data
    values: dict[str, Any] = field(default_factory=dict)  # all options by name, as they are recorded
    own_paths: Sequence[str] = ()  # local ones of all data sets that the options name, and of OSFT's cache
    data: Mixture | None = None
    sidecars: list[dict[str, Any] | None] = field(default_factory=list)  # of each training set, if it has one
    validation_data: Mixture | None = None  # None also if no validation is requested
    old_data: Mixture | None = None  # of --keep
    old: "OldStream | None" = None  # its samples in each step
    model_dir: str | None = None
    config: PreTrainedConfig | None = None
    generation_config: GenerationConfig | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    new_tokens: tuple[int, ...] = ()  # see ModelSource
    objective: Objective | None = None
    other_models: dict[str, ModelSource] = field(default_factory=dict)  # that the objective reads, by option
    teacher: str | None = None  # digest of a teacher's scores of the data
    scores: "list[ScoreFile]" = field(default_factory=list)  # those of a teacher that the run reads
    batching: Batching | None = None  # None without data, or if a sample is longer than a batch
    num_steps: int | None = None  # None: no end
    origin: Checkpoint | None = None  # of another run, whose weights and optimizer state this one starts with
    schedule_steps: int | None = None  # of the learning rate, which runs can share; None: no end
    callbacks: "Classes" = field(default_factory=dict)
    samples: "Samples | None" = None  # None without prompts to answer
    errors: Errors = field(default_factory=Errors)
    warnings: list[str] = field(default_factory=list)

    @property
    def export_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of exports: without a chat template if the data's texts were not rendered with one, since
        sentence-transformers would apply it to a classifier's texts."""
        if not COLUMNS[self.data.task.objective].has_labels:
            return self.tokenizer
        tokenizer = copy.deepcopy(self.tokenizer)
        tokenizer.chat_template = None
        return tokenizer

    @property
    def num_steps_before(self) -> int:
        """Optimizer steps of the runs that this one continues."""
        return 0 if self.origin is None else self.origin.num_steps

    @property
    def last_step(self) -> int | None:
        """Optimizer steps at the run's end, with those of the runs that it continues; None: no end."""
        return None if self.num_steps is None else self.num_steps_before + self.num_steps

    @property
    def compares_with_start(self) -> bool:
        """Whether the weights that the run starts with are its reference, or it keeps what they know."""
        has_reference = self.objective.reference is not None and REFERENCE_MODEL not in self.other_models
        return has_reference or self.old_data is not None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(data.longest_sequence for data in self.data_sets.values())

    @property
    def longest_set(self) -> Mixture:
        """The data that trains with the longest sample: the run's own, or that of --keep."""
        return max(filter(None, (self.data, self.old_data)), key=lambda data: data.longest)

    @property
    def roles(self) -> set[str]:
        """The roles whose messages are trained on, as far as the data's sidecars say."""
        return {role for sidecar in self.sidecars if sidecar for role in sidecar.get("num_trained_by_role") or ()}

    @property
    def data_sets(self) -> dict[str, Mixture]:
        """The open data sets, by option."""
        named = {"--data-path": self.data, "--validation-data-path": self.validation_data, "--keep": self.old_data}
        return {option: data for option, data in named.items() if data is not None}

    def draw_batches(self, start: RunPosition) -> Iterator[np.ndarray]:
        """Yields the rows of each global batch, endlessly, from `start`."""
        return draw_batches(self.data, self.batching, seed=self.data_options.seed, start=start.num_samples)

    def open_batches(self, options: DataOptions, **shared: Any) -> Iterator[Batch]:
        """Yields the run's global batches, with the samples of --keep beside them, if there are any. `shared`: start,
        number of steps, attention_cost and world, as the sampler takes them."""
        batches = iterate_batches(self.data, options, objective=self.objective, batching=self.batching, **shared)
        return batches if self.old is None else self.old.add_to(batches, self.objective, options, **shared)

    @property
    def source(self) -> ModelSource:
        o = self.options.model
        return ModelSource(
            self.model_dir, self.config, o.trust_remote_code, name=o.model_name_or_path, new_tokens=self.new_tokens
        )

    def list_models(self) -> list[tuple[str, str]]:
        """Names and directories of the model and of the other models that the run reads."""
        models = [] if self.model_dir is None else [(self.options.model.model_name_or_path, self.model_dir)]
        return models + [(other.name, other.directory) for other in self.other_models.values()]

    def find_weights(self, *, verifies: bool) -> None:
        """Downloads the weights of all its models, and `verifies` them. Rank 0."""
        for name, directory in self.list_models():
            find_weights(name, directory)
            if verifies:
                verify_weights(directory)

    def verify(self) -> None:
        """Checks the other files that every node reads against the hashes recorded with them."""
        for data in self.data_sets.values():
            for source in data.sources:
                verify_data(source)
        for scores in self.scores:
            scores.verify()
        self.method.verify_files()
