"""Runs in vLLM's environment: reads a JSON request on stdin, asks vLLM, and writes what it says to a file, in JSON.

In: {"output": FILE, "model": arguments of vllm.LLM}, with either
"chats", "num_tokens" and "adapters" (each a directory or null): greedy answers to all chats by each adapter; or
"texts": the scores of a classifier or a reward model.
"""

import json
import sys


def main() -> None:
    from vllm import LLM

    asked = json.load(sys.stdin)
    llm = LLM(**asked["model"])
    if "texts" in asked:
        said = [output.outputs.probs for output in llm.classify(asked["texts"], use_tqdm=False)]
    else:
        said = [answer(llm, asked, number, adapter) for number, adapter in enumerate(asked["adapters"], start=1)]
    with open(asked["output"], "w") as file:
        json.dump(said, file)


def answer(llm, asked: dict, number: int, adapter: str | None) -> list[dict]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    params = SamplingParams(temperature=0, max_tokens=asked["num_tokens"], logprobs=1)
    lora = None if adapter is None else LoRARequest(f"adapter {number}", number, adapter)
    return [describe(output) for output in llm.chat(asked["chats"], params, lora_request=lora, use_tqdm=False)]


def describe(output) -> dict:
    said = output.outputs[0]
    logprobs = [top[token].logprob for token, top in zip(said.token_ids, said.logprobs, strict=True)]
    return {
        "prompt": list(output.prompt_token_ids),
        "ids": list(said.token_ids),
        "logprobs": logprobs,
        "stopped": said.finish_reason == "stop",
    }


if __name__ == "__main__":  # vLLM's engine starts this file again
    main()
