"""Takes the place of the package vllm, whose own names are checked where it is installed (tests/engines)."""

import importlib.util
import json
import sys
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import ModuleType
from types import SimpleNamespace as Made
from typing import Any, Literal

import pytest

NEUTRAL = dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, top_p=1.0, top_k=0, min_p=0.0)
CONTEXT = 4096  # tokens that a prompt and its answer may have together


@dataclass
class Asked:
    """What the engine was given."""

    models: list[dict[str, Any]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    params: list[dict[str, Any]] = field(default_factory=list)
    loras: list[Any] = field(default_factory=list)
    steps_to_failure: int | None = None


class StandIn:
    """Both `LLM` and its `llm_engine`: each step completes one request, the last one first."""

    def __init__(self, asked: Asked, options: dict[str, Any]):
        asked.models.append(options)
        self.asked, self.options, self.waiting = asked, options, []
        self.llm_engine = self
        self.model_config = Made(max_model_len=options.get("max_model_len", CONTEXT))

    def get_default_sampling_params(self) -> Made:
        """Neutral values, except for those that the generation config sets, as in vLLM."""
        path = Path(self.options["generation_config"]) / "generation_config.json"
        config = json.loads(path.read_text()) if path.is_file() else {}
        return Made(**NEUTRAL | {name: config[name] for name in NEUTRAL if name in config})

    def enqueue(
        self, prompts: list[dict[str, list[int]]], params: list[Made], *, lora_request: object, use_tqdm: bool
    ) -> list[str]:
        assert not use_tqdm
        for prompt, one in zip(prompts, params, strict=True):
            ids = prompt["prompt_token_ids"]
            self.asked.prompts.append(ids)
            self.asked.params.append(vars(one).copy())
            self.asked.loras.append(lora_request)
            said = Made(text=f"{len(ids)} {one.temperature}", finish_reason="length", token_ids=[7])
            name = str(len(self.asked.prompts))
            self.waiting.append(Made(request_id=name, prompt_token_ids=ids, outputs=[said], finished=True))
        return [f"{one.request_id}-{one.request_id:>08}" for one in self.waiting]

    def step(self) -> list[Made]:
        if self.asked.steps_to_failure is not None:
            self.asked.steps_to_failure -= 1
            if self.asked.steps_to_failure < 0:
                raise KeyboardInterrupt
        return [self.waiting.pop()]


def install_vllm(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Puts the modules that the engine imports in the place of vLLM's."""
    asked = Asked()
    known = ("model", "max_model_len", "gpu_memory_utilization", "quantization", "dtype")
    arguments = make_dataclass("EngineArgs", [(name, Any, None) for name in known])
    modules = {
        "vllm": dict(
            __version__="0", LLM=lambda **options: StandIn(asked, options), SamplingParams=Made, EngineArgs=arguments
        ),
        "vllm.config.lora": dict(MaxLoRARanks=Literal[1, 8, 16, 32]),
        "vllm.lora.request": dict(LoRARequest=lambda *given: given),
    }
    for name, names in modules.items():
        module = ModuleType(name)
        module.__spec__ = importlib.util.spec_from_loader(name, None, origin="a stand-in")
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    return asked
