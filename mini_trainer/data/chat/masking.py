"""Converts messages and a chat template to token ids and a loss mask.

Rendered text is never searched for role markers, because a user can write them too. A conversation's *outline*
(data/chat/conversation.py) is rendered with placeholders for all texts, once for all conversations with the same
outline. This shows the template's own text around each text (data/chat/skeletons.py), where turns begin and end
(data/chat/turns.py), and that the assistant's texts, and nothing else, are in its turns (data/chat/placing.py). A real
conversation is rendered by the tokenizer, unaltered, and must equal, character by character, its texts put into that
skeleton. So the bounds of each turn are known, never guessed; a conversation that differs is refused. The price is one
rendering per row. If a template itself marks generated text ({% generation %}), its marks bound the turns, minus the
text of the generation prompt.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mini_trainer.data.chat.conversation import Chat, Example
from mini_trainer.data.chat.labelling import ChatLabeller
from mini_trainer.data.chat.pictures import ImageExpander
from mini_trainer.data.chat.rendering import catch_error
from mini_trainer.data.chat.template_masker import MODEL_TEMPLATE, TemplateMasker, TurnRules
from mini_trainer.data.chat.token_spans import TextMasker, TokenizedChat
from mini_trainer.data.chat.tokens import KEEP, BorderEncoder, ByteEncoder, ControlTokens

MAX_NUM_OTHERS = 16  # sets of arguments that rows have for themselves
THINKING_PREFIXES = {"as-rendered": False, "train-as-prompted": True}  # whether the generation prompt's words win


@dataclass(frozen=True)
class Contents:
    """The treatment of contents' control tokens (data/chat/tokens.py), and the template's arguments, all of
    which it has to read."""

    control_tokens: str = KEEP
    template_args: Mapping[str, Any] = field(default_factory=dict)


AS_THEY_ARE = Contents()


class ChatMasker:
    """Renders, tokenizes and masks rows with one tokenizer.

    `stop_token_ids`: tokens that end generation in addition to the tokenizer's eos token (see `load_stop_token_ids`).
    `allow_missing_stop_token`: train assistant turns without a stop token, up to the end of their content.
    `append_stop_token`: append one after a conversation's last turn if the template writes none there.
    `expander`: puts images into conversations.
    `thinking_prefix`: "train-as-prompted" puts the generation prompt's text before the last answer (see
    data/chat/prompting.py).
    `strict_reasoning`: refuse answers whose reasoning the template leaves out.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop_token_ids: Sequence[int] = (),
        allow_missing_stop_token: bool = False,
        append_stop_token: bool = False,
        expander: ImageExpander | None = None,
        thinking_prefix: str = "as-rendered",
        strict_reasoning: bool = False,
        contents: Contents = AS_THEY_ARE,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):  # mistral-common's has no such attribute
            raise ValueError(
                f"{type(tokenizer).__name__} does not report which characters a token covers, so masks cannot be"
                " placed with certainty: use a model that has a fast tokenizer (tokenizer.json)"
            )
        self.tokenizer, self.template_args = tokenizer, contents.template_args
        borders = BorderEncoder(tokenizer, ByteEncoder(tokenizer), ControlTokens(tokenizer, contents.control_tokens))
        self.texts, self.labeller = TextMasker(tokenizer, borders), ChatLabeller(borders, expander)
        self.rules = TurnRules(
            stop_token_ids,
            allows_missing_stop=allow_missing_stop_token,
            appends_stop=append_stop_token,
            as_prompted=THINKING_PREFIXES[thinking_prefix],
            strict_reasoning=strict_reasoning,
        )
        self.chats = TemplateMasker(tokenizer, self.labeller, self.rules, self.template_args)
        self.others: dict[str, TemplateMasker | ValueError] = {}  # by the arguments that rows have for themselves

    def mask(self, rows: Sequence[Example], *, divides: bool = False) -> list[TokenizedChat | ValueError]:
        """Each row's token ids and labels, or the error that makes it unusable. `divides`: a chat's prompt, up to the
        first passage that is trained, has the tokens that it has alone.

        Raises ValueError if no row is usable: no chat template, or no end-of-text token.
        """
        groups: dict[Any, list[int]] = {}
        for i, row in enumerate(rows):
            groups.setdefault((type(row), repr(getattr(row, "template_args", None))), []).append(i)
        results: dict[int, TokenizedChat | ValueError] = {}
        for (kind, _), indices in groups.items():
            own = [rows[i] for i in indices]
            masked = self.mask_chats(own, divides=divides) if kind is Chat else self.texts.mask(own)
            results.update(zip(indices, masked, strict=True))
        return [results[i] for i in range(len(rows))]

    def mask_chats(self, chats: Sequence[Chat], *, divides: bool) -> list[TokenizedChat | ValueError]:
        """`mask` for chats with the same arguments of the template."""
        args = chats[0].template_args
        if not args:
            return self.chats.mask(chats, divides=divides)
        key = json.dumps(args, sort_keys=True)
        if key not in self.others:
            self.others[key] = catch_error(self.make_other, args)
        other = self.others[key]
        return [other] * len(chats) if isinstance(other, ValueError) else other.mask(chats, divides=divides)

    def make_other(self, template_args: Mapping[str, Any]) -> TemplateMasker:
        """The masker of rows with arguments of their own; ValueError if the template cannot be used with them."""
        if len(self.others) >= MAX_NUM_OTHERS:
            raise ValueError(f"chat_template_kwargs: more than {MAX_NUM_OTHERS} different ones")
        other = TemplateMasker(self.tokenizer, self.labeller, self.rules, {**self.template_args, **template_args})
        other.check()
        return other

    def check_template(self, name: str = MODEL_TEMPLATE) -> list[str]:
        """`TemplateMasker.check` for rows without arguments of their own."""
        return self.chats.check(name)
