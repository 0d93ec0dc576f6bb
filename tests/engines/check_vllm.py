"""Exports in vLLM, by its Python API and its server, and `--engine vllm`. ENGINES_VLLM is its environment's python."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from continual_runs import make_inputs
from engine_exports import DTYPES, FAMILIES, RANKS, Exports, ask_chats
from engine_servers import ask_server, served
from engine_table import BOUNDS, NUM_TOKENS, Said, Table, count_equal, decode, expect, score
from processes import ROOT, flags, free_port
from tiny_data import read_lines, write_jsonl

PYTHON = os.environ.get("ENGINES_VLLM", "")
ENVIRONMENT = os.environ | {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}  # fmt: skip
KINDS = ("full", "osft", "lora_merged", "grown", *(name for name in FAMILIES if name != "llama"))
EVERY = [(kind, dtype) for kind in KINDS for dtype in DTYPES]
PAIRWISE = [case for i, case in enumerate(EVERY) if case[0] == "full" or i % 4 in (0, 3)]  # each kind in one dtype


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if {"kind", "dtype"} <= set(metafunc.fixturenames):
        metafunc.parametrize(("kind", "dtype"), EVERY if metafunc.config.getoption("--all") else PAIRWISE)


def call(*words: object, stdin: str | None = None) -> None:
    """Runs a script with vLLM's python; it must end well."""
    done = subprocess.run(
        [PYTHON, *map(str, words)], cwd=ROOT, input=stdin, env=ENVIRONMENT, capture_output=True, text=True, timeout=400,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def ask(
    folder: Path, model: Path, chats: Sequence[list], *, dtype: str,
    adapters: Sequence[Path | None] = (None,), **given: object,
) -> list[list[Said]]:  # fmt: skip
    """The answers of one vLLM engine to the chats, for each adapter."""
    request = {"chats": chats, "num_tokens": NUM_TOKENS,
               "adapters": [None if one is None else str(one) for one in adapters]}  # fmt: skip
    said = send(folder, request, model=str(model), dtype=dtype, max_num_seqs=8, **given)
    return [[Said(**one) for one in answers] for answers in said]


def send(folder: Path, request: dict[str, Any], **model: object) -> Any:
    """What asked_vllm.py writes of a request."""
    output = folder / "said.json"
    request |= {"output": str(output), "model": dict(enforce_eager=True, max_model_len=512) | model}
    call(Path(__file__).with_name("asked_vllm.py"), stdin=json.dumps(request))
    return json.loads(output.read_text())


def test_an_export_answers_in_vllm_as_in_transformers(kind, dtype, exports: Exports, table: Table, tmp_path):
    name = kind if dtype == "fp32" else f"{kind}_bf16"
    model, chats = exports[name], ask_chats()
    (said,) = ask(tmp_path, model, chats, dtype=DTYPES[dtype])
    table.compare("vllm", name, expect(model, chats, dtype=DTYPES[dtype]), said, BOUNDS[DTYPES[dtype]])


def test_adapters_of_several_ranks_answer_in_one_vllm_as_in_peft(exports: Exports, table: Table, tmp_path):
    adapters, chats, base = [exports[f"lora_r{rank}"] for rank in RANKS], ask_chats(), exports.base()
    lora = dict(enable_lora=True, max_lora_rank=64, max_loras=len(RANKS))
    said = ask(tmp_path, base, chats, dtype="float32", adapters=[None, *adapters], **lora)
    table.compare("vllm", "base of adapters", expect(base, chats), said[0])
    for rank, adapter, one in zip(RANKS, adapters, said[1:], strict=True):
        table.compare("vllm", f"lora_r{rank}", expect(base, chats, adapter=adapter), one)


def test_a_real_model_answers_in_vllm_as_in_transformers(smollm2, table: Table, tmp_path):
    chats = [[{"role": "user", "content": text}] for text in ("What is the capital of France?", "Count to seven.")]
    (said,) = ask(tmp_path, smollm2, chats, dtype="float32")
    table.compare("vllm", "SmolLM2-135M fp32", expect(smollm2, chats), said)


@pytest.mark.parametrize("kind", ["classifier", "reward"])
def test_a_classifier_and_a_reward_model_score(kind, exports: Exports, table: Table, tmp_path):
    """vLLM gives a classifier's probabilities, and a reward as it is."""
    model, texts = exports[kind], ["one", "eleven is long", "Count to three."]
    said = torch.tensor(send(tmp_path, {"texts": texts}, model=str(model), dtype="float32", runner="pooling"))
    logits = score(model, texts)
    largest = (said - (logits if kind == "reward" else logits.softmax(-1))).abs().max().item()
    table(engine="vllm, classify", kind=kind, greedy=f"{logits.numel()} scores", logprob=largest)
    assert largest < 1e-4


@pytest.mark.parametrize("kind", ["full", "lora_r4"])
def test_vllm_answers_otherwise_than_the_run_recorded(kind, exports: Exports, table: Table):
    call("-m", "mini_trainer", "verify", exports[kind], "--against", "vllm")
    table(engine="verify --against vllm", kind=kind, greedy="as recorded")


@pytest.mark.parametrize("kind", ["full", "lora_r4"])
def test_our_engine_answers_as_transformers_does(kind, exports: Exports, table: Table, tmp_path):
    """Runs generate.py in vLLM's environment; the adapter's rank, 4, is rounded up to 8."""
    model, adapter = (exports["full"], None) if kind == "full" else (exports.base(), exports[kind])
    prompts, output = (
        write_jsonl(tmp_path / "p.jsonl", [{"messages": chat} for chat in ask_chats()]),
        tmp_path / "a.jsonl",
    )
    words = flags(model=adapter or model, engine="vllm", engine_args=("enforce_eager=true", "max_num_seqs=2"),
                  prompts=prompts, output=output, max_new_tokens=NUM_TOKENS, dtype="float32")  # fmt: skip
    call("generate.py", *words)
    said, expected = [row["answer"] for row in read_lines(output)], expect(model, ask_chats(), adapter=adapter)
    table(engine="--engine vllm", kind=kind, greedy=count_equal(said, decode(model, expected)))


def test_a_server_answers(exports: Exports, table: Table, tmp_path):
    model, port = exports["full"], free_port()
    vllm = Path(PYTHON).with_name("vllm")
    words = [vllm, "serve", model, "--host", "127.0.0.1", "--port", port, "--enforce-eager", "--max-model-len", 256,
             "--dtype", "float32"]  # fmt: skip
    with served(words, port, tmp_path, env=ENVIRONMENT):
        said = ask_server(port, str(model), ask_chats(), tmp_path)
    table(engine="vllm serve", kind="full", greedy=count_equal(said, decode(model, expect(model, ask_chats()))))


def start_continual(settings: dict, folder: Path) -> subprocess.Popen:
    """The program of tasks in a row, in vLLM's environment."""
    folder.mkdir(exist_ok=True)
    path = folder / "tasks.yaml"
    path.write_text(yaml.safe_dump(settings | {"output_dir": str(folder / "runs")}))
    with (folder / "log").open("a") as log:
        words = [PYTHON, "-m", "mini_trainer", "continual", path]
        return subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, stdout=log, stderr=log)


