"""An adapter carries the stop tokens and the chat template that its data taught, and all that read it follow them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from breadth import wide
from exports import export
from forked import run_forked
from in_process import train_here
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from processes import flags
from scored_data import TOP_K, score_here, write_data
from tiny_data import read_lines, write_counting_chats, write_jsonl
from tiny_models import FAMILIES, save_model, save_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from vllm_standin import install_vllm

from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.ending import RunError
from mini_trainer.generate import generate
from mini_trainer.model.scoring.score_files import ScoreFile
from mini_trainer.options import group_options
from mini_trainer.options.tools import GenerateOptions, MergeAdapterOptions, ProcessDataOptions
from mini_trainer.process_data import process_data
from mini_trainer.tools.merge_adapter import merge_adapter

NEW = 12
ADAPTER_FILES = {"generation_config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A base model whose tokenizer has no chat template, and whose generation ends only with its own token."""
    path = save_tokenizer(save_model(FAMILIES["llama"], tmp_path_factory.mktemp("base")))
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template, tokenizer.eos_token = None, "<|endoftext|>"
    tokenizer.save_pretrained(path)
    (path / "chat_template.jinja").unlink()
    config = {"eos_token_id": tokenizer.eos_token_id, "repetition_penalty": 1.3}
    (path / "generation_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def data(base, tmp_path_factory) -> Path:
    """Chats in ChatML, which the base does not know."""
    folder = tmp_path_factory.mktemp("data")
    write_counting_chats(folder / "chats.jsonl")
    given = dict(input_file=(str(folder / "chats.jsonl"),), output_file=str(folder / "chats.arrow"), preview=0)
    chatml = dict(model_name_or_path=str(base), chat_template="chatml", num_proc=1)
    process_data(group_options(ProcessDataOptions, **given, **chatml))
    return folder / "chats.arrow"


def train(world, base: Path, data: Path, output_dir: Path, **options: object) -> Path:
    """The export of one step of LoRA."""
    given = dict(model_name_or_path=str(base), data_path=(str(data),), output_dir=str(output_dir), max_steps=1)
    sizes = dict(batch_size=4, max_tokens_per_gpu=512, learning_rate=1e-3)
    train_here(world, **given, **sizes, lora=True, **options)
    return output_dir / "hf_format" / "latest"


def read_files(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in ADAPTER_FILES}


def test_an_adapter_has_the_stop_tokens_and_the_template_of_a_merged_export(base, data, world, tmp_path):
    merged = train(world, base, data, tmp_path / "merged", lora_export="merged")
    both = train(world, base, data, tmp_path / "both", lora_export="both")
    alone = train(world, base, data, tmp_path / "alone", lora_export="adapter")
    assert read_files(alone) == read_files(both / "adapter") == read_files(merged) == read_files(both)
    taught = json.loads(Path(f"{data}.meta.json").read_text())["stop_token_id"]
    own = GenerationConfig.from_pretrained(alone)
    assert taught != GenerationConfig.from_pretrained(base).eos_token_id
    assert (own.eos_token_id, own.repetition_penalty) == (taught, 1.3)
    tokenizer = AutoTokenizer.from_pretrained(alone)
    assert tokenizer.decode([taught]) == tokenizer.eos_token == "<|im_end|>"
    # Merged later, it is the model that the run would have exported.
    merge_adapter(MergeAdapterOptions(adapter=str(alone), output_dir=str(tmp_path / "later")), world)
    assert read_files(tmp_path / "later") == read_files(merged)
    # Trained further, it keeps its stop tokens, also where the next data teach others.
    sidecar = json.loads(Path(f"{data}.meta.json").read_text())
    other = AutoTokenizer.from_pretrained(base).convert_tokens_to_ids("a")
    copied = data.with_name("other.arrow")
    copied.write_bytes(data.read_bytes())
    changed = sidecar | {"stop_token_id": other, "tokenizer_dir": None}
    Path(f"{copied}.meta.json").write_text(json.dumps(changed))
    further = train(world, base, copied, tmp_path / "further", lora_adapter=str(alone))
    assert GenerationConfig.from_pretrained(further).eos_token_id == [other, taught]


def save_adapter(base: Path, folder: Path, *, r: int = 4) -> Path:
    """An adapter as peft writes it, which changes what the model says."""
    config = LoraConfig(r=r, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    torch.manual_seed(0)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)
    return folder


def answer_by_peft(adapter: Path, text: str, generation_dir: Path) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(
        json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"]
    )
    model = AutoPeftModelForCausalLM.from_pretrained(adapter).eval()
    config = GenerationConfig.from_pretrained(generation_dir, do_sample=False, max_new_tokens=NEW)
    ids = tokenizer(text, return_tensors="pt")
    return model.generate(**ids, generation_config=config)[0, ids["input_ids"].shape[1] :].tolist()


def ask(world, output: Path, prompts: Path, **options: object) -> dict:
    generate(
        group_options(GenerateOptions, prompts=str(prompts), output=str(output), max_new_tokens=NEW, **options), world
    )
    return read_lines(output)[0]


def test_generating_follows_the_adapters_own_file_or_the_bases(base, world, tmp_path):
    adapter, prompts = save_adapter(base, tmp_path / "adapter"), write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a b"}])
    plain = ask(world, tmp_path / "plain.jsonl", prompts, model=str(adapter))
    expected = answer_by_peft(adapter, "a b", base)
    assert (plain["num_tokens"], plain["finish_reason"]) == (len(expected), "length")

    stop = expected[3]
    (adapter / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop], "repetition_penalty": 1.3}))
    expected = answer_by_peft(adapter, "a b", adapter)
    assert expected[-1] == stop and len(expected) < NEW
    for name, given in {
        "named": dict(model=str(adapter)),
        "given": dict(model=str(base), adapter=str(adapter)),
    }.items():
        line = ask(world, tmp_path / f"{name}.jsonl", prompts, **given)
        assert (line["num_tokens"], line["finish_reason"]) == (len(expected), "stop")
    # Answers that ended otherwise are not resumed.
    (tmp_path / "plain.jsonl").rename(tmp_path / "again.jsonl.part0")
    with pytest.raises(RunError, match=r"again\.jsonl.*generation_config"):
        ask(world, tmp_path / "again.jsonl", prompts, model=str(adapter))

    merge_adapter(MergeAdapterOptions(adapter=str(adapter), output_dir=str(tmp_path / "merged")), world)
    line = ask(world, tmp_path / "merged.jsonl", prompts, model=str(tmp_path / "merged"))
    assert (line["num_tokens"], line["finish_reason"]) == (len(expected), "stop")


