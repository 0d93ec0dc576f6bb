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
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mini_trainer.data.chat import conversation, tokens
from mini_trainer.data.chat.conversation import Chat, Example, Located, Passage, PreparedChat, TokenizedChat
from mini_trainer.data.chat.linting import Linter
from mini_trainer.data.chat.locating import PassageLocator, TurnFinder
from mini_trainer.data.chat.normalizing import separate_reasoning
from mini_trainer.data.chat.prompting import PromptMatcher, StopAppender, TemplateChecker, describe_open_turns
from mini_trainer.data.chat.rendering import ChatRenderer, catch_error, select_args
from mini_trainer.data.chat.turns import find_stops
from mini_trainer.data.stores.image_files import open_image
from mini_trainer.distributed.messages import one_line

if TYPE_CHECKING:
    from PIL.Image import Image

TRIED_SIZE = (64, 48)  # width and height of the image used to test a processor
# Processors whose `image_token_ids` omit the token of an image's parts: Llama 4's has its placeholder's id instead,
# which also precedes the tile of the whole image.
WITH_PATCH_TOKEN = ("Llama4Processor",)

MODEL_TEMPLATE = "the model's chat template"

MAX_NUM_OTHERS = 16  # maskers that are kept for rows' own arguments
THINKING_PREFIXES = {"as-rendered": False, "train-as-prompted": True}  # whether the generation prompt's words win


class ImageExpander:
    """Expands the image placeholders of rendered conversations. Invariant: `processor` has one placeholder token for an
    image, `image_token`, which the chat template writes."""

    def __init__(self, processor: Any, *, directory: Path):
        """`directory`: base of relative image paths."""
        if getattr(processor, "image_token", None) is None:
            raise ValueError(f"{type(processor).__name__} has no image_token, so images cannot be located in the text")
        self.processor, self.directory = processor, directory
        self.placeholder = processor.image_token
        ids = processor.image_token_ids  # of the tokens that stand for parts of an image; None: not in the vocabulary
        if type(processor).__name__ in WITH_PATCH_TOKEN:
            ids = processor.tokenizer.convert_tokens_to_ids([processor.img_patch_token])
        self.image_token_ids = frozenset(token for token in ids if token is not None)
        self.image_tokens = tuple(processor.tokenizer.convert_ids_to_tokens(sorted(self.image_token_ids)))
        import PIL.Image

        if "text_replacement_offsets" not in self.process(self.placeholder, [PIL.Image.new("RGB", TRIED_SIZE)]):
            raise ValueError(
                f"{type(processor).__name__} does not report the text that replaces an image, so its tokens cannot be"
                " masked: models of its type cannot be trained on images"
            )

    def expand(self, located: Located, references: Sequence[str]) -> Located:
        """The row with its placeholders replaced by the processor's text, which is never trained."""
        if located.is_weighted:
            raise ValueError("a message has a 'weight', which data with images cannot store: use 'train' alone")
        num_found = located.text.count(self.placeholder)
        if num_found != len(references):
            raise ValueError(
                f"{len(references)} images, but the rendered conversation has {self.placeholder!r} {num_found} times:"
                " texts must not contain it, and the chat template has to write it once per image"
            )
        typed = [token for token in self.image_tokens if token in located.text]
        if typed and self.placeholder not in self.image_tokens:
            raise ValueError(f"a text contains {typed[0]!r}, which stands for a part of an image: remove it")
        if not references:
            return located
        shown = []
        for number, reference in enumerate(references, start=1):
            try:
                shown.append(open_image(reference, directory=self.directory))
            except ValueError as error:
                raise ValueError(f"image {number}: {error}") from None
        made = self.process(located.text, shown)
        replaced = made["text_replacement_offsets"][0]
        ids = tuple(int(token) for token in made["input_ids"][0])
        return replace(
            located,
            text=replace_all(located.text, replaced),
            passages=[move_passage(passage, replaced) for passage in located.passages],
            pictures=conversation.Pictures(
                references=tuple(references),
                sizes=tuple((image.height, image.width) for image in shown),
                spans=self.find_spans(ids, [place["replacement"] for place in replaced]),
                num_tokens=sum(token in self.image_token_ids for token in ids),
                input_ids=ids,
            ),
        )

    def find_spans(self, ids: Sequence[int], replacements: Sequence[str]) -> tuple[tuple[int, int], ...]:
        """The tokens [start, end) of each image, first to last image token; `replacements`: the processor's texts."""
        places = [at for at, token in enumerate(ids) if token in self.image_token_ids]
        spans, first = [], 0
        for replacement in replacements:
            after = first + sum(replacement.count(token) for token in self.image_tokens)
            spans.append((places[first], places[after - 1] + 1))
            first = after
        return tuple(spans)

    def process(self, text: str, images: Sequence["Image"]) -> Any:
        try:
            return self.processor(
                text=[text], images=[list(images)], add_special_tokens=False, return_text_replacement_offsets=True
            )
        except Exception as error:  # processors may raise any error for an image that they cannot resize
            raise ValueError(f"the model's processor cannot take its images: {one_line(error)}") from None


