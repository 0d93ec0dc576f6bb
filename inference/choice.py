"""Which engine answers."""

import torch

from inference.engine import Engine
from inference.hf_engine import HFEngine
from inference.models import FoundModel
from inference.openai_engine import OpenAIEngine
from inference.vllm_engine import VLLMEngine
from options import EngineOptions, SamplingOptions


def open_engine(
    found: FoundModel | None,
    name: str,
    engine: EngineOptions,
    sampling: SamplingOptions,
    *,
    device: torch.device,
) -> Engine:
    """The engine that the options name; `found` is None for a server's, which knows the model by `name`."""
    if engine.engine == "openai":
        return OpenAIEngine(name, engine, sampling)
    if engine.engine == "vllm":
        return VLLMEngine(found, engine, sampling)
    return HFEngine(found, engine, sampling, device=device)
