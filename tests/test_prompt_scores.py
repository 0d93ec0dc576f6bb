"""Scores by a server's prompt_logprobs: equal to those of the same model here; odd answers are refused by name."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai_standin import Server, serve
from scored_data import TOP_K, score_here, write_data
from tiny_models import FAMILIES, save_model, save_tokenizer
from transformers import AutoModelForCausalLM

from mini_trainer.model.scoring.score_files import locate_scores
from mini_trainer.objectives.soft_targets import make_record_type

Change = Callable[[dict[str, Any], list[int]], object]  # of a choice, and the prompt's ids


class Teacher:
    """The completions of vLLM with `prompt_logprobs` and `return_token_ids`, in its documented schema."""

    def __init__(self, model: Path):
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self.answer_well()

    def answer_well(self) -> None:
        self.change: Change = lambda choice, ids: None
        self.num_good = self.num_asked = 0  # requests before `change` makes the answers odd, and all so far

    @torch.no_grad()
    def __call__(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["max_tokens"] == 1 and body["return_token_ids"] and "stream" not in body
        ids, self.num_asked = body["prompt"], self.num_asked + 1
        log_q = self.model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(1)
        rows = zip(log_q, log_q.topk(body["prompt_logprobs"]).indices.tolist(), ids[1:], strict=True)
        positions = [None, *(list_entries(row, [token_id, *top]) for row, top, token_id in rows)]
        choice = {"index": 0, "text": "x", "logprobs": None, "finish_reason": "length", "stop_reason": None,
                  "prompt_logprobs": positions, "prompt_token_ids": list(ids), "token_ids": [7]}  # fmt: skip
        if self.num_asked > self.num_good:
            self.change(choice, ids)
        usage = {"prompt_tokens": len(ids), "completion_tokens": 1, "total_tokens": len(ids) + 1}
        return dict(id="1", object="text_completion", created=1, model="m", choices=[choice], usage=usage)


def list_entries(log_q: torch.Tensor, ids: list[int]) -> dict[str, dict[str, Any]]:
    """A position's entries: the prompt's own token first, whether or not it is one of the most probable."""
    entries = {}
    for i in ids:
        rank = int((log_q > log_q[i]).sum()) + 1
        entries[str(i)] = {"logprob": log_q[i].item(), "rank": rank, "decoded_token": f"<{i}>"}
    return entries


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tokenizer(save_model(FAMILIES["llama"], tmp_path_factory.mktemp("teacher") / "t", seed=1))


@pytest.fixture(scope="module")
def teacher(model) -> Teacher:
    return Teacher(model)


@pytest.fixture
def server(teacher, monkeypatch) -> Iterator[Server]:
    teacher.answer_well()
    monkeypatch.setattr("mini_trainer.use.inference.openai_engine.NUM_RETRIES", 0)
    with serve(teacher) as server:
        yield server


@pytest.fixture
def data(model, tmp_path) -> Path:
    return write_data(tmp_path / "data.arrow", model)


def ask(world, server: Server, data: Path, *, name: str = "served", **changes: object) -> Path:
    """Scores the data by the server; the file."""
    given = dict(engine="openai", base_url=server.url, concurrency=4)
    score_here(world, "m", data, **given | changes, name=name)
    return locate_scores(data, name)


def read(path: Path) -> np.ndarray:
    return np.fromfile(path, make_record_type(TOP_K))


@pytest.mark.parametrize("echoes", [True, False], ids=["with its token ids", "an older server"])
def test_a_servers_scores_are_those_of_the_same_model_here(echoes, world, model, server, teacher, data):
    if not echoes:
        teacher.change = lambda choice, ids: choice.pop("prompt_token_ids")
    score_here(world, model, data)
    served, local = read(ask(world, server, data)), read(locate_scores(data, "teacher"))
    np.testing.assert_array_equal(served["ids"], local["ids"])
    for name in ("nll", "tail", "target"):  # up to the last bit of half precision
        np.testing.assert_allclose(served[name].astype(float), local[name].astype(float), rtol=2**-10, err_msg=name)
    sidecar = json.loads(Path(f"{locate_scores(data, 'served')}.json").read_text())
    assert (sidecar["teacher_name"], sidecar["top_k"], sidecar["num_tokens"]) == ("m", TOP_K, len(served))
    assert {path for path, _ in server.asked} == {"/v1/completions"} and server.most_running > 1


def test_other_weights_under_the_same_name_are_noticed(world, server, data):
    server.models = [{"id": "m", "object": "model", "created": 1, "root": "/models/a"}]
    scores = ask(world, server, data)
    server.models[0] |= {"root": "/models/b", "created": 2}
    with pytest.raises(ValueError, match=r"scores\.json: .*served weights"):
        ask(world, server, data)
    server.models = []  # a server that does not list its weights, or has ended
    assert ask(world, server, data) == scores


def test_a_server_that_cannot_score_the_data_is_refused_before_it_is_asked(world, server, data):
    server.models = [{"id": "m", "object": "model", "created": 1, "max_model_len": 9}]
    with pytest.raises(ValueError, match=r"--model m: has a context of 9 tokens, but the longest row has "):
        ask(world, server, data)
    # vLLM with --enable-lora: the model is an adapter, or the metrics name them.
    server.models = [{"id": "m", "object": "model", "created": 1, "parent": "base"}]
    with pytest.raises(ValueError, match=r"--model m: vLLM runs with --enable-lora"):
        ask(world, server, data)
    server.models, server.metrics = [], "# HELP vllm:lora_requests_info Running stats on lora requests.\n"
    with pytest.raises(ValueError, match=r"--model m: vLLM runs with --enable-lora"):
        ask(world, server, data)
    assert server.asked == []
    server.metrics = "# HELP vllm:num_requests_running Number of requests.\n"
    assert ask(world, server, data).is_file()


def change_positions(change: Callable[[dict[str, Any], int], Any]) -> Change:
    """Replaces each position's entries by `change(entries, the token that is there)`."""

    def change_all(choice: dict[str, Any], ids: list[int]) -> None:
        rows = zip(choice["prompt_logprobs"][1:], ids[1:], strict=True)
        choice["prompt_logprobs"][1:] = [change(entries, token_id) for entries, token_id in rows]

    return change_all


