"""Tokenizers that differ in what they do with spaces and line breaks, trained on a few words."""

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = (
    "<|im_start|> Question: which big city is the capital of Peru? Answer: Lima. yes no 51 Quito user assistant"
    " ### Response: end "
)
SPECIAL = ["<unk>", "<s>", "</s>"]


def train(tokenizer: Tokenizer, trainer: trainers.Trainer) -> Tokenizer:
    tokenizer.train_from_iterator([TEXT, TEXT.replace("? ", "?\n\n").replace(": ", ":\n")] * 20, trainer)
    return tokenizer


def make_bytes() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    return train(tokenizer, trainer)


def make_sentencepiece() -> Tokenizer:
    """Like Llama 2's, which puts a space before every text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
        max_token_length=8,
    )
    return train(tokenizer, trainer)


def make_metaspace() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return train(tokenizer, trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False))


def make_marked() -> Tokenizer:
    """Its decoder writes a space for every mark, also where a text begins."""
    tokenizer = make_metaspace()
    tokenizer.decoder = decoders.Replace("▁", " ")
    return tokenizer


def make_unigram() -> Tokenizer:
    """Like T5's, whose normalizer turns line breaks into spaces."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Replace("\n", " ")
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    return train(tokenizer, trainer)


MAKERS = {each.__name__: each for each in (make_bytes, make_sentencepiece, make_metaspace, make_marked, make_unigram)}


def wrap(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer that one of the `MAKERS` makes."""
    names = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=MAKERS[name](), **names)
