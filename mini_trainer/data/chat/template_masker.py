"""Masks chats with one chat template, and tries the template before any row is read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from mini_trainer.data.chat.chat_renderer import ChatRenderer
from mini_trainer.data.chat.conversation import Chat, prepare_chat
from mini_trainer.data.chat.labelling import ChatLabeller
from mini_trainer.data.chat.locating import PassageLocator
from mini_trainer.data.chat.prompting import PromptMatcher
from mini_trainer.data.chat.rendering import catch_error
from mini_trainer.data.chat.template_check import StopAppender, TemplateChecker, describe_open_turns
from mini_trainer.data.chat.token_spans import TokenizedChat
from mini_trainer.data.chat.turn_finder import TurnFinder
from mini_trainer.data.chat.turns import find_stops

MODEL_TEMPLATE = "the model's chat template"


@dataclass(frozen=True)
class TurnRules:
    """How turns begin and end. `data.chat.masking.ChatMasker` explains each."""

    stop_token_ids: Sequence[int]
    allows_missing_stop: bool
    appends_stop: bool
    as_prompted: bool
    strict_reasoning: bool


class TemplateMasker:
    """Masks chats with the tokenizer's template and one set of its arguments. Invariant: its skeletons were learned
    from that template with those arguments."""

    def __init__(
        self, tokenizer: Any, labeller: ChatLabeller, rules: TurnRules, template_args: Mapping[str, Any]
    ) -> None:
        self.tokenizer, self.labeller, self.rules, self.template_args = tokenizer, labeller, rules, template_args
        self.renderer = ChatRenderer(tokenizer, template_args)
        stops = replace(find_stops(tokenizer, rules.stop_token_ids), may_be_missing=rules.allows_missing_stop)
        self.finder = TurnFinder(self.renderer, stops)
        template = json.dumps(tokenizer.chat_template, ensure_ascii=False)
        matcher = PromptMatcher(labeller.borders.encode, template, as_prompted=rules.as_prompted)
        self.locator = PassageLocator(self.renderer, self.finder, matcher, rules.strict_reasoning)
        self.open_turns: set[str] = set()  # turns without a stop token ("inner", "last"); set by `check`

    def mask(self, chats: Sequence[Chat], *, divides: bool) -> list[TokenizedChat | ValueError]:
        """`ChatMasker.mask` of chats with these arguments."""
        return self.mask_at(self.locator, chats, appends_stop=self.rules.appends_stop, divides=divides)

    def mask_at(
        self, locator: PassageLocator, chats: Sequence[Chat], *, appends_stop: bool = False, divides: bool = False
    ) -> list[TokenizedChat | ValueError]:
        """Token ids and labels of chats, with the passages that `locator` finds.

        Raises ValueError without a template, if no stop token can be appended, or if the template takes too long for
        several of them.
        """
        if self.tokenizer.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template: name one with --chat-template, or use the model's instruct version"
            )
        prepared = [catch_error(prepare_chat, chat) for chat in chats]
        located = locator.locate_each(prepared)
        mark = partial(self.labeller.mark_control, renderer=self.renderer)
        located = [catch_error(mark, *pair) for pair in zip(located, prepared, strict=True)]
        if appends_stop:
            located = [catch_error(self.appender.append, *pair) for pair in zip(located, prepared, strict=True)]
        return self.labeller.label_each(located, prepared, divides=divides)

    @cached_property
    def appender(self) -> StopAppender:
        """Appends stop tokens (--missing-stop-token append). Raises ValueError if there is no token to append."""
        return StopAppender(self.locator.locate_one, self.make_checker(), self.stop_token_ids)

    def make_checker(self) -> TemplateChecker:
        mask = partial(self.mask_at, self.locator.as_rendered)
        return TemplateChecker(
            self.tokenizer, self.finder.stops, mask, self.renderer.render, template_args=self.template_args
        )

    def find_stop_token(self) -> int | None:
        """The token that ends an assistant's turn, at which generation has to stop; None if there is none."""
        if self.tokenizer.chat_template is None:
            return None
        found = self.make_checker().find_stop_token()
        return self.tokenizer.eos_token_id if found is None and self.rules.appends_stop else found

    @cached_property
    def stop_token_ids(self) -> frozenset[int]:
        """All tokens that end turns: stop tokens of generation, and tokens that the template writes after a turn."""
        ids = {self.tokenizer.convert_tokens_to_ids(token) for token in self.finder.stops.known}
        if self.tokenizer.chat_template is not None:
            ids |= self.make_checker().list_stop_tokens()
        return frozenset(ids)

    def check(self, name: str = MODEL_TEMPLATE) -> list[str]:
        """Notes on the template, tried on known conversations. Raises ValueError, with the template's name, if it
        cannot be masked with certainty.

        Errors that the template itself raises (no system role, say) are accepted: rows of that kind will be refused.
        """
        if self.rules.appends_stop and isinstance(catch_error(self.make_checker().check, name), ValueError):
            # The template may write none at all; if that is not the cause, it fails again.
            self.finder.let_stops_be_missing()
        checker = self.make_checker()
        notes = checker.check(name)
        self.open_turns = checker.open_turns
        if self.rules.as_prompted:
            checker.check_as_prompted(partial(self.mask_at, self.locator), name)
        if not (self.rules.allows_missing_stop or self.rules.appends_stop):
            return notes
        appended = self.appender.after_text.strip() if self.rules.appends_stop else None
        return [*describe_open_turns(checker.open_turns, name, appended=appended), *notes]
