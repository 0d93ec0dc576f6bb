"""Asks an exported model that sees held-out questions on pictures, and the same with the pictures exchanged.

    python examples/quickstart/ask_pictures.py --model runs/pictures/run/hf_format/samples_N \
        --questions runs/pictures/held_out.jsonl

By transformers alone: its processor, its `generate`. What is answered right with other pictures was guessed.
"""

import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from PIL import Image

sys.path.append(str(Path(__file__).resolve().parents[2]))
from mini_trainer.distributed.ending import exit_with_message


@dataclass(frozen=True, kw_only=True)
class AskPicturesOptions:
    """Ask an exported model questions on pictures and count the right answers."""

    model: str
    """Exported model directory."""
    questions: str
    """Messages JSONL: a user's question with one image, whose path is from this file, and the expected answer."""
    batch_size: int = 50
    """Questions that are answered at once."""
    max_new_tokens: int = 8
    """Longest answer, in tokens."""
    seed: int = 0
    """Seed of the exchange of pictures."""


def check_paths(options: AskPicturesOptions) -> None:
    """Ends with a message before anything is loaded: transformers would look for what is not here on the hub."""
    if not (Path(options.model) / "config.json").is_file():
        exit_with_message(f"--model {options.model}: there is no config.json in it; give an exported model's directory")
    if not Path(options.questions).is_file():
        exit_with_message(f"--questions {options.questions}: there is no such file; give messages as JSONL")


def answer(model, processor, questions: Sequence[dict], images: Sequence[Image.Image], *, max_new_tokens: int):
    """What the model says to each question on each image."""
    texts = [processor.apply_chat_template([question], add_generation_prompt=True) for question in questions]
    inputs = processor(text=texts, images=[[image] for image in images], padding=True, return_tensors="pt")
    outputs = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return processor.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def exchange(images: Sequence[Image.Image], *, seed: int) -> list[Image.Image]:
    """The same images, each at the place of another one."""
    order = list(range(len(images)))
    random.Random(seed).shuffle(order)
    following = dict(zip(order, [*order[1:], order[0]], strict=True))
    return [images[following[i]] for i in range(len(images))]


def ask_pictures(options: AskPicturesOptions) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(options.model)
    processor.tokenizer.padding_side = "left"
    model = AutoModelForImageTextToText.from_pretrained(options.model).eval()
    path = Path(options.questions)
    chats = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    questions, expected = [chat[0] for chat in chats], [chat[1]["content"] for chat in chats]
    images = [Image.open(path.parent / question["content"][0]["image"]) for question in questions]
    sorts = [" ".join(question["content"][1]["text"].split()[:2]) for question in questions]
    for name, shown in (("its own picture", images), ("another one's", exchange(images, seed=options.seed))):
        answers = [
            text
            for start in range(0, len(chats), options.batch_size)
            for text in answer(
                model,
                processor,
                questions[start : start + options.batch_size],
                shown[start : start + options.batch_size],
                max_new_tokens=options.max_new_tokens,
            )
        ]
        right = [given == wanted for given, wanted in zip(answers, expected, strict=True)]
        print(f"each question with {name}: {sum(right)} of {len(chats)} answered right ({sum(right) / len(chats):.0%})")
    print(f"the commonest answer to each sort of question: {guess_best(sorts, expected):.0%}")


def guess_best(sorts: Sequence[str], expected: Sequence[str]) -> float:
    """The share that is right if every question gets the commonest answer to those that begin with its two words."""
    counts = {sort: Counter() for sort in sorts}
    for sort, wanted in zip(sorts, expected, strict=True):
        counts[sort][wanted] += 1
    return sum(max(found.values()) for found in counts.values()) / len(expected)


if __name__ == "__main__":
    options = tyro.cli(AskPicturesOptions)
    check_paths(options)
    ask_pictures(options)
