"""Tiny random models that see, with their processors, and rows with generated images."""

import base64
import importlib.util
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_data import write_jsonl
from tiny_models import SHAPE, save_tokenizer
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mini_trainer.options import group_options
from mini_trainer.options.tools import ProcessDataOptions
from mini_trainer.process_data import process_data

VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=16)
QWEN_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
GLM_TOKENS = ("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>",
              "<|end_of_video|>")  # fmt: skip
QWEN_IMAGES = dict(image_processor_type="Qwen2VLImageProcessor", patch_size=4, temporal_patch_size=2, merge_size=2,
                   min_pixels=128, max_pixels=512)  # fmt: skip
QWEN_VISION = dict(depth=2, hidden_size=32, num_heads=2, patch_size=4)
TILES = [[16, 32], [32, 16], [32, 32]]
MROPE = dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])
QWEN3 = dict(head_dim=8, rope_parameters=MROPE | dict(mrope_interleaved=True))
QWEN3_VISION = dict(intermediate_size=48, out_hidden_size=32, num_position_embeddings=16)
DEEPSTACK = dict(deepstack_visual_indexes=[0])
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
HYBRID = dict(
    head_dim=16, layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4, linear_num_key_heads=2,
    linear_key_head_dim=8, linear_value_head_dim=8,
    rope_parameters=MROPE | dict(mrope_interleaved=True, partial_rotary_factor=0.5),
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for part in m['content'] %}{% if part['type'] == 'image' %}PLACE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A kind of model that sees, tiny."""

    model_type: str
    tokens: tuple[str, ...]  # the first one stands for a part of an image
    images: dict[str, Any]  # preprocessor_config.json
    processor: dict[str, Any]  # processor_config.json
    config: dict[str, Any]  # beside the ids of tokens, which names in it may say: {"image_token_id": "<image>"}
    place: str | None = None  # how texts have an image; None: as the first token
    named: dict[str, str] = field(default_factory=dict)  # tokens by names that the tokenizer knows


def make_text(**changes: Any) -> dict[str, Any]:
    return SHAPE | dict(model_type="llama") | changes


def make_clip(**changes: Any) -> dict[str, Any]:
    return VISION | dict(model_type="clip_vision_model", patch_size=4, projection_dim=32) | changes


def make_siglip(**changes: Any) -> dict[str, Any]:
    return VISION | dict(model_type="siglip_vision_model", patch_size=4, vision_use_head=False) | changes


def qwen(model_type: str, processor: str, text: dict[str, Any], vision: dict[str, Any]) -> Family:
    image, video, start, end = QWEN_TOKENS
    return Family(
        model_type, QWEN_TOKENS, QWEN_IMAGES, dict(processor_class=processor),
        dict(text_config=SHAPE | text, vision_config=QWEN_VISION | vision, image_token_id=image, video_token_id=video,
             vision_start_token_id=start, vision_end_token_id=end),
        place=f"{start}{image}{end}",
    )  # fmt: skip


def glm(model_type: str, name: str) -> Family:
    image, video, *marks = GLM_TOKENS
    text = SHAPE | dict(model_type="glm4v_text", rope_parameters=MROPE | dict(partial_rotary_factor=1.0))
    vision = QWEN_VISION | dict(model_type="glm4v_vision", intermediate_size=48, out_hidden_size=32, image_size=16)
    names = ("image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id")
    return Family(
        model_type, GLM_TOKENS,
        dict(image_processor_type=f"{name}ImageProcessor", patch_size=4, temporal_patch_size=2, merge_size=2,
             size=dict(shortest_edge=128, longest_edge=1024)),
        dict(processor_class=f"{name}Processor"),
        dict(text_config=text, vision_config=vision, image_token_id=image, video_token_id=video)
        | dict(zip(names, marks, strict=True)),
        place=f"{marks[0]}{image}{marks[1]}",
    )  # fmt: skip


def llava(model_type: str, images: str, **config: Any) -> Family:
    tiles = {name: value for name, value in config.items() if name == "image_grid_pinpoints"}
    return Family(
        model_type, ("<image>",),
        dict(image_processor_type=f"{images}ImageProcessor", size=dict(shortest_edge=16),
             crop_size=dict(height=16, width=16), **tiles),
        dict(processor_class="LlavaNextProcessor" if tiles else "LlavaProcessor", patch_size=4,
             vision_feature_select_strategy="default", num_additional_image_tokens=1),
        dict(text_config=make_text(), vision_config=make_clip(), image_token_index="<image>", **config),
    )  # fmt: skip


def pixtral(model_type: str, processor: dict[str, Any], **config: Any) -> Family:
    return Family(
        model_type, ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        dict(image_processor_type="PixtralImageProcessor", patch_size=4, size=dict(longest_edge=24)),
        dict(processor_class="PixtralProcessor", patch_size=4, **processor),
        dict(text_config=make_text(model_type="mistral"), image_token_index="[IMG]", **config,
             vision_config=VISION | dict(model_type="pixtral", image_size=32, patch_size=4)),
    )  # fmt: skip


def idefics(model_type: str, name: str) -> Family:
    return Family(
        model_type, ("<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>"),
        dict(image_processor_type=f"{name}ImageProcessor", size=dict(longest_edge=32),
             max_image_size=dict(longest_edge=16)),
        dict(processor_class=f"{name}Processor", image_seq_len=4),
        dict(text_config=make_text(), vision_config=VISION | dict(patch_size=4), image_token_id="<image>",
             scale_factor=2),
    )  # fmt: skip


def gemma4(**changes: Any) -> Family:
    text = dict(head_dim=8, sliding_window=5, layer_types=["sliding_attention", "full_attention"])
    vision = VISION | dict(
        patch_size=4, num_key_value_heads=2, head_dim=16, pooling_kernel_size=3, position_embedding_size=64
    )
    return Family(
        "gemma4", ("<img>", "<boi>", "<eoi>", "<audio>", "<boa>", "<eoa>"),
        dict(image_processor_type="Gemma4ImageProcessor", patch_size=4, max_soft_tokens=70, pooling_kernel_size=3),
        dict(processor_class="Gemma4Processor", image_seq_length=70),
        dict(text_config=SHAPE | text | changes, vision_config=vision, image_token_id="<img>", boi_token_id="<boi>",
             eoi_token_id="<eoi>", audio_token_id="<audio>"),
        named=dict(boi_token="<boi>", image_token="<img>", eoi_token="<eoi>", audio_token="<audio>", boa_token="<boa>",
                   eoa_token="<eoa>"),
    )  # fmt: skip


VISION_MODELS = {
    "qwen2-vl": qwen("qwen2_vl", "Qwen2VLProcessor", dict(rope_parameters=MROPE),
                     dict(embed_dim=32, mlp_ratio=2)),
    "qwen2.5-vl": qwen("qwen2_5_vl", "Qwen2_5_VLProcessor", dict(rope_parameters=MROPE),
                       dict(intermediate_size=48, out_hidden_size=32, fullatt_block_indexes=[1], window_size=16)),
    "qwen3-vl": qwen("qwen3_vl", "Qwen3VLProcessor", QWEN3, QWEN3_VISION | DEEPSTACK),
    "qwen3-vl-moe": qwen("qwen3_vl_moe", "Qwen3VLProcessor", QWEN3 | EXPERTS, QWEN3_VISION | DEEPSTACK),
    "qwen3.5": qwen("qwen3_5", "Qwen3VLProcessor", HYBRID, QWEN3_VISION),
    "qwen3.5-moe": qwen("qwen3_5_moe", "Qwen3VLProcessor",
                        HYBRID | EXPERTS | dict(shared_expert_intermediate_size=16), QWEN3_VISION),
    "glm-4v": glm("glm4v", "Glm4v"),
    "glm-4.6v": glm("glm46v", "Glm46V"),
    "llava": llava("llava", "Llava"),
    "vip-llava": llava("vipllava", "CLIP", vision_feature_layers=[-2, -1]),
    "llava-next": llava("llava_next", "LlavaNext", image_grid_pinpoints=TILES),
    "llava-onevision": Family(
        "llava_onevision", ("<image>", "<video>"),
        dict(image_processor_type="LlavaOnevisionImageProcessor", size=dict(height=16, width=16),
             image_grid_pinpoints=TILES),
        dict(processor_class="LlavaOnevisionProcessor", num_image_tokens=16, vision_feature_select_strategy="full"),
        dict(text_config=make_text(), vision_config=make_siglip(), image_token_index="<image>",
             video_token_index="<video>", image_grid_pinpoints=TILES),
    ),
    "internvl": Family(
        "internvl", ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"),
        dict(image_processor_type="GotOcr2ImageProcessor", size=dict(height=16, width=16), max_patches=3),
        dict(processor_class="InternVLProcessor", image_seq_length=4),
        dict(text_config=make_text(), image_token_id="<IMG_CONTEXT>", image_seq_length=4,
             vision_config=VISION | dict(image_size=[16, 16], patch_size=[4, 4])),
        named=dict(start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>",
                   video_token="<video>"),
    ),
    "mistral3": pixtral("mistral3", dict(spatial_merge_size=2)),
    "pixtral": pixtral("llava", {}, vision_feature_layer=-1, vision_feature_select_strategy="full"),
    "idefics2": Family(
        "idefics2", ("<image>", "<fake_token_around_image>", "<end_of_utterance>"),
        dict(image_processor_type="Idefics2ImageProcessor", size=dict(shortest_edge=12, longest_edge=16)),
        dict(processor_class="Idefics2Processor", image_seq_len=4),
        dict(text_config=make_text(model_type="mistral"), vision_config=VISION | dict(patch_size=4),
             perceiver_config=dict(resampler_n_latents=4, resampler_depth=1, resampler_n_heads=2,
                                   resampler_head_dim=16, num_key_value_heads=1),
             image_token_id="<image>"),
    ),
    "idefics3": idefics("idefics3", "Idefics3"),
    "smolvlm": idefics("smolvlm", "SmolVLM"),
    "gemma3": Family(
        "gemma3", ("<img>", "<boi>", "<eoi>"),
        dict(image_processor_type="Gemma3ImageProcessor", size=dict(height=16, width=16)),
        dict(processor_class="Gemma3Processor", image_seq_length=4),
        dict(text_config=SHAPE | dict(head_dim=8, sliding_window=5,
                                      layer_types=["sliding_attention", "full_attention"]),
             image_token_index="<img>", vision_config=VISION | dict(patch_size=4), mm_tokens_per_image=4),
        place="<boi>",
        named=dict(boi_token="<boi>", image_token="<img>", eoi_token="<eoi>"),
    ),
    "gemma4": gemma4(hidden_size_per_layer_input=8, vocab_size_per_layer_input=SHAPE["vocab_size"]),
    "gemma4-both-ways": gemma4(hidden_size_per_layer_input=0, use_bidirectional_attention="vision"),
    "llama4": Family(
        "llama4", ("<|patch|>", "<|image|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>",
                   "<|tile_y_separator|>"),
        dict(image_processor_type="Llama4ImageProcessor", size=dict(height=16, width=16), max_patches=4),
        dict(processor_class="Llama4Processor", patch_size=4),
        # The last of 4 layers has no positions; the others attend in chunks shorter than an image.
        dict(text_config=SHAPE | dict(num_hidden_layers=4, head_dim=8, intermediate_size_mlp=48, num_local_experts=2,
                                      attention_chunk_size=6, floor_scale=4),
             vision_config=VISION | dict(patch_size=4, intermediate_size=128, vision_output_dim=24,
                                         projector_input_dim=24, projector_output_dim=24),
             image_token_index="<|patch|>", boi_token_index="<|image_start|>", eoi_token_index="<|image_end|>"),
        place="<|image|>",
    ),
    "paligemma": Family(
        "paligemma", ("<image>",),
        dict(image_processor_type="SiglipImageProcessor", size=dict(height=16, width=16), image_seq_length=16),
        dict(processor_class="PaliGemmaProcessor"),
        dict(text_config=make_text(model_type="gemma", head_dim=8), vision_config=make_siglip(),
             image_token_index="<image>", projection_dim=32, hidden_size=32),
        named=dict(image_token="<image>"),
    ),
    "aya-vision": Family(
        "aya_vision", ("<|IMG_PATCH|>", "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>"),
        dict(image_processor_type="GotOcr2ImageProcessor", size=dict(height=16, width=16), max_patches=3),
        dict(processor_class="AyaVisionProcessor", patch_size=4, img_size=16, downsample_factor=2),
        dict(text_config=SHAPE | dict(model_type="cohere2", head_dim=8), vision_config=make_siglip(),
             image_token_index="<|IMG_PATCH|>"),
        place="<image>",
    ),
}  # fmt: skip

# Families that are refused at the start of a run, or when rows are tokenized.
NOT_EXACT = ("idefics2", "aya-vision", "paligemma")
# Packages that a family's own processor needs, and we do not.
NEEDED = {"llama4": "torchvision", "mistral3": "torchvision", "pixtral": "torchvision", "smolvlm": "num2words"}


def exact_families(always: tuple[str, ...]) -> list:
    """The families that train, for parametrize: these, and as wide cases all others."""
    return [
        *always,
        *(
            pytest.param(name, marks=[pytest.mark.wide, *lacking(NEEDED.get(name))])
            for name in VISION_MODELS
            if name not in (*always, *NOT_EXACT)
        ),
    ]


def lacking(package: str | None) -> list[pytest.MarkDecorator]:
    is_there = package is None or importlib.util.find_spec(package) is not None
    return [] if is_there else [pytest.mark.skip(f"its processor needs the package {package}")]


def name_ids(config: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The config with ids in the place of tokens."""
    return {
        key: tokenizer.convert_tokens_to_ids(value) if key.endswith(("_token_id", "_token_index")) else value
        for key, value in config.items()
    }


