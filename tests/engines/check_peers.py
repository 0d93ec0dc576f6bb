"""Exports in transformers' own programs, TRL, peft, lm_eval, sentence-transformers and CTranslate2."""

import json
import subprocess
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from engine_exports import Exports, ask_chats, make_chats, run
from engine_servers import ask_here, ask_server, served
from engine_table import NUM_TOKENS, Said, Table, count_equal, decode, expect, score
from evaluations import write_task
from hub_standin import Hub
from processes import ENV, ROOT, flags, free_port
from tiny_data import read_lines
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

RECORDED = ("full_bf16", "osft", "lora_r4", "lora_merged", "grown", "vision", "classifier", "reward")
LABELS = {"classifier": ("long", "short"), "reward": ("reward",)}
SCRIPTS = Path(sys.executable).parent  # of the programs that packages install


def call(*words: object, env: dict[str, str] | None = None) -> str:
    """What a program of the environment prints; it must end well."""
    done = subprocess.run(
        list(map(str, words)), cwd=ROOT, env=ENV | (env or {}), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.parametrize("kind", RECORDED)
def test_transformers_answers_otherwise_than_the_run_recorded(kind, exports: Exports, table: Table):
    call(sys.executable, "-m", "mini_trainer", "verify", exports[kind], "--against", "transformers")
    table(engine="verify --against transformers", kind=kind, greedy="as recorded")


def test_a_pipeline_answers(exports: Exports, table: Table):
    model = exports["full"]
    ask = pipeline("text-generation", model=str(model), dtype=torch.float32)
    said = [ask(chat, max_new_tokens=NUM_TOKENS, do_sample=False)[0]["generated_text"][-1]["content"]
            for chat in ask_chats()]  # fmt: skip
    table(engine="pipeline", kind="full", greedy=count_equal(said, decode(model, expect(model, ask_chats()))))


def test_transformers_serve_answers(exports: Exports, table: Table, tmp_path):
    model, port = exports["full"], free_port()
    words = [SCRIPTS / "transformers", "serve", model, "--host", "127.0.0.1", "--port", port, "--device", "cpu"]
    with served(words, port, tmp_path):
        said = ask_server(port, str(model), ask_chats(), tmp_path)
    table(engine="transformers serve", kind="full", greedy=count_equal(said, decode(model, expect(model, ask_chats()))))


def test_our_server_answers_otherwise_than_the_run_recorded(exports: Exports, table: Table, tmp_path):
    model, port = exports["full"], free_port()
    words = [sys.executable, "-m", "mini_trainer", "serve", model, "--engine", "hf", "--port", port]
    with served(words, port, tmp_path):
        call(sys.executable, "-m", "mini_trainer", "verify", model, "--against", f"http://127.0.0.1:{port}/v1")
    table(engine="verify --against URL", kind="full", greedy="as recorded")


def test_a_pipeline_sees(exports: Exports, table: Table):
    model = exports["vision"]
    rows = [json.loads(line)["messages"][:1] for line in exports.pictures.read_text().splitlines()]
    chats = [[{"role": "user", "content": [row[0]["content"][0] | {"image": str(exports.folder / f"{i}.png")},
               row[0]["content"][1]]}] for i, row in enumerate(rows)]  # fmt: skip
    ask = pipeline("image-text-to-text", model=str(model), dtype=torch.float32)
    said = [ask(text=chat, max_new_tokens=NUM_TOKENS, do_sample=False, return_full_text=False)[0]["generated_text"]
            for chat in chats]  # fmt: skip
    assert len(set(said)) > 1  # it looks at them
    table(engine="pipeline", kind="vision", greedy=f"{len(said)} answers")


@pytest.mark.parametrize("kind", ["classifier", "reward"])
def test_a_cross_encoder_scores_as_transformers_does(kind, exports: Exports, table: Table):
    """A classifier's pairs of texts, a reward model's chats."""
    from sentence_transformers import CrossEncoder

    model = exports[kind]
    rows = make_chats() if kind == "reward" else [("one", "is short"), ("eleven", "is long")]
    rows = [row["messages"] if kind == "reward" else row for row in rows]
    logits = score(model, rows)
    encoder = CrossEncoder(str(model), device="cpu", model_kwargs={"dtype": "float32"})
    scores = torch.from_numpy(encoder.predict(rows, activation_fn=torch.nn.Identity())).reshape(logits.shape)
    largest = (scores - logits).abs().max().item()
    table(engine="CrossEncoder", kind=kind, greedy=f"{logits.numel()} scores", logprob=largest)
    assert largest < 1e-5
    classify = pipeline("text-classification", model=str(model), dtype=torch.float32)
    assert {classify(text)[0]["label"] for text in ("one", "eleven")} <= set(LABELS[kind])


def tokenize(exports: Exports, model: Path, folder: Path) -> tuple[Path, datasets.Dataset]:
    """Tokenized chats, and the same rows as TRL takes them."""
    data = folder / "data.jsonl"
    run("process_data.py", input_file=exports.chats, output_file=data, model_name_or_path=model, preview=0, num_proc=1)
    rows = [{"input_ids": row["input_ids"], "completion_mask": [int(label != -100) for label in row["labels"]]}
            for row in read_lines(data)]  # fmt: skip
    return data, datasets.Dataset.from_list(rows)


def train_by_trl(model: str | Path, rows: datasets.Dataset, folder: Path, **given: object) -> list[float]:
    """Losses of TRL's trainer over all rows a step; the model is saved to `folder`."""
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(
        output_dir=str(folder), per_device_train_batch_size=len(rows), max_steps=3, learning_rate=1e-2, logging_steps=1,
        bf16=False, use_cpu=True, report_to="none", lr_scheduler_type="constant", max_length=None, save_strategy="no",
        completion_only_loss=True,
        model_init_kwargs={"dtype": "float32"}, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = SFTTrainer(str(model), args=config, train_dataset=rows, **given)
    trainer.train()
    trainer.save_model(str(folder))
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def train_here(model: Path, data: Path, folder: Path, **given: object) -> float:
    """The first loss of a run here over all rows."""
    run("train.py", model_name_or_path=model, data_path=data, output_dir=folder, batch_size=12, max_steps=1,
        max_tokens_per_gpu=4096, compute_dtype="float32", save_final_checkpoint=False, **given)  # fmt: skip
    return read_lines(folder / "training_metrics_0.jsonl")[0]["loss"]


def test_trl_goes_on_from_an_export_and_a_run_here_from_trls(exports: Exports, table: Table, tmp_path):
    model = exports["full"]
    data, rows = tokenize(exports, model, tmp_path)
    losses = train_by_trl(model, rows, tmp_path / "trl")
    first, later = train_here(model, data, tmp_path / "a"), train_here(tmp_path / "trl", data, tmp_path / "b")
    table(engine="TRL", kind="full, continued", greedy="loss", logprob=abs(first - losses[0]))
    assert first == pytest.approx(losses[0], abs=2e-4)  # TRL prints four digits
    assert later < losses[2]


def test_an_adapter_of_trl_and_peft_goes_on_here(exports: Exports, table: Table, tmp_path):
    from peft import LoraConfig, PeftModel

    model = exports["full"]
    data, rows = tokenize(exports, model, tmp_path)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    train_by_trl(model, rows, tmp_path / "adapter", peft_config=lora)
    net = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "adapter").eval()
    sums = [0.0, 0]
    for row in read_lines(data):
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])[1:]
        with torch.no_grad():
            logits = net(ids).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
        sums = [sums[0] + loss.item(), sums[1] + int((labels != -100).sum())]
    ours = train_here(model, data, tmp_path / "on", lora=True, lora_adapter=tmp_path / "adapter")
    difference = abs(ours - sums[0] / sums[1])
    table(engine="peft, TRL", kind="their adapter, continued", greedy="loss", logprob=difference)
    assert difference < 1e-5
    said = ask_here(tmp_path, ask_chats(), model=model, adapter=tmp_path / "adapter")
    expected = expect(model, ask_chats(), adapter=tmp_path / "adapter")
    table(engine="peft, TRL", kind="their adapter, asked", greedy=count_equal(said, decode(model, expected)))