def replace_all(text: str, replaced: Sequence[dict[str, Any]]) -> str:
    """`text` with every placeholder replaced."""
    for place in reversed(replaced):  # so that the places before it stay where they are
        start, end = place["span"]
        text = text[:start] + place["replacement"] + text[end:]
    return text


def move_passage(passage: Passage, replaced: Sequence[dict[str, Any]]) -> Passage:
    """The passage at its place after the replacements. ValueError if an image is in it."""
    moved = 0
    for place in replaced:
        start, end = place["span"]
        if start < passage.end and end > passage.start:
            raise ValueError(f"a trained message of the {passage.role} has an image: images cannot be trained")
        if end <= passage.start:
            moved += len(place["replacement"]) - (end - start)
    return replace(passage, start=passage.start + moved, end=passage.end + moved)


@dataclass(frozen=True)
class ChatLabeller:
    """Lints, encodes and labels chats with one tokenizer. `expander`: puts images into conversations."""

    borders: tokens.BorderEncoder
    linter: Linter
    expander: ImageExpander | None

    def label_each(
        self, located: Sequence[Located | ValueError], chats: Sequence[PreparedChat | ValueError], *, divides: bool
    ) -> list[TokenizedChat | ValueError]:
        """Token ids of chats as the tokenizer makes them, except for divided tokens (see `label`), and labels by the
        position of each turn. `divides`: see `ChatMasker.mask`."""
        located = [catch_error(self.put_images, *pair) for pair in zip(located, chats, strict=True)]
        # The template writes the special tokens.
        encodings = tokens.encode_each(self.borders.encoder, located, "text", add_special_tokens=False)
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
        if joined := [start for start in starts if tokens.spans_border(encoding, start)]:
            located = replace(located, remarks=(*located.remarks, conversation.Remark(conversation.DIVIDED)))
        is_prompted = encoding.ids[: len(prompt_ids)] == list(prompt_ids)
        divided = joined if is_prompted else sorted({*joined, *starts[:1]})
        if joined and located.pictures is not None:
            raise ValueError("a row with images is tokenized whole, but its answers need it in parts")
        if divided and located.pictures is None:
            encoding = self.borders.divide(located.text, divided)
        return tokens.label_encoding(encoding, located)


@dataclass(frozen=True)
class TurnRules:
    """How turns begin and end. `data.chat.masking.ChatMasker` explains each."""

    stop_token_ids: Sequence[int]
    allows_missing_stop: bool
    appends_stop: bool
    as_prompted: bool


