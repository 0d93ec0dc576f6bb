"""The files of an export are, byte by byte, those of transformers' `save_pretrained`, though no one holds the model."""

from pathlib import Path

import pytest
import torch
from breadth import wide
from exports import MODELS
from safetensors.torch import save_file
from tiny_classifiers import ENCODERS
from tiny_models import HYBRIDS, build, make_osft, save_model
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    HrmTextConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from mini_trainer.model.method import Full
from mini_trainer.model.methods.lora import LoRA
from mini_trainer.options import LoRAOptions
from mini_trainer.run import export_weights
from mini_trainer.run.export_weights import WeightStream
from mini_trainer.run.write_pool import DTYPES, TensorFile, WritePool

MAX_BYTES = 20_000  # of a file: some families have a larger tensor


def make_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    is_encoder = type(config) in map(type, ENCODERS.values())
    return (AutoModelForSequenceClassification if is_encoder else AutoModelForCausalLM).from_config(config, dtype=dtype)


def gather(model: PreTrainedModel) -> dict[str, Tensor]:
    """What a method gathers of a model that trains as a whole."""
    saved = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {name: param.detach() for name, param in model.named_parameters()} | buffers


def read_files(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


def export_both_ways(
    config: PreTrainedConfig, dtype: torch.dtype, path: Path, *, max_bytes: int = MAX_BYTES
) -> tuple[dict[str, bytes], dict[str, bytes], int]:
    """The files by `save_pretrained` and by `WeightStream`, and the most bytes that this held for the next tensor."""
    torch.manual_seed(0)
    weights = gather(make_model(config, dtype))
    with torch.device("meta"):
        shell = make_model(config, dtype)
    shell.save_pretrained(path / "whole", state_dict=dict(weights), max_shard_size=max_bytes)
    shell.save_pretrained(path / "streamed", state_dict={})
    shapes = {name: tensor.to("meta") for name, tensor in weights.items()}
    pool = WritePool(2, max_bytes)
    stream, most = WeightStream(shell, shapes, path / "streamed", pool, max_bytes=max_bytes), 0
    for name, tensor in weights.items():
        most = max(most, sum(held.nbytes for held in stream.held.values()))
        stream.add({name: tensor})
    stream.finish()
    pool.close()
    return read_files(path / "whole"), read_files(path / "streamed"), most


FUSED = {  # stored together, apart in the model
    "hrm_text": HrmTextConfig(
        vocab_size=288, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
        H_cycles=1, L_cycles=1, num_layers_per_stack=1,
    ),
}  # fmt: skip
CASES = MODELS | ENCODERS | HYBRIDS | FUSED
CHEAP = ("llama_tied_bias", "gpt2", "gpt_oss_sinks", "mixtral", "glm4_moe", "deberta_v2", "mamba 2 alone", "hrm_text")


@pytest.mark.parametrize("name", [name if name in CHEAP else wide(name) for name in CASES])
def test_the_files_are_those_of_save_pretrained(name, tmp_path):
    whole, streamed, held = export_both_ways(CASES[name], torch.bfloat16, tmp_path)
    assert len([file for file in whole if file.endswith(".safetensors")]) > 1
    assert streamed.keys() == whole.keys()
    assert [file for file in whole if streamed[file] != whole[file]] == []
    assert held < sum(map(len, whole.values())) / 10 and (held > 0) == (name in FUSED)


def test_a_small_model_is_one_file(tmp_path):
    whole, streamed, _ = export_both_ways(MODELS["mixtral"], torch.float32, tmp_path, max_bytes=10**9)
    assert streamed == whole and "model.safetensors" in whole and "model.safetensors.index.json" not in whole


def test_without_transformers_internals_the_files_are_the_same(monkeypatch, tmp_path):
    def fail(*args: object) -> None:
        raise TypeError("got an unexpected keyword argument 'reverse'")

    monkeypatch.setattr(export_weights, "find_targets", fail)
    whole, streamed, held = export_both_ways(MODELS["mixtral"], torch.float32, tmp_path)
    assert streamed == whole and held > 0


def test_every_type_has_its_place(tmp_path):
    """Among others in a file of its own bytes, in an order that is not the file's."""
    tensors = {f"{dtype}": torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES} | {
        "empty": torch.empty(0, 3), "one": torch.tensor(2.5), "näme": torch.ones(3, dtype=torch.int8),
    }  # fmt: skip
    save_file(tensors, tmp_path / "whole", metadata={"format": "pt"})
    pool = WritePool(1, 0)
    shapes = {name: (DTYPES[each.dtype], each.shape) for name, each in tensors.items()}
    file, again = (TensorFile(tmp_path / name, shapes, pool) for name in ("ours", "again"))
    for name, tensor in tensors.items():
        file.write(name, tensor)
    pool.wait()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "whole").read_bytes()
    with pytest.raises(AssertionError, match="24 bytes for 6"):
        again.write("torch.bool", torch.zeros(6))
    pool.close()


def make_lora() -> LoRA:
    method = LoRA(LoRAOptions(lora=True, lora_rank=2, lora_export="merged"), seed=0)
    method.open_files(None, None)
    return method


@pytest.mark.parametrize("name", ["osft", wide("lora"), wide("lora of experts"), wide("full")])
def test_a_methods_groups_are_what_they_say(name, world, tmp_path):
    """Names, shapes and types are known before a tensor is; no group is more than a layer."""
    config = MODELS["mixtral" if name == "lora of experts" else "llama_tied_bias"]
    path = save_model(config, tmp_path / "model")
    methods = {"full": Full, "osft": lambda: make_osft(tmp_path, osft_unfreeze_rank_ratio=0.5)}
    method = methods.get(name, make_lora)()
    groups = method.gather_weights(build(path, world, method=method), torch.bfloat16, world=world)
    planned = {key: shape for group in groups for key, shape in group.shapes.items()}
    assert planned.keys() == gather(make_model(config, torch.bfloat16)).keys()
    for group in groups:
        tensors = group.gather()
        kinds = [{key: (each.shape, each.dtype) for key, each in those.items()} for those in (tensors, group.shapes)]
        assert kinds[0] == kinds[1]
        assert len({key.rpartition(".")[0] for key in tensors}) == 1 and len(tensors) <= 2
