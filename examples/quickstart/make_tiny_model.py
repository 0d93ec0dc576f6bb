"""Makes a small randomly initialised model with its own tokenizer, for trying things out without a download.

    python examples/quickstart/make_tiny_model.py --messages-file chats.jsonl --output-dir /tmp/tiny_model

The tokenizer is a byte-level BPE trained on the chats, with the ChatML template; the model is a Qwen3 of a few
million parameters. Knows nothing until it is trained.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import tyro

CHATML_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class TinyModelOptions:
    """Make a small randomly initialised model and its tokenizer."""

    messages_file: str
    """Chats to train the tokenizer on: messages JSONL."""
    output_dir: str
    """Where model and tokenizer are written."""
    vocab_size: int = 4096
    """Most entries of the tokenizer's vocabulary."""
    hidden_size: int = 128
    """Width of the model."""
    num_layers: int = 4
    """Number of blocks."""
    seed: int = 0
    """Seed of the random weights."""


def train_tokenizer(texts: Iterable[str], *, vocab_size: int, chat_template: str = CHATML_TEMPLATE):
    """A byte-level BPE `PreTrainedTokenizerFast` with ChatML's special tokens and `<|endoftext|>`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=chat_template
    )


def save_tiny_model(output_dir: str | Path, tokenizer, *, hidden_size: int, num_layers: int, seed: int) -> None:
    """Writes a randomly initialised Qwen3 for `tokenizer`'s vocabulary, and the tokenizer, to `output_dir`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64 or 1,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)


def read_contents(messages_file: str | Path) -> Iterator[str]:
    """The text of every message of a messages JSONL file."""
    with open(messages_file, encoding="utf-8") as lines:
        for line in lines:
            yield from (message["content"] for message in json.loads(line)["messages"])


if __name__ == "__main__":
    options = tyro.cli(TinyModelOptions)
    tokenizer = train_tokenizer(read_contents(options.messages_file), vocab_size=options.vocab_size)
    save_tiny_model(
        options.output_dir, tokenizer, hidden_size=options.hidden_size, num_layers=options.num_layers, seed=options.seed
    )
    print(f"wrote a random model and a tokenizer of {len(tokenizer):,} entries to {options.output_dir}")
