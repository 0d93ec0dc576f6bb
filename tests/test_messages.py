"""What people read on a terminal: nothing that it obeys, no secrets; and no code from the hub.

Of each class of message one has its whole text here, as do those that no other test refuses; DIR stands for the
test's directory. Other tests know an error by its type and what it names.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch.distributed as dist
from breadth import wide
from forked import run_forked
from make_tiny_model import CHATML_TEMPLATE
from processes import ENV, ROOT
from pyarrow.feather import write_feather

from mini_trainer.api.errors import BadInputError
from mini_trainer.data.rows.prompts import Prompt, encode_prompt
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed import lifeline, lock, meeting
from mini_trainer.distributed.agreement import Account, describe_differences
from mini_trainer.distributed.ending import ExitCode, Flag, RunError, stop_reason
from mini_trainer.distributed.hang import Peer
from mini_trainer.distributed.lock import RunLock
from mini_trainer.distributed.messages import CleanFormatter, hide_secrets, make_visible
from mini_trainer.distributed.watch import describe_death
from mini_trainer.options import Options, TrainOptions, command_line, group_options
from mini_trainer.options.tools import EvaluateOptions, GenerateOptions, ProcessDataOptions
from mini_trainer.process_data import process_data
from mini_trainer.run.callbacks import explain_stop
from mini_trainer.run.inputs import Errors
from mini_trainer.run.record import check_unused
from mini_trainer.run.start_checks import check_schedule, find_oddities
from mini_trainer.use.evaluation.metrics import choose_measures
from mini_trainer.use.plots.board import Board
from mini_trainer.use.plots.run_files import open_runs

MODEL = "tokenizer"
TURNING = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}  # Unicode's names for what turns writing


def test_nothing_stays_that_a_terminal_obeys():
    """Every character there is: by Unicode's own categories, and nothing else is changed."""
    for code in range(sys.maxunicode + 1):
        text = chr(code)
        obeyed = unicodedata.category(text) in ("Cc", "Cs") or unicodedata.bidirectional(text) in TURNING
        is_kept = text in "\n\t" or (not obeyed and text not in "\u061c\u200e\u200f")
        assert (make_visible(text) == text) == is_kept, hex(code)
        assert is_kept or make_visible(text).isascii()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see https://me:p@ss@host/x", "see https://***@host/x"),
        ("https://bucket/a.png?X-Amz-Signature=abc&size=3", "https://bucket/a.png?X-Amz-Signature=***&size=3"),
        ("http://h/?API-Key=abc sqlite://u:p@h/db", "http://h/?API-Key=*** sqlite://***@h/db"),
        ("me@example.org, a/b@c, 1 < 2 & 3 = 3?", "me@example.org, a/b@c, 1 < 2 & 3 = 3?"),
        ("the key is longer-secret", "the key is ***"),
        ("/home/me/hf_token and 100000 and false", "/home/me/hf_token and 100000 and false"),
    ],
)
def test_secrets_are_hidden_wherever_they_stand(text, shown, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "longer-secret")
    monkeypatch.setenv("HF_TOKEN_PATH", "/home/me/hf_token")
    monkeypatch.setenv("MAX_TOKENS", "100000")
    assert hide_secrets(text) == shown


def test_log_lines_are_clean():
    record = logging.LogRecord("mini_trainer", logging.INFO, "", 0, "name \x1b]0;x\x07 at http://a:b@c", None, None)
    assert CleanFormatter().format(record) == r"name \x1b]0;x\x07 at http://***@c"


@pytest.mark.slow
def test_messages_of_scripts_are_clean(tmp_path):
    name = tmp_path / "a\x1b[31m\u202eb.jsonl"
    name.write_text('{"messages": "\\u001b]0;x\\u0007"}\n')
    words = ["--input-file", str(name), "--output-file", str(tmp_path / "o.arrow"), "--model-name-or-path", "none"]
    done = run_forked(0, "process_data.py", *words)
    assert done.returncode == 2 and "error: " in done.stderr
    assert make_visible(done.stderr) == done.stderr and make_visible(done.stdout) == done.stdout


