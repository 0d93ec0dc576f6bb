"""Fields and modules of Red Hat's mini_trainer, for training_hub and its callers (docs/reference/training_hub.md)."""

import dataclasses
import json
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from api_words import NEEDED, parse, parse_defaults
from processes import ENV, ROOT
from tiny_data import make_samples, write_jsonl, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer

from mini_trainer import PretrainingConfig, TorchrunArgs, TrainingArgs, TrainingMode, run_training
from mini_trainer.api import commands
from mini_trainer.api.commands import make_data_args, make_data_values, make_train_values, make_train_words, make_words
from mini_trainer.api.errors import BadInputError
from mini_trainer.api.tokenized import derive_data, names_tokenized
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.options import TrainOptions
from mini_trainer.options.tools import ProcessDataOptions, VerifyOptions
from mini_trainer.tools.verify import verify

DOCUMENTS = [[1, 2, 3, 4, 9], [5, 6, 9], [7, 8, 1, 2, 3, 9], [4, 9]]  # each ends with 9


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (dict(compile_model=True, keep_last_checkpoint_only=True, disable_flash_attn=True),
         dict(compile=True, keep_exports=1, attention="sdpa")),
        (dict(fsdp_sharding_strategy="SHARD_GRAD_OP", eval_file="v.arrow", osft_memory_efficient_init=True),
         dict(sharding="full", reshard_after_forward="never", validation_data_path=("v.arrow",))),
        (dict(beta1=0.8, beta2=0.9, eps=1e-6), dict(adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6)),
        (dict(train_dtype="bf16", save_dtype="torch.float32"), dict(master_weights="bfloat16", export_dtype="float32")),
        (dict(save_dtype=None, osft_upcast_dtype="float32"), dict()),
        (dict(min_samples_per_validation=100, batch_size=32), dict(validate_every_steps=4, batch_size=32)),
        (dict(validate_at_final=True, on_demand_checkpointing=True, accelerate_full_state_at_epoch=False), dict()),
        (dict(save_best_val_loss=False, validation_data_path="v.arrow"),
         dict(export_best=False, validation_data_path=("v.arrow",))),
        (dict(save_best_val_loss=False), dict()), (dict(val_loss_improvement_threshold=0.0), dict()),
        (dict(val_loss_improvement_threshold=0.01), dict(best_metric="loss:0.01")),
        (dict(resume_from_full_state_checkpoint="o/checkpoints/step_4"), dict(resume="o/checkpoints/step_4")),
        (dict(training_mode="step", max_epochs=3), dict(lr_scheduler="cosine")),
        (dict(training_mode=TrainingMode.EPOCH), dict(max_steps=None, max_epochs=1, lr_scheduler="cosine")),
        (dict(training_mode="epoch", num_epochs=3, lr_scheduler="linear"),
         dict(max_steps=None, max_epochs=3, lr_scheduler="linear")),
        (dict(training_mode="token", max_tokens=9, max_steps=0),
         dict(max_steps=None, max_tokens=9, lr_scheduler="cosine")),
        (dict(training_mode="infinite"), dict(max_steps=None)),
        (dict(lr_scheduler="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 0.25}, learning_rate=0.5),
         dict(lr_scheduler="cosine", learning_rate=0.5, min_lr_ratio=0.5)),
        (dict(lr_scheduler="cosine_with_restarts", lr_scheduler_kwargs={"num_cycles": 3}),
         dict(lr_scheduler="cosine_with_restarts", lr_shape=3.0)),
        (dict(lr_scheduler="polynomial", lr_scheduler_kwargs={"power": 2.0, "lr_end": 1e-5}),
         dict(lr_scheduler="polynomial", lr_shape=2.0, min_lr_ratio=1.0)),
        (dict(lr_scheduler="warmup_stable_decay", lr_scheduler_kwargs={"num_decay_steps": 2}),
         dict(lr_scheduler="wsd", lr_shape=2)),
        (dict(lr_scheduler="cosine", lr_scheduler_kwargs={}), dict(lr_scheduler="cosine")),
    ],
)  # fmt: skip
def test_red_hats_fields_mean_what_they_mean_there(given, expected):
    found = parse(TrainOptions, make_train_words(TrainingArgs(**(NEEDED | given))))
    assert found == parse_defaults() | expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(osft_output_dtype="bfloat16"), "osft_output_dtype has no counterpart here: exports have one data type"),
        (dict(osft_upcast_dtype="bfloat16"), "osft_upcast_dtype bfloat16: OSFT decomposes in float64"),
        (dict(lr_scheduler="cosine", lr_scheduler_kwargs={"num_cycles": 2}), "num_cycles: allowed with cosine: none"),
        (dict(min_samples_per_validation=100), "min_samples_per_validation 100: .*needs batch_size"),
        (dict(min_samples_per_validation=100, batch_size=8, validation_frequency=2),
         "min_samples_per_validation and validation_frequency both set"),
        (dict(beta1=0.8, adamw_betas=(0.8, 0.9)), "beta1 and adamw_betas both set"),
        (dict(fsdp_sharding_strategy="MOST"), "fsdp_sharding_strategy 'MOST': must be one of FULL_SHARD, "),
        (dict(training_mode="tokens"), "training_mode 'tokens': must be one of epoch, step, token, infinite"),
        (dict(training_mode="token"), "training_mode 'token' needs max_tokens"),
        (dict(block_size=32), "block_size cuts documents: give pretraining_config"),
    ],
)  # fmt: skip
def test_values_without_a_meaning_are_refused_by_the_field_s_name(given, message):
    with pytest.raises(BadInputError, match=message):
        make_train_words(TrainingArgs(**(NEEDED | given)))


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
    write_samples(tmp_path / "data.arrow", make_samples(40, vocab_size=VOCAB_SIZE, max_len=40))
    rows = pa.ipc.open_file(tmp_path / "data.arrow").read_all().select(["input_ids", "labels", "len"]).to_pylist()
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
