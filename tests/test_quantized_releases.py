"""Quantized releases are read as their own libraries dequantize them, and train and export like any other model."""

import pytest
import torch
from quantizing import RELEASES, load_dequantized, save_release
from tiny_models import load_source

from model.weights import read_weights
from objectives.causal_lm import CausalLM


@pytest.fixture
def never_whole(monkeypatch) -> None:
    """Fails the test if a model is loaded as a whole."""

    def refuse(*args, **kwargs):
        raise AssertionError("the whole model was loaded")

    monkeypatch.setattr("model.weights.read_whole", refuse)


@pytest.mark.parametrize("kind", RELEASES)
def test_every_kind_is_read_as_its_library_dequantizes_it(kind, tmp_path, never_whole):
    save_release(kind, tmp_path)
    expected = load_dequantized(kind, tmp_path)
    readers = read_weights(load_source(tmp_path), CausalLM())
    assert expected.keys() <= readers.keys()
    for name, weight in expected.items():
        read = readers[name]()
        assert read.shape == weight.shape, name
        assert torch.equal(read.to(torch.bfloat16), weight), name
