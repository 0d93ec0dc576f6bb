"""Choice of the inference engine."""

import torch

from corpus.formats import FORMATS
from inference.engine import Engine
from inference.hf_engine import HFEngine
from inference.models import FoundModel
from inference.openai_engine import OpenAIEngine
from inference.vllm_engine import VLLMEngine
from options import EngineOptions, SamplingOptions
from options.choices import Implemented
from ranks.devices import DTYPES

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
