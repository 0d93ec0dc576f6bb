"""Exports of every kind, made by this program's own commands from tiny random models whose shapes all engines take."""

from functools import cached_property
from pathlib import Path

import transformers as hf
from forked import succeed
from make_tiny_model import train_tokenizer
from processes import flags
from safetensors.torch import load_file, save_file
from tiny_data import write_jsonl
from tiny_models import save_moved
from tiny_vision import make_image, save_vision_model

from mini_trainer.data.stores.older_keys import rewrite_config

# Heads of 32 numbers: vLLM's attention on the CPU has no smaller ones. Rows of 64 and 96: whole blocks of q8_0.
SHAPE = dict(
    vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, max_position_embeddings=512, bos_token_id=None, eos_token_id=2, pad_token_id=0,
    initializer_range=0.2,
)  # fmt: skip
# Short contexts to scale from, so that a reader that misses a base or a scaling answers otherwise at once.
LLAMA3 = dict(rope_type="llama3", rope_theta=7e3, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=32)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=2e3, factor=4.0, original_max_position_embeddings=32)
LINEAR = dict(rope_type="linear", rope_theta=3e3, factor=2.0)
PLAIN = dict(rope_type="default", rope_theta=3e2)
GEMMA = dict(full_attention=LINEAR, sliding_attention=PLAIN)
FAMILIES: dict[str, hf.PreTrainedConfig] = {
    "llama": hf.LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "mistral": hf.MistralConfig(**SHAPE, rope_parameters=PLAIN),
    "qwen2": hf.Qwen2Config(**{name: value for name, value in SHAPE.items() if name != "head_dim"},
                            rope_parameters=LINEAR),
    "qwen3": hf.Qwen3Config(**SHAPE, tie_word_embeddings=True, rope_parameters=YARN),
    "gemma3": hf.Gemma3TextConfig(
        **SHAPE | dict(num_hidden_layers=6, query_pre_attn_scalar=32), sliding_window=32, rope_parameters=GEMMA
    ),
    "qwen3_moe": hf.Qwen3MoeConfig(
        **SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True,
        rope_parameters=PLAIN,
    ),
    "smollm3": hf.SmolLM3Config(
        **SHAPE | dict(num_hidden_layers=4), no_rope_layer_interval=4, rope_parameters=PLAIN
    ),
}  # fmt: skip
COUNTING = "one two three four five six seven eight nine ten eleven twelve"
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
RANKS = (4, 16, 64)


def make_chats() -> list[dict]:
    """Chats as a user has them: to count to a number in words, and the answer."""
    words = COUNTING.split()
    return [
        {"messages": [{"role": "user", "content": f"Count to {word}."},
                      {"role": "assistant", "content": " ".join(words[: i + 1])}]}
        for i, word in enumerate(words)
    ]  # fmt: skip


def ask_chats() -> list[list[dict[str, str]]]:
    """The chats that every engine answers: with accents, an earlier turn, a system message."""
    counted = make_chats()[4]["messages"]
    return [
        [{"role": "user", "content": "Count to seven."}],
        [{"role": "user", "content": "Say 42, naïvely: 数!\n\tDone?"}],
        [*counted, {"role": "user", "content": "And now to three."}],
        [{"role": "system", "content": "You count."}, {"role": "user", "content": "Count to ten."}],
    ]