def test_a_generation_config_that_cannot_be_read_is_refused_by_name(base, tmp_path):
    adapter, prompts = save_adapter(base, tmp_path / "adapter"), write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a b"}])
    (adapter / "generation_config.json").write_text("{broken")
    words = flags(model=adapter, prompts=prompts, output=tmp_path / "answers.jsonl")
    for script, given in (
        ("generate.py", words),
        ("mini_trainer/tools/merge_adapter.py", flags(adapter=adapter, output_dir=tmp_path / "m")),
    ):
        done = run_forked(0, script, *given)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert f"{adapter}/generation_config.json: " in done.stderr


def test_vllm_reads_the_adapters_files(base, world, tmp_path, monkeypatch):
    adapter, prompts = save_adapter(base, tmp_path / "adapter"), write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a b"}])
    asked = install_vllm(monkeypatch)
    ask(world, tmp_path / "plain.jsonl", prompts, model=str(adapter), engine="vllm")
    (adapter / "generation_config.json").write_text("{}")
    AutoTokenizer.from_pretrained(base).save_pretrained(adapter)
    ask(world, tmp_path / "own.jsonl", prompts, model=str(adapter), engine="vllm")
    assert [(one["model"], one["tokenizer"], one["generation_config"]) for one in asked.models] == [
        (str(base), str(base), str(base)),
        (str(base), str(adapter), str(adapter)),
    ]


def test_the_adapters_rank_is_rounded_up_to_one_of_vllms(base, world, tmp_path, monkeypatch):
    prompts = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a b"}])
    asked = install_vllm(monkeypatch)
    adapters = {rank: str(save_adapter(base, tmp_path / f"r{rank}", r=rank)) for rank in (1, 4, 8, 9, 33)}
    for rank, adapter in adapters.items():
        if rank < 33:
            ask(world, tmp_path / f"{rank}.jsonl", prompts, model=adapter, engine="vllm")
    assert [one["max_lora_rank"] for one in asked.models] == [1, 8, 8, 16]
    assert [lora[2] for lora in asked.loras] == list(adapters.values())[:4]
    with pytest.raises(ValueError, match="has rank 33, and vLLM takes up to 32: merge it"):
        ask(world, tmp_path / "33.jsonl", prompts, model=adapters[33], engine="vllm")


def test_an_adapter_scores_data_as_peft_does(base, world, tmp_path):
    adapter, data = save_adapter(base, tmp_path / "adapter"), write_data(tmp_path / "data.arrow", base)
    score_here(world, adapter, data)
    model = AutoPeftModelForCausalLM.from_pretrained(adapter).eval()
    rows = TokenizedData(data)
    for row in range(0, len(rows.lengths), 5):
        sample = rows.read(row)
        ids, labels = (torch.from_numpy(sample[name].astype(np.int64)) for name in ("input_ids", "labels"))
        with torch.no_grad():
            log_q = model(input_ids=ids[None]).logits[0, :-1][labels[1:] >= 0].log_softmax(1)
        top, records = log_q.topk(TOP_K, dim=1), ScoreFile(rows, "teacher")[row]
        np.testing.assert_array_equal(records["ids"], top.indices)
        np.testing.assert_allclose(records["nll"], -top.values, rtol=1e-3)
    with pytest.raises(ValueError, match=r"scores\.json: .*other teacher"):
        score_here(world, base, data)


@pytest.mark.parametrize("ignored", [{"temperature": 0.6, "top_p": 0.9}, wide({"num_beams": 1, "length_penalty": 0.3})])
def test_settings_that_transformers_ignores_do_not_stop_an_export(ignored, base, world, tmp_path):
    """Published models have such files: a temperature without do_sample."""
    model = save_tokenizer(save_model(FAMILIES["llama"], tmp_path / "model"))
    config = {"eos_token_id": 2, "do_sample": False} | ignored
    (model / "generation_config.json").write_text(json.dumps(config))
    exported = export(model, tmp_path / "export", world)
    found = GenerationConfig.from_pretrained(exported).to_dict()
    assert {name: found[name] for name in ignored} == ignored
    assert found["pad_token_id"] == AutoTokenizer.from_pretrained(model).pad_token_id
