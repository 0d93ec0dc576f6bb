"""A run's inputs: data, tokenizer, the model's config, objective and method; and the errors found in them."""

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

    Invariant: `errors` explains everything that is None or does not fit. A run starts only without errors.
    """

    family: Family  # complete once there is a tokenizer
    method: Method
    data_options: DataOptions  # with a number for max_tokens_per_gpu: if "auto", the longest sample's
    compute_dtype: torch.dtype
    data: Mixture | None = None
    sidecars: list[dict[str, Any] | None] = field(default_factory=list)  # of each data set, if it has one
    validation_data: Mixture | None = None  # None also if no validation is requested
    model_dir: str | None = None
    config: PreTrainedConfig | None = None
    generation_config: GenerationConfig | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    objective: Objective | None = None
    num_steps: int | None = None  # None: no end
    errors: Errors = field(default_factory=Errors)
    warnings: list[str] = field(default_factory=list)

    @property
    def longest(self) -> int:
        """Tokens of the longest training or validation sample."""
        return max(data.longest for data in (self.data, self.validation_data) if data is not None)

    def source(self, options: ModelOptions) -> ModelSource:
        return ModelSource(self.model_dir, self.config, options.trust_remote_code, name=options.model_name_or_path)

    def identify(self, options: TrainOptions) -> dict[str, Any]:
        """Everything that determines the run's numbers (see lifecycle.record)."""
        return identify_run(
            options,
            model_dir=self.model_dir,
            data=self.data,
            data_sources=[sidecar and sidecar.get("source") for sidecar in self.sidecars],
            tokenizer=self.tokenizer,
            method_data=self.method.list_data_hashes(),
            compute_dtype=self.compute_dtype,
            num_steps=self.num_steps if options.optimization.needs_end else None,
        )
