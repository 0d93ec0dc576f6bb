"""Every option of train.py changes something, and nothing is exported, logged or stopped by accident.

The runs are in this process, on one rank, with a model of a few thousand parameters.
"""

import dataclasses
import importlib.metadata
import json
import logging
import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from breadth import long, wide
from in_process import train_here
from safetensors.torch import load_file
from small_runs import make_inputs
from tiny_data import make_samples, read_lines, to_row, write_rows, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, AutoTokenizer

from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer
from mini_trainer.distributed.ending import RunError, log
from mini_trainer.options import RowOptions, TrainOptions, iterate_fields

NUM_SAMPLES = 30
STEPS, BATCH_SIZE = 4, 8
BASE = dict(batch_size=BATCH_SIZE, max_tokens_per_gpu=64, max_steps=STEPS, learning_rate=1e-2, num_warmup_steps=1,
            activation_checkpointing="none")  # fmt: skip


@dataclasses.dataclass
class Run:
    """What a run left behind."""

    output_dir: Path
    rows: list[dict]  # training_metrics_0.jsonl
    text: str  # the console
    exports: dict[str, dict[str, torch.Tensor]]  # directory name -> weights

    def column(self, name: str) -> list:
        return [row[name] for row in self.rows]

    @property
    def checkpoints(self) -> set[str]:
        return {path.name for path in self.output_dir.glob("checkpoints/*")}

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return self.exports[max(self.exports, key=lambda name: int(name.removeprefix("samples_")))]


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> dict[str, str]:
    return make_inputs(tmp_path_factory.mktemp("inputs"), "llama_tied_bias", num_samples=NUM_SAMPLES)


@pytest.fixture(scope="module")
def run(paths, world, tmp_path_factory):
    """Trains with `BASE` and the given changes and gathers what was left behind."""

    cache_dir = tmp_path_factory.mktemp("osft")

    def start(**changes) -> Run:
        output_dir = Path(changes.pop("output_dir", tmp_path_factory.mktemp("run")))
        if "osft" in changes:
            changes["osft_cache_dir"] = str(cache_dir)
        records: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: records.append(record.getMessage())
        log.addHandler(handler)
        log.setLevel(changes.get("logging_level", "INFO"))
        try:
            train_here(world, **(paths | BASE | dict(output_dir=str(output_dir)) | changes))
        finally:
            log.removeHandler(handler)
        rows = read_lines(output_dir / "training_metrics_0.jsonl")
        files = [path for path in output_dir.glob("hf_format/*/model.safetensors") if not path.parent.is_symlink()]
        exports = {path.parent.name: load_file(path) for path in files}
        return Run(output_dir, rows, "\n".join(records), exports)

    return start


@pytest.fixture(scope="module")
def base(run) -> Run:
    return run()


def same_weights(a: Run, b: Run) -> bool:
    return all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)


def has_profile(output_dir: Path, *, num_steps: int) -> bool:
    """Whether the trace holds the updates of so many steps, and the table operations."""
    events = json.loads((output_dir / "profile" / "rank_0.json").read_text())["traceEvents"]
    updates = [event for event in events if event.get("name", "").startswith("Optimizer.step#")]
    return len(updates) == num_steps and "aten::" in (output_dir / "profile" / "rank_0.txt").read_text()


