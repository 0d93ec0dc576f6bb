"""Training continues from an adapter: what has to train as a whole does, the export is peft's model to the logit."""

import json
from pathlib import Path

import pytest
import torch
from in_process import train_here
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from small_runs import check_same, copy_until
from tiny_classifiers import CLASSIFIERS, make_class_samples, save_base, write_classified
from tiny_data import make_samples, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer
from tiny_pairs import write_pairs
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer

RUN = dict(
    batch_size=8, max_tokens_per_gpu=64, learning_rate=1e-2, max_steps=2, export_dtype="float32", lora=True,
    lora_export="both", checkpoint_every_steps=1,
)  # fmt: skip
LAYERS = dict(r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"])


def save_adapter(model: torch.nn.Module, path: Path, **config: object) -> Path:
    """An adapter of peft's, whose random weights change the model, and so do those of its whole modules."""
    torch.manual_seed(1)
    adapted = get_peft_model(model, LoraConfig(**LAYERS | config))
    with torch.no_grad():
        for param in adapted.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param) * 0.1)
    adapted.save_pretrained(path)
    return path


def train(world, output_dir: Path, **options: object) -> Path:
    """The export of a run."""
    train_here(world, output_dir=str(output_dir), **{key: str(value) if isinstance(value, Path) else value
                                                     for key, value in (RUN | options).items()})  # fmt: skip
    return output_dir / "hf_format" / "samples_16"


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> torch.Tensor:
    ids = torch.randint(3, VOCAB_SIZE, (1, 20), generator=torch.Generator().manual_seed(0))
    return model.eval()(input_ids=ids, use_cache=False).logits


def load_scores(model: Path, adapter: Path, *, num_labels: int = 1) -> PeftModel:
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=num_labels, dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapter)


def merged_scores(export: Path) -> torch.Tensor:
    return logits_of(AutoModelForSequenceClassification.from_pretrained(export, dtype=torch.float32))


def weights_of(adapter: Path) -> dict[str, torch.Tensor]:
    return load_file(adapter / "adapter_model.safetensors")


def reward_options(root: Path, model: Path, adapter: Path) -> dict[str, object]:
    data = write_pairs(root / "pairs.arrow", model)
    return dict(model_name_or_path=model, data_path=data, objective="reward", lora_adapter=adapter)


SCORE = "base_model.model.score.weight"


