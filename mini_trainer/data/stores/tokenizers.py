"""Tokenizers: loading, templates and special tokens for base models, fingerprints, and the tokens that end
generation."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mini_trainer.data.stores.disk import hash_json
from mini_trainer.distributed.messages import one_line
from mini_trainer.options.reading import read_document, read_text

# Whitespace runs, digits, case, composed and decomposed accents, scripts, an emoji of several code points, a
# byte-order mark, code: pre-tokenizers and normalizers with the same vocabulary differ on these.
FINGERPRINT_TEXT = (
    " a  b\t\tc\n\nd\r\n    e 0123456789 1,234.50 It's DON'T na\u00efve nai\u0308ve \u00a0\u2003\ufeff"
    " Stra\u00dfe \ufb01 \u00bd \u4f60\u597d\uff0c \u0417\u0434\u0440 \u0645\u0631\u062d \u0928\u092e"
    " \U0001f469\u200d\U0001f467 def f(x):\n\treturn x**2  # ok\n"
)

GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # transformers' own

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


def load_tokenizer(model_dir: str, *, trust_remote_code: bool = False, flag: str = "--model-name-or-path") -> Any:
    """Loads the tokenizer from a directory that `find_model` found."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoTokenizer  # seconds to import, which --help and mistyped flags do not need

    # transformers takes tekken.json where mistral-common is installed; that tokenizer does not say where tokens are.
    has_both = Path(model_dir, "tokenizer.json").is_file() and Path(model_dir, "tekken.json").is_file()
    choice = {"mistral_format": False} if has_both else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=trust_remote_code, **choice)
    except Exception as error:  # reads files of any origin, and the network
        what = "config: config.json" if isinstance(error, StrictDataclassError) else "tokenizer"
        raise ValueError(f"{flag} {model_dir}: no usable {what}: {one_line(error)}") from None
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes one from the config alone
        raise ValueError(
            f"{flag} {model_dir}: has no tokenizer, only special tokens: copy tokenizer.json and tokenizer_config.json"
            " there from the model it was made from"
        )
    if not trust_remote_code:
        tokenizer.init_kwargs.pop("auto_map", None)  # the saved tokenizer would ask for code that is not there
    if tokenizer.chat_template is None:
        tokenizer.chat_template = read_processors_template(Path(model_dir))
    return tokenizer


def read_processors_template(model_dir: Path) -> str | None:
    """The chat template in a file of a multi-modal model's processor, for tokenizers without one."""
    for name in ("chat_template.json", "processor_config.json"):
        try:
            template = read_document(model_dir / name).get("chat_template")
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
        if isinstance(template, str):
            return template
    return None


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """sha256 of every token with its id and of the tokens of a fixed text, with and without those that the tokenizer
    adds to texts. Independent of padding, truncation, chat template and library version."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    probes = [tokenizer(FINGERPRINT_TEXT, add_special_tokens=each)["input_ids"] for each in (False, True)]
    return hash_json([vocabulary, *probes])


def fingerprint_chat_template(tokenizer: Any) -> str | None:
    """sha256 of the chat template (of all named ones, if there are several); None without one."""
    return None if tokenizer.chat_template is None else hash_json(tokenizer.chat_template)


def load_stop_token_ids(model_dir: str) -> list[int]:
    """Token ids that end generation according to the model's generation_config.json; empty if there is no such file."""
    from transformers import GenerationConfig  # seconds to import

    try:
        ids = GenerationConfig.from_pretrained(model_dir).eos_token_id
    except OSError:
        return []
    except Exception as error:  # transformers' own checks of a file of any origin
        where = f"{model_dir}/generation_config.json"
        raise ValueError(f"{where}: not a usable generation config: {' '.join(str(error).split())}") from None
    return [ids] if isinstance(ids, int) else list(ids or [])


@dataclass(frozen=True)
class NamedTemplate:
    """A template that can be chosen by name."""

    text: str
    special_tokens: tuple[str, ...] = ()  # added if missing from the vocabulary
    eos_token: str | None = None  # end-of-turn token, becomes the tokenizer's eos token; None: already the same


NAMED_TEMPLATES = {
    "chatml": NamedTemplate(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "llama3": NamedTemplate(LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
    "zephyr": NamedTemplate(ZEPHYR),
}


def change_tokenizer(tokenizer: Any, *, template: str | None, special_tokens: Sequence[str]) -> dict[str, int]:
    """Sets the template (a name or a file) and adds the tokens; returns the new entries of the vocabulary. A token that
    is in the vocabulary but not special becomes special and keeps its id."""
    known = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    if useless := [token for token in special_tokens if token in known or not token.strip()]:
        raise ValueError(f"--add-special-tokens {' '.join(useless)}: has no effect: the tokenizer has them already")
    named = NAMED_TEMPLATES.get(template, NamedTemplate(""))
    if template is not None and template not in NAMED_TEMPLATES:
        try:
            named = NamedTemplate(read_text(Path(template)))
        except (OSError, UnicodeDecodeError) as error:
            names = ", ".join(NAMED_TEMPLATES)
            raise ValueError(f"--chat-template {template}: allowed: {names}, or a Jinja file ({error})") from None
    wanted = [*dict.fromkeys([*named.special_tokens, *special_tokens])]
    vocabulary = tokenizer.get_vocab()
    tokenizer.add_tokens([token for token in wanted if token not in known], special_tokens=True)
    if template is not None:
        tokenizer.chat_template = named.text
    if named.eos_token is not None:
        tokenizer.eos_token = named.eos_token
    return {token: tokenizer.convert_tokens_to_ids(token) for token in wanted if token not in vocabulary}
