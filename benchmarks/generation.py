"""Answers by generate.py's hf engine against transformers' `generate`, one prompt after the other: same, and how fast?

    python benchmarks/generation.py --model runs/quickstart/run/hf_format/samples_7584 \
        --prompts runs/quickstart/held_out.jsonl

Greedy, on this machine's device, in the model's own dtype. Both are warm, and take turns; the fastest of each counts.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent.parent))

from inference.engine import Request
from inference.hf_engine import HFEngine
from inference.models import find_answering_model
from inference.prompts import encode_prompt, read_prompts
from options import EngineOptions, SamplingOptions
from ranks.terminal import shows_progress


def answer_one_by_one(engine: HFEngine, requests: list[Request], max_new_tokens: int) -> list[str]:
    """What one would write without us."""
    answers = []
    for request in requests:
        ids = torch.tensor([encode_prompt(request.prompt, engine.tokenizer)], device=engine.device)
        outputs = engine.model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens
        )
        answers.append(engine.tokenizer.decode(outputs[0, ids.shape[1] :], skip_special_tokens=True))
    return answers


def answer_batched(engine: HFEngine, requests: list[Request]) -> list[str]:
    answers = {request.index: answer.text for request, answer in engine.answer(requests)}
    return [answers[request.index] for request in requests]


def measure(function: Callable[[], list[str]]) -> tuple[list[str], float]:
    start = time.perf_counter()
    answers = function()
    return answers, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if not shows_progress():
        transformers.utils.logging.disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    engine = HFEngine(
        find_answering_model(options.model),
        EngineOptions(batch_size=options.batch_size, dtype=options.dtype),
        SamplingOptions(max_new_tokens=options.max_new_tokens),
        device=device,
    )
    requests = [Request(i, 0, prompt) for i, prompt in enumerate(read_prompts([options.prompts], None))]
    ways = {
        "one by one": lambda: answer_one_by_one(engine, requests, options.max_new_tokens),
        "batched": lambda: answer_batched(engine, requests),
    }
    answers, seconds = {}, dict.fromkeys(ways, float("inf"))
    for way in ways.values():  # warm
        way()
    for _ in range(options.repeats):
        for name, way in ways.items():
            answers[name], taken = measure(way)
            seconds[name] = min(seconds[name], taken)
    same = sum(a == b for a, b in zip(*answers.values(), strict=True))
    for name, value in seconds.items():
        print(f"{name:12} {value:7.2f} s  {len(requests) / value:7.1f} answers a second")
    print(f"same answers: {same} of {len(requests)}; {seconds['one by one'] / seconds['batched']:.1f} times as fast")


if __name__ == "__main__":
    main()
