"""Every chat template of the tests, with its stop tokens, and a small tokenizer for each."""

import copy
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tiny_models import SHAPE, save_model
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from trait_templates import TRAITS
from transformers import LlamaConfig, PreTrainedTokenizerFast

from mini_trainer.data.chat.conversation import TokenizedChat
from mini_trainer.data.chat.masking import ChatMasker
from mini_trainer.data.rows.formats import find_format, read_example

HERE = Path(__file__).parent / "chat_templates"
TRL = find_spec("trl")

# eos_token and generation_config.json's eos_token_id, by what a template's name begins with: the longest counts
STOPS = {
    **dict.fromkeys(("cohere", "command_r"), ("<|END_OF_TURN_TOKEN|>",)),
    "deepseek": ("<｜end▁of▁sentence｜>",),
    "gemma": ("<eos>", "<end_of_turn>"),
    **dict.fromkeys(("gemma4", "diffusion_gemma"), ("<eos>", "<turn|>", "<|tool_response>")),
    "glm4": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|endoftext|>", "<|call|>"),
    **dict.fromkeys(("idefics3", "smolvlm"), ("<end_of_utterance>",)),
    "llama": ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    **dict.fromkeys(("llama2", "llava_next", "mistral", "nemotron_mini", "vicuna", "zephyr"), ("</s>",)),
    "muse_glimmer": ("<|eot|>", "<|eom|>"),
    "phi3": ("<|endoftext|>", "<|assistant|>", "<|end|>"),
    "phi4_mini": ("<|endoftext|>", "<|end|>"),
    "qwen": ("<|im_end|>", "<|endoftext|>"),
    "nemotron_super": ("<|eot_id|>", "<|end_of_text|>"),
    **dict.fromkeys(("falcon", "olmo"), ("<|endoftext|>",)),
    "granite": ("<|end_of_text|>",),
    "": ("<|im_end|>",),
}
SPECIAL = re.compile(
    r"<\|[^|<>'\" ]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_[a-z]+>|<\|[a-z_]+>|<[a-z_]+\|>|\[/?[A-Z_]+\]|<SPECIAL_[0-9]+>"
)


def find_templates() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Every template: its text, and the stop tokens, of which the first is the tokenizer's."""
    found = {}
    folders = {"": HERE} | ({"trl:": Path(TRL.origin).parent / "chat_templates"} if TRL else {})
    for prefix, folder in folders.items():
        for path in sorted(folder.glob("*.jinja")):
            stops = STOPS[max((start for start in STOPS if path.stem.startswith(start)), key=len)]
            found[prefix + path.stem] = (path.read_text(), stops)
    return found | TRAITS


TEMPLATES = find_templates()


@cache
def train_base() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(["How many? Five of them. Be brief. user assistant tool"] * 5, trainer)
    return tokenizer


def make_tokenizer(template: str, stops: tuple[str, ...]) -> PreTrainedTokenizerFast:
    tokenizer = copy.deepcopy(train_base())
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=stops[0], bos_token="<s>")
    special = sorted({*stops, *SPECIAL.findall(template)} - {"<s>"})
    wrapped.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    wrapped.chat_template = template
    return wrapped


def in_parts(message: dict) -> dict:
    """The message with OpenAI's list of parts as its content."""
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def write_model(path: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A small random model with this tokenizer."""
    save_model(LlamaConfig(**SHAPE | {"vocab_size": len(tokenizer)}), path)
    tokenizer.save_pretrained(path)
    return path


def mask(masker: ChatMasker, row: dict) -> TokenizedChat | ValueError:
    (masked,) = masker.mask([read_example(row, find_format(row), is_given=False)])
    return masked


@cache
def make_masker(name: str) -> ChatMasker:
    template, stops = TEMPLATES[name]
    tokenizer = make_tokenizer(template, stops)
    return ChatMasker(tokenizer, stop_token_ids=tokenizer.convert_tokens_to_ids(list(stops)))
