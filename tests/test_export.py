"""The files of an export are, byte by byte, those of transformers' `save_pretrained`, though no one holds the model.

Threads write and hash them; an untouched model is exported as it was loaded, however it was stored.
"""

import errno
import itertools
import json
import os
import random
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from breadth import wide
from exports import MODELS, export
from forked import succeed
from harness import read_stored
from processes import ROOT
from safetensors.torch import load_file, save_file
from tiny_classifiers import ENCODERS
from tiny_data import read_files
from tiny_models import FAMILIES, HYBRIDS, SHAPE, VOCAB_SIZE, build, make_osft, save_model, save_tokenizer
from tiny_vision import save_vision_model
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HrmTextConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from mini_trainer.data.stores.older_keys import add_older_keys, rewrite_config
from mini_trainer.data.stores.older_keys import save_tokenizer as save_older
from mini_trainer.distributed.ending import RunError
from mini_trainer.model import weights
from mini_trainer.model.method import Full
from mini_trainer.model.methods.lora import LoRA
from mini_trainer.model.stored_tensors import StoredFiles
from mini_trainer.options import LoRAOptions
from mini_trainer.options.reading import hash_file
from mini_trainer.run import export as exporting
from mini_trainer.run import write_pool
from mini_trainer.run.checkpoint_files import write_tensors
from mini_trainer.run.export import WeightStream, follow_tokenizer
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
    stream, most = WeightStream(shell, shapes, path / "streamed", pool, max_bytes=max_bytes, left_out={}), 0
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


def test_without_transformers_internals_the_files_are_the_same(monkeypatch, tmp_path):
    def fail(*args: object) -> None:
        raise TypeError("got an unexpected keyword argument 'reverse'")

    monkeypatch.setattr(exporting, "find_targets", fail)
    whole, streamed, held = export_both_ways(MODELS["mixtral"], torch.float32, tmp_path)
    assert streamed == whole and held > 0


def test_a_stream_of_less_or_of_another_type_than_was_planned_is_finished(pool, tmp_path):
    weights = gather(make_model(MODELS["llama"], torch.float32))
    with torch.device("meta"):
        shell = make_model(MODELS["llama"], torch.float32)
    shapes = {name: tensor.to("meta") for name, tensor in weights.items()}
    stream = WeightStream(shell, shapes, tmp_path, pool, max_bytes=10**9, left_out={})
    name, tensor = weights.popitem()
    with pytest.raises(AssertionError, match=f"^{name} is .* torch.float16, but .* torch.float32 was planned"):
        stream.add({name: tensor.half()})
    for given in weights.items():
        stream.add(dict([given]))
    with pytest.raises(AssertionError, match=f"^1 tensors were not written, such as {name}"):
        stream.finish()


def test_tensors_that_the_model_lacks_are_stored_beside_its_own_whatever_their_type(tmp_path):
    """Types of 8 bits and less among others: nothing looks at the numbers."""
    others = {"a": torch.randn(5).to(torch.float8_e4m3fn), "b": torch.randn(3, 99), "c": torch.tensor(3)}
    (tmp_path / "others").mkdir()
    save_file(others, tmp_path / "others/model.safetensors")
    weights = gather(make_model(MODELS["llama"], torch.float32))
    with torch.device("meta"):
        shell = make_model(MODELS["llama"], torch.float32)
    shapes, left_out = {name: tensor.to("meta") for name, tensor in weights.items()}, StoredFiles(tmp_path / "others")
    pool = WritePool(2, 500)
    stream = WeightStream(shell, shapes, tmp_path, pool, max_bytes=MAX_BYTES, left_out=left_out.find())
    stream.add(weights)
    stream.finish()
    entries = pool.finish()
    pool.close()
    found, before = read_stored(tmp_path), read_stored(tmp_path / "others")
    assert found.keys() == weights.keys() | others.keys() and all(found[name] == before[name] for name in others)
    assert all(entry == hash_file(path) for path, entry in entries.items())


def test_a_token_beyond_the_vocabulary_is_named_in_an_exports_config():
    config = LlamaConfig(bos_token_id=7, pad_token_id=7)
    follow_tokenizer(config, SimpleNamespace(bos_token_id=8, pad_token_id=9), vocab_size=9)
    assert (config.bos_token_id, config.pad_token_id) == (8, 7)
    follow_tokenizer(config, SimpleNamespace(bos_token_id=None, pad_token_id=3), vocab_size=9)
    assert (config.bos_token_id, config.pad_token_id) == (8, 3)


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


@pytest.fixture
def small_blocks(monkeypatch):
    """Every block of a part goes to the other thread, and most parts have several."""
    monkeypatch.setattr(write_pool, "BLOCK_BYTES", 100)
    monkeypatch.setattr(write_pool, "INLINE_BYTES", 30)


