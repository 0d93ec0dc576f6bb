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
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from mini_trainer.data.chat.chat_renderer import ChatRenderer, Rendered
from mini_trainer.data.chat.conversation import ASSISTANT, Chat, Example, PreparedChat, prepare_chat
from mini_trainer.data.chat.pictures import ImageExpander
from mini_trainer.data.chat.prompting import PromptMatcher, find_unread_keys, refuse_untrained_reasoning
from mini_trainer.data.chat.rendering import catch_error, check_length
from mini_trainer.data.chat.skeletons import Span
from mini_trainer.data.chat.template_check import StopAppender, TemplateChecker, describe_open_turns
from mini_trainer.data.chat.token_spans import (
    DIVIDED,
    Located,
    Passage,
    Remark,
    TextMasker,
    TokenizedChat,
    check_unicode,
    encode_each,
    label_encoding,
    mark_control,
    text_of,
)
from mini_trainer.data.chat.tokens import AS_TEXT, KEEP, BorderEncoder, ByteEncoder, ControlTokens, spans_border
from mini_trainer.data.chat.turn_finder import TurnFinder
from mini_trainer.data.chat.turns import find_stops

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
    """Renders, tokenizes and masks with one tokenizer. Invariant: its skeletons were learned from its template.

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
        self.tokenizer, self.expander = tokenizer, expander
        self.contents, self.given_stop_ids = contents, stop_token_ids
        self.renderer = ChatRenderer(tokenizer, contents.template_args)
        self.others: dict[str, ChatMasker | ValueError] = {}  # by the arguments that rows have for themselves
        self.allows_missing_stop, self.appends_stop = allow_missing_stop_token, append_stop_token
        stops = replace(find_stops(tokenizer, stop_token_ids), may_be_missing=allow_missing_stop_token)
        self.finder = TurnFinder(self.renderer, stops)
        self.encoder = ByteEncoder(tokenizer)
        self.control = ControlTokens(tokenizer, contents.control_tokens)
        self.borders = BorderEncoder(tokenizer, self.encoder, self.control)
        self.texts = TextMasker(tokenizer, self.borders)
        self.strict_reasoning = strict_reasoning
        template = json.dumps(tokenizer.chat_template, ensure_ascii=False)
        self.matcher = PromptMatcher(self.encode_text, template, as_prompted=THINKING_PREFIXES[thinking_prefix])
        self.open_turns: set[str] = set()  # turns without a stop token ("inner", "last"); set by `check_template`

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
            masked = self.mask_alike(own, divides=divides) if kind is Chat else self.texts.mask(own)
            results.update(zip(indices, masked, strict=True))
        return [results[i] for i in range(len(rows))]

    def mask_alike(self, chats: Sequence[Chat], *, divides: bool) -> list[TokenizedChat | ValueError]:
        """`mask` for chats with the same arguments of the template."""
        args = chats[0].template_args
        if not args:
            return self.mask_chats(chats, appends_stop=self.appends_stop, divides=divides)
        key = json.dumps(args, sort_keys=True)
        if key not in self.others:
            self.others[key] = catch_error(self.make_other, args)
        other = self.others[key]
        if isinstance(other, ValueError):
            return [other] * len(chats)
        return other.mask_chats(chats, appends_stop=self.appends_stop, divides=divides)

    def make_other(self, template_args: Mapping[str, Any]) -> "ChatMasker":
        """The masker of rows with arguments of their own; ValueError if the template cannot be used with them."""
        if len(self.others) >= MAX_NUM_OTHERS:
            raise ValueError(f"chat_template_kwargs: more than {MAX_NUM_OTHERS} different ones")
        other = ChatMasker(
            self.tokenizer,
            stop_token_ids=self.given_stop_ids,
            allow_missing_stop_token=self.allows_missing_stop,
            append_stop_token=self.appends_stop,
            expander=self.expander,
            thinking_prefix="train-as-prompted" if self.matcher.as_prompted else "as-rendered",
            strict_reasoning=self.strict_reasoning,
            contents=replace(self.contents, template_args={**self.contents.template_args, **template_args}),
        )
        other.check_template()
        return other

    def mark_chat(self, located: Located, chat: PreparedChat) -> Located:
        """A chat, with the places of texts that are to be encoded without control tokens."""
        token = self.control.find(chat.values)
        if token is None:
            return located
        places = []
        if self.control.mode == AS_TEXT:
            messages, texts = self.control.hide(chat.messages)
            hidden = self.renderer.render_one(messages, tools=chat.tools)
            places = self.control.locate(located.text, hidden.text, texts)
        return mark_control(located, token, places, mode=self.control.mode)

    def label(self, encoding: Any, located: Located, prompt_ids: Sequence[int] = ()) -> TokenizedChat:
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

    def mask_chats(
        self, chats: Sequence[Chat], *, appends_stop: bool = False, divides: bool = False
    ) -> list[TokenizedChat | ValueError]:
        """Token ids of chats, as `apply_chat_template` returns them except for divided tokens (see `label`), and labels
        by the position of each turn.

        Raises ValueError if the template takes too long for several of them.
        """
        if self.tokenizer.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template: name one with --chat-template, or use the model's instruct version"
            )
        prepared = [catch_error(prepare_chat, chat) for chat in chats]
        located = [
            catch_error(self.locate, rendered, chat)
            for rendered, chat in zip(self.renderer.render_each(prepared), prepared, strict=True)
        ]
        self.renderer.patience.check()
        located = [catch_error(self.mark_chat, found, chat) for found, chat in zip(located, prepared, strict=True)]
        if appends_stop:
            located = [catch_error(self.appender.append, *pair) for pair in zip(located, prepared, strict=True)]
        located = [catch_error(self.put_images, found, chat) for found, chat in zip(located, prepared, strict=True)]
        # The template writes the special tokens.
        encodings = encode_each(self.encoder, [text_of(found) for found in located], add_special_tokens=False)
        prompts = self.encode_prompts(located) if divides else [()] * len(located)
        return [catch_error(self.label, *each) for each in zip(encodings, located, prompts, strict=True)]

    def encode_prompts(self, located: Sequence[Located | ValueError]) -> list[Sequence[int]]:
        """The tokens of each row's text before its first passage; rows that share it, such as pairs, share them."""
        texts = [
            "" if isinstance(found, ValueError) or not found.passages else found.text[: found.passages[0].start]
            for found in located
        ]
        unique = list(dict.fromkeys(texts))
        encoded = dict(zip(unique, self.encoder.encode(unique, add_special_tokens=False), strict=True))
        return [encoded[text].ids for text in texts]

    @cached_property
    def appender(self) -> StopAppender:
        """Appends stop tokens (--append-stop-token). Raises ValueError if there is no token to append."""

        def locate(chat: Chat) -> Located:
            return self.locate(self.renderer.render_one(chat.messages, tools=chat.tools), prepare_chat(chat))

        return StopAppender(locate, self.make_checker(), self.stop_token_ids)

    def mask_as_rendered(self, chats: Sequence[Chat]) -> list[TokenizedChat | ValueError]:
        """`mask_chats` without --thinking-prefix."""
        matcher, self.matcher = self.matcher, replace(self.matcher, as_prompted=False)
        try:
            return self.mask_chats(chats)
        finally:
            self.matcher = matcher

    def put_images(self, located: Located, chat: PreparedChat) -> Located:
        """The row with its image placeholders expanded by the model's processor."""
        if self.expander is not None:
            return self.expander.expand(located, chat.images)
        return located

    def locate(self, rendered: Rendered, chat: PreparedChat) -> Located:
        """A rendered chat and its trained passages."""
        located = catch_error(self.locate_now, rendered, chat)
        if isinstance(located, ValueError) and self.renderer.tells_time:
            self.finder.forget(chat.key)  # skeleton or text may have yesterday's date
            return self.locate_now(self.renderer.render_one(chat.messages, tools=chat.tools), chat)
        if isinstance(located, ValueError):
            raise located
        return located

    def locate_now(self, rendered: Rendered, chat: PreparedChat) -> Located:
        text = check_unicode(check_length(rendered.text))
        if rendered.marked is None:
            spans = self.finder.find_spans(text, chat)
        else:
            spans = self.finder.find_marked_spans(text, rendered.marked, chat)
            if chat.unmasked:
                others = self.finder.find_spans(text, chat)
                spans += [span for span in others if chat.messages[span.message]["role"] != ASSISTANT]
        text, spans, remarks = self.match_prompts(text, spans, chat)
        passages = [
            Passage(span.start, span.end, chat.messages[span.message]["role"], chat.weights[span.message])
            for span in sorted(spans, key=lambda span: span.start)
            if chat.weights[span.message] > 0
        ]
        is_weighted = any(weight not in (0.0, 1.0) for weight in chat.weights)
        return Located(text, passages, is_weighted, remarks=tuple(remarks))

    def match_prompts(self, text: str, spans: list[Span], chat: PreparedChat) -> tuple[str, list[Span], list[Remark]]:
        """The row and its spans, with the generation prompt's text before the last turn if asked for; and remarks on
        turns that differ from their prompt."""
        render = partial(self.renderer.render, tools=chat.tools)
        unread = [] if chat.is_plain else find_unread_keys(chat.messages, text, render)
        trained = [weight > 0 for weight in chat.weights]
        text, spans, remarks = self.matcher.match(
            text, spans, chat.messages, trained=trained, render=render, has_tools=bool(chat.tools)
        )
        if self.strict_reasoning:
            refuse_untrained_reasoning(remarks)
        return text, spans, remarks + unread

    def encode_text(self, text: str) -> list[int]:
        (encoding,) = self.encoder.encode([text], add_special_tokens=False)
        return encoding.ids

    def make_checker(self) -> TemplateChecker:
        return TemplateChecker(
            self.tokenizer,
            self.finder.stops,
            self.mask_as_rendered,
            self.renderer.render,
            template_args=self.contents.template_args,
        )

    def find_stop_token(self) -> int | None:
        """The token that ends an assistant's turn, at which generation has to stop; None if there is none."""
        if self.tokenizer.chat_template is None:
            return None
        found = self.make_checker().find_stop_token()
        return self.tokenizer.eos_token_id if found is None and self.appends_stop else found

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """All tokens that end turns: stop tokens of generation, and tokens that the template writes after a turn."""
        ids = {self.tokenizer.convert_tokens_to_ids(token) for token in self.finder.stops.known}
        if self.tokenizer.chat_template is not None:
            ids |= self.make_checker().list_stop_tokens()
        return frozenset(ids)

    def check_template(self, name: str = "the model's chat template") -> list[str]:
        """Notes on the template, tried on known conversations. Raises ValueError, with the template's name, if it
        cannot be masked with certainty.

        Errors that the template itself raises (no system role, say) are accepted: rows of that kind will be refused.
        """
        if self.appends_stop and isinstance(catch_error(self.make_checker().check, name), ValueError):
            # The template may write none at all; if that is not the cause, it fails again.
            self.finder.let_stops_be_missing()
        checker = self.make_checker()
        notes = checker.check(name)
        self.open_turns = checker.open_turns
        if self.matcher.as_prompted:
            checker.check_as_prompted(self.mask_chats, name)
        if not (self.allows_missing_stop or self.appends_stop):
            return notes
        appended = self.appender.after_text.strip() if self.appends_stop else None
        return [*describe_open_turns(checker.open_turns, name, appended=appended), *notes]
