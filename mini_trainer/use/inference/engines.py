"""Choice of the inference engine."""

import torch

from mini_trainer.data.rows.formats import FORMATS
from mini_trainer.distributed.devices import DTYPES
from mini_trainer.options import EngineOptions, SamplingOptions
from mini_trainer.options.choices import Implemented
from mini_trainer.use.inference.engine import Engine
from mini_trainer.use.inference.hf_engine import HFEngine
from mini_trainer.use.inference.loading import FoundModel
from mini_trainer.use.inference.openai_engine import OpenAIEngine
from mini_trainer.use.inference.vllm_engine import VLLMEngine

IMPLEMENTED: Implemented = {
    "dtype": ("auto", *DTYPES),
    "engine": ("hf", "openai", "vllm"),
    "format": FORMATS,
}


def open_engine(
    found: FoundModel | None,
    name: str,
    engine: EngineOptions,
    sampling: SamplingOptions,
    *,
    device: torch.device,
) -> Engine:
    """Opens the engine that the options name; `found` is None for a server, which knows the model by `name`."""
    match engine.engine:
        case "hf":
            return HFEngine(found, engine, sampling, device=device)
        case "openai":
            return OpenAIEngine(name, engine, sampling)
        case "vllm":
            return VLLMEngine(found, engine, sampling)
    raise ValueError(f"--engine {engine.engine}: is not implemented")
