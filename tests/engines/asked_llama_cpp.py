"""Asks llama.cpp, with the Python that has llama_cpp: a JSON of requests on stdin, a JSON of answers on stdout.

    /venv/bin/python asked_llama_cpp.py <<< '{"model": "m.gguf", "requests": [{"text": "Hi", "max_tokens": 8}]}'

A request has `text`, in which special tokens are recognised, or `ids`; `max_tokens` for a greedy answer; `score`, ids
after the prompt whose log-probabilities are wanted; `logits`, a file for those of all positions of the prompt and
`score`. Options beside `requests`: `cache` (f32 or f16), `flash_attention`, `context`.
"""

import json
import sys

import llama_cpp
import numpy as np

CACHES = {"f32": llama_cpp.GGML_TYPE_F32, "f16": llama_cpp.GGML_TYPE_F16}


def load(path: str, *, cache: str = "f32", flash_attention: bool = False, context: int = 512) -> llama_cpp.Llama:
    return llama_cpp.Llama(
        path, n_ctx=context, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False, swa_full=True,
        type_k=CACHES[cache], type_v=CACHES[cache], flash_attn=flash_attention,
    )  # fmt: skip


def normalize(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities in float64."""
    logits = logits.astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def compute_logits(llama: llama_cpp.Llama, ids: list[int]) -> np.ndarray:
    """The logits after each of the ids, (tokens, vocab)."""
    llama.reset()
    llama.eval(ids)
    return np.array(llama.scores[: len(ids)])


def list_stops(llama: llama_cpp.Llama) -> list[int]:
    """The tokens at which llama.cpp ends an answer."""
    vocab = llama_cpp.llama_model_get_vocab(llama.model)
    return [i for i in range(llama.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocab, i)]


def answer(llama: llama_cpp.Llama, request: dict[str, object], stops: list[int]) -> dict[str, object]:
    prompt = (
        request["ids"] if "ids" in request else llama.tokenize(request["text"].encode(), add_bos=False, special=True)
    )
    replied = {"prompt": prompt}
    if scored := request.get("score", []):
        logits = compute_logits(llama, [*prompt, *scored])
        if "logits" in request:
            np.save(request["logits"], logits)
        logprobs = normalize(logits[len(prompt) - 1 : -1])
        replied["scores"] = logprobs[np.arange(len(scored)), scored].tolist()
    if "max_tokens" in request:
        greedy, logprobs, stop = [], [], "length"
        logits = compute_logits(llama, prompt)[-1]
        while len(greedy) < request["max_tokens"]:
            greedy.append(int(logits.argmax()))
            logprobs.append(float(normalize(logits)[greedy[-1]]))
            if greedy[-1] in stops:
                stop = "token"
                break
            llama.eval(greedy[-1:])
            logits = np.array(llama.scores[llama.n_tokens - 1])
        replied |= {"greedy": greedy, "logprobs": logprobs, "stop": stop}
    return replied


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    requests, path = asked.pop("requests"), asked.pop("model")
    model = load(path, **asked)
    ends = list_stops(model)
    replies = [answer(model, request, ends) for request in requests]
    json.dump({"version": llama_cpp.__version__, "stops": ends, "answers": replies}, sys.stdout)
