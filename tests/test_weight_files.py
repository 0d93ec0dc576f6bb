"""The weights of every family come from the files one by one, bitwise as transformers loads them."""

import re
import threading
import time

import pytest
import torch
from op_recording import CollectiveCounter
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, VOCAB_SIZE, build, change_json, load_source, save_model
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from mini_trainer.model import stored_tensors
from mini_trainer.model.weights import read_weights
from mini_trainer.objectives.families.text import TextFamily


def load_plainly(path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def read_tensors(path, *, vocab_size: int = VOCAB_SIZE) -> dict[str, torch.Tensor]:
    source = load_source(path)
    source.config.vocab_size = vocab_size
    readers = read_weights(source, TextFamily())
    return {name: read().to(torch.float32) for name, read in readers.items()}


def assert_same_weights(model: torch.nn.Module, reference: PreTrainedModel) -> None:
    """Every parameter and buffer of the sharded `model` is the reference's, bit by bit."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    expected = dict(reference.named_parameters()) | dict(reference.named_buffers())
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        whole = tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
        assert whole.dtype == expected[name].dtype and torch.equal(whole, expected[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_loaded_as_transformers_does(family, world, tmp_path, never_whole):
    """In bf16 and several files, as models are published; Mixtral's experts are stored apart."""
    save_model(FAMILIES[family], tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).save_pretrained(
        tmp_path, max_shard_size="20KB"
    )
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert_same_weights(build(tmp_path, world).model, load_plainly(tmp_path))


@pytest.mark.parametrize("family", ["mixtral", "qwen3"])
def test_a_model_that_cannot_be_read_in_parts_is_read_as_a_whole(family, tmp_path, monkeypatch, caplog):
    path = save_model(FAMILIES[family], tmp_path)
    parts = read_tensors(path)

    def fail(*args, **kwargs):
        raise AttributeError("transformers has no such function")

    monkeypatch.setattr("mini_trainer.model.weights.plan_reading", fail)
    with caplog.at_level("WARNING", logger="mini_trainer"):
        whole = read_tensors(path)
    assert re.search(r"so rank 0 loads the whole model in fp32, .*\(AttributeError", caplog.text)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], tensor) for name, tensor in parts.items())


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])  # tied heads
def test_weights_of_the_model_without_its_head_are_found(family, tmp_path, never_whole):
    save_model(FAMILIES[family], tmp_path)
    load_plainly(tmp_path).base_model.save_pretrained(tmp_path)  # names without the prefix
    expected = dict(load_plainly(tmp_path).named_parameters())
    tensors = read_tensors(tmp_path)
    assert expected.keys() <= tensors.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def test_weights_stored_in_several_types_are_not_rounded(world, tmp_path, never_whole):
    save_model(FAMILIES["llama"], tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights = {name: w.to(torch.float16) if "mlp" in name else w.double() for name, w in weights.items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    change_json(tmp_path / "config.json", dtype="bfloat16")  # narrower than they are
    assert_same_weights(build(tmp_path, world).model, load_plainly(tmp_path))


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi_head_bias"])
def test_new_rows_of_the_vocabulary_are_the_mean_of_the_old(family, tmp_path, never_whole):
    save_model(FAMILIES[family], tmp_path)
    reference = load_plainly(tmp_path)
    tensors = read_tensors(tmp_path, vocab_size=VOCAB_SIZE + 3)
    modules = [reference.get_input_embeddings(), reference.get_output_embeddings()]
    num_grown = 0
    for name, old in reference.named_parameters():
        expected = old
        if any(old is param for module in modules for param in module.parameters()):
            expected = torch.cat([old, old.mean(dim=0).expand(3, *old.shape[1:])])
            num_grown += 1
        assert torch.equal(tensors[name], expected), name
    assert num_grown == {"qwen2": 2, "qwen3": 1, "phi_head_bias": 3}[family]


def change_weights(path, change) -> None:
    weights = load_file(path / "model.safetensors")
    change(weights)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "missing_keys: {'model.norm.weight'}"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(31)}),
            "mismatched_keys: {('model.norm.weight', torch.Size([31]), torch.Size([32]))}",
        ),
        (
            lambda weights: weights.update({"lm_head.weight": torch.ones(VOCAB_SIZE, 32)}),
            "the config ties the head to the embedding, but the weights contain two different ones",
        ),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused(change, message, tmp_path, never_whole):
    change_weights(save_model(FAMILIES["qwen3"], tmp_path), change)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_weights(load_source(tmp_path), TextFamily())


def test_a_tied_head_that_is_stored_too_is_read_once(tmp_path, never_whole):
    def add_head(weights):
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()

    change_weights(save_model(FAMILIES["qwen3"], tmp_path), add_head)
    tensors = read_tensors(tmp_path)
    assert "lm_head.weight" not in tensors and "model.embed_tokens.weight" in tensors


def test_weights_that_the_model_has_no_place_for_are_reported_as_transformers_does(tmp_path, never_whole, caplog):
    change_weights(save_model(FAMILIES["llama"], tmp_path), lambda w: w.update(surplus=torch.ones(2)))
    transformers_logging.enable_propagation()
    try:
        tensors = read_tensors(tmp_path)
    finally:
        transformers_logging.disable_propagation()
    assert "surplus" not in tensors
    assert "surplus" in caplog.text and "UNEXPECTED" in caplog.text


def test_weights_are_sent_in_the_type_that_they_are_stored_in(world, tmp_path):
    save_model(FAMILIES["llama"], tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    with CollectiveCounter() as counted:
        built = build(tmp_path, world).model
    assert_same_weights(built, load_plainly(tmp_path))
    stored, buffers = sum(p.nbytes for p in model.parameters()), sum(b.nbytes for b in model.buffers())
    types = 8 * len([*model.parameters(), *model.buffers()])  # one number a tensor says in which type it comes
    assert counted.collective_bytes["broadcast"] <= stored + buffers + types + 2000  # what rank 0 has to say of reading


def make_readers(sizes: dict[str, int], read: list[str]) -> dict:
    """Readers of as many bytes; `read` gets their names when they are called."""

    def reader(name: str, size: int):
        return lambda: read.append(name) or torch.full((size,), len(name), dtype=torch.uint8)

    return {name: reader(name, size) for name, size in sizes.items()}


def test_tensors_are_read_ahead_and_taken_in_any_order():
    sizes, read = {f"{module}.weight": 10 for module in "abcdef"}, []
    readers = make_readers(sizes, read)
    with stored_tensors.reading_ahead(readers, "abcdef"):
        assert readers.pop("e.weight")().nbytes == 10
        while len(read) < 1 + stored_tensors.NUM_AHEAD:
            time.sleep(0.001)
        assert read == ["e.weight", "a.weight", "b.weight"]
        for module in "abcd":
            assert readers.pop(f"{module}.weight")().nbytes == 10
    assert sorted({*read, "f.weight"}) == list(sizes) and len(set(read)) == len(read)


def test_what_a_reader_raises_comes_out_where_its_tensor_is_used():
    def fail():
        raise ValueError("b.weight has 1 NaN")

    readers = make_readers({"a.weight": 1}, []) | {"b.weight": fail}
    with pytest.raises(ValueError, match=r"b\.weight has 1 NaN"), stored_tensors.reading_ahead(readers, ["a", "b"]):
        assert readers["a.weight"]().nbytes == 1
        readers["b.weight"]()
    assert "read-ahead" not in {thread.name.partition("_")[0] for thread in threading.enumerate()}
