"""Prompts that are too long for a server's model are refused one by one, in the words of each kind of server."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from evaluations import evaluate_here
from openai_standin import Refusal, Server, repeat, serve
from tiny_data import read_lines, write_jsonl

from mini_trainer.continual.replay import describe_refused, keep_passing
from mini_trainer.continual.settings import Replay, Task
from mini_trainer.generate import generate
from mini_trainer.options import group_options
from mini_trainer.options.tools import GenerateOptions

CONTEXT = 20  # tokens of the stand-in, one for each character
BEGINNING = "This model's maximum context length is 20 tokens. However, "
Rule = tuple[str, int, int, dict[str, Any]]  # what is refused, from how many tokens on, and with what status and error
RULES: dict[str, list[Rule]] = {  # of each kind of server; the first that holds counts
    "vllm": [  # version 0.32, which itself shortens answers to what is left
        ("answer", 21, 400, dict(message="max_tokens={answer} cannot be greater than max_model_len=20. Please ...")),
        ("prompt", 21, 400, dict(message=f"{BEGINNING}your prompt ...")),
        ("prompt", 20, 400, dict(message="max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)")),
    ],
    "older vllm": [  # whose number of the prompt's tokens is a bound: they stop to count where it is too long
        ("total", 21, 400, dict(message=f"{BEGINNING}you requested {{answer}} output tokens and your prompt contains at"
                                " least {least} input tokens, for a total of at least 21.")),
    ],
    "sglang": [
        ("prompt", 20, 400, dict(message="The input ({prompt} tokens) is longer than the model's context length (20"
                                 " tokens).")),
        ("total", 20, 400, dict(message="Requested token count exceeds the model's maximum context length of 20 tokens."
                                " You ...")),
    ],
    "llama.cpp": [
        ("prompt", 20, 400, dict(message="request ({prompt} tokens) exceeds the available context size (20 tokens), try"
                                 " increasing it", code=400, type="exceed_context_size_error", n_ctx=CONTEXT)),
    ],
    "tgi": [
        ("total", 21, 422, dict(message="Input validation error: `inputs` tokens + `max_new_tokens` must be <= 20."
                                " Given: {prompt} `inputs` tokens and ...", type="validation")),
    ],
    "openai": [("total", 21, 400, dict(message=f"{BEGINNING}you requested ...", type="invalid_request_error",
                                       code="context_length_exceeded"))],
    "proxy": [("prompt", 20, 413, dict(message="Payload"))],  # about whose limit nothing is known
}  # fmt: skip


def complete_by(rules: list[Rule], *, shortens: bool = False) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Repeats the prompt, up to the length that is asked for, and that is left if the server `shortens` answers."""

    def complete(body: dict[str, Any]) -> dict[str, Any]:
        prompt, answer = len(body["messages"][-1]["content"]), body["max_tokens"]
        counts = dict(prompt=prompt, answer=answer, total=prompt + answer, least=CONTEXT - answer + 1)
        for what, first_refused, status, error in rules:
            if counts[what] >= first_refused:
                raise Refusal(status, **error | {"message": error["message"].format(**counts)})
        num_tokens = min(answer, 8, CONTEXT - prompt if shortens else 8)
        reply = repeat(body)
        reply["choices"][0] |= {"finish_reason": "stop" if num_tokens == 8 else "length"}
        return reply | {"usage": dict(prompt_tokens=prompt, completion_tokens=num_tokens, total_tokens=0)}

    return complete


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setattr("mini_trainer.use.inference.openai_engine.NUM_RETRIES", 0)
    with serve() as server:
        yield server


def run(world, server: Server, folder: Path, lengths: list[int], **changes: object) -> list[dict]:
    prompts = write_jsonl(folder / "prompts.jsonl", [{"question": "q" * length} for length in lengths])
    given = dict(model="m", engine="openai", base_url=server.url, prompts=str(prompts), concurrency=2)
    given |= dict(output=str(folder / "answers.jsonl"), max_new_tokens=9) | changes
    generate(group_options(GenerateOptions, **given), world)
    return read_lines(folder / "answers.jsonl")


# The lengths of prompts fit, fit with a shorter answer, leave one token, fill the context, and are beyond it.
LENGTHS = [5, 15, 18, 20, 50]


