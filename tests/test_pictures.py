"""Images where people look: on the page of samples, in the terminal, and in the quickstart's own pictures."""

import json
import random
import re
from pathlib import Path

import pytest
from ask_pictures import exchange, guess_best
from make_pictures import COLOURS, CORNER, CORNERS, ask_questions, choose_shapes, draw_picture
from PIL import Image
from tiny_data import write_jsonl
from tiny_vision import VISION_MODELS, make_image, make_rows, save_vision_model

from mini_trainer.data.chat.conversation import Located
from mini_trainer.data.chat.masking import ImageExpander
from mini_trainer.data.stores.image_files import load_processor, open_image
from mini_trainer.options import group_options
from mini_trainer.options.tools import ProcessDataOptions
from mini_trainer.process_data import process_data
from mini_trainer.use.pages.preview import THUMBNAIL_SIDE


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: save_vision_model(root, family) for family in ("qwen2.5-vl", "idefics3", "gemma3")}


@pytest.mark.parametrize("family", ("qwen2.5-vl", "idefics3", "gemma3"))
def test_each_image_is_known_by_its_tokens(family, models, tmp_path):
    """Also where images stand side by side, and where one is several tiles."""
    make_image(0).save(tmp_path / "a.png")
    make_image(1).save(tmp_path / "b.png")
    processor = load_processor(str(models[family]))
    expander = ImageExpander(processor, directory=tmp_path)
    place = expander.placeholder
    pictures = expander.expand(Located(f"x {place} y {place}{place} z", []), ("a.png", "b.png", "a.png")).pictures
    tokens = processor.tokenizer.convert_ids_to_tokens(pictures.input_ids)
    is_image = [token == VISION_MODELS[family].tokens[0] for token in tokens]
    assert [is_image[start] and is_image[end - 1] for start, end in pictures.spans] == [True] * 3
    counts = [sum(is_image[start:end]) for start, end in pictures.spans]
    alone = [expander.expand(Located(place, []), (name,)).pictures.num_tokens for name in ("a.png", "b.png")]
    assert counts == [*alone, alone[0]] and sum(counts) == sum(is_image) == pictures.num_tokens


def test_samples_are_shown_with_their_images_in_the_place_of_placeholders(models, tmp_path, capsys):
    """Thumbnails are drawn anew, at most so large, and are all that the page's policy lets it show."""
    rows = make_rows(tmp_path)
    make_image(7).resize((300, 150)).save(tmp_path / "<b>large.png")
    rows.append(rows[0] | {"messages": json.loads(json.dumps(rows[0]["messages"]).replace("0.png", "<b>large.png"))})
    write_jsonl(tmp_path / "rows.jsonl", rows)
    # fmt: off
    given = dict(input_file=str(tmp_path / "rows.jsonl"), output_file=str(tmp_path / "out" / "data.arrow"), num_proc=1,
                 model_name_or_path=str(models["qwen2.5-vl"]), images=True, preview=len(rows),
                 preview_html=str(tmp_path / "page.html"))
    # fmt: on
    (tmp_path / "out").mkdir()
    process_data(group_options(ProcessDataOptions, **given))
    page, said = (tmp_path / "page.html").read_text(), capsys.readouterr().out
    samples = json.loads(re.search(r"<script id=samples type=application/json>(.*?)</script>", page)[1])
    assert "; img-src data:" in page and "<|image_pad|>" not in said + page and "<b>large" not in page
    by_row = {sample["place"].removeprefix("rows.jsonl:"): sample for sample in samples}
    third = [part for part in by_row["3"]["sides"][0]["parts"] if part[4] is not None]
    assert [part[4] for part in third] == [0, 1, 2] and not any(part[1] for part in third)
    for part, name in zip(third, ("0.png", "1.png", None), strict=True):
        image = make_image(9) if name is None else Image.open(tmp_path / name)
        width, height, tokens = map(int, re.search(r"(\d+) x (\d+) pixels, (\d+) tokens", part[0]).groups())
        assert (width, height) == image.size and tokens > 0 and part[0] in said
    assert [name for name, _ in by_row["3"]["images"]] == ["../0.png", "../1.png", "a data: URL"]
    assert "images" not in by_row["2"]
    ((_, large),) = by_row["7"]["images"]
    assert open_image(large, directory=tmp_path).size == (THUMBNAIL_SIDE, THUMBNAIL_SIDE // 2)


def test_pictures_show_what_their_questions_say():
    rng = random.Random(0)
    colours = {colour: Image.new("RGB", (1, 1), colour).getpixel((0, 0)) for colour in COLOURS}
    for _ in range(50):
        shapes = choose_shapes(rng)
        picture = draw_picture(shapes, rng)
        seen = {}
        for corner, (column, row) in CORNERS.items():
            left, top = column * CORNER, row * CORNER
            found = {pixel for _, pixel in picture.crop((left, top, left + CORNER, top + CORNER)).getcolors()}
            for colour in COLOURS:
                if colours[colour] in found:
                    seen[corner] = colour
        assert seen == dict.fromkeys(shapes.corners, shapes.colour)
        answers = dict(ask_questions(shapes, rng))
        assert answers["How many shapes are there?"] == ("one", "two", "three", "four")[len(seen) - 1]
        assert answers["What colour are they?"] in seen.values()
        (asked,) = (question for question in answers if question.startswith("Is one at the"))
        assert answers[asked] == ("yes" if asked.removeprefix("Is one at the ").rstrip("?") in seen else "no")


def test_no_question_keeps_its_picture_when_they_are_exchanged():
    images = [Image.new("RGB", (1, 1), (i, 0, 0)) for i in range(40)]
    exchanged = exchange(images, seed=0)
    assert all(given is not own for given, own in zip(exchanged, images, strict=True))
    assert {id(image) for image in exchanged} == {id(image) for image in images}
    assert guess_best(["a", "a", "a", "b"], ["x", "x", "y", "z"]) == 0.75
