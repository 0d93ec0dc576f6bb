"""An adapter carries the stop tokens and the chat template that its data taught, and all that read it follow them.

Training continues from an adapter: what has to train as a whole does, and the export is peft's model to the logit.
"""

import json
from pathlib import Path

import pytest
import torch
from breadth import long, wide
from data_runs import tokenize_rows
from exports import export
from forked import run_forked
from in_process import train_here
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from peft_runs import add_tokens, logits_of
from processes import flags
from safetensors.torch import load_file, save_file
from small_runs import check_same, copy_until
from tiny_classifiers import CLASSIFIERS, make_class_samples, save_base, write_classified
from tiny_data import make_samples, read_lines, write_counting_chats, write_jsonl, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, change_json, save_model, save_tokenizer
from tiny_pairs import write_pairs
from tiny_vision import save_vision_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
    TokenizersBackend,
)
from vllm_standin import install_vllm

from mini_trainer.distributed.ending import RunError
from mini_trainer.generate import generate
from mini_trainer.model.build import make_meta_model
from mini_trainer.model.config import ModelSource
from mini_trainer.model.method import Full
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.families.vision import VisionLanguageFamily
from mini_trainer.options import ComputeOptions, group_options
from mini_trainer.options.tools import GenerateOptions, MergeAdapterOptions
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
    return tokenize_rows(base, folder / "chats.jsonl", folder / "chats.arrow", chat_template="chatml")


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
    assert {weight.dtype for weight in weights_of(alone).values()} == {torch.float32}  # beside a model in bf16
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


@pytest.mark.parametrize("ignored", [{"temperature": 0.6, "top_p": 0.9}, wide({"num_beams": 1, "length_penalty": 0.3})])
def test_settings_that_transformers_ignores_do_not_stop_an_export(ignored, base, world, tmp_path):
    """Published models have such files: a temperature without do_sample."""
    model = save_tokenizer(save_model(FAMILIES["llama"], tmp_path / "model"))
    config = {"eos_token_id": 2, "do_sample": False} | ignored
    (model / "generation_config.json").write_text(json.dumps(config))
    change_json(model / "config.json", pad_token_id=5)  # another than the tokenizer's
    exported = export(model, tmp_path / "export", world)
    found = GenerationConfig.from_pretrained(exported).to_dict()
    assert {name: found[name] for name in ignored} == ignored
    pads = (found["pad_token_id"], AutoConfig.from_pretrained(exported).pad_token_id)
    assert set(pads) == {AutoTokenizer.from_pretrained(model).pad_token_id}


RUN = dict(
    batch_size=8, max_tokens_per_gpu=64, learning_rate=1e-2, max_steps=2, export_dtype="float32", lora=True,
    lora_export="both", checkpoint_every_steps=1,
)  # fmt: skip
LAYERS = dict(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])


def save_moving_adapter(model: torch.nn.Module, path: Path, **config: object) -> Path:
    """An adapter of peft's, whose random weights change the model, and so do those of its whole modules."""
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(**LAYERS | config))
    with torch.no_grad():
        for param in adapted.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param) * 0.1)
    adapted.save_pretrained(path)
    return path


def train_on_adapter(world, output_dir: Path, **options: object) -> Path:
    """The export of a run."""
    train_here(world, output_dir=str(output_dir), **{key: str(value) if isinstance(value, Path) else value
                                                     for key, value in (RUN | options).items()})  # fmt: skip
    return output_dir / "hf_format" / "samples_16"


@torch.no_grad()
def load_scores(model: Path, adapter: Path, *, num_labels: int = 1) -> PeftModel:
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=num_labels, dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter)


def merged_scores(export: Path) -> torch.Tensor:
    return logits_of(AutoModelForSequenceClassification.from_pretrained(export, dtype=torch.float32))


def weights_of(adapter: Path) -> dict[str, torch.Tensor]:
    return load_file(adapter / "adapter_model.safetensors")


SCORE = "base_model.model.score.weight"


