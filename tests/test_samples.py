"""--sample-prompts: what the model answers at each validation, without a trace in training."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from breadth import long, wide
from in_process import train_forked, train_here, train_on
from small_runs import OPTIONS, copy_until, make_inputs, read_rows
from stock_templates import TEMPLATES, make_tokenizer
from tiny_data import read_lines, write_jsonl
from tiny_models import FAMILIES, HYBRIDS, VOCAB_SIZE, build, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from mini_trainer.run.samples import (
    MOST_NEW_TOKENS,
    MOST_PROMPTS,
    MOST_TOKENS,
    SamplesFile,
    answer_greedily,
    find_question,
)

STEPS = 4
PROMPTS = [{"prompt": "a b c"}, {"question": "What follows on nine?"}, {"prompt": "x"}]
SHOWN = [next(iter(prompt.values())) for prompt in PROMPTS]
# Without such a chat, or of models of images.
UNASKABLE = ("a line break before the next turn", "only with tools", "trl:idefics3", "trl:llava_next", "trl:smolvlm")
# Templates without a special token before a user's turn: the earlier turns are shown as well.
KEPT_WHOLE = ("deepseek_v2", "nemotron_mini", "vicuna")
OSFT = dict(osft=True, osft_unfreeze_rank_ratio=0.5)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict:
    given = make_inputs(tmp_path_factory.mktemp("inputs"), "qwen3") | OPTIONS
    return given | dict(validation_data_path=given["data_path"], validate_every_steps=2, max_steps=STEPS)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> str:
    return str(write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", PROMPTS))


@pytest.fixture(scope="module")
def finished(inputs, prompts, world, tmp_path_factory) -> Path:
    output_dir = tmp_path_factory.mktemp("runs") / "run"
    train_here(world, **inputs, sample_prompts=prompts, output_dir=str(output_dir))
    return output_dir


def read_samples(output_dir: Path) -> list[dict]:
    return read_lines(output_dir / "samples_0.jsonl")


@torch.no_grad()
def continue_plainly(model_dir: Path | str, ids: list[int], num_tokens: int) -> list[int]:
    """The answer of transformers' own model to one sequence, without a cache."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager").eval()
    row = torch.tensor([ids])
    for _ in range(num_tokens):
        row = torch.cat([row, model(input_ids=row, use_cache=False).logits[:, -1].argmax(-1)[:, None]], dim=1)
    return row[0, len(ids) :].tolist()


