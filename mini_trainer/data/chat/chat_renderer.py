"""Renders chats with a tokenizer's chat template, many at once, and within limits on time."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mini_trainer.data.chat.conversation import Message, PreparedChat
from mini_trainer.data.chat.rendering import Patience, catch_error, prepare_for
from mini_trainer.data.chat.templates import check_template_args

WITHOUT_TOOLS = (
    "the chat template leaves out the row's tools: use one that writes them (--chat-template), or describe them in the"
    " system message"
)
GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Rendered:
    """A conversation's text, and the passages that the template marks as generated (None: it has no markers)."""

    text: str
    marked: list[tuple[int, int]] | None = None


class ChatRenderer:
    """Renders chats with one tokenizer's template, and with arguments of the template, all of which it has to read."""

    def __init__(self, tokenizer: Any, template_args: Mapping[str, Any]) -> None:
        check_template_args(tokenizer, template_args)
        self.tokenizer, self.template_args = tokenizer, template_args
        self.patience = Patience()

    @cached_property
    def tells_time(self) -> bool:
        return "strftime_now" in json.dumps(self.tokenizer.chat_template)

    def render_each(self, chats: Sequence[PreparedChat | ValueError]) -> list[Rendered | ValueError]:
        """Renders all chats with the same tools at once, which is faster; if one fails, each alone, to find out
        which."""
        results: list[Any] = list(chats)
        by_tools: dict[str, list[int]] = {}
        for i, chat in enumerate(chats):
            if not isinstance(chat, ValueError):
                by_tools.setdefault(repr(chat.tools), []).append(i)
        for indices in by_tools.values():
            conversations, tools = [chats[i].messages for i in indices], chats[indices[0]].tools
            rendered = catch_error(self.render_marked, conversations, tools=tools)
            if isinstance(rendered, ValueError):
                rendered = [catch_error(self.render_one, messages, tools=tools) for messages in conversations]
            for i, result in zip(indices, rendered, strict=True):
                results[i] = self.explain(result, chats[i])
        return results

    def explain(self, rendered: Rendered | ValueError, chat: PreparedChat) -> Rendered | ValueError:
        """Adds a hint to an error that occurs if a content is null or missing, but not if it is empty."""
        if not isinstance(rendered, ValueError) or all(message.get("content") is not None for message in chat.messages):
            return rendered
        filled = [{**message, "content": message.get("content") or ""} for message in chat.messages]
        accepted = catch_error(self.render_one, filled, tools=chat.tools)
        if isinstance(accepted, ValueError):
            return rendered
        if chat.tools and accepted == catch_error(self.render_one, filled, tools=None):
            return ValueError(WITHOUT_TOOLS)
        return ValueError(f'{rendered}; it accepts messages with calls if their content is "", not null or missing')

    def render_one(self, messages: list[Message], *, tools: list[dict[str, Any]] | None) -> Rendered:
        (rendered,) = self.render_marked([messages], tools=tools)
        return rendered

    def render_marked(
        self, conversations: Sequence[list[Message]], *, tools: list[dict[str, Any]] | None
    ) -> list[Rendered]:
        """The texts, and the passages that the template marks as generated if it has markers."""
        template = self.tokenizer.get_chat_template(None, tools)
        if GENERATION_MARKER.search(template) is None:
            return [Rendered(text) for text in self.render(conversations, tools=tools)]
        from transformers.utils.chat_template_utils import render_jinja_template

        with self.patience.render(len(conversations)):
            texts, marked = render_jinja_template(
                [prepare_for(self.tokenizer, messages) for messages in conversations],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
                **self.template_args,
            )
        return [Rendered(text, passages) for text, passages in zip(texts, marked, strict=True)]

    def render(
        self,
        conversations: Sequence[list[Message]],
        *,
        tools: list[dict[str, Any]] | None = None,
        generation_prompt: bool = False,
    ) -> list[str]:
        """The texts that `apply_chat_template` tokenizes."""
        with self.patience.render(len(conversations)):
            return self.tokenizer.apply_chat_template(
                [prepare_for(self.tokenizer, messages) for messages in conversations],
                tools=tools,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self.template_args,
            )
