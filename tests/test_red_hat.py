"""Red Hat's modules, and data as training_hub and its callers pass them (docs/reference/training_hub.md)."""

import dataclasses
import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from api_words import NEEDED, parse
from processes import ENV, ROOT
from tiny_data import make_samples, write_jsonl, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer

from mini_trainer import PretrainingConfig, TorchrunArgs, TrainingArgs, TrainingMode, run_training
from mini_trainer.api import commands
from mini_trainer.api.commands import make_data_args, make_data_values, make_train_values, make_words
from mini_trainer.api.errors import BadInputError
from mini_trainer.api.tokenized import derive_data, names_tokenized
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.options.tools import ProcessDataOptions, VerifyOptions
from mini_trainer.tools.verify import verify

DOCUMENTS = [[1, 2, 3, 4, 9], [5, 6, 9], [7, 8, 1, 2, 3, 9], [4, 9]]  # each ends with 9


def test_nothing_is_dropped_without_a_note(tmp_path):
    tokens = write_jsonl(tmp_path / "tokens.jsonl", [dict(input_ids=[1], labels=[1], len=1)])
    args = TrainingArgs(**NEEDED | dict(data_path=str(tokens)), on_demand_checkpointing=True, validate_at_final=False,
                        max_seq_len=9, training_mode="step", max_epochs=2, osft_upcast_dtype="float32")  # fmt: skip
    said = "\n".join(commands.list_notes(args))
    for name in ("on_demand_checkpointing has no effect: always on", "validate_at_final has no effect",
                 "osft_upcast_dtype has no", "max_seq_len has no effect: data_path is tokenized",
                 "max_epochs has no effect with training_mode 's", "lr_scheduler is cosine",
                 "save_dtype is bfloat16"):  # fmt: skip
        assert name in said
    assert commands.list_notes(TrainingArgs(**NEEDED)) == []
    assert "data_path has no effect" in commands.list_notes(TrainingArgs(**NEEDED, mock_data=True))[0]


def test_training_hub_finds_the_fields_that_it_looks_for():
    names, of_torchrun = ({field.name for field in dataclasses.fields(one)} for one in (TrainingArgs, TorchrunArgs))
    assert {"callbacks", "on_demand_checkpointing", "osft_target_patterns", "pretraining_config"} <= names
    assert TrainingArgs.model_fields.keys() == names
    assert {"nproc_per_node", "rdzv_endpoint", "master_port"} <= of_torchrun


def test_red_hats_modules_are_there_and_import_nothing_heavy():
    script = (
        "import mini_trainer, sys\n"
        "assert not {'torch', 'numpy', 'tyro', 'transformers', 'yaml'} & set(sys.modules)\n"
        "import mini_trainer.osft_utils as osft_utils, mini_trainer.api_train\n"
        "from mini_trainer.callbacks import TrainerCallback, serialize_callback\n"
        "from mini_trainer.training_types import PretrainingConfig, TrainingArgs, TrainingMode\n"
        "from mini_trainer import TrainerCallback as same, run_training\n"
        "assert same is TrainerCallback and run_training is mini_trainer.api_train.run_training\n"
        "assert 'mlp.up_proj' in osft_utils.MODEL_CONFIGS['default']['patterns']\n"
        "assert not {'torch', 'transformers', 'datasets', 'pyarrow'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], env=ENV, check=True, timeout=60, cwd=ROOT)


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_rows_of_tokens_and_labels_alone_are_read_with_their_counts(ending, tmp_path):
    rows = [dict(input_ids=[3, 4, 5], labels=[3, -100, 5], len=3), dict(input_ids=[6, 7], labels=[-100, 7], len=2)]
    path = write_jsonl(tmp_path / "data.jsonl", rows)
    if ending == "parquet":
        path = tmp_path / "data.parquet"
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)
    data = TokenizedData(path, option="--data-path")
    assert data.lengths.tolist() == [3, 2] and data.num_loss_tokens.tolist() == [1, 1]
    assert names_tokenized(TrainingArgs(data_path=str(path)))


def test_tokenized_data_is_known_by_its_columns_and_not_mixed_with_chats(tmp_path):
    tokens = str(write_jsonl(tmp_path / "tokens.jsonl", [dict(input_ids=[1], labels=[1], len=1)]))
    chats = str(write_jsonl(tmp_path / "chats.jsonl", [dict(messages=[])]))
    assert not names_tokenized(TrainingArgs(data_path=chats)) and not names_tokenized(TrainingArgs())
    with pytest.raises(BadInputError, match=r"tokens\.jsonl: already tokenized, but other files are not"):
        names_tokenized(TrainingArgs(data_path=[tokens, chats]))


def derive(path: str, folder: Path, **given: object) -> TrainingArgs:
    given |= dict(data_path=path, output_dir=str(folder / "run"), data_output_dir=str(folder))
    return derive_data(TrainingArgs(**given))


def read_rows(path: str) -> list[list[int]]:
    return pa.ipc.open_file(path).read_all()["input_ids"].to_pylist()