@pytest.fixture
def pool():
    pool = WritePool(3, 1000)
    yield pool
    pool.close()


def cut(content: bytes, start: int, generator: random.Random) -> list[range]:
    """Ranges of random lengths, some empty, that cover `content` from `start` on."""
    ends = sorted(generator.choices(range(start, len(content) + 1), k=9))
    return [range(*pair) for pair in itertools.pairwise([start, *ends, len(content)])]


@pytest.mark.parametrize("seed", range(4))
def test_parts_in_any_order_give_the_file_and_its_hash(seed, pool, small_blocks, tmp_path, monkeypatch):
    generator, synced = random.Random(seed), []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.readlink(f"/proc/self/fd/{number}")))
    contents = [generator.randbytes(generator.randrange(50, 2000)) for _ in range(7)]
    numbers = [pool.add_file(tmp_path / str(i), content[:20], len(content)) for i, content in enumerate(contents)]
    parts = [(i, place) for i in numbers for place in cut(contents[i], 20, generator)]
    generator.shuffle(parts)
    for i, place in parts:
        pool.make_room(len(place))
        pool.write(i, place, contents[i][place.start : place.stop])
    entries = pool.finish()
    assert sorted(synced) == sorted(map(str, entries))
    for i, content in enumerate(contents):
        assert (tmp_path / str(i)).read_bytes() == content
        assert entries[tmp_path / str(i)] == hash_file(tmp_path / str(i))


def test_the_system_may_take_less_at_once(pool, small_blocks, tmp_path, monkeypatch):
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, start: pwrite(descriptor, data[:7], start))
    content = random.Random(0).randbytes(3000)
    pool.write(pool.add_file(tmp_path / "file", content[:20], 3000), range(20, 3000), content[20:])
    pool.finish()
    assert (tmp_path / "file").read_bytes() == content


def test_a_file_of_nothing_but_a_header_is_written_too(pool, tmp_path):
    assert write_tensors(tmp_path / "none", {}, pool) == hash_file(tmp_path / "none")
    tensors = {"empty": torch.empty(0, 2), "number": torch.tensor(2.0)}
    assert write_tensors(tmp_path / "some", tensors, pool) == hash_file(tmp_path / "some")


def test_the_first_error_surfaces_and_the_pool_can_go_on(pool, small_blocks, tmp_path, monkeypatch):
    """A checkpointer continues with the same pool after the disk was full."""
    pwrite, sizes = os.pwrite, []

    def fail(descriptor: int, data: memoryview, start: int) -> int:
        sizes.append(len(data))
        if len(sizes) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return pwrite(descriptor, data, start)

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        with pytest.raises(OSError, match="No space left"):
            write_tensors(tmp_path / "first", {str(i): torch.zeros(200) for i in range(20)}, pool)
    assert len(sizes) == 5  # nothing is written after an error
    assert len(os.listdir("/proc/self/fd")) == before
    assert write_tensors(tmp_path / "second", {"a": torch.zeros(200)}, pool) == hash_file(tmp_path / "second")
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "second", {"a": torch.zeros(200)}, pool)


def test_memory_is_bounded(pool, tmp_path, monkeypatch):
    """1000 bytes may wait, or one part that is larger."""
    may_write, pwrite = threading.Event(), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda *args: may_write.wait() and pwrite(*args))
    number = pool.add_file(tmp_path / "file", b"head", 4 + 400 + 500 + 1500)
    pool.make_room(400)
    pool.write(number, range(4, 404), bytes(400))
    pool.make_room(500)  # does not wait
    pool.write(number, range(404, 904), bytes(500))
    waiting = threading.Thread(target=pool.make_room, args=(1500,))
    waiting.start()
    waiting.join(0.05)
    waits, num_bytes = waiting.is_alive(), pool.num_bytes
    may_write.set()
    waiting.join()
    assert waits and (num_bytes, pool.num_bytes) == (900, 0)
    pool.write(number, range(904, 2404), bytes(1500))
    pool.finish()


def test_threads_that_cannot_be_started_are_an_error_of_writing(monkeypatch):
    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(OSError, match="no thread"):
        WritePool(1, 0)


# Exports


def read_weights(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("model*"))}


def save_plainly(path: Path, directory: Path, dtype: torch.dtype, max_bytes: int) -> dict[str, bytes]:
    """The files of weights that transformers writes for a model that was not loaded, which divides them differently."""
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    weights = {name: param.detach() for name, param in loaded.named_parameters()}  # tied ones once
    with torch.device("meta"):
        shell = AutoModelForCausalLM.from_config(loaded.config, dtype=dtype)
    shell.save_pretrained(directory, state_dict=weights, max_shard_size=max_bytes)
    return read_weights(directory)


