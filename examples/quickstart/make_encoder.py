"""Makes a small randomly initialised encoder with its own tokenizer, to train classifiers without a download.

    python examples/quickstart/make_encoder.py --text-file runs/lines/train.csv --output-dir runs/lines/model

The tokenizer is a WordPiece trained on the texts, with BERT's special tokens; the model is a ModernBERT of 1.0 million
parameters: attention in both directions, over a window in two layers of three. Knows nothing until it is trained.
"""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # by id
MAX_LENGTH = 512


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """Make a small randomly initialised encoder and its tokenizer."""

    text_file: str
    """Table to train the tokenizer on: a .csv with a column `text`."""
    output_dir: str
    """Where model and tokenizer are written."""
    vocab_size: int = 4096
    """Most entries of the tokenizer's vocabulary."""
    hidden_size: int = 128
    """Width of the model."""
    num_layers: int = 3
    """Number of blocks."""
    seed: int = 0
    """Seed of the random weights."""


def train_word_pieces(texts: Iterable[str], *, vocab_size: int):
    """A WordPiece `PreTrainedTokenizerFast` that writes [CLS] text [SEP], and of pairs [CLS] a [SEP] b [SEP]."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, SPECIAL_TOKENS.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    names = {f"{token.strip('[]').lower()}_token": token for token in SPECIAL_TOKENS}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=MAX_LENGTH, **names)


def save_encoder(output_dir: str | Path, tokenizer, *, hidden_size: int, num_layers: int, seed: int) -> None:
    """Writes a randomly initialised ModernBERT for `tokenizer`'s vocabulary, and the tokenizer, to `output_dir`."""
    import torch
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    torch.manual_seed(seed)
    config = ModernBertConfig(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        max_position_embeddings=MAX_LENGTH,
        local_attention=16,
        classifier_pooling="mean",
        pad_token_id=tokenizer.pad_token_id,
        cls_token_id=tokenizer.cls_token_id,
        sep_token_id=tokenizer.sep_token_id,
        bos_token_id=tokenizer.cls_token_id,
        eos_token_id=tokenizer.sep_token_id,
    )
    ModernBertForMaskedLM(config).save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)


def read_texts(text_file: str | Path) -> Iterator[str]:
    with open(text_file, newline="", encoding="utf-8") as table:
        yield from (row["text"] for row in csv.DictReader(table))


if __name__ == "__main__":
    options = tyro.cli(EncoderOptions)
    tokenizer = train_word_pieces(read_texts(options.text_file), vocab_size=options.vocab_size)
    save_encoder(
        options.output_dir, tokenizer, hidden_size=options.hidden_size, num_layers=options.num_layers, seed=options.seed
    )
    print(f"wrote a random encoder and a tokenizer of {len(tokenizer):,} entries to {options.output_dir}")