# For every option: a change, and what must differ from the base run.
EFFECTS = {
    "batch_size": (dict(batch_size=5), lambda r, b: r.column("num_samples") == [5] * STEPS),
    "batch_tokens": (
        dict(batch_size=None, batch_tokens=100),
        lambda r, b: (
            len(set(r.column("num_samples"))) > 1 and 0 <= sum(r.column("num_total_tokens")) - 100 * STEPS < 40
        ),
    ),
    "max_tokens_per_gpu": (dict(max_tokens_per_gpu=40),
                           lambda r, b: sum(r.column("grad_accum")) > sum(b.column("grad_accum"))),
    "drop_overlong": (dict(max_tokens_per_gpu=30, drop_overlong=True),
                      lambda r, b: "; 8 dropped" in r.text and "dropped" not in b.text),
    "seed": (dict(seed=7), lambda r, b: r.column("num_total_tokens") != b.column("num_total_tokens")),
    "learning_rate": (dict(learning_rate=5e-3), lambda r, b: r.column("lr") == [2.5e-3] + [5e-3] * 3),
    "num_warmup_steps": (dict(num_warmup_steps=0), lambda r, b: r.column("lr") == [1e-2] * STEPS),
    "lr_scheduler": (dict(lr_scheduler="linear", num_warmup_steps=0),
                     lambda r, b: r.column("lr") == pytest.approx([0.01, 0.0075, 0.005, 0.0025])),
    "lr_shape": (dict(lr_scheduler="wsd", num_warmup_steps=0, lr_shape=2),
                 lambda r, b: r.column("lr") == pytest.approx([0.01, 0.01, 0.01, 0.005])),
    "min_lr_ratio": (dict(lr_scheduler="linear", num_warmup_steps=0, min_lr_ratio=0.5),
                     lambda r, b: r.column("lr") == pytest.approx([0.01, 0.00875, 0.0075, 0.00625])),
    "weight_decay": (dict(weight_decay=0.5), lambda r, b: not same_weights(r, b)),
    "adam_beta1": (dict(adam_beta1=0.5), lambda r, b: not same_weights(r, b)),
    "adam_beta2": (dict(adam_beta2=0.5), lambda r, b: not same_weights(r, b)),
    "adam_eps": (dict(adam_eps=1e-2), lambda r, b: not same_weights(r, b)),
    "optimizer": (dict(optimizer="adamw8bit"), lambda r, b: not same_weights(r, b)),
    "master_weights": (dict(master_weights="bfloat16"), lambda r, b: not same_weights(r, b)),
    "max_grad_norm": (dict(max_grad_norm=1e-3), lambda r, b: not same_weights(r, b)),
    "max_steps": (dict(max_steps=2), lambda r, b: len(r.rows) == 2),
    "max_epochs": (dict(max_steps=None, max_epochs=2), lambda r, b: len(r.rows) == 8),  # 60 samples, 8 a step
    "max_samples": (dict(max_steps=None, max_samples=17), lambda r, b: len(r.rows) == 3),
    "max_tokens": (dict(max_steps=None, max_tokens=400),
                   lambda r, b: r.rows[-1]["total_tokens_accumulated"] >= 400 > r.rows[-2]["total_tokens_accumulated"]),
    "min_samples_per_checkpoint": (dict(min_samples_per_checkpoint=12),
                                   lambda r, b: set(r.exports) == {"samples_16", "samples_24", "samples_32"}),
    "checkpoint_at_epoch": (
        dict(checkpoint_at_epoch=True, max_steps=5),
        lambda r, b: set(r.exports) == {"samples_32", "samples_40"},  # 30 samples an epoch
    ),
    "save_final_checkpoint": (dict(save_final_checkpoint=False, min_samples_per_checkpoint=24),
                              lambda r, b: set(r.exports) == {"samples_24"} and set(b.exports) == {"samples_32"}),
    "keep_exports": (dict(min_samples_per_checkpoint=8, keep_exports=2),
                     lambda r, b: set(r.exports) == {"samples_24", "samples_32"}),
    "profile_steps": (dict(profile_steps="2:3"),
                      lambda r, b: has_profile(r.output_dir, num_steps=2) and same_weights(r, b)),
    "checkpoint_every_steps": (dict(checkpoint_every_steps=3),
                               lambda r, b: r.checkpoints == {"step_3", "step_4"} and b.checkpoints == set()),
    "checkpoint_every_minutes": (dict(checkpoint_every_minutes=1e-6),
                                 lambda r, b: r.checkpoints == {"step_3", "step_4"}),
    "keep_checkpoints": (dict(checkpoint_every_steps=1, keep_checkpoints=1), lambda r, b: r.checkpoints == {"step_4"}),
    "export_dtype": (
        dict(export_dtype="float32"),
        lambda r, b: (
            {w.dtype for w in r.weights.values()} == {torch.float32}
            and {w.dtype for w in b.weights.values()} == {torch.bfloat16}
        ),
    ),
    "compute_dtype": (
        dict(compute_dtype="bfloat16"),
        lambda r, b: (
            r.column("loss") != b.column("loss") and r.column("loss") == pytest.approx(b.column("loss"), rel=2e-2)
        ),
    ),
    "attention": (dict(attention="eager"), lambda r, b: " eager attention" in r.text and " sdpa attention" in b.text),
    "activation_checkpointing": (
        dict(activation_checkpointing="selective"),
        lambda r, b: "selective activation" in r.text and r.column("loss") == b.column("loss"),
    ),
    "compile": (dict(compile=True),
                lambda r, b: "compiled blocks" in r.text and counters["stats"]["unique_graphs"] > 0),
    "osft": (dict(osft=True, osft_unfreeze_rank_ratio=0.5),
             lambda r, b: 0 < r.rows[-1]["osft_leak"] < 1 and "osft_leak" not in b.rows[-1]),
    "osft_unfreeze_rank_ratio": (
        dict(osft=True, osft_unfreeze_rank_ratio=1.0),
        lambda r, b: re.search(r"15,360 trainable parameters .* 15,360\b", r.text) is not None,
    ),
    "osft_target_patterns": (dict(osft=True, osft_unfreeze_rank_ratio=0.5, osft_target_patterns=("mlp",)),
                             lambda r, b: "OSFT on 6 layers" in r.text and "OSFT" not in b.text),
    "osft_train_others": (dict(osft=True, osft_unfreeze_rank_ratio=0.5, osft_train_others=True),
                          lambda r, b: not torch.equal(*(run.weights["model.embed_tokens.weight"] for run in (r, b)))),
    "lora": (dict(lora=True),
             lambda r, b: re.search("LoRA .*rank 16 .*14 layers", r.text) and not r.exports and b.exports),
    "logging_level": (dict(logging_level="WARNING"), lambda r, b: "step 1/4" in b.text and "step" not in r.text),
}  # fmt: skip