def check_manifest(directory: Path) -> None:
    files = json.loads((directory / "manifest.json").read_text())["files"]
    assert files == {path.name: hash_file(path) for path in directory.iterdir() if path.name != "manifest.json"}


POOLED_CASES = [
    ("llama_tied_bias", "float32", 10**9),
    ("llama_tied_bias", "bfloat16", MAX_BYTES),
    ("mixtral", "bfloat16", MAX_BYTES),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: save_tokenizer(save_model(MODELS[name], root / name)) for name, _, _ in POOLED_CASES}


def export_on_ranks(path: Path, export_dir: Path, dtype: str, max_bytes: int, *, fault: str = "none") -> list[str]:
    """Exports on two ranks; how each of them ended."""
    succeed(2, ROOT / "tests" / "workers" / "exporting.py", path, export_dir, dtype, max_bytes, fault)
    return [export_dir.with_suffix(f".rank_{rank}").read_text() for rank in range(2)]


@pytest.mark.parametrize("name, dtype, max_bytes", POOLED_CASES)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_export_has_the_bytes_of_save_pretrained_and_their_hashes(
    name, dtype, max_bytes, num_ranks, models, world, tmp_path, monkeypatch
):
    expected = save_plainly(models[name], tmp_path / "plain", getattr(torch, dtype), max_bytes)
    if num_ranks == 1:
        monkeypatch.setattr(exporting, "MAX_SHARD_BYTES", max_bytes)
        export(models[name], tmp_path / "export", world, dtype=getattr(torch, dtype))
    else:
        assert export_on_ranks(models[name], tmp_path / "export", dtype, max_bytes) == ["done", "done"]
    assert read_weights(tmp_path / "export") == expected
    assert (len(expected) > 3) == (max_bytes == MAX_BYTES)
    check_manifest(tmp_path / "export")


@pytest.mark.parametrize("name, dtype, max_bytes", POOLED_CASES[:2])
def test_weights_are_gathered_in_the_order_of_the_files(
    name, dtype, max_bytes, models, world, small_blocks, tmp_path, monkeypatch
):
    """Else most would have to be read again to be hashed; there is room for each."""
    rooms = []
    monkeypatch.setattr(WritePool, "make_room", lambda pool, num_bytes: rooms.append(num_bytes))
    monkeypatch.delattr(os, "pread")
    monkeypatch.setattr(exporting, "MAX_SHARD_BYTES", max_bytes)
    export(models[name], tmp_path / "export", world, dtype=getattr(torch, dtype))
    check_manifest(tmp_path / "export")
    files = (tmp_path / "export").glob("*.safetensors")
    assert sorted(rooms) == sorted(tensor.nbytes for file in files for tensor in load_file(file).values())


