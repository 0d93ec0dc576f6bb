"""What is stored is what is read: bytes that changed since they were written are refused by every program that reads
them, and files that are edited by hand are named."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import train_here
from safetensors.torch import load_file
from scored_data import score_here, write_data
from small_runs import OPTIONS
from tiny_data import flip_bit, make_samples, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer

from mini_trainer.data.stores import contents
from mini_trainer.data.stores.contents import check_recorded, hash_once, sign
from mini_trainer.data.stores.disk import locked
from mini_trainer.data.tokenized.reader import TokenizedData, read_sidecar, verify_data
from mini_trainer.distributed.ending import ExitCode, RunError
from mini_trainer.evaluate_model import evaluate
from mini_trainer.generate import generate
from mini_trainer.model.hashed_tensors import write_hashed
from mini_trainer.model.methods.osft_directions import Statistics, read_data_hashes, read_statistics, write_statistics
from mini_trainer.model.methods.osft_subspaces import hash_bases, read_subspace, write_subspace
from mini_trainer.options import group_options
from mini_trainer.options.reading import hash_file
from mini_trainer.options.tools import (
    EvaluateOptions,
    ExportGgufOptions,
    GenerateOptions,
    MergeAdapterOptions,
    VerifyOptions,
)
from mini_trainer.run.references import read_file
from mini_trainer.run.start_checks import describe_data
from mini_trainer.tools.export_gguf import export_gguf
from mini_trainer.tools.merge_adapter import merge_adapter
from mini_trainer.tools.verify import verify

DAMAGED = ".*SHA-256"
LORA = dict(lora=True, lora_rank=2, lora_alpha=4.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory, world) -> Path:
    """A model, a data set with scores, and runs of all weights, of LoRA and of OSFT."""
    root = tmp_path_factory.mktemp("made")
    model = save_tokenizer(save_model(FAMILIES["llama"], root / "model"))
    data = write_data(root / "data.arrow", model)
    record(data)
    inputs = dict(model_name_or_path=str(model), data_path=str(data), max_steps=1)
    osft = dict(osft=True, osft_unfreeze_rank_ratio=0.5, osft_cache_dir=str(root / "cache"), osft_bases="new")
    for name, options in {"full": {}, "lora": LORA, "osft": osft}.items():
        train_here(world, **OPTIONS, **inputs, **options, output_dir=str(root / name))
    score_here(world, model, data)
    return root


@pytest.fixture
def root(made, tmp_path) -> Path:
    """A copy to damage."""
    return shutil.copytree(made, tmp_path / "root", symlinks=True)


def record(data: Path) -> None:
    sidecar = Path(f"{data}.meta.json")
    sidecar.write_text(json.dumps(sign(json.loads(sidecar.read_text()) | {"file": hash_file(data)})))


def export_of(run: Path) -> Path:
    (export,) = (run / "hf_format").glob("samples_*")
    return export


# Readers of an export's weights, which is `export`, or of the data beside it.
def train_on_export(world, root: Path, export: Path, **skip: bool) -> None:
    train_here(world, **OPTIONS, max_steps=1, model_name_or_path=str(export), data_path=str(root / "data.arrow"),
               output_dir=str(root / "new"), **skip)  # fmt: skip


def generate_by_export(world, root: Path, export: Path, **skip: bool) -> None:
    (root / "prompts.txt").write_text("Hi\n")
    given = dict(prompts=str(root / "prompts.txt"), output=str(root / "a.jsonl"), max_new_tokens=1)
    generate(group_options(GenerateOptions, **given, model=str(export), **skip), world)


def evaluate_export(world, root: Path, export: Path, **skip: bool) -> None:
    given = dict(data=str(root / "data.arrow"), output_dir=str(root / "seen"), model=str(export))
    evaluate(group_options(EvaluateOptions, **given, **skip), world)


def score_by_export(world, root: Path, export: Path, **skip: bool) -> None:
    score_here(world, export, root / "data.arrow", name="other", **skip)


def merge_adapter_into_export(world, root: Path, export: Path, **skip: bool) -> None:
    given = dict(adapter=str(export_of(root / "lora")), output_dir=str(root / "merged"))
    merge_adapter(MergeAdapterOptions(**given, model_name_or_path=str(export), **skip), world)


def convert_export(world, root: Path, export: Path, **skip: bool) -> None:
    given = dict(model_name_or_path=str(export), output=str(root / "model.gguf"), dtype="f32")
    export_gguf(ExportGgufOptions(**given, **skip))


Reader = Callable[..., None]
READERS = [train_on_export, generate_by_export, evaluate_export, score_by_export, merge_adapter_into_export,
           convert_export]  # fmt: skip


@pytest.mark.parametrize("read", READERS)
def test_weights_that_changed_since_their_export_are_refused_by_all_that_read_them(read: Reader, world, root):
    weights = export_of(root / "full") / "model.safetensors"
    tensors = load_file(weights)
    flip_bit(weights, 0.9)
    assert tensors.keys() == load_file(weights).keys()  # of the same form
    with pytest.raises(ValueError, match=rf"full/.*model.safetensors: {DAMAGED} .*manifest.json"):
        read(world, root, export_of(root / "full"))
    assert not any((root / name).exists() for name in ("a.jsonl", "mixed", "merged", "model.gguf"))
    if read not in (convert_export, merge_adapter_into_export):  # not for llama.cpp, and another adapter's
        read(world, root, export_of(root / "full"), skip_verification=True)


@pytest.mark.parametrize("read", [train_on_export, evaluate_export, score_by_export])
def test_tokens_that_changed_are_refused_by_all_that_read_them(read: Reader, world, root):
    data = root / "data.arrow"
    token = int(TokenizedData(data).read(0)["input_ids"][-1])
    content = bytearray(data.read_bytes())
    content[content.index(token.to_bytes(4, "little"))] ^= 1
    data.write_bytes(content)
    with pytest.raises(RunError, match=rf"data.arrow: {DAMAGED} .*data.arrow.meta.json"):
        read(world, root, export_of(root / "full"))
    read(world, root, export_of(root / "full"), skip_verification=True)


def test_a_sidecar_that_was_edited_is_a_warning(world, root, caplog):
    sidecar = root / "data.arrow.meta.json"
    verify_data(TokenizedData(root / "data.arrow"))
    assert caplog.messages == []
    sidecar.write_text(sidecar.read_text().replace('"max_token_id": ', '"max_token_id": 1'))
    verify_data(TokenizedData(root / "data.arrow"))
    (warning,) = caplog.messages
    assert warning.startswith(f"warning: {sidecar}: was edited")


def test_adapters_bases_and_calibration_data_are_verified(world, root):
    common = OPTIONS | dict(max_steps=1, data_path=str(root / "data.arrow"), output_dir=str(root / "new"))
    common |= dict(model_name_or_path=str(root / "model"))
    flip_bit(adapter := export_of(root / "lora") / "adapter_model.safetensors", 0.95)
    with pytest.raises(RunError, match=rf"adapter_model.safetensors: {DAMAGED}"):
        train_here(world, **common, **LORA, lora_adapter=str(adapter.parent))
    with pytest.raises(ValueError, match=rf"adapter_model.safetensors: {DAMAGED}"):
        merge_adapter(MergeAdapterOptions(adapter=str(adapter.parent), output_dir=str(root / "merged")), world)
    flip_bit(bases := next(export_of(root / "osft").rglob("*bases*")), 0.95)
    osft = dict(osft=True, osft_unfreeze_rank_ratio=0.5, osft_cache_dir=str(root / "cache"), osft_bases=str(bases))
    with pytest.raises(RunError, match=rf"{bases.name}: {DAMAGED}"):
        train_here(world, **common, **osft)


def test_a_damaged_cache_of_subspaces_is_named(root):
    for file in (root / "cache").iterdir():
        read_subspace(file)
        with pytest.raises(ValueError, match=rf"{file.name}: damaged"):
            read_subspace(flip_bit(file, 0.95))
        file.unlink(), os.mkfifo(file)
        with pytest.raises(ValueError, match=rf"{file.name}: .*regular file"):
            read_subspace(file)


def test_scores_that_changed_or_whose_sidecar_is_odd_are_refused(world, root, caplog):
    scores, sidecar = root / "data.arrow.teacher.scores", root / "data.arrow.teacher.scores.json"
    known = json.loads(sidecar.read_text())
    assert known["file"] == hash_file(scores)

    def distill(**options: object) -> None:
        train_here(world, **OPTIONS, max_steps=1, teacher_weight=0.5, model_name_or_path=str(root / "model"),
                   data_path=str(root / "data.arrow"), output_dir=str(root / "new"), **options)  # fmt: skip

    for key, value in {"top_k": "5", "loss": None, "num_ids": True, "file": [], "data": 3}.items():
        sidecar.write_text(json.dumps(known | {key: value}))
        with pytest.raises(ValueError, match=rf"scores.json: .*\b{key}\b"):
            distill()
    sidecar.write_text(json.dumps(known | {"teacher_name": "another"}))
    distill()
    assert f"warning: {sidecar}: was edited" in caplog.text
    shutil.rmtree(root / "new"), sidecar.write_text(json.dumps(known)), flip_bit(scores)
    with pytest.raises(RunError, match=rf"teacher.scores: {DAMAGED}"):
        distill()
    distill(skip_verification=True)


def test_files_edited_by_hand_are_a_warning_and_other_weights_are_not(world, root, caplog):
    export = export_of(root / "full")
    for name in ("generation_config.json", "README.md"):
        (export / name).write_text((export / name).read_text() + "\n")
    (export / "tokenizer_config.json").unlink()
    contents.verify_model(export, ["model.safetensors"])
    (warning,) = caplog.messages
    assert warning.startswith(f"warning: {export}: ")
    assert warning.endswith("manifest.json: generation_config.json, tokenizer_config.json")
    shutil.copy(export / "model.safetensors", export / "model-00001-of-00002.safetensors")
    with pytest.raises(ValueError, match=r"model-00001-of-00002.safetensors: .*listed in .*manifest.json"):
        contents.verify_model(export, ["model-00001-of-00002.safetensors"])


def test_a_damaged_manifest_is_refused_and_one_of_another_program_is_none(root, caplog):
    caplog.set_level("DEBUG", logger="mini_trainer")
    export = export_of(root / "full")
    manifest = export / "manifest.json"
    known = json.loads(manifest.read_text())
    for text in (manifest.read_text()[:-9], json.dumps(known | {"files": {}}), "[]"):
        manifest.write_text(text)
        with pytest.raises(ValueError, match=r"manifest.json is damaged.*--skip-verification"):
            contents.verify_model(export, ["model.safetensors"])
    manifest.write_text(json.dumps({"name": "an extension", "version": 3}))
    contents.verify_model(export, ["model.safetensors"])
    (message,) = caplog.messages
    assert message.startswith(f"{export}: ") and "manifest.json" in message and "unverified" in message


def test_a_hash_is_remembered_until_the_file_or_a_sampled_block_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(contents, "REMEMBERED_FROM", 1)
    monkeypatch.setattr(contents, "MEMORY_DIR", str(tmp_path / "memory"))
    monkeypatch.setattr(contents, "NUM_BLOCKS", 2)  # the first and the last
    path, reads = tmp_path / "large", []
    path.write_bytes(np.random.default_rng(0).bytes(contents.BLOCK_BYTES * 5))
    monkeypatch.setattr(contents, "hash_file", lambda path: reads.append(path) or hash_file(path))

    def is_read() -> bool:
        reads.clear()
        assert hash_once(path) == hash_file(path)["sha256"]
        return bool(reads)

    assert [is_read(), is_read()] == [True, False]
    times = (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    os.utime(flip_bit(path, 0.99), ns=times)
    assert [is_read(), is_read()] == [True, False]
    os.utime(path, ns=(0, 0))
    assert [is_read(), is_read()] == [True, False]
    path.rename(tmp_path / "moved"), shutil.copy2(tmp_path / "moved", path)  # of the same time, another inode
    assert is_read()
    known = hash_file(path)
    os.utime(flip_bit(path, 0.5), ns=(0, 0))  # between the blocks, and set back in time: read again when asked to
    with pytest.raises(ValueError, match=DAMAGED):
        check_recorded(path, known, record="r", again=True)
    next((tmp_path / "memory").glob("*.json")).write_text("{")
    assert is_read()


def test_ranks_compare_all_bytes_that_they_read(tmp_path, monkeypatch):
    monkeypatch.setattr(contents, "NUM_BLOCKS", 1)
    data = write_samples(tmp_path / "a.arrow", make_samples(400, vocab_size=VOCAB_SIZE))
    Path(f"{data}.meta.json").write_text(json.dumps({"file": hash_file(data)}))
    before = {whole: describe_data(TokenizedData(data), is_verified=whole) for whole in (True, False)}
    content, ids = bytearray(data.read_bytes()), TokenizedData(data).read(200)["input_ids"]
    content[content.index(ids.tobytes())] ^= 1
    data.write_bytes(content)
    after = {whole: describe_data(TokenizedData(data), is_verified=whole) for whole in (True, False)}
    assert before[False] == after[False]  # the sampled block is the same
    assert {key for key in before[True] if before[True][key] != after[True][key]} == {"SHA-256"}


def test_data_without_a_recorded_hash_is_used_and_said_and_an_odd_record_is_refused(tmp_path, caplog):
    caplog.set_level("DEBUG", logger="mini_trainer")
    data = write_samples(tmp_path / "a.arrow", make_samples(4, vocab_size=VOCAB_SIZE))
    verify_data(TokenizedData(data))
    (message,) = caplog.messages
    assert message.startswith(f"{data}: ") and "a.arrow.meta.json" in message and "unverified" in message
    for odd in ({"size": 3}, {"size": "3", "sha256": "a"}, [3]):
        Path(f"{data}.meta.json").write_text(json.dumps({"file": odd}))
        with pytest.raises(ValueError, match=r"a.arrow.meta.json: file "):
            read_sidecar(data)


DAMAGES = [lambda path: flip_bit(path, 0.6), lambda path: os.truncate(path, 300)]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_log_probabilities_of_a_reference_are_computed_again(damage: Callable, tmp_path, caplog):
    path, values = tmp_path / "values.safetensors", np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    write_hashed(path, {"values": torch.from_numpy(values)}, {"name": path.name})
    np.testing.assert_array_equal(read_file(path, 50), values)
    assert np.isnan(read_file(path, 49)).all() and "other rows" in caplog.text
    path.rename(other := tmp_path / "other.safetensors")
    assert np.isnan(read_file(other, 50)).all() and caplog.text.count("other rows") == 2
    other.rename(path)
    damage(path)
    assert np.isnan(read_file(path, 50)).all() and "scored again" in caplog.text


def test_the_directions_of_another_matrix_are_used(tmp_path):
    """Their shapes are equal, so that nothing else would notice."""
    files = [tmp_path / f"{name}.safetensors" for name in ("one", "other")]
    for file in files:
        write_subspace(file, {"basis": torch.rand(3, 3), "singular_values": torch.rand(3)})
    files[0].replace(files[1])
    with pytest.raises(ValueError, match=r"remove .*other\.safetensors: it is of another matrix, one"):
        read_subspace(files[1])


def test_statistics_of_other_layers_are_used_if_only_their_names_are_changed(tmp_path):
    path = tmp_path / "statistics.safetensors"
    write_statistics(Statistics({"a": torch.eye(2), "b": torch.zeros(2, 2)}, {"a": "a", "b": "b"}, ["hash"]), path)
    content = path.read_bytes()
    path.write_bytes(content.replace(rb"\"a\": \"a\", \"b\": \"b\"", rb"\"a\": \"b\", \"b\": \"a\""))
    assert path.read_bytes() != content
    with pytest.raises(ValueError, match="damaged"):
        read_statistics(path)


def test_a_pipe_in_a_files_place_does_not_hang(tmp_path, caplog):
    os.mkfifo(pipe := tmp_path / "pipe")
    assert np.isnan(read_file(pipe, 3)).all() and "regular file" in caplog.text
    for read in (hash_bases, read_data_hashes):
        with pytest.raises(ValueError, match=rf"{pipe}: .*regular file"):
            read(pipe)


def test_one_program_at_a_time_writes_scores(world, root):
    with locked(root / ".data.arrow.teacher.scores.lock"), pytest.raises(RunError, match="another process") as error:
        score_here(world, export_of(root / "full"), root / "data.arrow")
    assert error.value.code == ExitCode.LOCKED


def test_verify_reads_every_byte_of_what_has_recorded_hashes(root, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(contents, "REMEMBERED_FROM", 1)
    monkeypatch.setattr(contents, "MEMORY_DIR", str(tmp_path))
    monkeypatch.setattr(contents, "recall", lambda path, memory: pytest.fail("it trusts a remembered hash"))

    def lines(*paths: Path) -> Iterator[str]:
        verify(VerifyOptions(path=tuple(map(str, paths))))
        yield from capsys.readouterr().out.splitlines()

    export, checkpoint = export_of(root / "full"), root / "full" / "checkpoints" / "step_1"
    found = list(lines(root / "full", root / "data.arrow", root / "data.arrow.teacher.scores"))
    assert found == [f"ok {path}" for path in (checkpoint, export, root / "data.arrow",
                                               root / "data.arrow.teacher.scores")]  # fmt: skip
    assert len(list(lines(root))) == 8  # three runs' checkpoints and exports, data, scores
    (export / "config.json").write_text((export / "config.json").read_text() + " ")
    assert f"edited: {export / 'config.json'}" in list(lines(export))
    for path in (root / "data.arrow", checkpoint / "rank_00000.safetensors", export / "model.safetensors",
                 root / "data.arrow.teacher.scores"):  # fmt: skip
        flip_bit(path, 0.9)
    (checkpoint / "state.json").unlink()
    with pytest.raises(ValueError, match=r"^4 damaged"):
        list(lines(root))
    damaged = [line for line in capsys.readouterr().out.splitlines() if line.startswith("DAMAGED")]
    assert len(damaged) == 5 and f"DAMAGED {checkpoint / 'state.json'}: is missing" in damaged
    for name, listed in (("config.json", True), ("tokenizer_config.json", False), ("tokenizer.json", True)):
        (export / name).unlink()
        manifest = json.loads((export / "manifest.json").read_text())
        if not listed:
            del manifest["files"][name], manifest["sha256"]
            (export / "manifest.json").write_text(json.dumps(sign(manifest)))
        with pytest.raises(ValueError, match=r"^1 damaged"):
            list(lines(export))
        assert f"DAMAGED {export / name}: is missing" in capsys.readouterr().out.splitlines()
    (root / "notes.txt").write_text("x")
    for path, said in [(root / "notes.txt", "notes.txt: .*hash"), (root / "nowhere", "nowhere: .*exist")]:
        with pytest.raises(ValueError, match=said):
            list(lines(path))
