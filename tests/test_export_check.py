"""check.json: an export that was broken on purpose answers otherwise than its run recorded."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from data_runs import tokenize_rows
from exports import make_parts
from in_process import train_here
from openai_standin import repeat, serve
from safetensors.torch import load_file, save_file
from tiny_data import write_jsonl
from tiny_models import SHAPE, build, change_json, save_model, save_tokenizer
from transformers import PreTrainedTokenizerBase, Qwen2Config

from mini_trainer.options.tools import VerifyOptions
from mini_trainer.run.export import export_model
from mini_trainer.run.export_check import (
    CHECK_FILE,
    MARGIN,
    TOLERANCE_4_BITS,
    Said,
    carry_check,
    compare,
    cut_answer,
    read_check,
    record_answers,
)
from mini_trainer.run.exports import check_export
from mini_trainer.tools.verify import verify

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory) -> Path:
    """An export with what its model answers, as a run writes it: tied, with biases and a rotary base of its own; its
    prompts are rendered by a chat template."""
    folder = tmp_path_factory.mktemp("whole")
    rope = dict(rope_type="default", rope_theta=2e3)
    config = Qwen2Config(**SHAPE | dict(initializer_range=0.3), tie_word_embeddings=True, rope_parameters=rope)
    path = save_tokenizer(save_model(config, folder / "model"))
    model, parts = build(path, world), make_parts(path)
    notes = {CHECK_FILE: json.dumps(record_answers(model, parts, world=world))}
    export_model(model, folder / "export", replace(parts, notes=notes), world=world)
    return folder / "export"


def change(file: str, **changes: object) -> Callable[[Path], None]:
    return lambda export: change_json(export / file, **changes)


def change_weights(edit: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Path], None]:
    def apply(export: Path) -> None:
        weights = load_file(export / WEIGHTS)
        weights |= {name: tensor.contiguous() for name, tensor in edit(weights).items()}
        save_file(weights, export / WEIGHTS, metadata={"format": "pt"})

    return apply


def swap_layers(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name.replace("layers.0.", "layers.1."): tensor for name, tensor in weights.items() if "layers.0." in name
    } | {name.replace("layers.1.", "layers.0."): tensor for name, tensor in weights.items() if "layers.1." in name}


def drop_stop(export: Path) -> None:
    template = export / "chat_template.jinja"
    assert "<|im_end|>" in template.read_text()
    template.write_text(template.read_text().replace("<|im_end|>", ""))


def rope(**values: object) -> dict[str, object]:
    return dict(rope_parameters=values, rope_scaling=None, rope_theta=values["rope_theta"])


EMBEDDING, BIAS = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias"
BREAKAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no stop token": (change("generation_config.json", eos_token_id=None), "the stop tokens: "),
    "another stop token": (change("generation_config.json", eos_token_id=7), "the stop tokens: "),
    "another padding token": (change("config.json", pad_token_id=5), "the padding token in config.json"),
    "another padding token of the tokenizer": (change("tokenizer_config.json", pad_token="a"), "the padding token"),
    "a template without its stop": (drop_stop, "another chat template"),
    "the embedding rolled by a row": (change_weights(lambda w: {EMBEDDING: w[EMBEDDING].roll(1, 0)}), "apart"),
    "layers swapped": (change_weights(swap_layers), "apart"),
    "a norm scaled": (change_weights(lambda w: {"model.norm.weight": 1.2 * w["model.norm.weight"]}), "apart"),
    "a bias missing": (change_weights(lambda w: {BIAS: 0 * w[BIAS]}), "apart"),
    "another rotary base": (change("config.json", **rope(rope_type="default", rope_theta=1e4)), "apart"),
    "another rotary scaling": (
        change("config.json", **rope(rope_type="linear", factor=4.0, rope_theta=2e3)), "apart"),
    "an untied head": (change("config.json", tie_word_embeddings=False), "lm_head"),
    "another epsilon": (change("config.json", rms_norm_eps=0.5), "apart"),
}  # fmt: skip


def test_a_whole_export_differs_from_itself(whole, capsys):
    verify(VerifyOptions(path=(str(whole),), against="transformers"))
    assert "answers as the trained model does" in capsys.readouterr().out
    recorded = json.loads((whole / CHECK_FILE).read_text())
    assert any(prompt["answer"] for prompt in recorded["prompts"])


@pytest.mark.parametrize("name", BREAKAGES)
def test_a_broken_export_answers_as_the_trained_model(name, whole, tmp_path):
    apply, said = BREAKAGES[name]
    apply(Path(shutil.copytree(whole, tmp_path / "export")))
    with pytest.raises(ValueError, match=f"{said}"):
        verify(VerifyOptions(path=(str(tmp_path / "export"),), against="transformers"))


def test_check_export_takes_a_broken_or_damaged_export(whole, tmp_path):
    base, broken = whole.with_name("model"), Path(shutil.copytree(whole, tmp_path / "export"))
    recorded = json.loads((whole / CHECK_FILE).read_text())
    check_export(whole, make_parts(base), recorded)
    merged = json.loads(carry_check(whole, torch.bfloat16)[CHECK_FILE])  # of an adapter in fp32 that was merged so
    assert merged == recorded | dict(dtype="bfloat16", tolerance=0.3) and recorded["tolerance"] == 0.02
    change_weights(swap_layers)(broken)
    with pytest.raises(ValueError, match=r"--check-export: .*export, loaded back: .* apart"):
        check_export(broken, make_parts(base), recorded)
    (broken / WEIGHTS).write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"--check-export: .*export cannot be loaded back"):
        check_export(broken, make_parts(base), recorded)


LORA = dict(lora=True, lora_rank=4, learning_rate=5e-2, check_export=True)
KINDS = {
    "adapter": LORA,
    "4 bits": LORA | dict(base_quantization="nf4", check_export=False),
    "classifier": dict(objective="sequence-classification", format="classification"),
    "classifier's adapter": LORA | dict(objective="sequence-classification", format="classification"),
    "reward": dict(objective="reward", format="preference"),
    "average": dict(weight_average="ema", average_over=4),
}
ROWS = {
    None: [{"messages": [dict(role="user", content=f"{i}?"), dict(role="assistant", content=f"It is {i}.")]}
           for i in range(8)],
    "classification": [{"text": f"It is {i}.", "label": "odd" if i % 2 else "even"} for i in range(8)],
    "preference": [{"prompt": f"{i}?", "chosen": f"It is {i}.", "rejected": "No."} for i in range(8)],
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_records_what_its_export_does_not_answer(kind, whole, world, tmp_path):
    options = dict(export_dtype="float32", max_steps=3, batch_size=4, max_tokens_per_gpu=256) | KINDS[kind]
    base, kind_of_rows = whole.with_name("model"), options.pop("format", None)
    rows = write_jsonl(tmp_path / "rows.jsonl", ROWS[kind_of_rows])
    given = {} if kind_of_rows is None else dict(format=kind_of_rows)
    data = tokenize_rows(base, rows, tmp_path / "data.arrow", **given)
    train_here(world, output_dir=str(tmp_path / "run"), model_name_or_path=str(base), data_path=str(data), **options)
    exports = sorted({path.resolve() for path in (tmp_path / "run" / "hf_format").iterdir()})
    assert len(exports) == 1 + (kind == "average")
    export = exports[0]
    if kind == "4 bits":  # readers have the base in full precision
        assert json.loads((export / CHECK_FILE).read_text())["tolerance"] == TOLERANCE_4_BITS
        return
    verify(VerifyOptions(path=tuple(map(str, exports)), against="transformers"))
    if (export / "adapter_config.json").exists():
        change_json(export / "adapter_config.json", lora_alpha=80)
        with pytest.raises(ValueError, match="apart"):
            verify(VerifyOptions(path=(str(export),), against="transformers"))


def test_an_export_that_answers_otherwise_is_left_for_the_next_start(whole, world, tmp_path, monkeypatch):
    base, rows = whole.with_name("model"), write_jsonl(tmp_path / "rows.jsonl", ROWS[None])
    data = tokenize_rows(base, rows, tmp_path / "data.arrow")
    given = dict(model_name_or_path=str(base), data_path=str(data), output_dir=str(tmp_path / "run"))
    monkeypatch.setattr("mini_trainer.run.exports.compare", lambda recorded, said: ["otherwise"])
    with pytest.raises(ValueError, match=r"--check-export: .*samples_4, loaded back: otherwise"):
        train_here(world, **given, max_steps=1, batch_size=4, max_tokens_per_gpu=256, check_export=True)
    assert [path.name for path in (tmp_path / "run" / "hf_format").iterdir()] == [".rejected_samples_4"]


class Mute:
    """A tokenizer that knows no word of a text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> object:
        return getattr(self.tokenizer, name)

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": []}