@pytest.mark.parametrize("fault", ["open", "write", "hash", "sync"])
def test_an_error_in_a_thread_ends_every_rank_with_one_message(fault, models, tmp_path):
    endings = export_on_ranks(models["llama_tied_bias"], tmp_path / "export", "float32", MAX_BYTES, fault=fault)
    assert endings[0] == endings[1]
    assert endings[0].startswith("IO: ") and f"{tmp_path / 'export'}: [Errno 28] injected in {fault}; " in endings[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["export.rank_0", "export.rank_1"]


def test_after_an_error_the_others_are_still_gathered(models, world, tmp_path, monkeypatch):
    """All ranks take part in each, and rank 0 alone knows of the error."""
    gathered, gather = [], weights.gather_tensor
    monkeypatch.setattr(
        weights, "gather_tensor", lambda *args, **options: gathered.append(1) or gather(*args, **options)
    )
    export(models["mixtral"], tmp_path / "whole", world)
    num_gathered = len(gathered)

    def fail(*args: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(RunError, match=r"cannot write .*/export: .*No space left.* free$"):
        export(models["mixtral"], tmp_path / "export", world)
    assert len(gathered) == 2 * num_gathered
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole"]


def test_an_export_that_is_interrupted_ends_its_threads_and_leaves_nothing(models, world, tmp_path, monkeypatch):
    calls, gather, threads = [], weights.gather_tensor, set(threading.enumerate())

    def interrupt(*args: object, **options: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return gather(*args, **options)

    monkeypatch.setattr(weights, "gather_tensor", interrupt)
    with pytest.raises(KeyboardInterrupt):
        export(models["mixtral"], tmp_path / "export", world)
    started = set(threading.enumerate()) - threads  # tqdm has one, too
    assert not [thread for thread in started if thread.name.startswith(("hash", "write"))]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("family", MODELS)
def test_an_export_gives_the_logits_of_the_model_it_was_loaded_from(family, world, tmp_path):
    path = save_tokenizer(save_model(MODELS[family], tmp_path / "model"))
    weights = load_file(path / "model.safetensors")
    for name in weights:
        if name.endswith("e_score_correction_bias"):
            weights[name] = torch.randn_like(weights[name])
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    export_dir = export(path, tmp_path / "export", world)
    source = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    exported, report = AutoModelForCausalLM.from_pretrained(export_dir, dtype=torch.float32, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    prompt = torch.randint(3, VOCAB_SIZE, (1, 20), generator=torch.Generator().manual_seed(0))
    assert torch.equal(exported.eval()(prompt).logits, source(prompt).logits)
    assert load_file(export_dir / "model.safetensors").keys() == weights.keys()


LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)  # fmt: skip
FULL = dict(rope_type="linear", factor=8.0, rope_theta=1e6)
SLIDING = dict(rope_type="default", rope_theta=1e4)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (dict(model_type="llama", rope_parameters=LLAMA3 | dict(rope_theta=5e5)),
         dict(rope_theta=5e5, rope_scaling=LLAMA3)),
        (dict(model_type="gpt_oss", rope_parameters=SLIDING), dict(rope_theta=1e4, rope_scaling=None)),
        (dict(model_type="phi", rope_parameters=SLIDING | dict(partial_rotary_factor=0.4)),
         dict(rope_theta=1e4, rope_scaling=None, partial_rotary_factor=0.4)),
        (dict(model_type="gpt_neox", rope_parameters=SLIDING | dict(partial_rotary_factor=0.4)),
         dict(rotary_emb_base=1e4, rope_scaling=None, rotary_pct=0.4)),
        (dict(model_type="gemma3_text", rope_parameters=dict(full_attention=FULL, sliding_attention=SLIDING)),
         dict(rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=dict(rope_type="linear", factor=8.0))),
        (dict(model_type="olmo3", rope_parameters=dict(full_attention=SLIDING, sliding_attention=SLIDING)),
         dict(rope_theta=1e4, rope_scaling=None)),
        (dict(model_type="olmo3", rope_parameters=dict(full_attention=FULL, sliding_attention=SLIDING)), None),
        (dict(model_type="gemma3_text", rope_parameters=dict(full_attention=SLIDING, sliding_attention=FULL)), None),
        (dict(model_type="lfm3", rope_parameters=dict(full_attention=SLIDING, sliding_attention=SLIDING)), None),
        (dict(model_type="qwen3_moe", num_local_experts=8, dtype="bfloat16"),
         dict(num_experts=8, torch_dtype="bfloat16")),
    ],
)  # fmt: skip
def test_older_names_say_something_else_than_the_positions(values, expected):
    outer = dict(model_type="llava", text_config=dict(values))
    assert add_older_keys(outer) == (expected is not None)
    assert outer["text_config"] == values | (expected or {})


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss_sinks"])
def test_older_names_change_what_transformers_5_reads(family, world, tmp_path):
    path = save_tokenizer(save_model(FAMILIES[family], tmp_path / "model"))
    export_dir = export(path, tmp_path / "export", world)
    values = json.loads((export_dir / "config.json").read_text())
    assert "rope_theta" in values and values["torch_dtype"] == values["dtype"]
    config, again = AutoConfig.from_pretrained(path), AutoConfig.from_pretrained(export_dir)
    assert again.rope_parameters == config.rope_parameters
    tokenizer = json.loads((export_dir / "tokenizer_config.json").read_text())
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"  # 4.57 does not know TokenizersBackend
    assert tokenizer["model_input_names"] == ["input_ids", "attention_mask"]


def test_a_tokenizers_further_special_tokens_are_lost(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path / "model"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    save_older(tokenizer, tmp_path)
    values = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert values["additional_special_tokens"] == ["<|tool|>"] and "extra_special_tokens" not in values  # a list fails
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.extra_special_tokens == ["<|tool|>"] and len(again) == len(tokenizer)


def test_a_config_class_that_reads_an_older_name_differently_gets_it(tmp_path):
    """CohereCompassText is such a class: its positions would be lost."""

    class Reading(LlamaConfig):
        def __init__(self, **values):
            super().__init__(**values)
            self.rope_parameters = None if "rope_scaling" in values else self.rope_parameters

    config = Reading(**SHAPE)
    config.save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_bytes()
    rewrite_config(tmp_path / "config.json", config)
    assert (tmp_path / "config.json").read_bytes() == before


def test_the_names_of_a_published_vision_tower_lose_their_prefix(tmp_path):
    path = save_vision_model(tmp_path, "llava")
    shell = AutoModelForImageTextToText.from_pretrained(path)
    own = load_file(path / "model.safetensors").keys()  # as of a model that was never loaded
    published = {name.replace("vision_tower.", "vision_tower.vision_model.") for name in own}
    for names in (own, published):
        shell._weight_conversions = exporting.list_conversions(shell, names)
        assert exporting.revert_weight_conversion(shell, dict(shell.state_dict())).keys() == set(names)
