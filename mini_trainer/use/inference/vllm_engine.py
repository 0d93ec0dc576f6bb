"""The engine that runs vLLM in this process, which batches all prompts itself.

Answers depend on their batch to within the rounding of vLLM's kernels; each answer has its own seed, as in the others.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from mini_trainer.model.methods.adapter_settings import check_settings
from mini_trainer.options.problems.packages import require
from mini_trainer.options.tools import EngineOptions, SamplingOptions
from mini_trainer.use.inference.engine import Answer, Key, Request, make_seed
from mini_trainer.use.inference.loading import FoundModel, choose_dtype
from mini_trainer.use.inference.prompts import Prompt, encode_prompt

# Sampling parameters that a model's generation config can set in vLLM, besides temperature and length.
MODELS_OWN = ("repetition_penalty", "presence_penalty", "frequency_penalty", "top_p", "top_k", "min_p")


class VLLMEngine:
    """A model in vLLM (see `use.inference.engine.Engine`)."""

    @classmethod
    def open(
        cls, found: FoundModel, name: str, engine: EngineOptions, sampling: SamplingOptions, *, device: Any
    ) -> "VLLMEngine":
        return cls(found, engine, sampling)

    def __init__(self, found: FoundModel, engine: EngineOptions, sampling: SamplingOptions):
        require("vllm", flag="--engine vllm")
        from vllm import LLM

        self.found, self.sampling = found, sampling
        self.dtype = str(choose_dtype(found.config, engine.dtype)).removeprefix("torch.")
        lora = {} if found.adapter is None else {"enable_lora": True, "max_lora_rank": read_rank(found)}
        self.llm = LLM(
            model=found.directory,
            tokenizer=str(found.tokenizer_dir),
            generation_config=str(found.generation_dir),
            dtype=self.dtype,
            trust_remote_code=found.trust_remote_code,
            seed=sampling.seed,
            **lora,
        )

    def describe(self) -> dict[str, Any]:
        from vllm import __version__

        return {"engine": "vllm", **self.found.identify(), "dtype": self.dtype, "versions": {"vllm": __version__}}

    def answer(
        self, requests: Sequence[Request], *, done: Collection[Key] = (), rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Request, Answer]]:
        """Submits all requests at once, which is fastest; a run killed before they finish starts over."""
        requests = [request for request in requests if request.key not in done]
        prompts = [{"prompt_token_ids": encode_prompt(request.prompt, self.found.tokenizer)} for request in requests]
        params = [self.make_params(make_seed(self.sampling.seed, *request.key)) for request in requests]
        outputs = self.llm.generate(prompts, params, lora_request=self.make_lora())
        for request, output in zip(requests, outputs, strict=True):
            said = output.outputs[0]
            yield (
                request,
                Answer(said.text, said.finish_reason or "stop", len(output.prompt_token_ids), len(said.token_ids)),
            )

    def stream(self, prompt: Prompt) -> Iterator[str]:
        """Yields the whole answer in one piece: vLLM streams only from its server, for which use --engine openai."""
        ((_, answer),) = self.answer([Request(0, 0, prompt)])
        yield answer.text

    def make_params(self, seed: int) -> Any:
        """The model's own penalties and sampling settings, as vLLM reads them, except for those that are given."""
        from vllm import SamplingParams

        sampling, own = self.sampling, self.llm.get_default_sampling_params()
        given = {name: value for name in ("top_p", "top_k") if (value := getattr(sampling, name)) is not None}
        return SamplingParams(
            **{name: getattr(own, name) for name in MODELS_OWN} | given,
            temperature=sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            seed=seed if sampling.temperature > 0 else None,
        )

    def make_lora(self) -> Any:
        if self.found.adapter is None:
            return None
        from vllm.lora.request import LoRARequest

        return LoRARequest("adapter", 1, str(self.found.adapter))


def read_rank(found: FoundModel) -> int:
    """The adapter's rank, which vLLM needs in advance. ValueError for settings that vLLM does not support."""
    from peft import PeftConfig

    check_settings(found.adapter, flag="--engine vllm: --adapter", reader="vllm")
    return PeftConfig.from_pretrained(str(found.adapter)).r
