"""Tiny random models that see, with their processors, and rows with generated images."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tiny_models import SHAPE, save_tokenizer
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    CLIPVisionConfig,
    Gemma3Config,
    Idefics3Config,
    LlavaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
)

VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=16)
# As texts have it where an image stands, and as they have each of its tokens; others of the family's.
TOKENS = {
    "qwen2.5-vl": ("<|image_pad|>", "<|image_pad|>", ("<|video_pad|>",)),
    "llava": ("<image>", "<image>", ()),
    "idefics3": ("<image>", "<image>", ("<fake_token_around_image>", "<global-img>", "<row_1_col_1>")),
    "gemma3": ("<boi>", "<img>", ("<eoi>",)),
}
NORMAL = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)
IMAGE_SETTINGS = {
    "qwen2.5-vl": dict(image_processor_type="Qwen2VLImageProcessor", patch_size=4, temporal_patch_size=2, merge_size=2,
                       min_pixels=128, max_pixels=512),
    "llava": dict(image_processor_type="LlavaImageProcessor", size=dict(shortest_edge=16),
                  crop_size=dict(height=16, width=16)),
    "idefics3": dict(image_processor_type="Idefics3ImageProcessor", size=dict(longest_edge=32),
                     max_image_size=dict(longest_edge=16)),
    "gemma3": dict(image_processor_type="Gemma3ImageProcessor", size=dict(height=16, width=16)),
}  # fmt: skip
PROCESSOR_SETTINGS = {
    "qwen2.5-vl": dict(processor_class="Qwen2_5_VLProcessor"),
    "llava": dict(processor_class="LlavaProcessor", patch_size=4, vision_feature_select_strategy="default",
                  num_additional_image_tokens=1),
    "idefics3": dict(processor_class="Idefics3Processor", image_seq_len=4),
    "gemma3": dict(processor_class="Gemma3Processor", image_seq_length=4),
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}PLACE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_config(family: str, image: int, video: int) -> PreTrainedConfig:
    text = SHAPE | dict(model_type="llama")
    match family:
        case "qwen2.5-vl":
            rope = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
            return Qwen2_5_VLConfig(
                text_config=SHAPE | dict(rope_parameters=rope), image_token_id=image, video_token_id=video,
                vision_config=dict(depth=2, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=32,
                                   patch_size=4, fullatt_block_indexes=[1], window_size=16),
            )  # fmt: skip
        case "llava":
            vision = CLIPVisionConfig(**VISION, patch_size=4, projection_dim=32)
            return LlavaConfig(text_config=text, vision_config=vision, image_token_index=image)
        case "idefics3":
            return Idefics3Config(
                text_config=text, vision_config=VISION | dict(patch_size=4), image_token_id=image, scale_factor=2
            )
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3Config(
        text_config=SHAPE | dict(head_dim=8, sliding_window=5, layer_types=kinds), image_token_index=image,
        vision_config=VISION | dict(patch_size=4), mm_tokens_per_image=4,
    )  # fmt: skip


def save(tokenizer: PreTrainedTokenizerBase, path: Path) -> Path:
    tokenizer.save_pretrained(path)
    return path


def save_seeing(root: Path, family: str) -> Path:
    """A model of the family, its tokenizer and what prepares its images."""
    path = save_tokenizer(root / family)
    place, token, others = TOKENS[family]
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": [*dict.fromkeys((place, token)), *others]})
    tokenizer.chat_template = TEMPLATE.replace("PLACE", place)
    if family == "gemma3":
        named = dict(boi_token=place, image_token=token, eoi_token=others[0])
        tokenizer = AutoTokenizer.from_pretrained(save(tokenizer, path), extra_special_tokens=named)
    save(tokenizer, path)
    ids = tokenizer.convert_tokens_to_ids([token, *others])
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(make_config(family, ids[0], ids[-1]), dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    model.save_pretrained(path)
    settings = IMAGE_SETTINGS[family] | NORMAL
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    (path / "processor_config.json").write_text(json.dumps(PROCESSOR_SETTINGS[family]))
    return path


def make_image(seed: int) -> Image.Image:
    random = np.random.default_rng(seed)
    height, width = random.integers(12, 40, 2)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))


def as_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def make_rows(directory: Path) -> list[dict]:
    """Text alone, an image, several in a turn and in several turns; from files, data: URLs and columns."""
    for i in range(4):
        make_image(i).save(directory / f"{i}.png")

    def say(*turns: object) -> dict:
        roles = ("user", "assistant")
        return {"messages": [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]}

    def text(words: str) -> dict:
        return {"type": "text", "text": words}

    file = {"type": "image", "image": "0.png"}
    url = {"type": "image_url", "image_url": {"url": as_url(make_image(9))}}
    return [
        say([file, text("What is this?")], "noise"),
        say("How are you?", "well, thanks"),
        say([text("one "), file, text(" and two "), {"type": "image", "path": "1.png"}], "both", [url], "a third"),
        say("<image>\nand <image>, compare", "not the same") | {"images": ["2.png", {"path": "3.png"}]},
        say([{"type": "image"}, text("x")], "y") | {"image": "1.png"},
        say("count to five", "1 2 3 4 5"),
    ]
