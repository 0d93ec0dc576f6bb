"""A Modelfile for Ollama beside a GGUF file, with the chat template in Ollama's language, Go's text/template.

The template is derived from what Jinja renders of chats, and compared with that of others.
"""

import itertools
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mini_trainer.data.chat.rendering import template_errors
from mini_trainer.data.stores.disk import written_aside
from mini_trainer.data.stores.tokenizers import load_tokenizer
from mini_trainer.model.config import load_config, load_generation_config
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.use.exporters.llama_chats import adds_bos

# Contents of chats: system message, question, answer, question.
PROBES = (
    ("Sys-1x", "User-2x", "Answer-3x", "Second-4x"),
    ("Be brief.\n\nBe kind.", "Hi!\n- one\n- two", 'One: 1 < 2, "two".', "{{ x }} & 'y'?"),
    ("You are a pirate.", "naïve 数 🚀", "def f():\n    return 1", "And now?\n\nPlease."),
)


@dataclass(frozen=True)
class Parts:
    """The text around the contents of a chat."""

    start: str
    system: tuple[str, str] | None  # in place of `start`; None: the template takes no system message
    is_folded: bool  # the system message is part of the first question
    user: tuple[str, str]
    answer: tuple[str, str]
    prompt: str  # begins the answer

    def render(self, system: str | None, *turns: str) -> str:
        """Ollama's rendering of a system message, if any, and alternating questions and answers."""
        texts = [turn.join(self.answer if i % 2 else self.user) for i, turn in enumerate(turns)]
        if system is None:
            return "".join([self.start, *texts, self.prompt])
        first = texts[0].removeprefix(self.user[0]) if self.is_folded else texts[0]
        return "".join([system.join(self.system), first, *texts[1:], self.prompt])

    def write(self) -> str:
        """The template in Go's language."""
        start, (before, after), answer = self.start, self.user, "{{ .Content }}".join(self.answer)
        if self.system is not None:
            system = "{{ .System }}".join(self.system)
            start = "".join(["{{ if .System }}", system, "{{ else }}", start, "{{ end }}"])
        if self.is_folded:
            before = "".join(["{{ if not (and $.System (eq $i 1)) }}", before, "{{ end }}"])
        head = '{{ range $i, $_ := .Messages }}{{ if eq .Role "user" }}'
        user = "".join([before, "{{ .Content }}", after, '{{ else if eq .Role "assistant" }}'])
        return "".join([start, head, user, answer, "{{ end }}{{ end }}", self.prompt])


def write_modelfile(model_dir: Path, gguf: Path) -> list[str]:
    """Writes the file Modelfile beside a GGUF file; returns notes for the user."""
    name, lines, notes = str(model_dir), [f"FROM ./{gguf.name}"], []
    tokenizer = load_tokenizer(name)
    template = derive_template(tokenizer)
    if template is not None:
        lines.append(f'TEMPLATE """{template}"""')
        notes.append("the Modelfile's template is for chats without tools and reasoning")
    elif tokenizer.chat_template is not None:
        notes.append(
            "the chat template has no exact form in Ollama's language, so the Modelfile has none: Ollama chooses its"
            " own if it knows a similar one; see ollama show --template"
        )
    stops = load_generation_config(name, load_config(name, TextFamily())).eos_token_id
    ids = stops if isinstance(stops, list) else [stops]
    lines += [f'PARAMETER stop "{tokenizer.convert_ids_to_tokens(token)}"' for token in ids if token is not None]
    with written_aside(gguf.with_name("Modelfile")) as (aside,):
        aside.write_text("\n".join(lines) + "\n")
    return notes


def derive_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The chat template for Ollama; None if there is none, or none that is exactly the same."""
    if "strftime_now" in str(tokenizer.chat_template):
        return None  # it writes the date
    try:
        parts = find_parts(tokenizer)
        for system, *turns in PROBES:
            for given, chat in itertools.product([system] * (parts.system is not None) + [None], (turns[:1], turns)):
                if parts.render(given, *chat) != render(tokenizer, given, *chat):
                    return None
    except ValueError:
        return None
    texts = [parts.start, *(parts.system or ()), *parts.user, *parts.answer, parts.prompt]
    return parts.write() if all(map(is_plain, texts)) else None


def is_plain(text: str) -> bool:
    """Whether a text means itself in a template and a Modelfile, which drops characters that are not printable."""
    return "{{" not in text + "{" and '"""' not in text and text.translate(dict.fromkeys(b"\n\t")).isprintable()


def find_parts(tokenizer: PreTrainedTokenizerBase) -> Parts:
    """The parts found in one chat each; ValueError unless every content occurs exactly once."""
    system, question, answer, second = PROBES[0]
    _, user_end = render(tokenizer, None, question, begins=False).split(question)
    _, answer_end = render(tokenizer, None, question, answer, begins=False).split(answer)
    start, text = render(tokenizer, None, question, answer, second).split(question)
    before_answer, text = text.split(answer)
    user_begin, prompt = text.removeprefix(answer_end).split(second)
    answer_begin, prompt = before_answer.removeprefix(user_end), prompt.removeprefix(user_end)
    start = start[: start.rindex(user_begin)]
    user, around_answer = (user_begin, user_end), (answer_begin, answer_end)
    try:
        before, text = render(tokenizer, system, question).split(system)
        after, _ = text.split(question)
    except ValueError:  # it is refused, left out or written twice
        return Parts(start, None, False, user, around_answer, prompt)
    is_folded = not after.endswith(user_begin)
    around_system = (before, after if is_folded else after.removesuffix(user_begin))
    return Parts(start, around_system, is_folded, user, around_answer, prompt)


def render(tokenizer: PreTrainedTokenizerBase, system: str | None, *turns: str, begins: bool = True) -> str:
    """The text of a chat, without the BOS token that Ollama puts before it."""
    chat = [] if system is None else [dict(role="system", content=system)]
    chat += [dict(role="assistant" if i % 2 else "user", content=turn) for i, turn in enumerate(turns)]
    with template_errors():
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=begins)
    return text.removeprefix(tokenizer.bos_token) if adds_bos(tokenizer) else text
