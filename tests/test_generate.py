"""Answers to prompts: batched as alone, drawn by their own seed, over several processes, after a kill, in a chat."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from breadth import long
from forked import run_forked, succeed
from peft import LoraConfig, get_peft_model
from processes import flags
from tiny_data import read_lines, write_jsonl
from tiny_models import FAMILIES, HYBRIDS, save_model, save_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from mini_trainer.data.rows.prompts import encode_prompt, read_prompts
from mini_trainer.distributed.ending import RunError
from mini_trainer.generate import generate, open_model
from mini_trainer.options import group_options
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.options.tools import GenerateOptions, SamplingOptions
from mini_trainer.use.inference.engine import Request
from mini_trainer.use.inference.hf_engine import find_padding_obstacle, make_generation_config

QUESTIONS = ["Hi", "Who are you?", "What is 12 and 30, and is it more than 40?", "Hi", "a b c d e f g h i j", "Why?"]
NEW = 12


def make_model(root: Path, name: str) -> Path:
    return save_tokenizer(save_model((FAMILIES | HYBRIDS)[name], root / name))


def run(world, output: Path, **changes) -> list[dict]:
    """Answers to prompts, as generate.py writes them."""
    options = group_options(GenerateOptions, **dict(max_new_tokens=NEW, output=str(output)) | changes)
    assert find_problems(options) == []
    generate(options, world)
    return read_lines(output)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("generate")


@pytest.fixture(scope="module")
def llama(root) -> str:
    return str(make_model(root, "llama"))


@pytest.fixture(scope="module")
def questions(root) -> str:
    rows = [{"messages": [{"role": "user", "content": text}]} for text in QUESTIONS]
    return str(write_jsonl(root / "questions.jsonl", rows))


@pytest.fixture(scope="module")
def plain(root, llama, questions, world) -> list[dict]:
    return run(world, root / "plain.jsonl", model=llama, prompts=questions)


@pytest.mark.parametrize(
    "name", ["llama", "mistral_window", "gemma3", "gpt2", "gpt_oss_sinks", *map(long, list(HYBRIDS)[:4])]
)
def test_greedy_answers_of_a_batch_are_those_of_generate_one_by_one(name, root, questions, world, tmp_path):
    path = make_model(tmp_path, name)
    lines = run(world, tmp_path / "answers.jsonl", model=str(path), prompts=questions, batch_size=4)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    for line, question in zip(lines, QUESTIONS, strict=True):
        messages = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        alone = model.generate(**prompt, do_sample=False, max_new_tokens=NEW)[0, prompt["input_ids"].shape[1] :]
        assert line["answer"] == tokenizer.decode(alone, skip_special_tokens=True)
        has_ended = alone[-1].item() == model.generation_config.eos_token_id
        assert line["finish_reason"] == ("stop" if has_ended else "length")
        assert (line["num_tokens"], line["num_prompt_tokens"]) == (len(alone), prompt["input_ids"].shape[1])


def test_models_that_padding_would_change_are_found_by_rule_and_by_measuring(root, llama):
    def find(path: str, **changes) -> str | None:
        model = AutoModelForCausalLM.from_pretrained(path)
        config = make_generation_config(model.generation_config, AutoTokenizer.from_pretrained(path), SamplingOptions())
        for name, value in changes.items():
            setattr(config, name, value)
        return find_padding_obstacle(model, config)

    assert find(llama) is None
    assert "recurrent" in find(str(make_model(root, "short convolution")))
    assert "repetition" in find(llama, repetition_penalty=1.1)
    # padding that is taken for a token of the prompt
    model = AutoModelForCausalLM.from_pretrained(llama)
    forward = model.forward
    model.forward = lambda *args, attention_mask=None, **named: forward(*args, **named)
    config = make_generation_config(model.generation_config, AutoTokenizer.from_pretrained(llama), SamplingOptions())
    assert "padding" in find_padding_obstacle(model, config)


def test_a_line_says_what_was_asked_and_what_reproduces_the_answer(plain, llama):
    assert [line["row"]["messages"][0]["content"] for line in plain] == QUESTIONS
    made_by = plain[0]["made_by"]
    assert made_by["model"] == llama and len(made_by["fingerprint"]) == 64 and made_by["dtype"] == "float32"
    assert made_by["sampling"] == dict(max_new_tokens=NEW, temperature=0.0, top_p=None, top_k=None, seed=0)
    assert made_by["versions"]["torch"] == torch.__version__
    assert plain[0]["place"] == "questions.jsonl:1"


def test_what_is_drawn_depends_on_no_batch_and_follows_the_models_probabilities(root, llama, questions, world):
    drawn = dict(model=llama, prompts=questions, temperature=0.7, top_k=50, top_p=0.9, num_samples=2)
    first = run(world, root / "drawn.jsonl", **drawn, batch_size=5, seed=3)
    alone = run(world, root / "drawn_alone.jsonl", **drawn, batch_size=1, seed=3)
    other = run(world, root / "drawn_other.jsonl", **drawn, batch_size=5, seed=4)
    answers = [line["answer"] for line in first]
    assert answers == [line["answer"] for line in alone]
    assert len(set(answers)) > len(QUESTIONS)  # a prompt's two answers differ, and so do those of equal prompts
    assert answers != [line["answer"] for line in other]
    assert [(line["index"], line["sample"]) for line in first[:3]] == [(0, 0), (0, 1), (1, 0)]


def test_noise_draws_by_the_softmax_of_the_logits():
    from mini_trainer.use.inference.engine import OwnNoise

    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0, float("-inf")]])
    noise = OwnNoise([(0, 0)], seed=1, device=torch.device("cpu"))
    counts = torch.zeros(5)
    for _ in range(4000):
        counts[noise(None, scores).argmax()] += 1
    assert counts[4] == 0
    assert torch.allclose(counts / 4000, scores[0].softmax(0), atol=0.03)


@pytest.mark.slow
def test_two_processes_share_the_prompts_and_a_killed_run_goes_on(root, llama, questions, plain):
    output = root / "two.jsonl"
    half = root / "two.jsonl.part3"  # of a process that has been killed while it wrote
    half.write_text(json.dumps(plain[2]) + "\n" + json.dumps(plain[0])[:50])
    words = flags(model=llama, prompts=questions, output=output, max_new_tokens=NEW, batch_size=2)
    done = succeed(2, "generate.py", *words)
    assert "1 of 6 answers" in done.stderr and " 6 answers" in done.stdout
    assert read_lines(output) == plain
    assert list(root.glob("two.jsonl.*")) == []
    before = output.stat().st_mtime_ns
    again = run_forked(2, "generate.py", *words)
    assert again.returncode == 0 and "6 of 6 answers" in again.stderr
    assert output.stat().st_mtime_ns == before


def test_the_rest_of_a_cut_batch_is_computed_in_the_same_batch(root, llama, questions, world):
    given = dict(model=llama, prompts=questions, output="o", batch_size=2, max_new_tokens=NEW)
    engine = open_model(group_options(GenerateOptions, **given), world)
    requests = [Request(i, 0, prompt) for i, prompt in enumerate(read_prompts([questions], None))]
    batches, generate_batch = [], engine.model.generate

    def keep(**given: Any) -> torch.Tensor:
        batches.append(given["input_ids"].tolist())
        return generate_batch(**given)

    assert engine.obstacle is None  # measured by generate, before it is watched
    engine.model.generate = keep
    answers, all_batches = list(engine.answer(requests)), batches.copy()
    for num_done in range(len(requests)):
        batches.clear()
        done = {request.key for request, _ in answers[:num_done]}
        assert list(engine.answer(requests, done=done)) == answers[num_done:]
        assert batches == all_batches[num_done // 2 :]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(max_new_tokens=NEW + 1), "(sampling.max_new_tokens 12, now 13)"),
        (dict(dtype="bfloat16"), "dtype float32, now bfloat16"),
        (dict(prompts="fewer"), "not requested"),
        (dict(prompts="others"), "different row"),
    ],
)
def test_answers_that_were_made_otherwise_are_not_gone_on_with(change, reason, root, llama, questions, plain, world):
    output = root / "changed.jsonl"
    (root / "changed.jsonl.part0").write_text("".join(json.dumps(line) + "\n" for line in plain[:5]))
    rows = [{"messages": [{"role": "user", "content": text}]} for text in QUESTIONS]
    prompts = {"fewer": rows[:2], "others": [rows[1], *rows[1:]]}.get(change.get("prompts"))
    if prompts is not None:
        change = dict(prompts=str(write_jsonl(root / "changed_prompts.jsonl", prompts)))
    with pytest.raises(RunError) as error:
        run(world, output, **dict(model=llama, prompts=questions) | change)
    assert reason in str(error.value)


def test_rows_of_every_format_become_prompts(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path))
    user = [{"role": "user", "content": "Hi"}]
    rows = [
        {"messages": [*user, {"role": "assistant", "content": "Ho", "train": True}]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}], "system": "S"},
        {"instruction": "Hi", "input": "there", "output": "Ho"},
        {"prompt": "Hi", "completion": "Ho"},
        {"prompt": "Hi"},
        {"text": "Hi"},
        {"question": "Hi", "answer": "6 * 7 = 42\n#### 42"},
        {"text": "Hi", "label": 3},
        {"prompt": "Hi", "references": ["Ho", "He"]},
    ]
    chat, gpt, alpaca, completion, alone, text, question, label, several = read_prompts(
        [str(write_jsonl(tmp_path / "rows.jsonl", rows))], None
    )
    assert (chat.messages, chat.references) == (user, ("Ho",)) and chat.row == rows[0]
    assert [message["role"] for message in gpt.messages] == ["system", "user"] and gpt.references == ("Ho",)
    assert alpaca.messages == [{"role": "user", "content": "Hi\n\nthere"}]
    assert (completion.messages, completion.text, completion.references) == (None, "Hi", ("Ho",))
    assert (alone.text, alone.references, text.text) == ("Hi", (), "Hi")
    assert question.messages == user and question.references == ("6 * 7 = 42\n#### 42",)
    assert label.references == ("3",) and several.references == ("Ho", "He")
    assert tokenizer.decode(encode_prompt(question, tokenizer)) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(encode_prompt(alone, tokenizer)) == "Hi"
    tokenizer.chat_template = None
    assert tokenizer.decode(encode_prompt(question, tokenizer)) == "Hi"
    with pytest.raises(ValueError, match=r"^rows\.jsonl:1: .*no chat"):
        encode_prompt(chat, tokenizer)
    (tmp_path / "lines.txt").write_text("Hi\n\nWho?\n")
    lines = read_prompts([str(tmp_path / "lines.txt")], None)
    assert [(line.place, line.shown) for line in lines] == [("lines.txt:1", "Hi"), ("lines.txt:3", "Who?")]


@pytest.mark.parametrize(
    ("row", "reason"),
    [({"question": ""}, "'question' is ''"), ({"question": "Hi", "references": "a"}, "'references' is 'a'")],
)
def test_rows_that_are_no_prompts_are_refused_with_their_line(row, reason, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": "Hi"}, row])
    with pytest.raises(ValueError) as error:
        read_prompts([str(path)], None)
    assert "rows.jsonl:2: " in str(error.value) and reason in str(error.value)


def test_prompts_that_cannot_be_answered_leave_no_file(llama, questions, world, tmp_path):
    base = shutil.copytree(llama, tmp_path / "base", ignore=shutil.ignore_patterns("chat_template*"))
    with pytest.raises(ValueError, match=r"^questions\.jsonl:1: .*no chat"):
        run(world, tmp_path / "answers.jsonl", model=str(base), prompts=questions)
    assert list(tmp_path.iterdir()) == [base]


def test_an_adapter_answers_as_peft_lets_it(root, llama, questions, world):
    model = AutoModelForCausalLM.from_pretrained(llama)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    tuned = get_peft_model(model, config).eval()
    tuned.save_pretrained(root / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(llama)
    expected = []
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        ids = tuned.generate(**prompt, do_sample=False, max_new_tokens=NEW)[0, prompt["input_ids"].shape[1] :]
        expected.append(tokenizer.decode(ids, skip_special_tokens=True))
    given = dict(prompts=questions, batch_size=3)
    named = run(world, root / "named.jsonl", model=llama, adapter=str(root / "adapter"), **given)
    found = run(world, root / "found.jsonl", model=str(root / "adapter"), **given)
    assert [line["answer"] for line in named] == [line["answer"] for line in found] == expected
    assert named[0]["made_by"]["adapter_sha256"] and named[0]["made_by"]["model"] == llama
    with pytest.raises(ValueError, match=r"--adapter .*: has no adapter_config.json"):
        run(world, root / "no.jsonl", model=llama, adapter=llama, **given)


def test_an_answer_ends_where_the_model_has_no_more_room(root, world, tmp_path, caplog):
    path = make_model(tmp_path, "gpt2")  # whose positions end at 256
    prompts = write_jsonl(tmp_path / "long.jsonl", [{"prompt": "x" * 250}, {"prompt": "x"}, {"prompt": "x" * 256}])
    lines = run(world, tmp_path / "answers.jsonl", model=str(path), prompts=str(prompts), max_new_tokens=8)
    assert lines[0]["num_tokens"] <= 6 and "reason" not in lines[0]
    assert ("1 of 3 answers end" in caplog.text) == (lines[0]["finish_reason"] == "length")
    # A prompt that leaves no room is refused by file and line, and the others are answered.
    assert (lines[2]["finish_reason"], lines[2]["answer"]) == ("refused", "")
    assert re.search(r"1 of 3 answers are missing.*long\.jsonl:3\): has 256 tokens", caplog.text)
    alone = write_jsonl(tmp_path / "alone.jsonl", [{"prompt": "x" * 250}, {"prompt": "x"}])
    others = run(world, tmp_path / "others.jsonl", model=str(path), prompts=str(alone), max_new_tokens=8)
    assert [line["answer"] for line in others] == [line["answer"] for line in lines[:2]]
