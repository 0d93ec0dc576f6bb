"""The engine that runs vLLM in this process, which batches all prompts itself.

Answers depend on their batch to within the rounding of vLLM's kernels; each answer has its own seed, as in the others.
Tested with vLLM 0.28 and 0.32 (tests/engines).
"""

import dataclasses
import multiprocessing
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args

from mini_trainer.data.rows.prompts import Prompt, encode_prompt, find_refusal
from mini_trainer.model.methods.adapter_files import check_settings
from mini_trainer.options import parse_named_values
from mini_trainer.options.command_line import suggest
from mini_trainer.options.problems.finding import require
from mini_trainer.options.tools import EngineOptions, SamplingOptions
from mini_trainer.use.inference.engine import Answer, Key, Request, make_seed, refuse
from mini_trainer.use.inference.loading import FoundModel, choose_dtype

# Sampling parameters that a model's generation config can set in vLLM, besides temperature and length.
MODELS_OWN = ("repetition_penalty", "presence_penalty", "frequency_penalty", "top_p", "top_k", "min_p")
# Arguments of vLLM's engine that our options set, and these options.
OURS = {
    **dict.fromkeys(("model", "tokenizer", "generation_config", "hf_config_path"), "--model"),
    **dict.fromkeys(("revision", "tokenizer_revision", "code_revision"), "--model-revision"),
    **dict.fromkeys(("enable_lora", "max_lora_rank"), "--adapter"),
    **{name: f"--{name.replace('_', '-')}" for name in ("dtype", "seed", "trust_remote_code")},
}
# Arguments that change speed and memory alone, so that a killed run can resume with others.
OF_SPEED = {
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend",
    "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "cpu_offload_gb", "block_size",
    "max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching", "enable_chunked_prefill", "enforce_eager",
    "load_format", "disable_log_stats",
}  # fmt: skip


class VLLMEngine:
    """A model in vLLM (see `use.inference.engine.Engine`)."""

    def __init__(self, found: FoundModel, name: str, engine: EngineOptions, sampling: SamplingOptions, *, device: Any):
        require("vllm", flag="--engine vllm")
        self.found, self.sampling = found, sampling
        self.dtype = str(choose_dtype(found.config, engine.dtype)).removeprefix("torch.")
        self.args = read_engine_args(engine.engine_args)
        lora = {} if found.adapter is None else {"enable_lora": True, "max_lora_rank": choose_rank(found)}
        files = dict(tokenizer=str(found.tokenizer_dir), generation_config=str(found.generation_dir))
        own = dict(dtype=self.dtype, trust_remote_code=found.trust_remote_code, seed=sampling.seed)
        self.llm = start(found.name, dict(model=found.directory, **files, **own, **lora, **self.args))
        self.engine = self.llm.llm_engine
        self.watcher = watch_children()

    def describe(self) -> dict[str, Any]:
        from vllm import __version__

        chosen = {name: value for name, value in self.args.items() if name not in OF_SPEED}
        return {
            "engine": "vllm",
            **self.found.identify(),
            "dtype": self.dtype,
            **({"engine_args": chosen} if chosen else {}),
            "versions": {"vllm": __version__},
        }

    def answer(
        self, requests: Sequence[Request], *, done: Collection[Key] = (), rank: int = 0, world_size: int = 1
    ) -> Iterator[tuple[Request, Answer]]:
        """Submits all requests at once, which is fastest, and yields each answer once it is complete."""
        fitting, prompts, params = [], [], []
        for request in requests:
            if request.key in done:
                continue
            ids = encode_prompt(request.prompt, self.found.tokenizer)
            if (reason := find_refusal(len(ids), self.engine.model_config.max_model_len)) is not None:
                yield request, refuse(reason)
                continue
            fitting.append(request)
            prompts.append({"prompt_token_ids": ids})
            params.append(self.make_params(make_seed(self.sampling.seed, *request.key)))
        names = self.llm.enqueue(prompts, params, lora_request=self.make_lora(), use_tqdm=False)
        # It names an output by the number alone that begins a request's name.
        waiting = {name.partition("-")[0]: request for name, request in zip(names, fitting, strict=True)}
        while waiting:
            for output in self.engine.step():
                said = output.outputs[0]
                reason, num_prompt_tokens = said.finish_reason or "stop", len(output.prompt_token_ids)
                answer = Answer(said.text, reason, num_prompt_tokens, len(said.token_ids))
                yield waiting.pop(output.request_id), answer

    def stream(self, prompt: Prompt) -> Iterator[str]:
        """Yields the whole answer in one piece: vLLM streams only from its server, for which use --engine openai."""
        ((_, answer),) = self.answer([Request(0, 0, prompt)])
        if answer.reason is not None:
            raise ValueError(answer.reason)
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


def read_engine_args(given: Sequence[str]) -> dict[str, Any]:
    """vLLM's engine arguments from NAME=VALUE; ValueError for names that this vLLM does not have, or that are ours."""
    if not (args := parse_named_values(given)):
        return {}
    from vllm import EngineArgs, __version__

    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in args:
        if name in OURS:
            raise ValueError(f"--engine-args {name}: is set by {OURS[name]}")
        if name not in known:
            reason = f"vLLM {__version__} has no such engine argument{suggest(name, known)}"
            raise ValueError(f"--engine-args {name}: {reason}")
    return args


def start(name: str, args: Mapping[str, Any]) -> Any:
    """Loads the model; ValueError with vLLM's reason if it does not take an argument or cannot run the model."""
    from vllm import LLM

    try:
        return LLM(**args)
    except Exception as error:  # of many libraries: this is the border to them
        from pydantic import ValidationError

        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, ValidationError):  # lists its inputs
            reason = "; ".join(": ".join((*map(str, one["loc"]), one["msg"])) for one in error.errors())
        raise ValueError(f"--engine vllm: vLLM does not run {name}: {reason}") from None


# Waits for the end of stdin, then kills the processes that it was given.
WATCHER = """
import os, signal, sys
processes = [os.pidfd_open(int(pid)) for pid in sys.argv[1:]]
sys.stdin.read()
for process in processes:
    try:
        signal.pidfd_send_signal(process, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""


def watch_children() -> subprocess.Popen | None:
    """Has vLLM's engine end with this process, also after a SIGKILL: it would keep the GPU's memory."""
    if not (pids := [str(child.pid) for child in multiprocessing.active_children()]):
        return None
    return subprocess.Popen(
        [sys.executable, "-c", WATCHER, *pids],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def choose_rank(found: FoundModel) -> int:
    """vLLM's smallest rank that holds the adapter's, needed in advance. ValueError for settings it does not support."""
    from peft import PeftConfig
    from vllm.config.lora import MaxLoRARanks

    check_settings(found.adapter, flag="--engine vllm: --adapter", runner="vllm")
    rank, allowed = PeftConfig.from_pretrained(str(found.adapter)).r, sorted(get_args(MaxLoRARanks))
    if rank > allowed[-1]:
        raise ValueError(
            f"--engine vllm: --adapter {found.adapter}: has rank {rank}, and vLLM takes up to {allowed[-1]}: merge it"
            " with mini-trainer merge-adapter, or use --engine hf"
        )
    return next(one for one in allowed if one >= rank)
