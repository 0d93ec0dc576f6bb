"""Rows without a chat template: completions, whose prompt is encoded apart as at inference, and documents."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from mini_trainer.data.chat.borders import BorderEncoder
from mini_trainer.data.chat.control_tokens import AS_TEXT, CONTROL, CONTROL_AS_TEXT, REFUSE
from mini_trainer.data.chat.examples import Completion, Document
from mini_trainer.data.chat.rendering import catch_error
from mini_trainer.data.chat.token_bytes import ByteEncoder
from mini_trainer.data.chat.token_spans import Located, Passage, Remark, TokenizedChat, label_encoding

Row = Completion | Document


class TextMasker:
    """Tokenizes and masks texts with one tokenizer."""

    def __init__(self, tokenizer: Any, borders: BorderEncoder) -> None:
        self.tokenizer, self.borders = tokenizer, borders

    def mask(self, rows: Sequence[Row]) -> list[TokenizedChat | ValueError]:
        """Each row's token ids and labels, or the error that makes it unusable; rows of one kind, ended by one eos
        token each. ValueError if the tokenizer has none."""
        if self.tokenizer.eos_token_id is None:
            raise ValueError("the tokenizer has no eos_token, which has to end every document and completion")
        located = [catch_error(self.locate, row) for row in rows]
        encode = self.encode_completions if isinstance(rows[0], Completion) else self.encode_documents
        label = partial(label_encoding, eos_token_id=self.tokenizer.eos_token_id)
        return [
            catch_error(label, encoding, found) for encoding, found in zip(encode(rows, located), located, strict=True)
        ]

    def locate(self, row: Row) -> Located:
        """The row's text and its trained passage. ValueError for half a character, and a row that is to be refused."""
        if isinstance(row, Document):
            located = Located(check_unicode(row.text), [Passage(0, len(row.text), "document")])
        else:
            text = check_unicode(row.prompt + row.completion)
            located = Located(text, [Passage(len(row.prompt), len(text), "completion")])
        control = self.borders.control
        token = control.find([located.text])
        if token is None:
            return located
        return mark_control(located, token, [(0, len(located.text))], mode=control.mode)

    def encode_documents(self, rows: Sequence[Document], located: Sequence[Located | ValueError]) -> list[Any]:
        encodings = encode_each(self.borders.encoder, [text_of(found) for found in located], add_special_tokens=True)

        def choose(encoding: Any, found: Located) -> Any:
            return self.borders.encode(found.text, is_plain=True, adds_special=True) if found.plain else encoding

        return [catch_error(choose, *each) for each in zip(encodings, located, strict=True)]

    def encode_completions(self, rows: Sequence[Completion], located: Sequence[Located | ValueError]) -> list[Any]:
        pairs = zip(rows, located, strict=True)
        usable = [found if isinstance(found, ValueError) else row for row, found in pairs]
        prompts, answers = (
            encode_each(
                self.borders.encoder,
                [catch_error(attrgetter(name), row) for row in usable],
                add_special_tokens=name == "prompt",
            )
            for name in ("prompt", "completion")
        )
        return [catch_error(self.join, *each) for each in zip(usable, located, prompts, answers, strict=True)]

    def join(self, row: Completion, located: Located, prompt: Any, answer: Any) -> Any:
        """The completion's encoding, from those of its prompt and its answer."""
        is_plain = bool(located.plain)
        if not row.prompt:
            return self.borders.encode(row.completion, is_plain=is_plain, adds_special=True)
        if is_plain:
            prompt = self.borders.encode(row.prompt, is_plain=True, adds_special=True)
            answer = self.borders.encode(row.completion, is_plain=True)
        texts = (row.prompt, row.completion)
        return self.borders.join(texts, (prompt, answer), is_plain=(is_plain, is_plain), adds_special=True)


def mark_control(located: Located, token: str, places: Sequence[tuple[int, int]], *, mode: str) -> Located:
    """A row whose texts have a control token, at the `places`. ValueError if such rows are to be refused."""
    if mode == REFUSE:
        raise ValueError(f"has the control token {token!r} in its texts (--control-tokens refuse)")
    remark = Remark(CONTROL_AS_TEXT if mode == AS_TEXT else CONTROL, rendered=token)
    return replace(located, plain=tuple(places) if mode == AS_TEXT else (), remarks=(*located.remarks, remark))


def encode_each(encoder: ByteEncoder, texts: Sequence[str | ValueError], *, add_special_tokens: bool) -> list[Any]:
    """Encodes the texts in one call; errors among them keep their places."""
    usable = [text for text in texts if isinstance(text, str)]
    encodings = iter(encoder.encode(usable, add_special_tokens=add_special_tokens))
    return [next(encodings) if isinstance(text, str) else text for text in texts]


def text_of(found: Located | ValueError) -> str | ValueError:
    return found if isinstance(found, ValueError) else found.text


def check_unicode(text: str) -> str:
    """`text`; ValueError if it cannot be encoded as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"contains half a character: the lone surrogate {text[error.start]!r}") from None
    return text
