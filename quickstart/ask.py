"""Asks an exported model held-out questions and counts the right answers.

python quickstart/ask.py --model runs/quickstart/run/hf_format/samples_N --questions runs/quickstart/held_out.jsonl
"""

import json
from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True, kw_only=True)
class AskOptions:
    """Ask an exported model questions and count the right answers."""

    model: str
    """Exported model directory."""
    questions: str
    """Messages JSONL: a user's question and the expected answer of the assistant."""
    num_shown: int = 6
    """Answers to print."""
    max_new_tokens: int = 32
    """Longest answer, in tokens."""


def ask(options: AskOptions) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model).to(device)
    chats = [json.loads(line)["messages"] for line in Path(options.questions).read_text().splitlines()]
    prompts = tokenizer.apply_chat_template(
        [chat[:-1] for chat in chats], add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    ).to(device)
    outputs = model.generate(**prompts, max_new_tokens=options.max_new_tokens, do_sample=False)
    answers = tokenizer.batch_decode(outputs[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True)
    expected = [chat[-1]["content"] for chat in chats]
    right = [answer == wanted for answer, wanted in zip(answers, expected, strict=True)]
    step = max(1, len(chats) // options.num_shown)
    for i in range(0, step * min(options.num_shown, len(chats)), step):
        verdict = "right" if right[i] else "wrong"
        print(f"  question: {chats[i][-2]['content']}\n  answer:   {answers[i]}  [{verdict}]\n")
    share = sum(right) / len(chats)
    print(f"{sum(right)} of {len(chats)} held-out questions answered right, word for word ({share:.0%})")


if __name__ == "__main__":
    ask(tyro.cli(AskOptions))
