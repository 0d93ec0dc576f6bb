"""What programs that run an export answer to the prompts that its run recorded in check.json."""

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mini_trainer.data.columns.base import TOKENS
from mini_trainer.data.rows.prompts import Prompt
from mini_trainer.data.stores.model_files import CONFIG
from mini_trainer.data.stores.tokenizers import fingerprint_chat_template
from mini_trainer.distributed.devices import DTYPES
from mini_trainer.model.config import load_generation_config
from mini_trainer.model.methods import adapter_files
from mini_trainer.options.problems.finding import require
from mini_trainer.options.reading import read_object
from mini_trainer.options.tools import EngineOptions, SamplingOptions
from mini_trainer.run.export_check import NUM_TOKENS, NUM_TOP, Said, ask, compare, read_check
from mini_trainer.use.inference.engine import Request
from mini_trainer.use.inference.loading import FoundModel, find_answering_model, load_answering_model

GGUF_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
GREEDY = SamplingOptions(temperature=0.0, max_new_tokens=NUM_TOKENS)


def find_differences(export: Path, reader: str) -> list[str]:
    """What `reader` answers otherwise than the trained model, and what files of the export say otherwise."""
    found = find_answering_model(str(export), flag="verify")
    recorded = read_check(Path(found.name))  # of a run, its best or latest export
    if reader != "transformers" and not recorded["generates"]:
        raise ValueError(f"--against {reader}: the export is a classifier, which is compared with transformers alone")
    if reader.startswith(("http://", "https://")):
        said = ask_server(found, recorded, reader)
    elif reader == "llama.cpp" or reader.endswith(".gguf"):
        said = ask_llama_cpp(found, recorded, reader)
    elif reader in ("transformers", "vllm"):
        said = (ask_transformers if reader == "transformers" else ask_vllm)(found, recorded)
    else:
        raise ValueError(f"--against {reader}: allowed: transformers, vllm, llama.cpp, FILE.gguf, http://HOST:PORT/v1")
    return [*compare_files(found, recorded), *compare(recorded, said)]


def compare_files(found: FoundModel, recorded: dict[str, Any]) -> list[str]:
    """Differences of stop tokens, padding, tokenizer and chat template."""
    own = {"stops": list_own_stops(found) if recorded["generates"] else [], "pad": found.tokenizer.pad_token_id}
    names = {"stops": "the stop tokens", "pad": "the padding token"}
    problems = [f"{names[key]}: {own[key]}, not {recorded[key]}" for key in own if own[key] != recorded[key]]
    if found.adapter is None and recorded["pad"] is not None:
        config = read_object(Path(found.directory, CONFIG))
        pads = {part.get("pad_token_id") for part in (config, config.get("text_config") or {}) if part}
        if recorded["pad"] not in pads:
            problems.append(f"the padding token in {CONFIG}: {sorted(map(str, pads))}, not {recorded['pad']}")
    if fingerprint_chat_template(found.tokenizer) != recorded["chat_template"]:
        problems.append("another chat template")
    for prompt in recorded["prompts"]:
        ids = found.tokenizer(prompt["text"])["input_ids"][: len(prompt["ids"])]
        if ids != prompt["ids"]:
            problems.append(f"the tokenizer makes {ids} of {prompt['text']!r}, not {prompt['ids']}")
    return problems


def list_own_stops(found: FoundModel) -> list[int]:
    """The stop tokens in the generation config of the export's own files."""
    stops = load_generation_config(str(found.generation_dir), found.config).eos_token_id
    return [stops] if isinstance(stops, int) else list(stops or ())


def ask_transformers(found: FoundModel, recorded: dict[str, Any]) -> list[Said]:
    dtype = DTYPES[recorded["dtype"]]
    if recorded["generates"]:
        model = load_answering_model(found, dtype=dtype, device=torch.device("cpu"))
        return ask(model, recorded, stops=list_own_stops(found))
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    kind = AutoModelForTokenClassification if found.classifies == TOKENS else AutoModelForSequenceClassification
    labels = {} if found.adapter is None else {"num_labels": len(recorded["prompts"][0]["values"])}
    model = kind.from_pretrained(found.directory, dtype=dtype, **labels)
    model = model if found.adapter is None else adapter_files.add_adapter(model, found.adapter)
    return ask(model.eval(), recorded, stops=())