def test_every_option_is_given_by_some_test():
    """Here, or by its name or flag in another file; those of rows are covered where process_data.py's are."""
    others = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__))
    words = {word.strip("_") for word in re.findall(r"\w+", others.replace("-", "_"))}
    covered = {option.name for option in fields(RowOptions)} | EFFECTS.keys() | {"float8"} | words
    assert {option.name for option, _ in iterate_fields(TrainOptions)} <= covered


MARKED = {"compile": wide, "profile_steps": long}


@pytest.mark.parametrize("option", [MARKED[name](name) if name in MARKED else name for name in EFFECTS])
def test_the_option_changes_what_it_says(option, run, base):
    changes, effect = EFFECTS[option]
    assert effect(run(**changes), base)


def test_what_is_surely_not_meant_is_said(run):
    text = run(batch_size=NUM_SAMPLES + 1, num_warmup_steps=STEPS).text
    assert f" {NUM_SAMPLES} samples repeatedly" in text
    assert "peak learning" in text


def test_the_metrics_add_up(base):
    for i, row in enumerate(base.rows):
        assert row["step"] == i + 1
        assert row["total_samples_accumulated"] == (i + 1) * BATCH_SIZE
        assert row["epoch"] == pytest.approx((i + 1) * BATCH_SIZE / NUM_SAMPLES)
        assert row["total_tokens_accumulated"] == sum(base.column("num_total_tokens")[: i + 1])
        assert 0 < row["num_loss_counted_tokens"] < row["num_total_tokens"]
        assert row["packing_efficiency"] == pytest.approx(row["num_total_tokens"] / (row["grad_accum"] * 64))
        assert row["rank_balance"] == 1.0
        seconds = row["time_per_batch"] + row["data_wait_seconds"]
        assert row["tokens_per_second"] == pytest.approx(row["num_total_tokens"] / seconds)
        assert row["samples_per_second"] == pytest.approx(BATCH_SIZE / seconds)
        assert row["peak_memory_usage_GB"] > 0
        assert row["mfu"] is None and row["data_wait_seconds"] > 0
    params = json.loads((base.output_dir / "training_params.json").read_text())
    assert params["options"]["learning_rate"] == 1e-2 and params["world_size"] == 1
    assert params["versions"]["torch"] == importlib.metadata.version("torch")


def test_dropout_is_honoured_and_drawn_from_seed_and_step(run, tmp_path):
    config = type(FAMILIES["gpt2"]).from_dict(FAMILIES["gpt2"].to_dict() | dict(attn_pdrop=0.3, resid_pdrop=0.3))
    with_dropout = str(save_tokenizer(save_model(config, tmp_path / "dropout")))
    without = str(save_tokenizer(save_model(FAMILIES["gpt2"], tmp_path / "none")))
    first, again, other = (run(model_name_or_path=path) for path in (with_dropout, with_dropout, without))
    assert first.column("loss") == again.column("loss") != other.column("loss")


def test_an_export_loads_with_nothing_missing_and_readable_by_others(run):
    finished = run(export_dtype="float32")
    export_dir = finished.output_dir / "hf_format" / "samples_32"
    model, report = AutoModelForCausalLM.from_pretrained(export_dir, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.dtype == torch.float32
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    files = {path.name: path for path in export_dir.iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"} <= set(files)
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in files.values())
    assert [path.name for path in export_dir.parent.iterdir() if not path.is_symlink()] == ["samples_32"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(memory_budget_gb=3.0), "--memory-budget-gb has no effect"),  # which nothing measures
        (dict(float8=True), "--float8 .*torchao.*CPU"),
        (dict(attention="flash_attn"), "--attention flash_attn: .*CUDA"),
        (dict(attention="varlen"), "--attention varlen: .*CUDA"),
    ],
)
def test_what_the_cpu_cannot_do_is_refused_with_what_it_needs(given, message, run):
    with pytest.raises(ValueError, match=message):
        run(**given)