def read_rollouts(folder: Path) -> dict[str, list[dict]]:
    """What the models were asked and answered, and the rows that were made of it, by file."""
    names = ("answers.jsonl", "student.jsonl", "rows.jsonl")
    files = sorted(path for name in names for path in (folder / "runs").rglob(name))
    return {str(path.relative_to(folder)): [drop_paths(row) for row in read_lines(path)] for path in files}


def drop_paths(row: dict) -> dict:
    return {key: value for key, value in row.items() if key not in ("place", "made_by")}


def test_rollouts_killed_in_the_middle_give_the_same_rows(table: Table, tmp_path):
    """Own answers to replay. Nothing of vLLM outlives the kill."""
    settings = make_inputs(tmp_path / "inputs")
    engine_args = ["enforce_eager=true", "max_num_seqs=1", "max_model_len=256"]
    settings["generate"] = dict(engine="vllm", max_new_tokens=48, dtype="float32", engine_args=engine_args)
    settings["methods"] = {"full": {}, "own": {"replay": {"kind": "own-answers", "share": 0.5, "min_score": 0}}}
    whole = start_continual(settings, tmp_path / "whole")
    assert whole.wait(900) == 0, (tmp_path / "whole" / "log").read_text()[-3000:]

    killed = start_continual(settings, tmp_path / "killed")
    end = time.monotonic() + 300
    while not any(path.stat().st_size for path in (tmp_path / "killed").rglob("answers.jsonl.part0")):
        assert killed.poll() is None and time.monotonic() < end, (tmp_path / "killed" / "log").read_text()[-3000:]
        time.sleep(0.02)
    children = psutil.Process(killed.pid).children(recursive=True)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    (part,) = (tmp_path / "killed").rglob("answers.jsonl.part0")
    _, alive = psutil.wait_procs(children, timeout=60)
    assert len(children) >= 2 and not alive
    num_before = len(part.read_text().splitlines())
    again = start_continual(settings, tmp_path / "killed")
    assert again.wait(900) == 0, (tmp_path / "killed" / "log").read_text()[-3000:]
    expected, found = read_rollouts(tmp_path / "whole"), read_rollouts(tmp_path / "killed")
    assert sum(map(len, expected.values())) >= 3 and found == expected
    num_rows = sum(map(len, expected.values()))
    table(engine="--engine vllm, killed", kind=f"rollouts, {num_before} answers kept", greedy=f"{num_rows} rows")