def ask_vllm(found: FoundModel, recorded: dict[str, Any]) -> list[Said]:
    from mini_trainer.use.inference.vllm_engine import VLLMEngine

    args = ("enforce_eager=true", "max_num_seqs=4", "max_model_len=512")
    options = EngineOptions(dtype=recorded["dtype"], engine_args=args)
    engine = VLLMEngine(found, found.name, options, GREEDY, device=None)
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": prompt["ids"]} for prompt in recorded["prompts"]]
    own = engine.llm.get_default_sampling_params()
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=NUM_TOP, stop_token_ids=own.stop_token_ids)
    outputs = engine.llm.generate(prompts, params, lora_request=engine.make_lora(), use_tqdm=False)
    said = []
    for prompt, output in zip(recorded["prompts"], (output.outputs[0] for output in outputs), strict=True):
        values = {str(token): top.logprob for token, top in output.logprobs[0].items()}
        best = list(prompt["values"])[:2]  # its own best ones hold these, but perhaps not all that are recorded
        said.append(Said({name: values.get(name, -math.inf) for name in best}, list(output.token_ids)))
    return said


def ask_llama_cpp(found: FoundModel, recorded: dict[str, Any], reader: str) -> list[Said]:
    """A GGUF file in llama.cpp, which makes the tokens of the prompts' text; without one, makes it for that."""
    require("llama_cpp", flag=f"--against {reader}")
    if reader != "llama.cpp":
        return ask_gguf(Path(reader), recorded)
    from mini_trainer.use.exporters.gguf_file import write_gguf

    if found.adapter is not None:
        raise ValueError("--against llama.cpp: the export is an adapter: merge it first (mini-trainer merge-adapter)")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.gguf")
        write_gguf(Path(found.directory), path, GGUF_TYPES[recorded["dtype"]])
        return ask_gguf(path, recorded)


def ask_gguf(path: Path, recorded: dict[str, Any]) -> list[Said]:
    import llama_cpp

    llama = llama_cpp.Llama(str(path), n_ctx=512, logits_all=True, verbose=False, swa_full=True)
    vocabulary, said = llama_cpp.llama_model_get_vocab(llama.model), []
    for prompt in recorded["prompts"]:
        ids = llama.tokenize(prompt["text"].encode(), add_bos=True, special=False)
        llama.reset()
        llama.eval(ids)
        answer, first = [], None
        while len(answer) < NUM_TOKENS:
            values = torch.from_numpy(np.array(llama.scores[llama.n_tokens - 1])).log_softmax(-1)
            first = values if first is None else first
            answer.append(int(values.argmax()))
            if llama_cpp.llama_vocab_is_eog(vocabulary, answer[-1]):
                break
            llama.eval(answer[-1:])
        said.append(Said({name: first[int(name)].item() for name in prompt["values"]}, answer, prompt=ids))
    return said


def ask_server(found: FoundModel, recorded: dict[str, Any], url: str) -> list[Said]:
    """A server of OpenAI's API, which only returns text."""
    from mini_trainer.use.inference.openai_engine import OpenAIEngine

    engine = OpenAIEngine(None, found.name, EngineOptions(base_url=url), GREEDY)
    if not (models := engine.call(engine.client.models.list).data):
        raise ValueError(f"--against {url}: the server lists no model")
    engine.model = models[0].id
    prompts = [Prompt(row={}, text=prompt["text"]) for prompt in recorded["prompts"]]
    requests = [Request(i, 0, prompt) for i, prompt in enumerate(prompts)]
    answers = {request.index: answer.text for request, answer in engine.answer(requests)}
    return [Said(None, None, text=answers[i]) for i in range(len(requests))]
