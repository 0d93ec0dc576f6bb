"""The inputs of a run: data, tokenizer, the model's config, objective and method; and the errors found in them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from corpus.mixture import Mixture
from families.family import Family
from lifecycle.record import identify_run
from model.config import ModelSource
from model.method import Method
from objectives.objective import Objective
from options import DataOptions, ModelOptions, TrainOptions

Result = TypeVar("Result")


class Errors(list[ValueError | OSError]):
    """The errors found in a run's inputs."""

    def attempt(self, function: Callable[[], Result]) -> Result | None:
        """The function's result, or None and one error more."""
        try:
            return function()
        except (ValueError, OSError) as error:
            self.append(error)
            return None

    def raise_all(self) -> None:
        """Raises the one error there is, or a ValueError that names them all."""
        if len(self) == 1:
            raise self[0]
        if self:
            listed = "".join(f"\n  - {error}" for error in self)
            raise ValueError(f"{len(self)} problems:{listed}")


@dataclass
class RunInputs:
    """The inputs of a run that are read before anything large is loaded; None for those that cannot be read.

    Invariant: `errors` names everything that is None or does not fit. A run starts only without errors.
    """

    family: Family  # complete once there is a tokenizer
    method: Method
    data_options: DataOptions  # with a number for max_tokens_per_gpu: the longest sample's, where it is auto
    compute_dtype: torch.dtype
    data: Mixture | None = None
    sidecars: list[dict[str, Any] | None] = field(default_factory=list)  # of each data set, if it has one
    validation_data: Mixture | None = None  # None, too, where none is asked for
    model_dir: str | None = None
    config: PreTrainedConfig | None = None
    generation_config: GenerationConfig | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    objective: Objective | None = None
    num_steps: int | None = None  # None: no end
    teacher: str | None = None  # digest of the teacher, if there is one
    errors: Errors = field(default_factory=Errors)
    warnings: list[str] = field(default_factory=list)

    @property
    def longest(self) -> int:
        """Tokens of the longest sample that is trained or measured on."""
        return max(data.longest for data in (self.data, self.validation_data) if data is not None)

    def source(self, options: ModelOptions) -> ModelSource:
        return ModelSource(self.model_dir, self.config, options.trust_remote_code, name=options.model_name_or_path)

    def identify(self, options: TrainOptions) -> dict[str, Any]:
        """What decides the numbers of the run (see lifecycle.record)."""
        return identify_run(
            options,
            model_dir=self.model_dir,
            data=self.data,
            data_sources=[sidecar and sidecar.get("source") for sidecar in self.sidecars],
            tokenizer=self.tokenizer,
            method_data=self.method.list_data_hashes(),
            compute_dtype=self.compute_dtype,
            num_steps=self.num_steps if options.optimization.needs_end else None,
        ) | ({} if self.teacher is None else {"teacher": self.teacher})