KERNELS = """
def get_kernel(name, *args, **options):
    open(__file__ + ".asked", "a").write(name + "\\n")
    raise OSError("no network here")
"""
LOADS = """
import sys, importlib.util, types
{guard}
import bitsandbytes
from transformers.integrations.hub_kernels import lazy_load_kernel
from transformers.utils.import_utils import is_kernels_available
print(lazy_load_kernel("causal-conv1d"), is_kernels_available())
try:
    from kernels import get_kernel  # as bitsandbytes does on processors with AVX512-BF16, and on Macs
    get_kernel("control")
except Exception as error:
    print(type(error).__name__)
"""
GUARD = """
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.tools import GenerateOptions
parse_options(GenerateOptions, ["--model", "m"])
"""


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("guard", "asks"), [(GUARD, False), wide("", True)])
def test_libraries_ask_the_hub_for_no_compiled_code(guard, asks, tmp_path):
    """Where the package kernels is installed (a stand-in, which writes down what it is asked for)."""
    package = tmp_path / "kernels"
    package.mkdir()
    (package / "__init__.py").write_text(KERNELS)
    (tmp_path / "kernels-0.12.0.dist-info").mkdir()
    (tmp_path / "kernels-0.12.0.dist-info" / "METADATA").write_text("Name: kernels\nVersion: 0.12.0\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT), ENV.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", LOADS.format(guard=guard)],
        env=ENV | {"PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    asked = Path(f"{package}/__init__.py.asked")
    assert asked.exists() == asks, done.stdout + done.stderr
    if not asks:
        assert done.returncode == 0 and "None False" in done.stdout, done.stderr
        assert "pip install" not in done.stderr


REQUIRED = {
    TrainOptions: "--model-name-or-path m --data-path d.arrow --output-dir o --max-steps 5",
    ProcessDataOptions: "--model-name-or-path m --input-file i.jsonl",
    GenerateOptions: "--model m",
    EvaluateOptions: "--output-dir o",
}
BAD = "these options cannot be used as they are:\n  "
# Options, words of a command line, text.
COMMANDS = [
    (TrainOptions, "--bach-size 3", "unknown option --bach-size; did you mean --batch-size?"),
    (TrainOptions, "--preview 3", "unknown option --preview; --preview is an option of process_data.py"),
    (TrainOptions, "--max-tokens-per-gpu all", "--max-tokens-per-gpu: given 'all', allowed: int or auto"),
    (TrainOptions, "--data-weights a b", "--data-weights: given 'a', 'b', allowed: a list of float"),
    (TrainOptions, "--max-steps 6", "given more than once: --max-steps"),
    (TrainOptions, "--lora-target-modules --lora",
     "--lora-target-modules: given without a value; give one or more, or leave it out"),
    (TrainOptions, "--batch-size 0 --adam-eps 0",
     f"{BAD}--batch-size 0: must be at least 1\n  --adam-eps 0.0: must be above 0, and finite"),
    (TrainOptions, "--input-file i.jsonl",
     f"{BAD}--data-path and --input-file both specify training data: give only one of them"),
    (ProcessDataOptions, "--output-file o.csv", f"{BAD}--output-file o.csv: must end in .arrow, .parquet or .jsonl"),
    (GenerateOptions, "--prompts p.jsonl", f"{BAD}--prompts needs --output, the file to write the answers to"),
    (EvaluateOptions, "--model m", f"{BAD}nothing to evaluate on: give --data, --task or --lm-eval"),
]  # fmt: skip
# Contents of a file of train.py's options, text.
FILES = [
    ("bach_size: 3", "unknown option 'bach_size'; did you mean 'batch_size'?"),
    ("output_dir:", "output_dir: given null, allowed: a value; leave the line out for the default, if it has one"),
    ("seed: 1\nseed: 2", "line 2: not valid YAML: a key is repeated: seed"),
    ("optimization:\n  seed: 1", "optimization: the file has no groups: write the options below it without it"),
    ("output_dir: ${HF_TOKEN}",
     "output_dir: '${HF_TOKEN}': the variable HF_TOKEN is not filled in; allowed: HOME, USER, SCRATCH, TMPDIR, SLURM_*;"
     " a secret is never filled in ($${ stands for the text ${)"),
]  # fmt: skip


def refuse(options_class: type[Options], words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """The message with which a command line ends its process, without the line about --help."""

    def end(message: str, *, code: ExitCode) -> None:
        assert code == ExitCode.BAD_INPUT
        raise SystemExit(message)

    monkeypatch.setattr(command_line, "exit_with_message", end)
    with pytest.raises(SystemExit, match=r"--help all lists all options$") as ended:
        command_line.parse_options(options_class, [*REQUIRED[options_class].split(), *words])
    return str(ended.value).rpartition("\n")[0]


def test_a_missing_option_is_named_otherwise_than_in_its_help(monkeypatch):
    monkeypatch.setitem(REQUIRED, GenerateOptions, "--output o.jsonl --prompts p.jsonl")
    message = refuse(GenerateOptions, [], monkeypatch)
    assert ":\n    MODEL, --model TEXT\n        Directory of a model" in message


@pytest.mark.parametrize(("options_class", "words", "text"), COMMANDS)
def test_command_lines(options_class, words, text, monkeypatch):
    assert refuse(options_class, words.split(), monkeypatch) == text


@pytest.mark.parametrize(("content", "text"), FILES)
def test_option_files(content, text, tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text(content)
    message = refuse(TrainOptions, ["--config", str(tmp_path / "run.yaml")], monkeypatch)
    assert message.replace(str(tmp_path), "DIR") == f"--config DIR/run.yaml: {text}"


USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
ROW, UNKNOWN = {"messages": [USER, ANSWER]}, {"dialog": [], "tools": [{"name": "add"}]}
FIX = "\nfix them, or pass --skip-invalid to skip them"
NAN = {"n": float("nan")}
FORMATS = (
    "expected messages; conversations; instruction and output; prompt and completion or generation; document or text;"
    " question and answer; prompt and response; instruction and response; input and output"
)
# A name, files of which the first is the input, options, and what process_data.py says.
PREPARED = [
    ("rows of no format", {"in.jsonl": [UNKNOWN, NAN, UNKNOWN]}, {},
     "3 of 3 rows cannot be used:\n  in.jsonl:1: unrecognised format: its keys are ['dialog', 'tools']; for a chat of"
     " a question and an answer pass --format alpaca --columns prompt=QUESTION completion=ANSWER, for messages"
     f" --columns messages=NAME; {FORMATS}\n    also in.jsonl:3\n  in.jsonl:2: not JSON: NaN is not"
     " a JSON number\nfix them"),
    ("chats that would be cut", {"in.jsonl": [{"messages": [USER | {"role": "pretrain"}]}, ROW]}, {"block_size": 8},
     f"1 of 2 rows cannot be used:\n  in.jsonl:2: not a document: --block-size cuts only documents{FIX}"),
    ("a template that ends no turn",
     {"in.jsonl": [ROW], "own.jinja": CHATML_TEMPLATE.replace("<|im_end|>", "")}, {"chat_template": "own.jinja"},
     "--chat-template own.jinja cannot be used: the chat template writes no end-of-turn token after an assistant"
     " turn: '\\n' within a conversation, '\\n' at its end; if a token that begins the next turn ends generation, the"
     " model's generation_config.json has to name it as eos_token_id; to append a stop token to conversations, pass"
     " --missing-stop-token append; to train without, which does not teach the model to stop, pass"
     " --missing-stop-token allow; tried with [{'role': 'user', 'content': 'What is 2 + 2?'}, {'role': 'assistant',"
     " 'content': 'It is 4.'}]"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "options", "text"), [pytest.param(*row[1:], id=row[0]) for row in PREPARED])
def test_what_process_data_says(files, options, text, model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content if isinstance(content, str) else "\n".join(map(json.dumps, content)))
    given = dict(input_file=next(iter(files), ""), output_file="out.arrow", model_name_or_path=str(model), num_proc=1)
    with pytest.raises(ValueError) as refused:
        process_data(group_options(ProcessDataOptions, **given | options))
    assert str(refused.value) == text


HOLDER = {"host": "node7", "boot_id": "another", "pid": 12, "started": "2026-01-01"}
BEFORE, NOW = {"seed": 42, "lora": False}, {"seed": 7, "lora": True}
STUCK = Peer("node1", 11, 100, 39, 60, "B")


def read_messages(path: Path, patch: pytest.MonkeyPatch) -> None:
    write_feather(pa.table({"messages": [[]]}), path / "rows.arrow")
    TokenizedData(path / "rows.arrow")


def differ(path: Path, patch: pytest.MonkeyPatch) -> str:
    seeds = [Account(rank, f"node{rank}", {"options": {"--seed": str(seed)}}) for rank, seed in ((0, 42), (2, 7))]
    return describe_differences(seeds, {0: [0, 1], 2: [2], 3: [3, 4, 5]})


def meet_nowhere(path: Path, patch: pytest.MonkeyPatch) -> None:
    def fail(*place: object, timeout: float) -> None:
        raise dist.DistNetworkError("timed out\nat a line of C++")

    patch.setattr(meeting, "open_store", fail)
    patch.setenv("MASTER_ADDR", "node0")
    patch.setenv("MASTER_PORT", "29500")
    meeting.meet(1, 2, timeout=9)


def wait_for_ranks(path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lifeline, "SECONDS_TO_CONNECT", 0.01)
    with contextlib.closing(asyncio.new_event_loop()) as loop:
        nobody = lifeline.Lifeline(0, 3, loop, on_met=print, on_message=print, on_lost=print)
    nobody.connect(lifeline.Address(7, "token", "node0", 1))


def take_lock_over(path: Path, patch: pytest.MonkeyPatch) -> None:
    (path / ".lock").write_text(json.dumps(HOLDER))
    patch.setattr(lock, "SECONDS_TO_WATCH", 0)
    RunLock(path).release()


def use_directory(path: Path, patch: pytest.MonkeyPatch) -> None:
    params = dict(options={}, identity=BEFORE, starts=[], versions={}, finished=None)
    (path / "training_params.json").write_text(json.dumps(params))
    check_unused(path, "auto", NOW, ["elsewhere"])


def fill_schedule(path: Path, patch: pytest.MonkeyPatch) -> None:
    options = group_options(TrainOptions, output_dir="o", model_name_or_path="m", data_path="d", schedule_steps=6)
    check_schedule(SimpleNamespace(num_steps_before=3, num_steps=7), options.optimization)


def warn_of_oddities(path: Path, patch: pytest.MonkeyPatch) -> str:
    batching = SimpleNamespace(mean_samples=8, flag="--batch-size 8")
    data = SimpleNamespace(kept=range(5), sources=[SimpleNamespace(path=Path("/data.arrow"))])
    inputs = SimpleNamespace(data=data, validation_data=data, batching=batching, warnings=[], num_steps=5,
                             last_step=5, schedule_steps=5, values={"context_parallel": None})  # fmt: skip
    o = group_options(TrainOptions, output_dir=str(path), model_name_or_path="m", data_path="d", num_warmup_steps=9,
                      save_final_checkpoint=False)  # fmt: skip
    find_oddities(inputs, o.optimization, o.end, o.validation, o.exports, num_rows=16)
    return "\n".join(inputs.warnings)


# A name, what leads to the text, and the whole text: of an error, returned, or logged.
OTHERS: list[tuple[str, Callable[[Path, pytest.MonkeyPatch], str | None], str]] = [
    ("rows that are not tokenized", read_messages,
     "--data-path DIR/rows.arrow: no column input_ids, labels, len, num_loss_counted_tokens; found messages. Tokenize"
     " rows with mini-trainer process-data, or give them to train with --input-file"),
    ("ranks that differ", differ,
     "the ranks differ, and nothing has been trained:\n"
     "  options: --seed: 42 on ranks 0-1 (rank 0 on node0); 7 on rank 2 (node2)\n"
     "  and ranks 3-5 differ in further ways\n"
     "make them equal on all ranks; docs/reference/running.md lists what may differ"),
    ("no rendezvous", meet_nowhere, "no rendezvous at node0, port 29500 (--start-timeout 9): timed out"),
    ("no connection", wait_for_ranks, "ranks 1-2 did not connect to rank 0 on node0, port 7"),
    ("lock left behind", take_lock_over,
     "DIR/.lock names the run with pid 12 on node7, started 2026-01-01: waiting 0 s to see if that run is alive\n"
     "warning: DIR/.lock: took over the lock that the run with pid 12 on node7, started 2026-01-01 left behind"),
    ("dead rank", lambda path, patch: describe_death(3, replace(STUCK, where="step 5")),
     "rank 3 (pid 11 on node1) died without a report, last seen in step 5: it crashed or was killed, perhaps because"
     " it ran out of memory"),
    ("two stops", lambda path, patch: stop_reason(Flag.SIGTERM | Flag.STOP_FILE)[1], "SIGTERM and the stop file"),
    ("another run", use_directory,
     "--output-dir DIR holds a run without a checkpoint, and other lora (False before, now True), seed (42 before, now"
     " 7): give the same ones, or name a new directory"),
    ("several problems", lambda path, patch: Errors([ValueError("a"), OSError("b")]).raise_all(),
     "2 problems:\n  - a\n  - b"),
    ("error at the end", lambda path, patch: explain_stop(None, ["hooks:Mine, on_end"], []),
     "the run is done, but there was an error in a callback (hooks:Mine, on_end)"),
    ("schedule", fill_schedule,
     "--schedule-steps 6: the run's 7 steps, after 3 of the runs that it continues, are 10: raise it, or end the run"
     " earlier"),
    ("unlikely settings", warn_of_oddities,
     "--batch-size 8: each step draws the 5 samples repeatedly\n"
     "the run has only 5 optimizer updates, in which a model learns little; 30 or more are usual:"
     " --batch-size 1 or more data. Usual learning rates of full fine-tuning are 2e-6 to 2e-5, this run's is 1e-05\n"
     "--validation-data-path /data.arrow is also trained on: its loss says nothing about other data\n"
     "--batch-size 8: fewer samples a step than the 16 ranks: some of them will be idle\n"
     "--no-save-final-checkpoint: the trained model will not be exported\n"
     "--num-warmup-steps 9: the run of 5 steps ends before its peak learning rate"),
    ("no template",
     lambda path, patch: encode_prompt(
         Prompt(row={}, place="rows.jsonl:1", messages=[USER]), SimpleNamespace(chat_template=None)
     ),
     "rows.jsonl:1: a chat, but the tokenizer has no chat template: give prompts as text, or use a chat model"),
    ("metric", lambda path, patch: choose_measures(["blue"], [("1",)]),
     "--metrics blue: is not one of exact_match, first_line, normalised_match, contains, number, token_f1, "
     "label, rouge_1, rouge_2, rouge_l, bleu, chrf, edit_similarity"),
    ("no directory of runs", lambda path, patch: Board(path / "gone"), "DIR/gone: no such directory"),
    ("no run to draw", lambda path, patch: open_runs([path]),
     "DIR: not a run's directory, it has no training_metrics_0.jsonl; name the --output-dir of a run"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "text"), [pytest.param(*row[1:], id=row[0]) for row in OTHERS])
def test_whole_texts(call, text, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")
    caplog.set_level("WARNING", logger="mini_trainer")
    try:
        message = call(tmp_path, monkeypatch) or "\n".join(caplog.messages)
    except (ValueError, OSError, RunError, BadInputError) as error:
        message = str(error)
    assert message.replace(str(tmp_path), "DIR") == text