@pytest.mark.parametrize("most", [9, 30], ids=["short answers", "answers longer than the context"])
@pytest.mark.parametrize("is_listed", [False, True])
@pytest.mark.parametrize("kind", RULES)
def test_each_kind_of_server(kind, is_listed, most, server, world, tmp_path, caplog):
    server.models = [{"id": "m", "max_model_len": CONTEXT}] if is_listed else []
    server.complete = complete_by(RULES[kind], shortens=kind in ("vllm", "llama.cpp", "proxy"))
    lines = run(world, server, tmp_path, LENGTHS, max_new_tokens=most)
    assert [line["finish_reason"] for line in lines] == ["stop", "length", "length", "refused", "refused"]
    assert 3 <= lines[1]["num_tokens"] <= 5 and 1 <= lines[2]["num_tokens"] <= 2
    assert [line["answer"] == "" for line in lines] == [False, False, False, True, True]
    assert all(line["reason"].startswith("refused (4") for line in lines[3:]) and "reason" not in lines[0]
    assert "2 of 5 answers are missing" in caplog.text and "2 of 5 answers end" in caplog.text
    assert "prompts.jsonl:4, " in caplog.text and "prompts.jsonl:5)" in caplog.text and "empty" not in caplog.text
    assert len(server.asked) <= 3 * len(LENGTHS)


def test_a_restart_asks_only_what_is_missing(server, world, tmp_path):
    refuses = [True]

    def complete(body: dict[str, Any]) -> dict[str, Any]:
        if refuses and body["messages"][-1]["content"] == "q":
            raise Refusal(400, message="The response was filtered by the policy", code="content_filter")
        return complete_by(RULES["older vllm"])(body)

    server.complete = complete
    with pytest.raises(ValueError, match=r"prompts\.jsonl:3: .*--model m: refused \(400\): The response was filtered"):
        run(world, server, tmp_path, [50, 51, 1, 2], concurrency=1)
    assert [line["finish_reason"] for line in read_lines(tmp_path / "answers.jsonl.part0")] == ["refused"] * 2
    server.asked.clear()
    refuses.clear()
    lines = run(world, server, tmp_path, [50, 51, 1, 2], concurrency=1)
    assert [line["finish_reason"] for line in lines] == ["refused", "refused", "stop", "stop"]
    assert [len(body["messages"][-1]["content"]) for _, body in server.asked] == [1, 2]


def test_a_refusal_without_numbers_is_an_answer_and_no_loop(server, world, tmp_path):
    error = dict(message="Please reduce the length of it, http://x/?access_token=abc")
    server.complete = complete_by([("total", 21, 400, error)])
    first, second = run(world, server, tmp_path, [5, 15])
    assert first["finish_reason"] == "stop" and second["reason"].endswith(
        "reduce the length of it, http://x/?access_token=***"
    )
    assert len(server.asked) == 3  # the last one with one token
    assert json.loads((tmp_path / "answers.jsonl").read_text().splitlines()[1])["num_tokens"] is None


def test_an_evaluation_counts_refused_prompts_as_wrong_and_says_so(server, world, tmp_path, capsys):
    server.complete = complete_by(RULES["older vllm"])
    rows = [{"question": "q" * length, "answer": answer} for length, answer in ((3, "QQQ"), (50, ""), (4, "QQQ"))]
    task = write_jsonl(tmp_path / "task.jsonl", rows)
    result = evaluate_here(
        world, tmp_path / "out", model=["m"], task=[str(task)], engine="openai", base_url=server.url, max_new_tokens=9
    )
    (measured,) = result["sets"]
    assert measured["extras"][0]["num_refused"] == 1
    # An empty answer would be the empty reference.
    assert measured["metrics"][0]["values"][0]["mean"] == pytest.approx(1 / 3)
    assert "(prompts too long, counted as wrong: 1)" in capsys.readouterr().out


def test_refused_prompts_are_not_trained_on(server, world, tmp_path):
    server.complete = complete_by(RULES["older vllm"])
    lines = run(world, server, tmp_path, [3, 50, 4])
    rows = [{"messages": [{"role": "user", "content": line["row"]["question"]}, {"role": "assistant", "content": "Q"}]}
            for line in lines]  # fmt: skip
    assert describe_refused(lines) == "; prompts too long for the model: 1"
    asked = write_jsonl(tmp_path / "asked.jsonl", rows)
    replay = Replay(kind="own-answers", min_score=0.0)
    kept = keep_passing(asked, tmp_path / "answers.jsonl", Task(name="t", metric="token_f1"), replay)
    assert [row["messages"][-1]["content"] for row in kept] == ["QQQ", "QQQQ"]
