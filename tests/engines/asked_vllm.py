"""Runs in vLLM's environment: reads a JSON request on stdin, answers chats with vLLM, writes JSON to its file.

{"output": FILE, "model": {arguments of vllm.LLM}, "chats": [...], "num_tokens": N, "adapters": [null, DIRECTORY]}
"""

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    asked = json.load(sys.stdin)
    llm = LLM(**asked["model"])
    params = SamplingParams(temperature=0, max_tokens=asked["num_tokens"], logprobs=1)
    answers = []
    for number, adapter in enumerate(asked["adapters"], start=1):
        lora = None if adapter is None else LoRARequest(f"adapter {number}", number, adapter)
        outputs = llm.chat(asked["chats"], params, lora_request=lora, use_tqdm=False)
        answers.append([describe(output) for output in outputs])
    with open(asked["output"], "w") as file:
        json.dump(answers, file)


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