def test_tokenized_documents_are_joined_and_cut_and_rows_with_labels_are_none(tmp_path):
    path = str(write_jsonl(tmp_path / "docs.jsonl", [dict(input_ids=ids, len=len(ids)) for ids in DOCUMENTS]))
    args = derive(path, tmp_path, pretraining_config=PretrainingConfig(block_size=4), max_seq_len=2)
    blocks = read_rows(args.data_path[0])
    assert [*chain(*blocks)] == [*chain(*DOCUMENTS)] and all(2 <= len(block) <= 4 for block in blocks)
    assert not [block for block in blocks if block[0] == 9]  # its end would never be learned
    found = args.process_data, args.pretraining_config, args.validation_data_path
    assert found == (False, None, TrainingArgs().data_path)
    assert derive(path, tmp_path, pretraining_config=PretrainingConfig(4)).data_path == args.data_path
    assert derive(path, tmp_path, pretraining_config=PretrainingConfig(3)).data_path != args.data_path
    path = str(write_jsonl(tmp_path / "rows.jsonl", [dict(input_ids=[1, 2], labels=[1, 2], len=2)]))
    with pytest.raises(BadInputError, match=r"pretraining_config: .*rows\.jsonl has labels"):
        derive(path, tmp_path, pretraining_config=PretrainingConfig(2))


def test_documents_that_are_no_tokens_yet_are_process_data_s(tmp_path):
    config = PretrainingConfig(block_size=64, document_column_name="body")
    args = TrainingArgs(model_path="m", data_path="docs.jsonl", data_output_dir="data", ckpt_output_dir="o",
                        pretraining_config=config, block_size=64, max_seq_len=9)  # fmt: skip
    made = parse(ProcessDataOptions, make_words(ProcessDataOptions, make_data_values(make_data_args(args))))
    assert (made["format"], made["columns"], made["block_size"]) == ("document", ("text=body",), 64)
    assert made["max_sample_num_tokens"] is None and "block_size" not in make_train_values(args)


def test_a_share_of_tokenized_rows_is_held_out(tmp_path):
    samples = make_samples(200, vocab_size=VOCAB_SIZE)
    write_samples(tmp_path / "all.arrow", [*samples, *samples])
    (tmp_path / "all.arrow.meta.json").write_text(json.dumps(dict(num_samples=400, tokenizer_fingerprint="f")))
    args = derive(str(tmp_path / "all.arrow"), tmp_path, validation_split=0.25)
    trained, held_out = [read_rows(path) for (path,) in (args.data_path, args.validation_data_path)]
    whole = read_rows(str(tmp_path / "all.arrow"))
    assert sorted(trained + held_out) == sorted(whole) and 60 < len(held_out) < 140
    assert not set(map(tuple, trained)) & set(map(tuple, held_out))  # equal rows are on one side
    verify(VerifyOptions(path=(args.data_path[0], args.validation_data_path[0])))  # of its own size and hash
    assert TokenizedData(args.data_path[0]).sidecar["tokenizer_fingerprint"] == "f"
    for share, message in ((1.5, "must be above 0 and below 1"), (1e-9, "400 rows, 0 of them for validation")):
        with pytest.raises(BadInputError, match=message):
            derive(str(tmp_path / "all.arrow"), tmp_path, validation_split=share)


def test_messages_name_arguments_as_they_were_given():
    args = TrainingArgs(**NEEDED, max_batch_len=600)
    message = "--learning-rate -1.0: must be at least 0\n--max-tokens-per-gpu 600 and --no-osft: see --unknown-flag"
    named = commands.name_arguments(f"{message}\npython -m mini_trainer train --help all lists all options", args,
                                    make_train_values(args))  # fmt: skip
    assert named == "learning_rate -1.0: must be at least 0\nmax_batch_len 600 and osft=False: see --unknown-flag"


@pytest.mark.slow
def test_an_error_of_a_run_has_its_message_and_its_log(tmp_path):
    args = TrainingArgs(**NEEDED | dict(output_dir=str(tmp_path / "run")), best_metric="loss:small",
                        validation_data_path="v.arrow")  # fmt: skip
    with pytest.raises(BadInputError) as raised:
        run_training(training_args=args)
    assert "best_metric loss:small: must be METRIC, or METRIC:D" in raised.value.message
    assert "--help" not in raised.value.message and raised.value.log_file == tmp_path / "run.console_node0.log"
    assert "--best-metric" in raised.value.log_file.read_text()


@pytest.mark.long
@pytest.mark.slow
def test_a_run_as_training_hub_starts_it(tmp_path):
    """Data inside of the output directory, of three columns, beside training_hub's file; a share held out."""
    save_model(FAMILIES["llama"], tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    folder = tmp_path / "run" / "_internal_data_processing"
    folder.mkdir(parents=True)
    (tmp_path / "run" / "training_hub_callbacks.json").write_text("{}")
    samples = make_samples(40, vocab_size=VOCAB_SIZE, max_len=40)
    rows = [dict(input_ids=input_ids, labels=labels, len=len(labels)) for input_ids, labels in samples]
    path = str(write_jsonl(folder / "data.jsonl", rows))
    result = run_training(
        torch_args=TorchrunArgs(nproc_per_node=1, nnodes=1, node_rank=0, rdzv_id=0),
        train_args=TrainingArgs(
            model_name_or_path=str(tmp_path / "model"), data_path=path, batch_size=8, max_tokens_per_gpu=256,
            learning_rate=1e-3, output_dir=str(tmp_path / "run"), training_mode=TrainingMode.EPOCH, max_seq_len=64,
            osft=True, osft_unfreeze_rank_ratio=0.3, on_demand_checkpointing=True, validation_split=0.25,
            val_loss_improvement_threshold=1e-4, min_samples_per_validation=10,
        ),
    )  # fmt: skip
    assert result.is_done and {path.name for path in result.exports} >= {"best"}
    assert {path.suffix for path in folder.iterdir()} == {".jsonl", ".arrow", ".json"}
