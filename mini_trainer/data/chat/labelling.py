"""Token ids and labels of located chats."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from mini_trainer.data.chat.chat_renderer import ChatRenderer
from mini_trainer.data.chat.conversation import PreparedChat
from mini_trainer.data.chat.pictures import ImageExpander
from mini_trainer.data.chat.rendering import catch_error
from mini_trainer.data.chat.token_spans import (
    DIVIDED,
    Located,
    Remark,
    TokenizedChat,
    encode_each,
    label_encoding,
    mark_control,
    text_of,
)
from mini_trainer.data.chat.tokens import AS_TEXT, BorderEncoder, spans_border


@dataclass(frozen=True)
class ChatLabeller:
    """Encodes and labels chats with one tokenizer. `expander`: puts images into conversations."""

    borders: BorderEncoder
    expander: ImageExpander | None

    def label_each(
        self, located: Sequence[Located | ValueError], chats: Sequence[PreparedChat | ValueError], *, divides: bool
    ) -> list[TokenizedChat | ValueError]:
        """Token ids of chats as the tokenizer makes them, except for divided tokens (see `label`), and labels by the
        position of each turn. `divides`: see `ChatMasker.mask`."""
        located = [catch_error(self.put_images, *pair) for pair in zip(located, chats, strict=True)]
        # The template writes the special tokens.
        encodings = encode_each(self.borders.encoder, [text_of(found) for found in located], add_special_tokens=False)
        prompts = self.encode_prompts(located) if divides else [()] * len(located)
        return [catch_error(self.label, *each) for each in zip(encodings, located, prompts, strict=True)]

    def put_images(self, located: Located, chat: PreparedChat) -> Located:
        """The row with its image placeholders expanded by the model's processor."""
        return located if self.expander is None else self.expander.expand(located, chat.images)

    def encode_prompts(self, located: Sequence[Located | ValueError]) -> list[Sequence[int]]:
        """The tokens of each row's text before its first passage; rows that share it, such as pairs, share them."""
        texts = [
            "" if isinstance(found, ValueError) or not found.passages else found.text[: found.passages[0].start]
            for found in located
        ]
        unique = list(dict.fromkeys(texts))
        encoded = dict(zip(unique, self.borders.encoder.encode(unique, add_special_tokens=False), strict=True))
        return [encoded[text].ids for text in texts]

    def label(self, encoding: Any, located: Located, prompt_ids: Sequence[int]) -> TokenizedChat:
        """A chat's tokens and their labels. Passages that begin within a token are encoded apart from the text before
        them, and the first one if that text alone has other tokens: `prompt_ids`, if they are known."""
        starts = [passage.start for passage in located.passages if passage.start > 0]
        joined = [start for start in starts if spans_border(encoding, start)]
        if joined:
            located = replace(located, remarks=(*located.remarks, Remark(DIVIDED)))
        is_prompted = encoding.ids[: len(prompt_ids)] == list(prompt_ids)
        divided = joined if is_prompted else sorted({*joined, *starts[:1]})
        if (joined or located.plain) and located.pictures is not None:
            raise ValueError("a row with images is tokenized whole, but its answers or control tokens need it in parts")
        if (divided or located.plain) and located.pictures is None:
            encoding = self.borders.divide(located.text, divided, plain=located.plain)
        return label_encoding(encoding, located)

    def mark_control(self, located: Located, chat: PreparedChat, renderer: ChatRenderer) -> Located:
        """A chat, with the places of texts that are to be encoded without control tokens."""
        control = self.borders.control
        token = control.find(chat.values)
        if token is None:
            return located
        places = []
        if control.mode == AS_TEXT:
            messages, texts = control.hide(chat.messages)
            hidden = renderer.render_one(messages, tools=chat.tools)
            places = control.locate(located.text, hidden.text, texts)
        return mark_control(located, token, places, mode=control.mode)
