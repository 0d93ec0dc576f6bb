"""Compares process_data.py with its bare cost and with `datasets.map`: rows per second and CPU time per row.

    python benchmarks/tokenization.py                                  # generated chats of GSM8K's lengths
    python benchmarks/tokenization.py --messages-file gsm8k.jsonl      # a file of one's own, ten times
    python benchmarks/tokenization.py --model-name-or-path M           # with M's tokenizer and template
    python benchmarks/tokenization.py --parts traces                   # only the traces (see below)

bare:          render with the chat template, then `tokenizer(list_of_texts)`, 1,000 rows at a time; nothing is read,
               masked or written
process_data:  all that the script does: read, check, render, tokenize, mask, write Arrow, describe
map ...:       `datasets.map(num_proc)` over JSON lines that renders, tokenizes and masks row by row: by the number of
               tokens of the prompt, which is the usual way and tokenizes the prompt twice, or by offsets, the leanest

All work with the same number of processes, load the tokenizer themselves, and take turns; the medians count.
CPU time is of all processes of a way, so it is less disturbed by what else the machine does.

Then traces of agents, of which each has an outline of its own, so that it has to be learned: with Qwen's templates
(out of the package trl), one process, row by row, CPU time. bare: rendering and tokenizing, each once.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import paths  # noqa: F401

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism

import datasets
from make_tiny_model import read_contents, train_tokenizer
from transformers import AutoTokenizer

from mini_trainer.data.chat.conversation import Chat
from mini_trainer.data.chat.masking import ChatMasker
from mini_trainer.data.columns.base import IGNORED
from mini_trainer.options import group_options
from mini_trainer.options.tools import ProcessDataOptions
from mini_trainer.process_data import process_data

CHUNK_ROWS = 1000
NUM_GENERATED = 7473  # as many as GSM8K has for training, and about as long
SENTENCE = (
    "the of and to a how many much each day week has have buys sells costs apples eggs dollars hours then total left"
    " twice half more than gives friends books pages miles minutes first second she he they altogether 3 12 25"
)

ARGUMENTS = {  # of each tool: its first argument is always there, the others sometimes
    "read_file": {"path": str, "start": int, "end": int},
    "run": {"command": str, "timeout": int, "in_shell": bool},
    "search": {"query": str, "limit": int, "exact": bool, "folders": list},
    "edit": {"path": str, "old": str, "new": str, "everywhere": bool},
}
NUM_TRACES = {40: 100, 200: 20}  # rounds of calls: rows


def generate_messages(path: Path) -> Path:
    """A messages file whose questions and answers are about as long as GSM8K's."""
    draw, words = random.Random(0), SENTENCE.split()

    def write_text(median: float) -> str:
        num_words = max(8, round(draw.lognormvariate(0, 0.4) * median))
        return " ".join(draw.choices(words, k=num_words)).capitalize() + "."

    with open(path, "w", encoding="utf-8") as file:
        for _ in range(NUM_GENERATED):
            answer = "\n".join(write_text(16) for _ in range(draw.randint(2, 5))) + f"\n#### {draw.randint(1, 999)}"
            messages = [{"role": "user", "content": write_text(45)}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def render_and_tokenize(model: str, conversations: list[list[dict[str, str]]], part: slice) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    conversations = conversations[part]
    for start in range(0, len(conversations), CHUNK_ROWS):
        texts = tokenizer.apply_chat_template(conversations[start : start + CHUNK_ROWS], tokenize=False)
        tokenizer(texts, add_special_tokens=False)


def run_bare(model: str, source: Path, work_dir: Path, num_proc: int, conversations: list[Any]) -> None:
    bounds = [len(conversations) * i // num_proc for i in range(num_proc + 1)]
    parts = [slice(start, end) for start, end in pairwise(bounds)]
    run_all([(render_and_tokenize, (model, conversations, part)) for part in parts])


def run_process_data(model: str, source: Path, work_dir: Path, num_proc: int, conversations: list[Any]) -> None:
    options = group_options(
        ProcessDataOptions,
        input_file=(str(source),),
        output_file=str(work_dir / "out.arrow"),
        model_name_or_path=model,
        num_proc=num_proc,
        preview=0,
    )
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        process_data(options)


def render(tokenizer: Any, messages: list[dict[str, str]], *, generation_prompt: bool = False) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)


def mask_by_prompts(messages: list[dict[str, str]], tokenizer: Any) -> dict[str, Any]:
    """Counts the tokens up to each answer's beginning and end, which tokenizes the text before it again."""
    input_ids = tokenizer(render(tokenizer, messages), add_special_tokens=False)["input_ids"]
    labels = [IGNORED] * len(input_ids)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = render(tokenizer, messages[:i], generation_prompt=True)
            start = len(tokenizer(prompt, add_special_tokens=False)["input_ids"])
            end = len(input_ids)
            if i < len(messages) - 1:
                end = len(tokenizer(render(tokenizer, messages[: i + 1]), add_special_tokens=False)["input_ids"])
            labels[start:end] = input_ids[start:end]
    return as_row(input_ids, labels)


def mask_by_offsets(messages: list[dict[str, str]], tokenizer: Any) -> dict[str, Any]:
    """Counts characters up to each answer's beginning and end, which renders the text before it again."""
    encoding = tokenizer(render(tokenizer, messages), add_special_tokens=False, return_offsets_mapping=True)
    input_ids, labels = encoding["input_ids"], [IGNORED] * len(encoding["input_ids"])
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(render(tokenizer, messages[:i], generation_prompt=True))
            end = len(render(tokenizer, messages[: i + 1]))
            for at, (first, _) in enumerate(encoding["offset_mapping"]):
                if start <= first < end:
                    labels[at] = input_ids[at]
    return as_row(input_ids, labels)


def as_row(input_ids: list[int], labels: list[int]) -> dict[str, Any]:
    num_targets = sum(label != IGNORED for label in labels[1:])
    return {"input_ids": input_ids, "labels": labels, "len": len(input_ids), "num_loss_counted_tokens": num_targets}


def run_datasets_map(
    model: str, source: Path, work_dir: Path, num_proc: int, conversations: list[Any], *, mask: Callable[..., Any]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_json(str(source), cache_dir=str(work_dir / "cache"))
    rows.map(
        mask,
        input_columns="messages",
        fn_kwargs={"tokenizer": tokenizer},
        num_proc=num_proc,
        remove_columns=rows.column_names,
    )


WAYS = {
    "bare": run_bare,
    "process_data": run_process_data,
    "map by prompts": partial(run_datasets_map, mask=mask_by_prompts),
    "map by offsets": partial(run_datasets_map, mask=mask_by_offsets),
}


def run_all(calls: list[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
    """Each call in a forked process of its own, at once."""
    processes = [multiprocessing.get_context("fork").Process(target=call, args=args) for call, args in calls]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert all(process.exitcode == 0 for process in processes), [process.exitcode for process in processes]


def measure(way: str, model: str, source: Path, num_proc: int, conversations: list[Any]) -> tuple[float, float]:
    """Wall-clock and CPU seconds of a run, with all its processes; imports are done before."""
    with tempfile.TemporaryDirectory() as work_dir:
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        run_all([(WAYS[way], (model, source, Path(work_dir), num_proc, conversations))])
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages-file", type=Path)
    parser.add_argument("--model-name-or-path")
    parser.add_argument("--num-repeats", type=int, default=10, help="how often the file is in the input")
    parser.add_argument("--num-runs", type=int, default=3, help="of each way; the medians are shown")
    parser.add_argument("--num-proc", type=int, default=os.cpu_count())
    parser.add_argument("--parts", nargs="+", choices=("chats", "traces"), default=("chats", "traces"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        once = arguments.messages_file or generate_messages(Path(directory, "generated.jsonl"))
        source = Path(directory, "in.jsonl")
        source.write_bytes(once.read_bytes() * arguments.num_repeats)
        model = arguments.model_name_or_path
        if model is None:
            model = str(Path(directory, "model"))
            train_tokenizer(read_contents(once), vocab_size=8000).save_pretrained(model)
        if "chats" in arguments.parts:
            compare_ways(model, source, num_proc=arguments.num_proc, num_runs=arguments.num_runs)
        if "traces" in arguments.parts:
            compare_traces(model)


def compare_ways(model: str, source: Path, *, num_proc: int, num_runs: int) -> None:
    conversations = [json.loads(line)["messages"] for line in source.read_bytes().splitlines()]
    print(f"{len(conversations):,} rows, {num_proc} processes")
    runs: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(num_runs):
        for way, measured in runs.items():
            measured.append(measure(way, model, source, num_proc, conversations))
    report(runs, num_rows=len(conversations))


def generate_trace(num_rounds: int, seed: int) -> list[dict[str, Any]]:
    """Rounds of one or two calls and their results, some with reasoning or a text."""
    draw, words = random.Random(seed), SENTENCE.split()

    def write(num_words: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(1, num_words)))

    def choose(kind: type) -> Any:
        values = {str: write(8), int: draw.randint(0, 999), bool: draw.random() < 0.5}
        return [write(2) for _ in range(draw.randint(1, 3))] if kind is list else values[kind]

    def call(id: str) -> dict[str, Any]:
        name, kinds = draw.choice(list(ARGUMENTS.items()))
        arguments = {key: choose(kind) for k, (key, kind) in enumerate(kinds.items()) if k == 0 or draw.random() < 0.7}
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    messages: list[dict[str, Any]] = [{"role": "user", "content": write(60)}]
    for number in range(num_rounds):
        calls = [call(f"call{number:04}{k}") for k in range(1 if draw.random() < 0.9 else 2)]
        thought = {"reasoning_content": write(30)} if draw.random() < 0.5 else {}
        content = write(20) if draw.random() < 0.5 else ""
        messages.append({"role": "assistant", "content": content, **thought, "tool_calls": calls})
        messages += [{"role": "tool", "content": write(60), "tool_call_id": each["id"]} for each in calls]
    return [*messages, {"role": "assistant", "content": write(30)}]


def describe_tools() -> list[dict[str, Any]]:
    names = {str: "string", int: "integer", bool: "boolean", list: "array"}
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"Does {name}.",
                "parameters": {"type": "object", "properties": {key: {"type": names[kinds[key]]} for key in kinds}},
            },
        }
        for name, kinds in ARGUMENTS.items()
    ]


def compare_traces(model: str) -> None:
    """CPU time of masking traces whose outlines have to be learned, and of rendering and tokenizing them."""
    trl, tools = find_spec("trl"), describe_tools()
    if trl is None or trl.origin is None:
        print("traces: the templates are in the package trl, which is not installed")
        return
    print(
        f"{'traces, each with a new outline':<34}{'rows/s':>8}{'ms/row':>8}{'render':>8}{'tokenize':>10}{'x bare':>8}"
    )
    for name in ("qwen2_5", "qwen3"):
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = Path(trl.origin).with_name("chat_templates").joinpath(f"{name}.jinja").read_text()
        masker = ChatMasker(tokenizer)
        masker.check_template()
        for num_rounds, num_rows in NUM_TRACES.items():
            traces = [generate_trace(num_rounds, 1000 * num_rounds + seed) for seed in range(num_rows)]
            seconds = [measure_trace(masker, messages, tools) for messages in traces]
            render, tokenize, mask = (1e3 * sum(each) / num_rows for each in zip(*seconds, strict=True))
            title = f"{name}, {num_rounds} rounds, {num_rows} rows"
            speed = f"{title:<34}{1e3 / mask:>8,.1f}{mask:>8,.1f}"
            print(f"{speed}{render:>8,.1f}{tokenize:>10,.1f}{mask / (render + tokenize):>8.2f}")


def measure_trace(masker: ChatMasker, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[float]:
    """CPU seconds to render it, to tokenize that, and to mask it, which does both."""
    clocks = [time.process_time()]
    text = masker.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    clocks.append(time.process_time())
    masker.tokenizer(text, add_special_tokens=False)
    clocks.append(time.process_time())
    (masked,) = masker.mask([Chat(messages, tools=tools)])
    clocks.append(time.process_time())
    assert not isinstance(masked, ValueError), masked
    return [end - start for start, end in pairwise(clocks)]


def report(runs: dict[str, list[tuple[float, float]]], *, num_rows: int) -> None:
    medians = {way: list(map(statistics.median, zip(*measured, strict=True))) for way, measured in runs.items()}
    bare_wall, bare_cpu = medians["bare"]
    print(f"{'':<14}{'rows/s':>10}{'x bare':>8}{'CPU us/row':>12}{'x bare':>8}")
    for way, (wall, cpu) in medians.items():
        speed = f"{way:<14}{num_rows / wall:>10,.0f}{wall / bare_wall:>8.2f}"
        print(f"{speed}{1e6 * cpu / num_rows:>12,.0f}{cpu / bare_cpu:>8.2f}")
    our_wall, our_cpu = medians["process_data"]
    for way, (wall, cpu) in medians.items():
        if way.startswith("map"):
            print(f"process_data is {wall / our_wall:.2f} times as fast as {way}, {cpu / our_cpu:.2f} by CPU time")


if __name__ == "__main__":
    main()
