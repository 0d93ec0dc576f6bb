"""Samples that a model draws itself: where a chat begins by every chat template, what is drawn, `train --keep self`."""

import json
import sys
from pathlib import Path

import pytest
from processes import run
from small_runs import read_rows
from stock_templates import TEMPLATES, make_tokenizer
from tiny_data import read_lines, write_counting_chats
from tiny_models import FAMILIES, change_json, save_model, save_tokenizer

from mini_trainer.data.stores.tokenizers import CHATML
from mini_trainer.distributed.world import World
from mini_trainer.options.tools import EngineOptions, SamplingOptions
from mini_trainer.use.inference.drawing import CHAT, TEXT, WITHOUT_SYSTEM, Drawn, draw_samples, find_openings
from mini_trainer.use.inference.hf_engine import HFEngine
from mini_trainer.use.inference.loading import find_answering_model

WITH_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}" + CHATML
ONLY_TEXT = {*(f"trl:{name}{end}" for name in ("idefics3", "llava_next", "smolvlm") for end in ("", "_training"))}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_begins_elsewhere_than_a_users_would(name):
    """For every template; those of images alone, or with traits of their own, have no such chat."""
    tokenizer = make_tokenizer(*TEMPLATES[name])
    openings = {one.kind: one for one in find_openings(tokenizer)}
    assert openings.pop(TEXT).ids == [tokenizer.bos_token_id]
    if CHAT not in openings:
        assert name in ONLY_TEXT | {"a line break before the next turn", "only with tools"}
        return
    whole = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Why?"}], add_generation_prompt=True, tokenize=False
    )
    first, bridge = (tokenizer.decode(ids) for ids in (openings[CHAT].ids, openings[CHAT].bridge))
    assert f"{first}Why?{bridge}" == whole
    if (alone := openings.get(WITHOUT_SYSTEM)) is not None:
        turn = tokenizer.decode(alone.ids).removeprefix("<s>")
        assert first.endswith(turn) and len(first) > len(turn) and "user" in turn.lower()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """One that often ends its turns, with a template that has a system line."""
    path = save_tokenizer(save_model(FAMILIES["llama"], tmp_path_factory.mktemp("models") / "m"))
    (path / "chat_template.jinja").write_text(WITH_SYSTEM)
    change_json(path / "generation_config.json", eos_token_id=find_stop(path))
    return path


def find_stop(path: Path) -> int:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path).convert_tokens_to_ids("<|im_end|>")


def draw(model: Path, world: World, num: int, *, batch_size: int = 64, seed: int = 0) -> list[Drawn]:
    sampling = SamplingOptions(max_new_tokens=60, temperature=1.0, seed=seed)
    engine_options = EngineOptions(batch_size=batch_size, dtype="float32")
    found = find_answering_model(str(model))
    return draw_samples(HFEngine(found, str(model), engine_options, sampling, device=world.device), num)


def test_words_of_the_template_count_as_drawn(model, world):
    """And a question that has ended gets an answer."""
    samples, stop = draw(model, world, 48), find_stop(model)
    tokenizer = find_answering_model(str(model)).tokenizer
    openings = {one.kind: one for one in find_openings(tokenizer)}
    answered = 0
    for i, sample in enumerate(samples):
        opening = [*openings.values()][i % len(openings)]
        assert (sample.kind, sample.input_ids[: len(opening.ids)]) == (opening.kind, opening.ids)
        said = [token for token, drawn in zip(sample.input_ids, sample.is_drawn, strict=True) if not drawn]
        ended = [k for k, token in enumerate(sample.input_ids) if token == stop and sample.is_drawn[k]]
        if opening.kind != TEXT and ended:
            answered += 1
            after = sample.input_ids[ended[0] + 1 :]
            assert (
                said == [*opening.ids, *opening.bridge[1:]] and after[: len(opening.bridge) - 1] == opening.bridge[1:]
            )
            assert sample.is_drawn[-1] and len(after) >= len(opening.bridge)
        else:
            assert said == opening.ids
    assert answered > 2 and {sample.kind for sample in samples} == {CHAT, WITHOUT_SYSTEM, TEXT}


def test_a_sample_depends_on_its_batch(model, world):
    samples = draw(model, world, 9)
    assert samples == draw(model, world, 9, batch_size=2) == draw(model, world, 12)[:9]
    assert samples != draw(model, world, 9, seed=1) and len({tuple(one.input_ids) for one in samples}) == 9


@pytest.mark.slow
def test_a_run_does_not_find_what_its_model_has_drawn(model, tmp_path):
    """The launcher draws once; train.py alone names the command. OSFT calibrates on the same samples. The data may have
    tokens that the model did not."""
    write_counting_chats(tmp_path / "chats.jsonl")
    words = [
        *("--model-name-or-path", str(model), "--input-file", str(tmp_path / "chats.jsonl"), "--data-cache-dir"),
        *(str(tmp_path / "cache"), "--max-steps", "2", "--batch-size", "6", "--learning-rate", "1e-2"),
        *("--compute-dtype", "float32"),
    ]
    kept = ["--keep", "self", str(tmp_path / "chats.jsonl"), "--add-special-tokens", "<|new|>"]
    refused = run([sys.executable, "train.py", *words, *kept, "--output-dir", str(tmp_path / "alone")])
    assert refused.returncode == 2 and "mini_trainer draw-samples --model-name-or-path" in refused.stderr
    launch = [sys.executable, "-m", "mini_trainer", "train", *words]
    drawn = run([*launch, *kept, "--output-dir", str(tmp_path / "one")])
    assert drawn.returncode == 0, drawn.stderr
    (samples,) = (tmp_path / "cache" / "drawn").glob("*/samples.jsonl")
    about = json.loads(Path(f"{samples}.meta.json").read_text())
    assert about["drawn_with"] == {"num_samples": 256, "max_new_tokens": 128, "seed": 0, "temperature": 1.0}
    rows = read_lines(samples)
    assert len(rows) == 256 and all(row["text"] and len(row["labels"]) == len(row["input_ids"]) for row in rows)
    assert f"wrote 256 samples (86 {CHAT}, 85 {WITHOUT_SYSTEM}, 85 {TEXT};" in drawn.stdout
    method = ["--osft", "--osft-basis", "activations", "--osft-unfreeze-rank-ratio", "0.5"]
    method += ["--osft-cache-dir", str(tmp_path / "osft")]
    again = run([*launch, *method, "--osft-calibration-data", "self", "--output-dir", str(tmp_path / "two")])
    assert again.returncode == 0, again.stderr
    assert f"samples of {samples}, " in again.stderr and "wrote 256 samples" not in again.stdout
    assert [row["num_kept_tokens"] > 0 for row in read_rows(tmp_path / "one")] == [True, True]
    assert (tmp_path / "one" / "kept_samples.jsonl").read_bytes() == samples.read_bytes()
    assert json.loads((tmp_path / "one" / "kept_samples.jsonl.meta.json").read_text()) == about
    done = run([*launch, *kept, "--output-dir", str(tmp_path / "one")])
    assert done.returncode == 0 and done.stderr.startswith("done already"), done.stderr
    (tmp_path / "others.jsonl").write_bytes((tmp_path / "chats.jsonl").read_bytes())
    other = [*kept[:2], str(tmp_path / "others.jsonl"), *kept[3:]]
    assert "done already" not in run([*launch, *other, "--output-dir", str(tmp_path / "one")]).stderr
    params = json.loads((tmp_path / "one" / "training_params.json").read_text())
    assert params["options"]["keep"][0] == str(samples)