class Exports:
    """Paths of exports by their kind, each made when it is first asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.made: dict[str, Path] = {}

    @cached_property
    def chats(self) -> Path:
        return write_jsonl(self.folder / "chats.jsonl", make_chats())

    def base(self, family: str = "llama") -> Path:
        """A random model of a family, with its tokenizer."""
        path = self.folder / f"base_{family}"
        if not path.is_dir():
            hf.set_seed(0)
            save_moved(hf.AutoModelForCausalLM.from_config(FAMILIES[family]), path)
            rewrite_config(path / "config.json", FAMILIES[family])  # as a published model has them
            train_tokenizer([COUNTING] * 9, vocab_size=300).save_pretrained(path)
        return path

    def __getitem__(self, kind: str) -> Path:
        if kind not in self.made:
            self.made[kind] = self.make(kind)
        return self.made[kind]

    def make(self, kind: str) -> Path:
        """A kind is one of those below, or a family, with "_bf16" for an export in that dtype."""
        name, dtype = (kind.removesuffix("_bf16"), "bfloat16" if kind.endswith("_bf16") else "float32")
        chats = {"input_file": self.chats, "export_dtype": dtype}
        if name == "full":
            return self.train(kind, **chats)
        if name in FAMILIES:
            return self.train(kind, model_name_or_path=self.base(name), **chats)
        if name == "osft":
            osft = dict(osft=True, osft_unfreeze_rank_ratio=0.5, osft_cache_dir=self.folder / "osft")
            return self.train(kind, **osft, **chats)
        if name == "grown":
            return self.train(kind, chat_template="llama3", **chats)
        if name.startswith("lora_r"):
            rank = int(name.removeprefix("lora_r"))
            return self.train(kind, lora=True, lora_rank=rank, lora_alpha=2 * rank, learning_rate=2e-2, **chats)
        if name == "lora_merged":
            output = self.folder / kind
            run("mini_trainer/tools/merge_adapter.py", adapter=self["lora_r16"], output_dir=output, export_dtype=dtype)
            return output
        if name == "classifier":
            kinds = {word: "long" if len(word) > 4 else "short" for word in COUNTING.split()}
            rows = [{"text": f"{word} is {kind}", "label": kind} for word, kind in kinds.items()]
            rows = write_jsonl(self.folder / "labelled.jsonl", rows)
            return self.train(kind, input_file=rows, format="classification", export_dtype=dtype,
                              objective="sequence-classification")  # fmt: skip
        if name == "reward":
            words = COUNTING.split()
            rows = [{"prompt": f"Count to {word}.", "chosen": f"{word}!", "rejected": "no"} for word in words]
            rows = write_jsonl(self.folder / "pairs.jsonl", rows)
            return self.train(kind, input_file=rows, format="preference", objective="reward", export_dtype=dtype)
        if name == "vision":
            return self.train(kind, model_name_or_path=self.see(), input_file=self.pictures, images=True,
                              export_dtype=dtype)  # fmt: skip
        raise ValueError(f"{kind}: is no kind of export")

    def see(self) -> Path:
        """A model that sees, with the names that published ones have."""
        path = self.folder / "llava"
        file = path / "model.safetensors"
        if not path.is_dir():
            save_vision_model(self.folder, "llava")
            rewrite_config(path / "config.json", hf.AutoConfig.from_pretrained(path))
            tensors = load_file(file).items()
            names = ("vision_tower.", "vision_tower.vision_model.")
            published = {name.replace(*names): tensor for name, tensor in tensors}
            save_file(published, file, metadata={"format": "pt"})
        return path

    @cached_property
    def pictures(self) -> Path:
        """Chats about images, and the images."""
        for i in range(4):
            make_image(i).save(self.folder / f"{i}.png")
        asked = [[{"type": "image", "image": f"{i}.png"}, {"type": "text", "text": "What?"}] for i in range(4)]
        return write_jsonl(self.folder / "pictures.jsonl", [
            {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "noise"}]}
            for content in asked
        ])  # fmt: skip

    def train(self, kind: str, **options: object) -> Path:
        """A few steps of train.py; the export."""
        given = dict(model_name_or_path=self.base(), output_dir=self.folder / kind, batch_size=4, max_steps=6,
                     max_tokens_per_gpu=512, learning_rate=2e-3,
                     data_cache_dir=self.folder / "data")  # fmt: skip
        run("train.py", **given | options)
        return self.folder / kind / "hf_format" / "latest"


def run(script: str, **options: object) -> None:
    succeed(0, script, *flags(**options))