def test_lm_evals_own_command_agrees_with_ours(exports: Exports, table: Table, tmp_path):
    model = exports["full"]
    task = write_task(tmp_path / "tasks", name="tiny_choice", file="tiny_choice.yaml")
    call(SCRIPTS / "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--tasks",
         task, "--device", "cpu", "--output_path", tmp_path / "theirs", "--batch_size", "1")  # fmt: skip
    (found,) = (tmp_path / "theirs").rglob("results_*.json")
    theirs = json.loads(found.read_text())["results"]["tiny_choice"]
    run("evaluate_model.py", model=model, lm_eval=task, output_dir=tmp_path / "ours")
    ours = json.loads((tmp_path / "ours" / "results.json").read_text())
    (measured,) = ours["sets"]
    values = {metric["name"]: metric["values"][0]["mean"] for metric in measured["metrics"]}
    assert len(values) == 2 and values == {name: theirs[f"{name},none"] for name in values}
    table(engine="lm_eval", kind="full", greedy=f"{len(values)} metrics", logprob=0.0)


@pytest.mark.parametrize("kind", ["qwen2", "qwen2_bf16"])
def test_ctranslate2_answers(kind, exports: Exports, table: Table, tmp_path):
    """In fp32: it has no bf16 on a CPU, and no YaRN. Its Llama needs a token that begins a text, which our tokenizer
    lacks."""
    import ctranslate2

    model, quantization = exports[kind], "float32"
    call(SCRIPTS / "ct2-transformers-converter", "--model", model, "--output_dir", tmp_path / "ct2", "--quantization",
         quantization)  # fmt: skip
    net, tokenizer = (
        ctranslate2.Generator(str(tmp_path / "ct2"), compute_type=quantization),
        AutoTokenizer.from_pretrained(model),
    )
    expected = expect(model, ask_chats())
    said = []
    for one in expected:
        (result,) = net.generate_batch(
            [tokenizer.convert_ids_to_tokens(one.prompt)], max_length=NUM_TOKENS, beam_size=1, return_scores=True,
            include_prompt_in_result=False, end_token=tokenizer.eos_token, return_end_token=True,
            return_logits_vocab=True,
        )  # fmt: skip
        ids = result.sequences_ids[0]
        logits = np.stack([np.asarray(step) for step in result.logits[0]])[: len(ids)]
        logprobs = torch.from_numpy(logits).float().log_softmax(-1)[range(len(ids)), ids].tolist()
        said.append(Said(one.prompt, ids, logprobs, ids[-1] == tokenizer.eos_token_id))
    table.compare("ctranslate2", kind, expected, said)


def test_what_the_hub_holds_is_the_export(exports: Exports, table: Table, tmp_path):
    """Uploaded by the hub's own client."""
    hub, run_dir = Hub(), tmp_path / "run"
    words = flags(model_name_or_path=exports.base(), input_file=exports.chats, output_dir=run_dir, batch_size=4,
                  max_steps=2, max_tokens_per_gpu=512, export_dtype="float32",
                  push_to_hub="me/counting")  # fmt: skip
    try:
        env = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "t", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
        call(sys.executable, "train.py", *words, env=env)
    finally:
        hub.close()
    files = hub.repos["me/counting"]["main"]
    for name, content in files.items():
        (tmp_path / "held" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "held" / name).write_bytes(content)
    export = run_dir / "hf_format" / "latest"
    table.compare("hub stand-in", "full", expect(export, ask_chats()), expect(tmp_path / "held", ask_chats()))
