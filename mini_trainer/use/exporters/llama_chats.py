"""Differences between chats as llama.cpp's server writes them and as the chat template does in training.

llama.cpp runs the template with a Jinja of its own, and gives it more than transformers does: `enable_thinking`, the
date, the system message as part of the first question where the template leaves it out (common/chat.cpp).
"""

import time

from transformers import PreTrainedTokenizerBase

from mini_trainer.data.chat.rendering import template_errors

SYSTEM, USER = "Sys-1x", "User-2x"
DATED = "with today's date, and not the one that this template has"


def list_given() -> dict[str, tuple[object, str]]:
    """A variable that llama.cpp passes to templates, and the note on prompts that it changes."""
    thinking = "with thinking turned on, which this template leaves off: start it with --reasoning off"
    return {
        "enable_thinking": (True, thinking),
        "date_string": (time.strftime("%d %b %Y"), DATED),
        "datetime": (time.strftime("%b %d %Y"), DATED),
    }


def check_chats(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Notes for the user about differences; none for a template that refuses a single question."""
    try:
        plain = render(tokenizer)
        notes = [f"llama.cpp writes chats {how}" for key, (value, how) in list_given().items()
                 if render(tokenizer, **{key: value}) != plain]  # fmt: skip
    except ValueError:
        return []
    if adds_bos(tokenizer) and not plain.startswith(tokenizer.bos_token):
        notes.append(f"llama.cpp puts {tokenizer.bos_token!r} before a chat, which this template does not")
    try:
        leaves_out = SYSTEM not in render(tokenizer, {"role": "system", "content": SYSTEM})
    except ValueError:
        leaves_out = False
    if leaves_out:
        notes.append("llama.cpp puts a system message before the first question; this template leaves it out")
    return list(dict.fromkeys(notes))


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer begins a text with its BOS token."""
    return tokenizer.bos_token is not None and tokenizer("a").input_ids[0] == tokenizer.bos_token_id


def render(tokenizer: PreTrainedTokenizerBase, *before: dict[str, str], **given: object) -> str:
    """The prompt of one question, after other messages."""
    chat = [*before, {"role": "user", "content": USER}]
    with template_errors():
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **given)
