"""Locates the trained passages of rendered chats."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from mini_trainer.data.chat.chat_renderer import ChatRenderer, Rendered
from mini_trainer.data.chat.conversation import ASSISTANT, Chat, PreparedChat, prepare_chat
from mini_trainer.data.chat.prompting import PromptMatcher, find_unread_keys, refuse_untrained_reasoning
from mini_trainer.data.chat.rendering import catch_error, check_length
from mini_trainer.data.chat.skeletons import Span
from mini_trainer.data.chat.token_spans import Located, Passage, Remark, check_unicode
from mini_trainer.data.chat.turn_finder import TurnFinder


@dataclass(frozen=True)
class PassageLocator:
    """Renders chats with one template and locates the passages to train on. `strict_reasoning`: refuse answers whose
    reasoning the template leaves out."""

    renderer: ChatRenderer
    finder: TurnFinder  # of this renderer's texts
    matcher: PromptMatcher
    strict_reasoning: bool

    @property
    def as_rendered(self) -> "PassageLocator":
        """The same without --thinking-prefix."""
        return replace(self, matcher=replace(self.matcher, as_prompted=False))

    def locate_each(self, chats: Sequence[PreparedChat | ValueError]) -> list[Located | ValueError]:
        """The chats, rendered, or the error that makes one unusable. Raises ValueError if the template takes too long
        for several of them."""
        rendered = self.renderer.render_each(chats)
        located = [catch_error(self.locate, *pair) for pair in zip(rendered, chats, strict=True)]
        self.renderer.patience.check()
        return located

    def locate_one(self, chat: Chat) -> Located:
        return self.locate(self.renderer.render_one(chat.messages, tools=chat.tools), prepare_chat(chat))

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