def render(tokenizer, prompt: dict) -> list[int]:
    if "prompt" in prompt:
        return tokenizer(prompt["prompt"])["input_ids"]
    messages = [{"role": "user", "content": prompt["question"]}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_answers_are_those_of_the_model_before_and_of_the_export_after(inputs, finished):
    rows = read_samples(finished)
    expected = [(step, shown) for step in (0, 2, STEPS) for shown in SHOWN]
    assert [(row["step"], row["prompt"]) for row in rows] == expected
    for step, model_dir in ((0, inputs["model_name_or_path"]), (STEPS, finished / "hf_format" / "latest")):
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        for row, prompt in zip([row for row in rows if row["step"] == step], PROMPTS, strict=True):
            answer = continue_plainly(model_dir, render(tokenizer, prompt), MOST_NEW_TOKENS)
            assert row["finish_reason"] == "length" and row["num_tokens"] == MOST_NEW_TOKENS
            assert row["answer"] == tokenizer.decode(answer, skip_special_tokens=True)
    assert len({row["answer"] for row in rows if row["prompt"] == SHOWN[0]}) > 1  # training has changed it


@pytest.mark.parametrize(
    ("num_ranks", "changes"),
    [
        (1, {}),
        (1, dict(lora=True, lora_dropout=0.3)),
        long(1, OSFT),
        long(2, {}),
        long(2, dict(lora=True, lora_dropout=0.3, reshard_after_forward="never")),
        long(2, OSFT),
        wide(4, dict(sharding="hybrid", shard_size=2, micro_batch_grad_sync="last")),
    ],
)
def test_training_is_what_it_is_without(num_ranks, changes, inputs, prompts, finished, world, tmp_path):
    """Losses to the last bit, also where dropout draws random numbers; and the answers on any ranks."""
    for name, more in (("without", {}), ("with", dict(sample_prompts=prompts))):
        train_on(num_ranks, world, **inputs | changes | more, output_dir=tmp_path / name)
    assert read_rows(tmp_path / "with") == read_rows(tmp_path / "without")
    assert not (tmp_path / "without" / "samples_0.jsonl").exists()
    rows = read_samples(tmp_path / "with")
    places = [[(row["step"], row["prompt"]) for row in each] for each in (rows, read_samples(finished))]
    assert places[0] == places[1]
    assert rows[:3] == read_samples(finished)[:3]  # of the untrained model


@pytest.mark.parametrize(
    "name",
    ["gemma2_softcaps", "mistral_window", "gpt2", long("phi_head_bias"), long("cohere_scaled"), long("mixtral"),
     "gated delta net, experts", long("mamba 2 alone"), long("short convolution")],
)  # fmt: skip
def test_every_kind_of_model_answers_as_it_would_alone(name, world, tmp_path):
    """Packed with others, up to a stop token, or the room that there is."""
    path = save_model((FAMILIES | HYBRIDS)[name], tmp_path)
    random = np.random.default_rng(0)
    prompts = [random.integers(3, VOCAB_SIZE, length).tolist() for length in (7, 1, 12)]
    expected = [continue_plainly(path, ids, 10) for ids in prompts]
    stop = expected[0][4]
    room = [10, 3, 10]
    model = build(path, world)
    found = answer_greedily(model, prompts, room=room, stops=[stop], world=world, progress=lambda where: None)
    ends = [ids.index(stop) + 1 if stop in ids else len(ids) for ids in expected]
    assert found == [ids[: min(end, most)] for ids, end, most in zip(expected, ends, room, strict=True)]
    assert model.training and len(found[0]) <= 5


@pytest.mark.long
def test_a_resumed_run_has_each_line_once(inputs, prompts, finished, world, tmp_path):
    """Killed while it wrote the lines after its last step, and before the first checkpoint."""
    whole = (finished / "samples_0.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    for step, torn in ((3, [*lines[:7], lines[7][:9]]), (2, lines[:6]), (2, lines)):
        output_dir = copy_until(finished, step, tmp_path / f"{step}_{len(torn)}")
        (output_dir / "samples_0.jsonl").write_bytes(b"".join(torn))
        train_here(world, **inputs, sample_prompts=prompts, output_dir=str(output_dir))
        assert (output_dir / "samples_0.jsonl").read_bytes() == whole
    before = copy_until(finished, 0, tmp_path / "before")
    (before / "samples_0.jsonl").write_bytes(lines[0] + b"damaged\n")
    train_here(world, **inputs, sample_prompts=prompts, output_dir=str(before))
    assert (before / "samples_0.jsonl").read_bytes() == whole and read_rows(before) == read_rows(finished)


def test_lines_of_other_prompts_are_kept_and_a_step_is_not_repeated(tmp_path):
    rows = [dict(step=2, prompt=name, answer="a", finish_reason="stop", num_tokens=2) for name in ("old", "both")]
    for num_validations, written in enumerate((rows, [rows[1], rows[0] | dict(prompt="new")])):
        file = SamplesFile(tmp_path, first_step=2, num_validations=num_validations)
        file.write_samples(written)
        file.close()
    assert [row["prompt"] for row in read_samples(tmp_path)] == ["old", "both", "new"]


@pytest.mark.parametrize("name", [name for name in TEMPLATES if not name.startswith(UNASKABLE)])
def test_a_question_is_shown_with_its_templates_words(name):
    tokenizer, asked = make_tokenizer(*TEMPLATES[name]), "Why is it so?"
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": "Ho"}]
    for chat in (messages[:1], [*messages, messages[0]]):
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert find_question(text, tokenizer) == asked or (len(chat) > 1 and name.startswith(KEPT_WHOLE))


def test_the_console_has_one_short_line(inputs, prompts, tmp_path):
    said = train_forked(0, **inputs, sample_prompts=prompts, output_dir=tmp_path / "run")
    lines = [line for line in said.splitlines() if "sample after" in line]
    assert len(lines) == 3 and max(map(len, lines)) < 300
    assert re.search(r'sample after step 0: "a b c" -> ".+"  \(and 2 more in samples_0.jsonl\)$', lines[0])
    assert not [char for line in lines for char in line if not char.isprintable()]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"prompt": "a"}] * (MOST_PROMPTS + 1), f"has 17 prompts of 17 tokens together, allowed: {MOST_PROMPTS} of"),
        ([{"prompt": "a"}, {"prompt": "a1 " * 120}], r"prompts.jsonl:2: has \d+ tokens, but the model's context of"),
        ([{"prompt": ""}], "prompts.jsonl:1: has no tokens"),
        ([{"odd": 1}], "1 of 1 rows cannot be used"),
        ([{"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}], "has the content part"),
        (None, "no such file"),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused_at_the_start(rows, reason, inputs, world, tmp_path):
    path = tmp_path / "prompts.jsonl"
    if rows is not None:
        write_jsonl(path, rows)
    given = inputs | dict(sample_prompts=str(path), output_dir=str(tmp_path / "run"), max_steps=1)
    with pytest.raises(ValueError, match=rf"--sample-prompts[\s\S]*{reason}"):
        train_here(world, **given)
    assert not (tmp_path / "run" / "samples_0.jsonl").exists()


def test_prompts_are_bounded_together(inputs, world, tmp_path):
    path = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "ab " * 150}] * 16)
    with pytest.raises(ValueError, match=rf"has 16 prompts of [\d,]+ tokens together, allowed: 16 of {MOST_TOKENS:,}"):
        train_here(world, **inputs, sample_prompts=str(path), output_dir=str(tmp_path / "run"))