def test_a_non_finite_loss_stops_before_the_update_and_names_step_and_samples(run, tmp_path):
    model_dir = save_tokenizer(save_model(FAMILIES["gpt2"], tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    with torch.no_grad():
        model.transformer.wpe.weight[30] = 1e38  # overflows, and is met only by a sequence of more than 30 tokens
    model.save_pretrained(model_dir)
    samples = make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE, max_len=20)
    samples[11] = ([3] * 35, [3] * 35)
    data = write_samples(tmp_path / "data.arrow", samples)
    with pytest.raises(RunError, match=r"step [1-4]: the loss ") as error:
        run(model_name_or_path=str(model_dir), data_path=str(data), max_tokens_per_gpu=36, output_dir=tmp_path / "run")
    assert str(error.value).endswith("data.arrow: 12 (rank 0)")
    assert not (tmp_path / "run" / "hf_format").exists()


def test_a_gradient_that_is_not_finite_stops_too(run, tmp_path):
    """The loss is finite, but the gradient of embeddings close to 0 overflows in the norm behind them."""
    path = save_tokenizer(save_model(FAMILIES["llama"], tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(path)
    model.config.rms_norm_eps = 1e-45
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1e-19)
        model.get_output_embeddings().weight.mul_(1e25)
    model.save_pretrained(path)
    with pytest.raises(RunError, match=r"step 1: the gradient is not finite \(loss \d"):
        run(model_name_or_path=str(path))


def test_weights_scale_the_loss_of_their_tokens_and_zero_switches_them_off(run, paths, tmp_path):
    samples = make_samples(NUM_SAMPLES, vocab_size=VOCAB_SIZE)
    rows = [to_row(sample) for sample in samples]
    losses = {}
    for weight in (None, 1.0, 0.5, 0.0):
        weighted = rows if weight is None else [row | {"loss_weights": [weight] * row["len"]} for row in rows]
        data = write_rows(tmp_path / f"{weight}.arrow", weighted)
        losses[weight] = run(data_path=str(data), max_steps=1).column("loss")[0]
    assert losses[1.0] == losses[None] > 0
    assert losses[0.5] == pytest.approx(losses[None] / 2, rel=1e-6)
    assert losses[0.0] == 0


def test_a_tokenizer_beside_the_data_grows_the_vocabulary_and_is_exported(run, paths, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(paths["model_name_or_path"])
    num_known = len(tokenizer)  # fewer than the embedding has rows
    tokenizer.add_tokens([f"<|added_{i}|>" for i in range(VOCAB_SIZE + 3 - num_known)], special_tokens=True)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(tmp_path / "data.arrow.tokenizer")
    samples = make_samples(NUM_SAMPLES, vocab_size=len(tokenizer))
    data = write_samples(tmp_path / "data.arrow", samples)
    sidecar = dict(tokenizer_fingerprint=fingerprint_tokenizer(tokenizer), tokenizer_dir="data.arrow.tokenizer")
    sidecar |= dict.fromkeys(("max_token_id", "stop_token_id"), len(tokenizer) - 1)
    (tmp_path / "data.arrow.meta.json").write_text(json.dumps(sidecar))
    finished = run(data_path=str(data), export_dtype="float32", learning_rate=1e-12)
    assert re.search(rf"\b{VOCAB_SIZE} rows .* 320\b", finished.text)
    export_dir = finished.output_dir / "hf_format" / "samples_32"
    model = AutoModelForCausalLM.from_pretrained(export_dir)
    embedding = model.get_input_embeddings().weight
    old = load_file(Path(paths["model_name_or_path"]) / "model.safetensors")
    assert model.config.vocab_size == len(embedding) == 320
    assert model.generation_config.eos_token_id == len(tokenizer) - 1
    known = embedding[:num_known]
    torch.testing.assert_close(known, old["model.embed_tokens.weight"][:num_known])
    torch.testing.assert_close(embedding[num_known:], known.mean(0).expand(320 - num_known, -1))
    exported = AutoTokenizer.from_pretrained(export_dir)
    assert exported.get_vocab() == tokenizer.get_vocab() and exported.chat_template == tokenizer.chat_template