@pytest.mark.parametrize("wholes", [long(()), ("embed_tokens", "lm_head")])
def test_a_reward_models_head_trains_beside_a_language_models_adapter(wholes, world, tmp_path):
    model = save_tokenizer(save_model(FAMILIES["llama"], tmp_path / "model"))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapter = save_moving_adapter(base, tmp_path / "chat", task_type="CAUSAL_LM", modules_to_save=[*wholes] or None)
    data = write_pairs(tmp_path / "pairs.arrow", model)
    options = dict(model_name_or_path=model, data_path=data, objective="reward", lora_adapter=adapter)
    start = train_on_adapter(world, tmp_path / "start", **options, learning_rate=0.0) / "adapter"
    export = train_on_adapter(world, tmp_path / "run", **options)
    held, begun, trained = weights_of(adapter), weights_of(start), weights_of(export / "adapter")
    assert begun.keys() == trained.keys() == {SCORE, *held} - {"base_model.model.lm_head.weight"}
    assert all(torch.equal(begun[name], held[name]) for name in begun if name != SCORE)
    assert all(not torch.equal(trained[name], begun[name]) for name in begun)  # the embeddings, too, if it has them
    config = json.loads((export / "adapter/adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and "score" in config["modules_to_save"]
    own = logits_of(load_scores(model, export / "adapter"))
    torch.testing.assert_close(own, merged_scores(export), rtol=1e-5, atol=1e-5)

    # The next run begins where this one ended, its head included; a resumed run is the uninterrupted one.
    again = train_on_adapter(
        world, tmp_path / "again", **options | dict(lora_adapter=export / "adapter"), learning_rate=0.0, max_steps=2
    )
    torch.testing.assert_close(merged_scores(again), own, rtol=1e-5, atol=1e-5)
    resumed = copy_until(tmp_path / "run", 1, tmp_path / "resumed")
    train_on_adapter(world, resumed, **options)
    check_same(tmp_path / "run", resumed, step=2)


@pytest.mark.parametrize(("family", "num_labels"), [("bert", 3), ("llama", 3), ("llama", 2)])
def test_a_classifier_begins_with_the_head_of_pefts_adapter_unless_it_is_for_other_labels(
    family, num_labels, world, tmp_path, caplog
):
    model = save_base(CLASSIFIERS[family], tmp_path / "model")
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=num_labels, dtype=torch.float32)
    targets = ["query", "value"] if family == "bert" else LAYERS["target_modules"]
    adapter = save_moving_adapter(base, tmp_path / "given", task_type="SEQ_CLS", target_modules=targets)
    data = write_classified(tmp_path / "data.arrow", make_class_samples(16), model)
    options = dict(model_name_or_path=model, data_path=data, objective="sequence-classification", lora_adapter=adapter)
    with caplog.at_level("INFO", logger="mini_trainer"):
        start = train_on_adapter(world, tmp_path / "start", **options, learning_rate=0.0)
    is_other = num_labels != 3
    assert is_other == (f"{SCORE} is for other labels, and is left out" in caplog.text)
    if not is_other:
        expected = logits_of(load_scores(model, adapter, num_labels=3))
        torch.testing.assert_close(merged_scores(start), expected, rtol=1e-5, atol=1e-5)
    export = train_on_adapter(world, tmp_path / "run", **options)
    own = logits_of(load_scores(model, export / "adapter", num_labels=3))
    torch.testing.assert_close(own, merged_scores(export), rtol=1e-5, atol=1e-5)
    assert (own - merged_scores(start)).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # peft's
@pytest.mark.parametrize("family", ["llama", "qwen3"])  # the second one's are tied
def test_embeddings_of_added_tokens_train_beside_an_adapter_without_them(family, world, tmp_path):
    model = save_tokenizer(save_model(FAMILIES[family], tmp_path / "model"))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapter = save_moving_adapter(base, tmp_path / "given", task_type="CAUSAL_LM")
    inputs = add_tokens(tmp_path / "two", model, 2)
    export = train_on_adapter(world, tmp_path / "run", **inputs, lora_adapter=adapter)
    theirs = AutoPeftModelForCausalLM.from_pretrained(export / "adapter", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    assert merged.config.vocab_size == VOCAB_SIZE + 2
    torch.testing.assert_close(logits_of(theirs), logits_of(merged), rtol=1e-5, atol=1e-5)
    stored = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    assert not torch.equal(merged.get_input_embeddings().weight[:VOCAB_SIZE], stored)

    # With data of more tokens yet, the rows that the adapter has are its own.
    more = add_tokens(tmp_path / "five", model, 5)
    given = dict(lora_adapter=export / "adapter", learning_rate=0.0)
    grown = AutoModelForCausalLM.from_pretrained(
        train_on_adapter(world, tmp_path / "more", **more, **given), dtype=torch.float32
    )
    assert grown.config.vocab_size == VOCAB_SIZE + 5
    torch.testing.assert_close(logits_of(grown)[..., : VOCAB_SIZE + 2], logits_of(merged), rtol=1e-5, atol=1e-5)
    rows = grown.get_input_embeddings().weight
    torch.testing.assert_close(rows[VOCAB_SIZE + 2 :], rows[: VOCAB_SIZE + 2].mean(0).expand(3, -1))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # peft's
@pytest.mark.parametrize("options", [{}, dict(base_quantization="nf4"), dict(lora=None)])
@pytest.mark.parametrize("family", ["llama", "qwen3"])  # the second one's embedding and head are tied
def test_added_tokens_that_fit_into_spare_rows_stay_as_they_were(family, options, world, tmp_path, caplog, monkeypatch):
    model = save_tokenizer(save_model(FAMILIES[family], tmp_path / "model"))
    num_known = len(AutoTokenizer.from_pretrained(model))
    inputs = add_tokens(tmp_path / "data", model, -2)
    new = slice(num_known, VOCAB_SIZE - 2)
    stored = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    tables, listed, kind = [], [], TokenizersBackend  # listing a vocabulary takes long: not once a token
    monkeypatch.setattr(kind, "get_vocab", lambda self, get=kind.get_vocab: listed.append(0) or get(self))
    caplog.set_level("INFO")
    for rate in (0.0, 2e-2):
        given = dict(lora=True, lora_rank=4, lora_alpha=8) | options | dict(learning_rate=rate)
        export = train_on_adapter(world, tmp_path / f"run_{rate}", **inputs, **given)
        loaded = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
        tables += [loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight]
    begun, _, trained, head = tables
    assert len(trained) == len(stored) == VOCAB_SIZE
    assert "they begin as the mean of the others" in caplog.text and len(listed) < 50
    torch.testing.assert_close(begun[:num_known], stored[:num_known])
    torch.testing.assert_close(begun[new], stored[:num_known].mean(0).expand_as(begun[new]))
    assert not torch.equal(trained[new], begun[new]) and not torch.equal(head[new], begun[new])


def test_added_tokens_are_trained_with_frozen_embeddings(world, tmp_path):
    path = save_vision_model(tmp_path, "llava")
    config = AutoConfig.from_pretrained(path)
    family = VisionLanguageFamily(TextFamily(), freeze=("language",))
    source = ModelSource(str(path), config, new_tokens=(280,))
    with pytest.raises(ValueError, match=r"^--freeze language: .* 1 tokens .*remove the option"):
        make_meta_model(source, ComputeOptions(), family=family, method=Full(), device=world.device)


def test_what_an_adapter_has_to_hold_is_missed(world, tmp_path):
    model = save_tokenizer(save_model(FAMILIES["llama"], tmp_path / "model"))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapter = save_moving_adapter(base, tmp_path / "given", task_type="CAUSAL_LM", modules_to_save=["lm_head"])
    weights = weights_of(adapter)
    head = weights.pop("base_model.model.lm_head.weight")
    data = write_samples(tmp_path / "data.arrow", make_samples(16, vocab_size=VOCAB_SIZE))
    options = dict(model_name_or_path=model, data_path=data, lora_adapter=adapter)
    for stored, message in (
        (weights, "1 missing, such as base_model.model.lm_head.weight"),
        (weights | {"base_model.model.lm_head.weight": head[:, :16].contiguous()}, r"\(288, 16\), not \(288, 32\)"),
        (weights | {"base_model.model.lm_head.weight": head, "base_model.model.other": torch.ones(2)},
         "1 unexpected, such as base_model.model.other"),
    ):  # fmt: skip
        save_file(stored, adapter / "adapter_model.safetensors")
        with pytest.raises(ValueError, match=message):
            train_on_adapter(world, tmp_path / "run", **options)