def change_logprobs(value: Any) -> Change:
    return change_positions(lambda entries, _: {key: entry | {"logprob": value} for key, entry in entries.items()})


NONE, NOT_BY_ID, NO_NUMBERS, OTHERS = "no prompt_logprobs", "no log-probabilities", "has ids", "its tokenizer"
ODD: dict[str, tuple[Change, str]] = {
    "no prompt_logprobs": (lambda choice, ids: choice.pop("prompt_logprobs"), NONE),
    "null": (lambda choice, ids: choice.update(prompt_logprobs=None), NONE),
    "fewer positions": (lambda choice, ids: choice["prompt_logprobs"].pop(), " positions "),
    "an object": (lambda choice, ids: choice.update(prompt_logprobs={str(i): {} for i in range(len(ids))}), NOT_BY_ID),
    "lists": (change_positions(lambda entries, _: list(entries)), NOT_BY_ID),
    "texts for ids": (
        change_positions(lambda entries, _: {entry["decoded_token"]: entry for entry in entries.values()}),
        NOT_BY_ID,
    ),
    "no logprob": (change_positions(lambda entries, _: {key: {} for key in entries}), NOT_BY_ID),
    "null for a number": (change_logprobs(None), NOT_BY_ID),
    "probabilities above 1": (change_logprobs(0.5), NO_NUMBERS),
    "large ids": (
        change_positions(lambda entries, _: {str(int(key) + 2**40): entry for key, entry in entries.items()}),
        NO_NUMBERS,
    ),
    "without the token that is there": (
        change_positions(lambda entries, token_id: {key: entries[key] for key in entries if key != str(token_id)}),
        "no log-probability of its token",
    ),
    "fewer tokens than asked for": (
        change_positions(lambda entries, _: dict(list(entries.items())[: TOP_K - 1])),
        f"names {TOP_K - 1} tokens, expected {TOP_K}",
    ),
    "other tokens": (lambda choice, ids: choice.update(prompt_token_ids=[*ids[:-1], ids[-1] + 1]), OTHERS),
    "more tokens": (lambda choice, ids: choice.update(prompt_token_ids=[1, *ids]), OTHERS),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_answer_is_refused_by_row_and_server(name, world, server, teacher, data):
    teacher.change, message = ODD[name]
    with pytest.raises(ValueError) as caught:
        ask(world, server, data)
    told = str(caught.value)
    assert re.match(rf"{data}: row \d+: --base-url {server.url}, --model m: ", told) and message in told
    assert not locate_scores(data, "served").exists()


def test_a_key_that_a_server_repeats_is_in_no_message(world, server, teacher, data, monkeypatch):
    monkeypatch.setenv("MY_LOGIN", "k3y")
    teacher.change = change_logprobs("k3y")
    with pytest.raises(ValueError, match=r"position 3: .*'\*\*\*'"):
        ask(world, server, data, api_key_env="MY_LOGIN")


def test_a_server_in_trouble_leaves_a_file_to_continue(world, server, teacher, data, monkeypatch):
    whole = ask(world, server, data).read_bytes()
    monkeypatch.setattr("mini_trainer.model.scoring.score_files.PART_BYTES", 60 * make_record_type(TOP_K).itemsize)
    teacher.change, teacher.num_good = ODD["null"][0], teacher.num_asked + 8
    with pytest.raises(ValueError, match="no prompt_logprobs"):
        ask(world, server, data, name="later")
    path = locate_scores(data, "later")
    begun = Path(f"{path}.part").read_bytes()
    assert not path.exists() and 0 < len(begun) < len(whole) and whole.startswith(begun)
    server.failures = 10**6
    with pytest.raises(ValueError, match=rf"row \d+: --base-url {server.url}, --model m: refused \(503\): "):
        ask(world, server, data, name="later")
    assert not path.exists() and Path(f"{path}.part").read_bytes() == begun
    teacher.answer_well()
    server.failures, num_asked = 0, len(server.asked)
    assert ask(world, server, data, name="later").read_bytes() == whole
    assert len(server.asked) - num_asked < 24  # rows of the first part are not asked for again