class TemplateMasker:
    """Masks chats with the tokenizer's template and one set of its arguments. Invariant: its skeletons were learned
    from that template with those arguments."""

    def __init__(self, tokenizer: Any, labeller: ChatLabeller, rules: TurnRules, args: Mapping[str, Any]) -> None:
        self.tokenizer, self.labeller, self.rules, self.template_args = tokenizer, labeller, rules, args
        self.renderer = ChatRenderer(tokenizer, args)
        stops = replace(find_stops(tokenizer, rules.stop_token_ids), may_be_missing=rules.allows_missing_stop)
        self.finder = TurnFinder(self.renderer, stops)
        template = json.dumps(tokenizer.chat_template, ensure_ascii=False)
        matcher = PromptMatcher(labeller.borders.encode, template, as_prompted=rules.as_prompted)
        self.locator = PassageLocator(self.renderer, self.finder, matcher)
        self.open_turns: set[str] = set()  # turns without a stop token ("inner", "last"); set by `check`

    def mask(self, chats: Sequence[Chat], *, divides: bool) -> list[TokenizedChat | ValueError]:
        """`ChatMasker.mask` of chats with these arguments."""
        return self.mask_at(self.locator, chats, appends_stop=self.rules.appends_stop, divides=divides)

    def mask_at(
        self, locator: PassageLocator, chats: Sequence[Chat], *, appends_stop: bool = False, divides: bool = False
    ) -> list[TokenizedChat | ValueError]:
        """Token ids and labels of chats, with the passages that `locator` finds. Raises ValueError without a template,
        or if no stop token can be appended."""
        if self.tokenizer.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template: name one with --chat-template, or use the model's instruct version"
            )
        prepared = [catch_error(self.prepare, chat) for chat in chats]
        rendered = locator.renderer.render_each(prepared)
        located = [catch_error(locator.locate, *pair) for pair in zip(rendered, prepared, strict=True)]
        located = [catch_error(self.labeller.linter.lint, *pair) for pair in zip(located, prepared, strict=True)]
        if appends_stop:
            located = [catch_error(self.appender.append, *pair) for pair in zip(located, prepared, strict=True)]
        return self.labeller.label_each(located, prepared, divides=divides)

    def prepare(self, chat: Chat) -> PreparedChat:
        return conversation.prepare_chat(separate_reasoning(self.tokenizer, chat))

    @cached_property
    def appender(self) -> StopAppender:
        """Appends stop tokens (--missing-stop-token append). Raises ValueError if there is no token to append."""
        return StopAppender(self.locator.locate_one, self.make_checker(), self.stop_token_ids)

    def make_checker(self) -> TemplateChecker:
        as_rendered = replace(self.locator, matcher=replace(self.locator.matcher, as_prompted=False))
        mask = partial(self.mask_at, as_rendered)
        return TemplateChecker(self.tokenizer, self.finder.stops, mask, self.renderer.render, self.template_args)

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
        cannot be masked with certainty. Errors that the template itself raises (no system role, say) are accepted: rows
        of that kind will be refused."""
        if self.rules.appends_stop and isinstance(catch_error(self.make_checker().check, name), ValueError):
            # The template may write none at all; if that is not the cause, it fails again.
            self.finder = TurnFinder(self.renderer, replace(self.finder.stops, may_be_missing=True))
            self.locator = replace(self.locator, finder=self.finder)
        checker = self.make_checker()
        notes = checker.check(name)
        self.open_turns = checker.open_turns
        if self.rules.as_prompted:
            checker.check_as_prompted(partial(self.mask_at, self.locator), name)
        if not (self.rules.allows_missing_stop or self.rules.appends_stop):
            return notes
        appended = self.appender.after_text.strip() if self.rules.appends_stop else None
        return [*describe_open_turns(checker.open_turns, name, appended=appended), *notes]


class ChatMasker:
    """Renders, tokenizes and masks rows with one tokenizer.

    `stop_token_ids`: tokens that end generation in addition to the tokenizer's eos token (see `load_stop_token_ids`).
    `missing_stop_token`: "allow" trains assistant turns without a stop token, up to the end of their content; "append"
    puts one after a conversation's last turn if the template writes none there; "refuse" does neither.
    `expander`: puts images into conversations.
    `thinking_prefix`: "train-as-prompted" puts the generation prompt's text before the last answer (see
    data/chat/prompting.py).
    `refused`: kinds of doubtful rows that are unusable (see data/chat/linting.py).
    `template_args`: arguments of the template, all of which it has to read.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        stop_token_ids: Sequence[int] = (),
        missing_stop_token: str = "refuse",
        expander: ImageExpander | None = None,
        thinking_prefix: str = "as-rendered",
        refused: Sequence[str] = (),
        template_args: Mapping[str, Any] | None = None,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):  # mistral-common's has no such attribute
            raise ValueError(
                f"{type(tokenizer).__name__} does not report which characters a token covers, so masks cannot be"
                " placed with certainty: use a model that has a fast tokenizer (tokenizer.json)"
            )
        self.tokenizer, self.template_args = tokenizer, template_args or {}
        linter = Linter(tokenizer, refused)
        borders = tokens.BorderEncoder(tokenizer, tokens.ByteEncoder(tokenizer))
        self.texts = tokens.TextMasker(tokenizer, borders, linter)
        self.labeller = ChatLabeller(borders, linter, expander)
        self.rules = TurnRules(
            stop_token_ids,
            allows_missing_stop=missing_stop_token == "allow",
            appends_stop=missing_stop_token == "append",
            as_prompted=THINKING_PREFIXES[thinking_prefix],
        )
        self.chats = TemplateMasker(tokenizer, self.labeller, self.rules, self.template_args)
        self.others: dict[str, TemplateMasker | ValueError] = {}  # by rows' own arguments, the latest last

    def mask(self, rows: Sequence[Example], *, divides: bool = False) -> list[TokenizedChat | ValueError]:
        """Each row's token ids and labels, or the error that makes it unusable. `divides`: a chat's prompt, up to the
        first passage that is trained, has the tokens that it has alone. Raises ValueError if no row is usable: no chat
        template, or no end-of-text token."""
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
        args = catch_error(select_args, self.tokenizer, chats[0].template_args or {})
        if isinstance(args, ValueError):
            return [args] * len(chats)
        if not args:
            return self.chats.mask(chats, divides=divides)
        key = json.dumps(args, sort_keys=True)
        other = self.others.pop(key, None) or catch_error(self.make_other, args)
        self.others[key] = other
        if len(self.others) > MAX_NUM_OTHERS:
            del self.others[next(iter(self.others))]
        return [other] * len(chats) if isinstance(other, ValueError) else other.mask(chats, divides=divides)

    def make_other(self, template_args: Mapping[str, Any]) -> TemplateMasker:
        """The masker of rows with arguments of their own; ValueError if the template cannot be used with them."""
        other = TemplateMasker(self.tokenizer, self.labeller, self.rules, {**self.template_args, **template_args})
        other.check()
        return other

    def check_template(self, name: str = MODEL_TEMPLATE) -> list[str]:
        """`TemplateMasker.check` for rows without arguments of their own."""
        return self.chats.check(name)
