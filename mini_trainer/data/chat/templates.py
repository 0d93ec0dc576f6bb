"""A base model's additions for chats: a template and special tokens."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # transformers' own
ALWAYS_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now")


@dataclass(frozen=True)
class NamedTemplate:
    """A template that can be chosen by name."""

    text: str
    special_tokens: tuple[str, ...] = ()  # added if missing from the vocabulary
    eos_token: str | None = None  # end-of-turn token, becomes the tokenizer's eos token; None: already the same


CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    "{{ message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
ZEPHYR = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
NAMED_TEMPLATES = {
    "chatml": NamedTemplate(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "llama3": NamedTemplate(LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
    "zephyr": NamedTemplate(ZEPHYR),
}


def find_template(name_or_file: str) -> NamedTemplate:
    """The template with that name or in that file."""
    if name_or_file in NAMED_TEMPLATES:
        return NAMED_TEMPLATES[name_or_file]
    try:
        return NamedTemplate(Path(name_or_file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(NAMED_TEMPLATES)
        raise ValueError(f"--chat-template {name_or_file}: allowed: {names}, or a Jinja file ({error})") from None


def change_tokenizer(tokenizer: Any, *, template: str | None, special_tokens: Sequence[str]) -> dict[str, int]:
    """Sets the template (a name or a file) and adds the tokens; returns the new entries of the vocabulary.

    A token that is in the vocabulary but not special becomes special and keeps its id.
    """
    known = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    useless = [token for token in special_tokens if token in known or not token.strip()]
    if useless:
        raise ValueError(f"--add-special-tokens {' '.join(useless)}: has no effect: the tokenizer has them already")
    named = NamedTemplate("") if template is None else find_template(template)
    wanted = [*dict.fromkeys([*named.special_tokens, *special_tokens])]
    vocabulary = tokenizer.get_vocab()
    tokenizer.add_tokens([token for token in wanted if token not in known], special_tokens=True)
    if template is not None:
        tokenizer.chat_template = named.text
    if named.eos_token is not None:
        tokenizer.eos_token = named.eos_token
    return {token: tokenizer.convert_tokens_to_ids(token) for token in wanted if token not in vocabulary}


def check_template_args(tokenizer: Any, template_args: Mapping[str, Any]) -> None:
    """ValueError for an argument that the chat template does not read."""
    if not template_args:
        return
    from jinja2 import Environment, TemplateError, meta

    templates = tokenizer.chat_template
    texts = list(templates.values()) if isinstance(templates, dict) else [templates or ""]
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        parsed = [environment.parse(GENERATION_TAG.sub("", text)) for text in texts]
    except TemplateError:
        return  # which is named when the template is tried
    read = set().union(*map(meta.find_undeclared_variables, parsed)) - {*ALWAYS_GIVEN, *tokenizer.special_tokens_map}
    unread = [name for name in template_args if name not in read]
    if unread:
        others = ", ".join(sorted(read)) or "none"
        raise ValueError(f"the chat template does not read the argument {unread[0]!r}; it reads: {others}")
