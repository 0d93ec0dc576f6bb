"""A tokenizer of transformers in a GGUF file: vocabulary, merges or scores, special tokens, chat template.

llama.cpp has its own two algorithms for BPE: "gpt2" for byte-level vocabularies, whose text is first split by an
expression that is known by name, and "llama" for those made by SentencePiece, which merges by scores of tokens.
"""

import json
import re
import time
from contextlib import suppress
from typing import Any

import gguf
from transformers import GenerationConfig, PreTrainedTokenizerBase

from mini_trainer.data.chat.rendering import template_errors
from mini_trainer.model.config import list_stops

BYTE = re.compile(r"<0x[0-9A-F]{2}>")
SPACE = "\u2581"  # a blank in SentencePiece's vocabularies
SYSTEM, USER = "Sys-1x", "User-2x"  # contents of a chat that is rendered
THINKING = "with thinking turned on, which this template leaves off: start it with --reasoning off"
DATED = "with today's date, and not the one that this template has"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# llama.cpp's names (src/llama-vocab.cpp) by the expression that splits text and whether whole words skip the merges.
SPLITS = {
    (LLAMA3, True): "llama-bpe",
    (LLAMA3, False): "smaug-bpe",
    (LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"), False): "qwen2",
    (TEKKEN, True): "tekken",
}
# Tokens at which llama.cpp ends an answer wherever a vocabulary has them, also as plain text.
STOPS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[",
}  # fmt: skip
# Defaults for sampling, by their names in a generation config.
SAMPLING = {
    "temperature": gguf.GGUFWriter.add_sampling_temp,
    "top_k": gguf.GGUFWriter.add_sampling_top_k,
    "top_p": gguf.GGUFWriter.add_sampling_top_p,
    "min_p": gguf.GGUFWriter.add_sampling_min_p,
    "repetition_penalty": gguf.GGUFWriter.add_sampling_penalty_repeat,
}


def add_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig, *, vocab_size: int
) -> list[str]:
    """Adds the tokenizer and the defaults for generating; returns notes for the user. `vocab_size`: rows of the
    embedding; those beyond the tokenizer's get names. ValueError for a tokenizer that llama.cpp does not have."""
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"the tokenizer {type(tokenizer).__name__} has no tokenizer.json, which GGUF is made from")
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    model, notes = stored["model"], []
    if model["type"] != "BPE":
        raise ValueError(f"the tokenizer is of type {model['type']}, and only BPE is supported in GGUF here")
    merges = [tuple(pair) for pair in model["merges"]]
    tokens, types = list_tokens(stored, vocab_size=vocab_size)
    if model["byte_fallback"]:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(has_space_prefix(stored))
        # With minus the rank of the first merge that makes a token as its score, llama.cpp merges like `merges`.
        ranks = {left + right: rank for rank, (left, right) in reversed([*enumerate(merges)])}
        writer.add_token_scores([-float(ranks.get(text, len(merges))) for text in tokens])
        notes.append(
            "llama.cpp merges by scores where this tokenizer has an order of merges: a few texts, such as those with"
            " runs of blanks or combined characters, may become other tokens"
        )
        if (stored["pre_tokenizer"] or {}).get("prepend_scheme") == "first":
            notes.append("llama.cpp puts a blank before a text and after special tokens, this tokenizer only before")
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name_split(stored))
        writer.add_token_merges([" ".join(pair) for pair in merges])
        if stored["normalizer"] is not None:
            notes.append(
                "this tokenizer composes accents (NFC), which llama.cpp does not: compose text before you send it, or"
                " its tokens are not those of training"
            )
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    texts = [text for text, kind in zip(tokens, types, strict=True) if text in STOPS and kind == gguf.TokenType.NORMAL]
    if texts:
        notes.append(f"llama.cpp treats these as stop tokens, which are plain text here: {', '.join(map(repr, texts))}")
    notes += add_special_tokens(writer, tokenizer, generation)
    if (template := tokenizer.chat_template) is not None:
        if isinstance(template, dict):
            template = [{"name": name, "template": text} for name, text in template.items()]
        writer.add_chat_template(template)
        notes += check_chats(tokenizer)
    return notes


def list_tokens(stored: dict[str, Any], *, vocab_size: int) -> tuple[list[str], list[gguf.TokenType]]:
    """Texts and types of all ids, (vocab_size,)."""
    model = stored["model"]
    names = {token_id: text for text, token_id in model["vocab"].items()}
    types = dict.fromkeys(names, gguf.TokenType.NORMAL)
    if model["byte_fallback"]:
        types |= {i: gguf.TokenType.BYTE for i, text in names.items() if BYTE.fullmatch(text)}
    for added in stored["added_tokens"]:
        text, is_special = added["content"], added["special"]
        names[added["id"]] = text if is_special else text.replace(SPACE, " ")  # llama.cpp finds these in plain text
        types[added["id"]] = gguf.TokenType.CONTROL if is_special else gguf.TokenType.USER_DEFINED
    if max(names) >= vocab_size:
        raise ValueError(f"the tokenizer has the token id {max(names)}, but the model only {vocab_size} embeddings")
    tokens = [names.get(i, f"[PAD{i}]") for i in range(vocab_size)]
    if len(set(tokens)) < len(tokens):
        twice = next(text for text in tokens if tokens.count(text) > 1)
        raise ValueError(f"the token {twice!r} would have two ids in GGUF, which llama.cpp does not load")
    return tokens, [types.get(i, gguf.TokenType.UNUSED) for i in range(vocab_size)]


