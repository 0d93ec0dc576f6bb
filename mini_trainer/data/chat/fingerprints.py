"""Fingerprints of tokenizers and chat templates, and the tokens that end generation."""

import hashlib
import json
from typing import Any

# Whitespace runs, digits, case, composed and decomposed accents, scripts, an emoji of several code points, a
# byte-order mark, code: pre-tokenizers and normalizers with the same vocabulary differ on these.
FINGERPRINT_TEXT = (
    " a  b\t\tc\n\nd\r\n    e 0123456789 1,234.50 It's DON'T na\u00efve nai\u0308ve \u00a0\u2003\ufeff"
    " Stra\u00dfe \ufb01 \u00bd \u4f60\u597d\uff0c \u0417\u0434\u0440 \u0645\u0631\u062d \u0928\u092e"
    " \U0001f469\u200d\U0001f467 def f(x):\n\treturn x**2  # ok\n"
)


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """sha256 of every token with its id and of the tokens of a fixed text, with and without those that the tokenizer
    adds to texts.

    Independent of padding, truncation, chat template and library version.
    """
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    probes = [tokenizer(FINGERPRINT_TEXT, add_special_tokens=each)["input_ids"] for each in (False, True)]
    return hashlib.sha256(json.dumps([vocabulary, *probes]).encode()).hexdigest()


def fingerprint_chat_template(tokenizer: Any) -> str | None:
    """sha256 of the chat template (of all named ones, if there are several); None without one."""
    if tokenizer.chat_template is None:
        return None
    return hashlib.sha256(json.dumps(tokenizer.chat_template, sort_keys=True).encode()).hexdigest()


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