def save_vision_model(root: Path, family: str) -> Path:
    """A model of the family, its tokenizer and what prepares its images."""
    kind, path = VISION_MODELS[family], save_tokenizer(root / family)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": list(kind.tokens)})
    tokenizer.chat_template = TEMPLATE.replace("PLACE", kind.place or kind.tokens[0])
    tokenizer.save_pretrained(path)
    if kind.named:
        AutoTokenizer.from_pretrained(path, extra_special_tokens=kind.named).save_pretrained(path)
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind.model_type, **name_ids(kind.config, tokenizer))
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    model.save_pretrained(path)
    normal = dict(image_mean=[0.5] * 3, image_std=[0.5] * 3)
    (path / "preprocessor_config.json").write_text(json.dumps(kind.images | normal))
    (path / "processor_config.json").write_text(json.dumps(kind.processor))
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


def tokenize(rows: list[dict], model: Path, directory: Path, **options: object) -> Path:
    directory.mkdir(exist_ok=True)
    write_jsonl(directory / "rows.jsonl", rows)
    given = dict(input_file=str(directory / "rows.jsonl"), output_file=str(directory / "data.arrow"), num_proc=1,
                 model_name_or_path=str(model), images=True, preview=0)  # fmt: skip
    process_data(group_options(ProcessDataOptions, **given | options))
    return directory / "data.arrow"


def load(path: Path) -> PreTrainedModel:
    model, report = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()