def name_split(stored: dict[str, Any]) -> str:
    """llama.cpp's name for how a byte-level tokenizer splits text into words; ValueError if it has none."""
    normalizer, splitter = stored["normalizer"], stored["pre_tokenizer"]
    if normalizer is not None and normalizer["type"] != "NFC":  # llama.cpp normalises nothing; most text is in NFC
        raise ValueError(f"the tokenizer's normalizer {normalizer['type']} does not exist in llama.cpp")
    if not stored["model"]["merges"]:
        raise ValueError("the tokenizer has no merges, without which llama.cpp loads no byte-level tokenizer")
    ignores_merges, name = bool(stored["model"].get("ignore_merges")), None
    match splitter and splitter.get("pretokenizers", [splitter]):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}] if not ignores_merges:
            name = "gpt-2"
        case [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        ] if not ignores_merges:
            name = "smollm"
        case [
            {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            name = SPLITS.get((expression, ignores_merges))
    if name is None:
        raise ValueError(
            f"llama.cpp has no name for how this tokenizer splits text ({json.dumps(splitter)}, ignore_merges"
            f" {ignores_merges}); supported here: gpt-2, smollm, {', '.join(SPLITS.values())}"
        )
    return name


def has_space_prefix(stored: dict[str, Any]) -> bool:
    """Whether a SentencePiece tokenizer puts a blank before a text; ValueError if it changes text in other ways."""
    normalizer, splitter = stored["normalizer"], stored["pre_tokenizer"]
    replaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    match normalizer and normalizer.get("normalizers", [normalizer]), splitter:
        case None, {"type": "Metaspace", "replacement": "\u2581", "split": False, "prepend_scheme": scheme}:
            return scheme != "never"
        case [{"type": "Prepend", "prepend": "\u2581"}, last], None if last == replaces:
            return True
        case [only], None | {"type": "Split", "pattern": {"String": " "}} if only == replaces:
            return False  # nothing is left to split
    raise ValueError(
        f"llama.cpp does not change text as this tokenizer does: normalizer {json.dumps(normalizer)}, pre_tokenizer"
        f" {json.dumps(splitter)}"
    )


def add_special_tokens(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig
) -> list[str]:
    stops = list_stops(generation, tokenizer)
    # Without one, llama.cpp takes a token of any text for it.
    bos = generation.bos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    eos = next(iter(stops), None) if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    # llama.cpp ends an answer at any of three, and at those that it knows.
    others = [stop for stop in stops if stop != eos]
    others.sort(key=lambda stop: tokenizer.convert_ids_to_tokens(stop) in STOPS)
    for add, token_id in [
        (writer.add_bos_token_id, bos),
        (writer.add_eos_token_id, eos),
        (writer.add_unk_token_id, tokenizer.unk_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
        *zip((writer.add_eot_token_id, writer.add_eom_token_id), others, strict=False),
    ]:
        if token_id is not None:
            add(token_id)
    ids = tokenizer("a").input_ids
    writer.add_add_bos_token(ids[0] == bos)
    writer.add_add_eos_token(ids[-1] == eos)
    for name, add in SAMPLING.items() if generation.do_sample else ():
        if (value := getattr(generation, name)) is not None:
            add(writer, value)
    left_out = [text for text in tokenizer.convert_ids_to_tokens(others[2:]) if text not in STOPS]
    return [f"llama.cpp has room for three stop tokens; left out: {', '.join(map(repr, left_out))}"] if left_out else []


def make_modelfile(name: str, tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig) -> str:
    """A Modelfile for the GGUF file `name`, from which Ollama reads neither stop tokens nor sampling defaults."""
    sampling = {key.replace("repetition", "repeat"): getattr(generation, key) for key in SAMPLING}
    given = [f'stop "{token}"' for token in tokenizer.convert_ids_to_tokens(list_stops(generation, tokenizer))]
    given += [f"{key} {value}" for key, value in sampling.items() if value is not None]
    return "\n".join([f"FROM ./{name}", *(f"PARAMETER {line}" for line in given)]) + "\n"


def check_chats(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Notes on how llama.cpp's chats differ from those of training; none for a template that refuses a single question.
    llama.cpp runs the template with a Jinja of its own, and gives it more than transformers does: `enable_thinking`,
    the date, the system message as part of the first question where the template leaves it out (common/chat.cpp)."""
    given = {
        "enable_thinking": (True, THINKING),
        "date_string": (time.strftime("%d %b %Y"), DATED),
        "datetime": (time.strftime("%b %d %Y"), DATED),
    }
    try:
        plain = render_question(tokenizer)
        notes = [f"llama.cpp writes chats {how}" for key, (value, how) in given.items()
                 if render_question(tokenizer, **{key: value}) != plain]  # fmt: skip
    except ValueError:
        return []
    adds_bos = tokenizer.bos_token is not None and tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    if adds_bos and not plain.startswith(tokenizer.bos_token):
        notes.append(f"llama.cpp puts {tokenizer.bos_token!r} before a chat, which this template does not")
    with suppress(ValueError):  # the template refuses system messages
        if SYSTEM not in render_question(tokenizer, {"role": "system", "content": SYSTEM}):
            notes.append("llama.cpp puts a system message before the first question; this template leaves it out")
    return list(dict.fromkeys(notes))


def render_question(tokenizer: PreTrainedTokenizerBase, *before: dict[str, str], **given: object) -> str:
    """The prompt of one question, after other messages."""
    chat = [*before, {"role": "user", "content": USER}]
    with template_errors():
        return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **given)