@pytest.mark.parametrize("wholes", [(), ("embed_tokens", "lm_head")])
def test_a_reward_models_head_trains_beside_a_language_models_adapter(wholes, world, tmp_path):
    model = save_tokenizer(save_model(FAMILIES["llama"], tmp_path / "model"))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapter = save_adapter(base, tmp_path / "chat", task_type="CAUSAL_LM", modules_to_save=[*wholes] or None)
    options = reward_options(tmp_path, model, adapter)
    start = train(world, tmp_path / "start", **options, learning_rate=0.0) / "adapter"
    export = train(world, tmp_path / "run", **options)
    held, begun, trained = weights_of(adapter), weights_of(start), weights_of(export / "adapter")
    assert begun.keys() == trained.keys() == {SCORE, *held} - {"base_model.model.lm_head.weight"}
    assert all(torch.equal(begun[name], held[name]) for name in begun if name != SCORE)
    assert all(not torch.equal(trained[name], begun[name]) for name in begun)  # the embeddings, too, if it has them
    config = json.loads((export / "adapter/adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and "score" in config["modules_to_save"]
    own = logits_of(load_scores(model, export / "adapter"))
    torch.testing.assert_close(own, merged_scores(export), rtol=1e-5, atol=1e-5)

    # The next run begins where this one ended, its head included; a resumed run is the uninterrupted one.
    again = train(
        world, tmp_path / "again", **options | dict(lora_adapter=export / "adapter"), learning_rate=0.0, max_steps=2
    )
    torch.testing.assert_close(merged_scores(again), own, rtol=1e-5, atol=1e-5)
    resumed = copy_until(tmp_path / "run", 1, tmp_path / "resumed")
    train(world, resumed, **options)
    check_same(tmp_path / "run", resumed, step=2)


@pytest.mark.parametrize(("family", "num_labels"), [("bert", 3), ("llama", 3), ("llama", 2)])
def test_a_classifier_begins_with_the_head_of_pefts_adapter_unless_it_is_for_other_labels(
    family, num_labels, world, tmp_path, caplog
):
    model = save_base(CLASSIFIERS[family], tmp_path / "model")
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=num_labels, dtype=torch.float32)
    targets = ["query", "value"] if family == "bert" else LAYERS["target_modules"]
    adapter = save_adapter(base, tmp_path / "given", task_type="SEQ_CLS", target_modules=targets)
    data = write_classified(tmp_path / "data.arrow", make_class_samples(16), model)
    options = dict(model_name_or_path=model, data_path=data, objective="sequence-classification", lora_adapter=adapter)
    with caplog.at_level("INFO", logger="mini_trainer"):
        start = train(world, tmp_path / "start", **options, learning_rate=0.0)
    is_other = num_labels != 3
    assert is_other == (f"{SCORE} is for other labels, and is left out" in caplog.text)
    if not is_other:
        expected = logits_of(load_scores(model, adapter, num_labels=3))
        torch.testing.assert_close(merged_scores(start), expected, rtol=1e-5, atol=1e-5)
    export = train(world, tmp_path / "run", **options)
    own = logits_of(load_scores(model, export / "adapter", num_labels=3))
    torch.testing.assert_close(own, merged_scores(export), rtol=1e-5, atol=1e-5)
    assert (own - merged_scores(start)).abs().max() > 1e-3


def add_tokens(root: Path, model: Path, count: int) -> dict[str, str]:
    """A data set whose tokenizer has `count` tokens more than the model has embeddings, as options."""
    root.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(model)
    num_added = VOCAB_SIZE + count - len(tokenizer)
    tokenizer.add_tokens([f"<|added_{i}|>" for i in range(num_added)], special_tokens=True)
    tokenizer.save_pretrained(root / "data.arrow.tokenizer")
    data = write_samples(root / "data.arrow", make_samples(16, vocab_size=len(tokenizer)))
    made_by = dict(tokenizer_fingerprint=fingerprint_tokenizer(tokenizer), max_token_id=len(tokenizer) - 1)
    (root / "data.arrow.meta.json").write_text(json.dumps(made_by | dict(tokenizer_dir="data.arrow.tokenizer")))
    return dict(model_name_or_path=str(model), data_path=str(data))


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # peft's
@pytest.mark.parametrize("family", ["llama", "qwen3"])  # the second one's are tied
def test_embeddings_of_added_tokens_train_beside_an_adapter_without_them(family, world, tmp_path):
    model = save_tokenizer(save_model(FAMILIES[family], tmp_path / "model"))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapter = save_adapter(base, tmp_path / "given", task_type="CAUSAL_LM")
    inputs = add_tokens(tmp_path / "two", model, 2)
    export = train(world, tmp_path / "run", **inputs, lora_adapter=adapter)
    theirs = AutoPeftModelForCausalLM.from_pretrained(export / "adapter", dtype=torch.float32)
    merged = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    assert merged.config.vocab_size == VOCAB_SIZE + 2
    torch.testing.assert_close(logits_of(theirs), logits_of(merged), rtol=1e-5, atol=1e-5)
    stored = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    assert not torch.equal(merged.get_input_embeddings().weight[:VOCAB_SIZE], stored)

    # With data of more tokens yet, the rows that the adapter has are its own.
    more = add_tokens(tmp_path / "five", model, 5)
    given = dict(lora_adapter=export / "adapter", learning_rate=0.0)
    grown = AutoModelForCausalLM.from_pretrained(train(world, tmp_path / "more", **more, **given), dtype=torch.float32)
    assert grown.config.vocab_size == VOCAB_SIZE + 5
    torch.testing.assert_close(logits_of(grown)[..., : VOCAB_SIZE + 2], logits_of(merged), rtol=1e-5, atol=1e-5)
    rows = grown.get_input_embeddings().weight
    torch.testing.assert_close(rows[VOCAB_SIZE + 2 :], rows[: VOCAB_SIZE + 2].mean(0).expand(3, -1))


def test_what_an_adapter_has_to_hold_is_missed(world, tmp_path):
    model = save_tokenizer(save_model(FAMILIES["llama"], tmp_path / "model"))
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapter = save_adapter(base, tmp_path / "given", task_type="CAUSAL_LM", modules_to_save=["lm_head"])
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
            train(world, tmp_path / "run", **options)
