"""Draws pictures with questions that need them, and makes a small randomly initialised model that sees.

    python examples/quickstart/make_pictures.py --output-dir runs/pictures

Each picture has one to four shapes of one kind and colour, each in a corner of its own, of any size that fits and
anywhere in it. `train.jsonl` asks four things of every picture, in any order; `held_out.jsonl` asks one thing of each
of its own pictures. `model` is a LLaVA of 0.8 million parameters, tower included, with its processor and
tokenizer. Knows nothing until it is trained.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from make_tiny_model import train_tokenizer
from PIL import Image, ImageDraw

SIDE = 48  # pixels
CORNER = SIDE // 2  # which is also a patch of the tower: an image is four tokens
SIZES = range(14, 21)  # of a shape
CORNERS = {"top left": (0, 0), "top right": (1, 0), "bottom left": (0, 1), "bottom right": (1, 1)}
COLOURS = ("red", "green", "blue", "orange", "purple", "black")
KINDS = ("circle", "square", "triangle")
NUMBERS = ("one", "two", "three", "four")
BACKGROUND = "white"
PLACE = "<image>"  # in a text, and as each token of an image
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}" + PLACE + "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class PicturesOptions:
    """Draw pictures, write questions on them, and make a small randomly initialised model that sees."""

    output_dir: str
    """Where train.jsonl, held_out.jsonl, their images and the model are written."""
    num_train: int = 3000
    """Pictures to train on, each with four questions."""
    num_held_out: int = 400
    """Other pictures, each with one question."""
    hidden_size: int = 128
    """Width of the language model; the tower has three quarters of it."""
    num_layers: int = 2
    """Blocks of the language model, and of the tower."""
    seed: int = 0
    """Seed of the pictures and of the random weights."""


@dataclass(frozen=True)
class Shapes:
    """What is in a picture."""

    kind: str
    colour: str
    corners: tuple[str, ...]


def choose_shapes(rng: random.Random) -> Shapes:
    corners = rng.sample(list(CORNERS), rng.randint(1, len(CORNERS)))
    return Shapes(rng.choice(KINDS), rng.choice(COLOURS), tuple(corners))


def draw_picture(shapes: Shapes, rng: random.Random) -> Image.Image:
    image = Image.new("RGB", (SIDE, SIDE), BACKGROUND)
    draw = ImageDraw.Draw(image)
    for corner in shapes.corners:
        size = rng.choice(SIZES)
        left, top = (at * CORNER + rng.randint(1, CORNER - size - 2) for at in CORNERS[corner])
        box = (left, top, left + size, top + size)
        match shapes.kind:
            case "circle":
                draw.ellipse(box, fill=shapes.colour)
            case "square":
                draw.rectangle(box, fill=shapes.colour)
            case "triangle":
                draw.polygon([(left, top + size), (left + size, top + size), (left + size // 2, top)], shapes.colour)
    return image


def ask_questions(shapes: Shapes, rng: random.Random) -> list[tuple[str, str]]:
    """A question of each sort, with its answer."""
    corner = rng.choice(list(CORNERS))
    pairs = [
        ("How many shapes are there?", NUMBERS[len(shapes.corners) - 1]),
        ("What colour are they?", shapes.colour),
        ("What are they?", f"{shapes.kind}s"),
        (f"Is one at the {corner}?", "yes" if corner in shapes.corners else "no"),
    ]
    return rng.sample(pairs, len(pairs))


def make_row(name: str, pairs: Sequence[tuple[str, str]]) -> dict:
    """A conversation on the picture of that name."""
    messages: list[dict] = []
    for question, answer in pairs:
        content = question if messages else [{"type": "image", "image": name}, {"type": "text", "text": question}]
        messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def write_rows(output_dir: Path, name: str, *, num_pictures: int, num_questions: int, rng: random.Random) -> list[str]:
    """Draws pictures and writes their rows. Returns all texts, each after who says it."""
    (output_dir / name).mkdir(parents=True, exist_ok=True)
    rows, texts = [], []
    for i in range(num_pictures):
        shapes = choose_shapes(rng)
        draw_picture(shapes, rng).save(output_dir / name / f"{i}.png")
        pairs = ask_questions(shapes, rng)[:num_questions]
        rows.append(json.dumps(make_row(f"{name}/{i}.png", pairs)) + "\n")
        texts += [f"{role}\n{text}" for pair in pairs for role, text in zip(("user", "assistant"), pair, strict=True)]
    (output_dir / f"{name}.jsonl").write_text("".join(rows))
    return texts


def save_vision_model(
    output_dir: Path, tokenizer, *, hidden_size: int, num_layers: int, seed: int, patch_size: int = CORNER
) -> None:
    """Writes a randomly initialised LLaVA for `tokenizer`'s vocabulary, its processor, and the tokenizer."""
    import torch
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    tokenizer.add_special_tokens({"additional_special_tokens": [PLACE]})
    vision = CLIPVisionConfig(
        hidden_size=hidden_size * 3 // 4,
        intermediate_size=hidden_size * 3 // 2,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        image_size=SIDE,
        patch_size=patch_size,
    )
    text = dict(
        model_type="llama",
        vocab_size=-(-len(tokenizer) // 64) * 64,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    config = LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids(PLACE),
        vision_feature_layer=-1,
    )
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():  # as large as what pixels become: else a random tower hardly knows where its patches are
        next(param for name, param in model.named_parameters() if "position_embedding" in name).mul_(25)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = (
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    model.save_pretrained(output_dir)
    images = LlavaImageProcessorPil(
        size=dict(shortest_edge=SIDE),
        crop_size=dict(height=SIDE, width=SIDE),
        image_mean=[1.0] * 3,  # the background is nothing
        image_std=[0.5] * 3,
    )
    LlavaProcessor(
        images,
        tokenizer,
        patch_size=patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=PLACE,
        chat_template=TEMPLATE,
    ).save_pretrained(output_dir)


if __name__ == "__main__":
    options = tyro.cli(PicturesOptions)
    output_dir, rng = Path(options.output_dir), random.Random(options.seed)
    texts = write_rows(output_dir, "train", num_pictures=options.num_train, num_questions=4, rng=rng)
    write_rows(output_dir, "held_out", num_pictures=options.num_held_out, num_questions=1, rng=rng)
    tokenizer = train_tokenizer(texts, vocab_size=512, chat_template=TEMPLATE)
    save_vision_model(
        output_dir / "model",
        tokenizer,
        hidden_size=options.hidden_size,
        num_layers=options.num_layers,
        seed=options.seed,
    )
    print(
        f"wrote {options.num_train} pictures to train on, {options.num_held_out} held out and a model to {output_dir}"
    )