def test_a_tokenizer_without_english_or_with_more_tokens_or_a_short_context_ends_a_run(whole, world, tmp_path):
    base = Path(shutil.copytree(whole.with_name("model"), tmp_path / "model"))
    change_json(base / "config.json", max_position_embeddings=12)
    model, parts = build(base, world), make_parts(base)
    assert {len(prompt["ids"]) for prompt in record_answers(model, parts, world=world)["prompts"]} == {4}
    assert model.training  # as before
    model.model.config.vocab_size = 70
    assert len(record_answers(model, parts, world=world)["prompts"]) < 4
    recorded = record_answers(model, replace(parts, tokenizer=Mute(parts.tokenizer)), world=world)
    (base / CHECK_FILE).write_text(json.dumps(recorded))
    with pytest.raises(ValueError, match="has no prompts, since the tokenizer makes no tokens of them"):
        read_check(base)


def test_a_server_that_says_something_else_passes(whole):
    recorded = json.loads((whole / CHECK_FILE).read_text())
    said = {prompt["text"]: prompt["says"] for prompt in recorded["prompts"]}

    def complete(body: dict) -> dict:
        answer = repeat(body)
        answer["choices"][0]["text"] = said[body["prompt"]]
        return answer

    with serve(complete) as server:
        options = VerifyOptions(path=(str(whole),), against=server.url)
        with pytest.raises(ValueError, match="lists no model"):
            verify(options)
        server.models = [dict(id="served", object="model", created=1, owned_by="m")]
        verify(options)
        assert {body["model"] for _, body in server.asked} == {"served"}
        server.complete = repeat
        with pytest.raises(ValueError, match=r"is answered by '[A-Z, ]+', not "):
            verify(options)


