"""Control tokens inside contents: text that the tokenizer takes for a token of its own, such as <|im_end|>.

A control token is any added token, special or not, but for those of whitespace. `as-text` encodes contents with such a
token by the same tokenizer without added tokens, apart from the template's text around them; all other rows keep their
tokens.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from mini_trainer.data.chat.examples import Message
from mini_trainer.data.chat.token_bytes import ByteEncoder

KEEP, AS_TEXT, REFUSE = "keep", "as-text", "refuse"
MODES = (KEEP, AS_TEXT, REFUSE)
CONTROL, CONTROL_AS_TEXT = "control token", "control token as text"  # kinds of remarks on rows with one in a text
HIDDEN = 0xF0000  # first of the characters that stand for hidden ones; for private use
MAX_NUM_HIDDEN = 1000  # texts of a row with control tokens
NEVER_WRITTEN = ("role", "type")  # keys of messages that are no contents


class ControlTokens:
    """The control tokens of one tokenizer, and what --control-tokens makes of them."""

    def __init__(self, tokenizer: Any, mode: str = KEEP) -> None:
        self.tokenizer, self.mode = tokenizer, mode
        found = {token.content: token_id for token_id, token in tokenizer.added_tokens_decoder.items()}
        self.ids = {token_id for token, token_id in found.items() if token.strip(" \t\r\n▁")}
        tokens = sorted((token for token, token_id in found.items() if token_id in self.ids), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")

    def find(self, texts: Sequence[Any]) -> str | None:
        """The first control token in the texts; what is no text has none."""
        found = (self.pattern.search(text) for text in texts if isinstance(text, str))
        return next((match[0] for match in found if match is not None), None)

    @cached_property
    def plain(self) -> ByteEncoder:
        """Encodes texts as if the tokenizer had no control tokens."""
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        state = json.loads(self.tokenizer.backend_tokenizer.to_str())
        state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] not in self.ids]
        return ByteEncoder(PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state))))

    def check(self, ids: Sequence[int], text: str) -> None:
        """ValueError if tokens that `plain` made of the text have a control token."""
        if not self.ids.isdisjoint(ids):
            raise ValueError(f"the tokenizer cannot encode {self.find([text])!r} as text (--control-tokens as-text)")

    def hide(self, messages: Sequence[Message]) -> tuple[list[Message], list[str]]:
        """The messages with the letters of each text that has a control token replaced by one character for all of
        them, and these texts, in order."""
        texts: list[str] = []

        def hide(value: Any, key: str = "") -> Any:
            if isinstance(value, dict):
                return {name: hide(item, name) for name, item in value.items()}
            if isinstance(value, list):
                return [hide(item, key) for item in value]
            if key in NEVER_WRITTEN or not isinstance(value, str) or self.find([value]) is None:
                return value
            texts.append(value)
            return re.sub(r"\S", chr(HIDDEN + len(texts) - 1), value)

        hidden = [hide(message) for message in messages]
        if len(texts) > MAX_NUM_HIDDEN:
            raise ValueError(f"has {len(texts):,} texts with control tokens, allowed: {MAX_NUM_HIDDEN:,}")
        return hidden, texts

    def locate(self, rendered: str, hidden: str, texts: Sequence[str]) -> list[tuple[int, int]]:
        """Where each of the texts is in a rendered row, of which `hidden` is the rendering with them hidden; with the
        spaces before it, which many vocabularies join with words.

        Raises ValueError if the template writes one of them otherwise than as it is.
        """
        places, last = [], 0
        for i, text in enumerate(texts):
            start, end = hidden.find(chr(HIDDEN + i)), hidden.rfind(chr(HIDDEN + i)) + 1
            as_it_is = rendered[start:end] == text.strip() and hidden[last:start] == rendered[last:start]
            if start < last or not as_it_is or len(hidden) != len(rendered):
                raise ValueError(
                    f"the chat template does not write a text with the control token {self.find([text])!r} as it is, so"
                    " it cannot be encoded as text: use --control-tokens keep or refuse"
                )
            places.append((len(rendered[:start].rstrip(" ")), end))
            last = end
        if hidden[last:] != rendered[last:]:
            raise ValueError("the chat template writes the row otherwise with other texts in place of control tokens")
        return places