def test_answers_are_compared_beyond_a_close_choice_or_a_stop():
    assert cut_answer([5, 6, 7], [1.0, MARGIN / 2, 1.0], stops=[], margin=MARGIN) == [5]
    assert cut_answer([5, 2, 7], [1.0, 1.0, 1.0], stops=[2], margin=MARGIN) == [5, 2]
    prompt = dict(text="a", ids=[9], answer=[5, 2], values={"5": -0.5}, says="x")
    recorded = dict(prompts=[prompt], stops=[2], tolerance=0.02)
    assert compare(recorded, [Said({"5": -0.51}, [5, 2], prompt=[9], text="x")]) == []
    for one, problem in (
        (Said({"5": -0.53}, [5, 2]), "apart"),
        (Said({"5": float("nan")}, [5, 2]), "apart"),
        (Said(None, [5]), "continued"),
        (Said(None, [5, 2, 7]), "continued"),
        (Said(None, None, prompt=[8]), "tokens"),
        (Said(None, None, text="xy"), "answered"),
    ):
        assert problem in compare(recorded, [one])[0]


def test_exports_without_a_check_and_readers_of_no_name_are_used(whole, tmp_path):
    bare = Path(shutil.copytree(whole, tmp_path / "export"))
    with pytest.raises(ValueError, match=r"--against ollama: allowed: transformers, vllm"):
        verify(VerifyOptions(path=(str(bare),), against="ollama"))
    (bare / CHECK_FILE).unlink()
    with pytest.raises(ValueError, match=r"has no check.json: .*mini-trainer export"):
        verify(VerifyOptions(path=(str(bare),), against="transformers"))
