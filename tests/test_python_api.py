"""The Python API: arguments become the scripts' options, and what a caller gets of the processes that it starts."""

import ast
import dataclasses
import hashlib
import importlib
import inspect
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from api_words import NEEDED, parse, parse_defaults
from breadth import wide
from processes import ENV, count_steps, is_alive, list_children, wait_until
from program import list_sources
from tiny_data import make_samples, write_counting_chats, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, save_model, save_tokenizer
from torch.distributed.elastic.agent.server import local_elastic_agent

import mini_trainer
from mini_trainer import DataProcessArgs, LoraOptions, TorchrunArgs, TrainingArgs, TrainingError, run_training
from mini_trainer.api import commands
from mini_trainer.api.commands import make_data_args, make_data_values, make_train_words, make_words
from mini_trainer.api.errors import ERRORS, BadInputError, StorageError, make_error
from mini_trainer.api.stub import STUB, make_stub
from mini_trainer.data.chat.rendering import UnreadableContent
from mini_trainer.data.chat.turns import UnknownPrompt
from mini_trainer.data.rows.column_names import RefusedColumn
from mini_trainer.data.rows.parts import JoinedElsewhere
from mini_trainer.data.rows.worker_pool import WorkerDied
from mini_trainer.data.stores.remote import BrokenTransfer
from mini_trainer.distributed import children
from mini_trainer.distributed.children import find_last_words
from mini_trainer.distributed.ending import ExitCode, RanksDiffer, RunError
from mini_trainer.options import TrainOptions, group_options, iterate_fields
from mini_trainer.options.tools import ProcessDataOptions
from mini_trainer.options.urls import RefusedRedirect
from mini_trainer.process_data import process_data as run_process_data
from mini_trainer.run.checkpointing import NoValidCheckpoint
from mini_trainer.run.stages import Stopped
from mini_trainer.tools.server_requests import Refused
from mini_trainer.use.inference.openai_engine import PromptTooLong

NOT_GIVEN = TrainingArgs().output_dir
LORA = dict(lora=True, lora_rank=4, lora_alpha=32.0, lora_dropout=0.1)  # LoraOptions' defaults
CHATS = dict(model_path="m", data_path="chats.jsonl", ckpt_output_dir="o", data_output_dir="data")


def make_data_words(args: DataProcessArgs) -> list[str]:
    return make_words(ProcessDataOptions, make_data_values(args))


def make_value(option_type):
    """A value of the type that is no option's default."""
    if typing.get_origin(option_type) is tuple:
        item = typing.get_args(option_type)[0]
        return (make_value(item),) * 2
    choices = [choice for part in (option_type, *typing.get_args(option_type)) for choice in typing.get_args(part)]
    if typing.get_origin(option_type) is typing.Literal:
        return typing.get_args(option_type)[-1]
    for kind, value in ((int, 77), (float, 0.123), (str, "given")):
        if option_type is kind or kind in typing.get_args(option_type):
            return value
    return choices[-1]


@pytest.mark.parametrize(
    ("args_class", "options_class", "needed"),
    [
        (TrainingArgs, TrainOptions, NEEDED),
        (DataProcessArgs, ProcessDataOptions, dict(input_file="i", output_file="o.arrow", model_name_or_path="m")),
    ],
)
def test_every_option_is_a_field_that_reaches_the_command_line(args_class, options_class, needed):
    make_words = make_train_words if args_class is TrainingArgs else make_data_words
    given = {
        option.name: (not option.default) if option.type is bool else make_value(option.type)
        for option, _ in iterate_fields(options_class)
        if option.name != "config"
    }
    defaults = parse(options_class, make_words(args_class(**needed)))
    assert [name for name, value in given.items() if value == defaults[name]] == []
    found = parse(options_class, make_words(args_class(**(needed | given))))
    assert {**found, "data_path": given.get("data_path")} == {**defaults | given, "data_path": given.get("data_path")}
    assert found.get("data_path") == (() if args_class is TrainingArgs else None)  # mock_data is instead of it


@pytest.mark.parametrize("args_class", [TrainingArgs, DataProcessArgs])
def test_the_stub_has_every_field_with_its_type_and_its_help(args_class):
    assert STUB.read_text() == make_stub(), "run python -m mini_trainer.api.stub"
    (node,) = [one for one in ast.parse(STUB.read_text()).body if getattr(one, "name", "") == args_class.__name__]
    assert ast.get_docstring(node).split() == args_class.__doc__.split()
    names = [one.target.id for one in node.body[1::2]]
    helps = [one.value.value for one in node.body[2::2]]
    assert names == [field.name for field in dataclasses.fields(args_class)] and len(helps) == len(names)
    assert all(isinstance(text, str) and len(text) > 4 for text in helps)
    namespace = {"__name__": "mini_trainer.api.stubbed"}
    exec(compile(STUB.read_text(), str(STUB), "exec"), namespace)
    stubbed = typing.get_type_hints(namespace[args_class.__name__], namespace)

    def list_parts(kind: object) -> set[str]:
        found = {str(part).replace("stubbed.", "arguments.") for part in typing.get_args(kind) or (kind,)}
        return found if typing.get_origin(kind) is not tuple else {str(kind)}

    for field in dataclasses.fields(args_class):
        if "tuple" not in str(field.type):
            assert list_parts(field.type) <= list_parts(stubbed[field.name]), field.name


def test_the_stub_takes_what_the_arguments_take():
    fields = {one.target.id: ast.unparse(one.annotation) for one in ast.walk(ast.parse(STUB.read_text()))
              if isinstance(one, ast.AnnAssign)}  # fmt: skip
    assert fields["weight_decay"] == "float | Given"
    assert fields["output_dir"] == "str | Path | Given" and fields["max_steps"] == "int | None | Given"
    assert fields["data_weights"].startswith("float | tuple[float, ...] | list[float]")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # InstructLab's names.
        (dict(model_path="other", model_name_or_path=NOT_GIVEN, max_batch_len=600, num_epochs=3, save_samples=500,
              effective_batch_size=96, warmup_steps=5, random_seed=7, adamw_betas=(0.8, 0.9), adamw_weight_decay=0.1,
              use_liger=True, keep_last_checkpoint_only=True, disable_flash_attn=True, checkpoint_at_epoch=True,
              validation_frequency=10, checkpoint_every_minutes=None),
         dict(model_name_or_path="other", max_tokens_per_gpu=600, max_epochs=3, min_samples_per_checkpoint=500,
              batch_size=96, num_warmup_steps=5, seed=7, adam_beta1=0.8, adam_beta2=0.9, weight_decay=0.1,
              kernels="fused", keep_exports=1, attention="sdpa", checkpoint_at_epoch=True, validate_every_steps=10,
              checkpoint_every_minutes=None)),
        (dict(output_dir=Path("p"), data_path=["a", Path("b")]), dict(output_dir="p", data_path=("a", "b"))),
        (dict(max_steps=NOT_GIVEN), dict(max_steps=None, max_epochs=1)),
        (dict(use_liger_kernels=False), dict(kernels="eager")),
        (dict(save_samples=0, mock_data=False, lora=None, distributed_backend=mini_trainer.DistributedBackend.FSDP),
         dict()),
        (dict(lora=LoraOptions()), LORA),
        (dict(lora=LoraOptions(target_modules=["q_proj", "v_proj"],
                               quantize_data_type=mini_trainer.QuantizeDataType.NF4)),
         LORA | dict(base_quantization="nf4", lora_target_modules=("q_proj", "v_proj"))),
        (dict(data_path=NOT_GIVEN, process_data=True, mock_data=True, mock_data_len=64),
         dict(data_path=(), mock_data=10_000, block_size=64)),
        (dict(data_path=NOT_GIVEN, process_data=True, input_file="rows.jsonl", preset="toy"),
         dict(data_path=(), input_file=("rows.jsonl",), preset="toy")),
        (dict(osft=mini_trainer.OSFTOptions(osft_unfreeze_rank_ratio=0.3)),
         dict(osft=True, osft_unfreeze_rank_ratio=0.3)),
        (dict(fsdp_options=mini_trainer.FSDPOptions()), dict(sharding="hybrid")),
        (dict(fsdp_options=mini_trainer.FSDPOptions(sharding_strategy="FULL_SHARD", cpu_offload_params=True)),
         dict(sharding="full", cpu_offload=True)),
        (dict(fsdp_options=mini_trainer.FSDPOptions(sharding_strategy="SHARD_GRAD_OP")),
         dict(reshard_after_forward="never")),
        (dict(fsdp_options=mini_trainer.FSDPOptions(sharding_strategy=mini_trainer.ShardingStrategies.NO_SHARD)),
         dict(sharding="hybrid", shard_size=1)),
        (dict(deepspeed_options=mini_trainer.DeepSpeedOptions(cpu_offload_optimizer=True)), dict(cpu_offload=True)),
        # Red Hat's.
        (dict(compile_model=True, fsdp_sharding_strategy="SHARD_GRAD_OP", eval_file="v.arrow", beta1=0.8, beta2=0.9,
              eps=1e-6, osft_memory_efficient_init=True, train_dtype="bf16", save_dtype="torch.float32",
              min_samples_per_validation=100, batch_size=32, val_loss_improvement_threshold=0.01,
              resume_from_full_state_checkpoint="o/checkpoints/step_4"),
         dict(compile=True, sharding="full", reshard_after_forward="never", validation_data_path=("v.arrow",),
              adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6, master_weights="bfloat16", export_dtype="float32",
              validate_every_steps=4, batch_size=32, best_metric="loss:0.01", resume="o/checkpoints/step_4")),
        (dict(save_dtype=None, osft_upcast_dtype="float32", validate_at_final=True, on_demand_checkpointing=True,
              accelerate_full_state_at_epoch=False, save_best_val_loss=False, val_loss_improvement_threshold=0.0),
         dict()),
        (dict(save_best_val_loss=False, validation_data_path="v.arrow"),
         dict(export_best=False, validation_data_path=("v.arrow",))),
        (dict(training_mode="step", max_epochs=3), dict(lr_scheduler="cosine")),
        (dict(training_mode=mini_trainer.TrainingMode.EPOCH),
         dict(max_steps=None, max_epochs=1, lr_scheduler="cosine")),
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
def test_other_trainers_names_mean_what_they_mean_there(given, expected):
    assert parse(TrainOptions, make_train_words(TrainingArgs(**(NEEDED | given)))) == parse_defaults() | expected


def test_chats_are_tokenized_into_the_directory_that_training_reads():
    args = TrainingArgs(**CHATS, max_seq_len=300, chat_tmpl_path="t.jinja", data_process_num_cpu_procs=3,
                        validation_split=0.1, validation_frequency=5)  # fmt: skip
    trained, made = parse(TrainOptions, make_train_words(args)), make_data_words(make_data_args(args))
    assert trained["data_path"] == (str(Path("data/data.arrow")),) and trained["max_epochs"] == 1
    assert trained["validation_data_path"] == (str(Path("data/data.validation.arrow")),)
    made = parse(ProcessDataOptions, made)
    chosen = ("input_file", "output_file", "max_sample_num_tokens", "chat_template", "num_proc", "validation_share")
    assert [made[name] for name in chosen] == [("chats.jsonl",), "data/data.arrow", 300, "t.jinja", 3, 0.1]
    assert parse(ProcessDataOptions, make_data_words(DataProcessArgs(data_path="c.jsonl", data_output_path="data",
                 max_seq_len=9, model_path="m")))["output_file"] == "data/data.arrow"  # fmt: skip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(callbacks=[print]), "callbacks: <built-in function print>: "),
        (dict(distributed_backend="deepspeed"), "distributed_backend 'deepspeed'"),
        (dict(deepspeed_options=mini_trainer.DeepSpeedOptions(cpu_offload_optimizer_ratio=0.5)), "cpu_offload_optim"),
        (dict(fsdp_options=mini_trainer.FSDPOptions(sharding_strategy="SHARD")), "sharding_strategy 'SHARD': "),
        (dict(output_dir=NOT_GIVEN), "missing: output_dir"),
        (dict(tensorboard_log_dir="logs"), "tensorboard_log_dir"),
        (dict(wandb_run_name="run-{time}"), "wandb_run_name"),
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
def test_what_has_no_counterpart_is_refused_by_name(given, message):
    with pytest.raises(BadInputError, match=message):
        make_train_words(TrainingArgs(**(NEEDED | given)))


def test_a_template_in_python_is_refused():
    with pytest.raises(BadInputError, match=r"chat_tmpl_path ibm\.py: "):
        make_data_words(DataProcessArgs(data_path="c", data_output_path="d", model_path="m", chat_tmpl_path="ibm.py"))


def test_trackers_by_instructlabs_names():
    given = dict(mlflow_tracking_uri="http://host:5000", mlflow_experiment_name="mine", wandb_entity="team",
                 wandb_run_name=None, is_padding_free=True, tensorboard_log_dir=None)  # fmt: skip
    args = TrainingArgs(**NEEDED, **given)
    options = parse(TrainOptions, make_train_words(args))
    assert options["track"] == ("mlflow", "wandb")
    assert commands.make_environment(args) == {
        "MLFLOW_TRACKING_URI": "http://host:5000", "MLFLOW_EXPERIMENT_NAME": "mine", "WANDB_ENTITY": "team"
    }  # fmt: skip


def test_none_is_as_if_not_given():
    """None for every field that InstructLab's users may leave open."""
    names = ("max_seq_len", "chat_tmpl_path", "tensorboard_log_dir",
             "max_batch_len", "save_samples", "warmup_steps", "random_seed", "lora",
             "adamw_betas", "adamw_eps", "use_liger", "mock_data", "mock_data_len", "log_level",
             "learning_rate")  # fmt: skip
    words = make_train_words(TrainingArgs(**NEEDED))
    for name in names:
        assert make_train_words(TrainingArgs(**NEEDED, **{name: None})) == words


def test_chats_tokenized_in_a_stage_before_are_what_is_trained_on(tmp_path):
    """As InstructLab's users write it: `data_path` stays the chats', `data_output_dir` holds what was made of them."""
    chats, made = tmp_path / "chats.jsonl", tmp_path / "data.arrow"
    chats.write_text("{}")

    def choose(*paths: object, **given: object) -> list[str]:
        base = dict(model_path="m", ckpt_output_dir="run", data_output_dir=str(tmp_path), process_data=False)
        named = dict(data_path=[str(path) for path in paths]) if paths else {}
        words = make_train_words(TrainingArgs(**base, **named, **given))
        return words[words.index("--data-path") + 1 :]

    assert choose(chats) == [str(chats)] and choose() == [str(made)]  # refused by train.py, by its name
    made.write_text("")
    with pytest.raises(BadInputError, match=r"data_path .*chats\.jsonl: .*data\.arrow\.meta\.json"):
        choose(chats)
    digest = hashlib.sha256(b"{}").hexdigest()
    write_sidecar(made, digest, max_sample_num_tokens=300)
    assert choose(chats) == choose(tmp_path / "chats.jsonl", max_seq_len=300) == choose() == [str(made)]
    (tmp_path / "folder").mkdir()
    chats.rename(tmp_path / "folder" / "chats.jsonl")
    (tmp_path / "folder" / "README.md").write_text("not rows")
    assert choose(tmp_path / "folder") == [str(made)]
    chats.write_text("{}")
    # What is no longer, or never was, made of these rows is refused by name.
    other = tmp_path / "other.jsonl"
    other.write_text("[]")
    for given in ([other], [chats, other], [tmp_path / "none.jsonl"], ["s3://bucket/chats.jsonl"]):
        with pytest.raises(BadInputError, match=rf"data_path {given[0]}.*: .*data\.arrow .*data_path"):
            choose(*given)
    with pytest.raises(BadInputError, match=r"max_seq_len=300, .* 200 "):
        choose(chats, max_seq_len=200)
    with pytest.raises(BadInputError, match=r"chat_tmpl_path=None, .*'t\.jinja'"):
        choose(chats, chat_tmpl_path="/x/t.jinja")
    # Tokenized data is trained on as it is, whatever data_output_dir holds; and so are rows that train.py tokenizes.
    write_sidecar(other, digest)
    assert choose(other) == [str(other)] and choose("b.arrow", other) == ["b.arrow", str(other)]
    given = NEEDED | dict(data_path=NOT_GIVEN, input_file="rows.jsonl", data_output_dir=str(tmp_path))
    assert "--data-path" not in make_train_words(TrainingArgs(**given))


def write_sidecar(data: Path, digest: str, **options: object) -> None:
    sidecar = {"sources": [{"file": "chats.jsonl", "sha256": digest}], "options": {"chat_template": None} | options}
    Path(f"{data}.meta.json").write_text(json.dumps(sidecar))


def test_what_process_data_writes_is_known_to_be_of_its_chats(chats, tmp_path):
    """The sidecar that process_data.py itself writes."""
    made = str(tmp_path / "data.arrow")
    run_process_data(group_options(ProcessDataOptions, input_file=(chats["data_path"],), output_file=made, preview=0,
                                   model_name_or_path=chats["model_path"], num_proc=1))  # fmt: skip
    given = NEEDED | dict(data_path=chats["data_path"], data_output_dir=str(tmp_path))
    assert made in make_train_words(TrainingArgs(**given))
    (tmp_path / "chats.jsonl").write_text(Path(chats["data_path"]).read_text() + "\n")
    with pytest.raises(BadInputError, match=r"chats\.jsonl: .*other rows"):
        make_train_words(TrainingArgs(**given | dict(data_path=str(tmp_path / "chats.jsonl"))))


def test_every_exception_is_pickled_with_all_that_it_says():
    errors: list[BaseException] = [make_error(code, f"code {code}") for code in (*ExitCode, 77)]
    errors += [TrainingError("m", code=1), RunError(ExitCode.IO, "m"), RanksDiffer("m"), NoValidCheckpoint("m")]
    errors += [UnknownPrompt("m", "p"), PromptTooLong("m", "r"), Refused(400, "m", "c")]
    errors += [WorkerDied(9), Stopped(), Stopped("m"), RefusedRedirect("m")]
    errors += [kind("m") for kind in (JoinedElsewhere, BrokenTransfer, RefusedColumn, UnreadableContent)]
    defined = {
        node.name
        for source in list_sources().values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases)
    }
    assert defined <= {type(error).__name__ for error in errors}
    for error in errors:
        error.add_note("a note")
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
            found = pickle.loads(pickle.dumps(error, protocol))
            assert type(found) is type(error) and str(found) == str(error) and found.args == error.args
            assert vars(found) == vars(error)


def test_children_do_not_inherit_a_launchers_environment(tmp_path, monkeypatch):
    """All that torchrun sets for a rank, by its own source; what else the caller has set stays."""
    source = inspect.getsource(local_elastic_agent)
    set_by_torchrun = set(re.findall(r'^ +"((?:[A-Z]+_)?[A-Z_]+)": ', source, re.MULTILINE)) | {"LOCAL_RANK"}
    assert {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} <= set_by_torchrun
    by_srun = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    for name in {*set_by_torchrun, *by_srun, "PET_NNODES"}:
        monkeypatch.setenv(name, by_srun.get(name, "2"))
    monkeypatch.setenv("MY_TOKEN", "x")
    said, script = tmp_path / "environment.json", tmp_path / "child.py"
    script.write_text(f"import json, os, sys\njson.dump([sys.argv[1:], dict(os.environ)], open({str(said)!r}, 'w'))\n")
    monkeypatch.setattr(children, "name_module", lambda module: [sys.executable, str(script)])
    assert children.run_child(["train", "--a"], more={"MORE": "y", "RANK": "0"})[0] == 0
    words, found = json.loads(said.read_text())
    assert (words, found["MY_TOKEN"], found["MORE"], found["RANK"]) == (["train", "--a"], "x", "y", "0")
    left = (set_by_torchrun | by_srun.keys() | {"PET_NNODES"}) & found.keys() - {"RANK"}
    assert left <= {"TORCH_NCCL_ASYNC_ERROR_HANDLING"}  # says nothing of the caller's place


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "--nproc-per-node=1"),
        (dict(nproc_per_node="gpu", rdzv_id=5), "--nproc-per-node=gpu"),
        (dict(nproc_per_node=8, nnodes=1, node_rank=0, rdzv_id=123, rdzv_endpoint="127.0.0.1:29500"),
         "--nproc-per-node=8 --nnodes=1 --node-rank=0 --rdzv-id=123 --rdzv-endpoint=127.0.0.1:29500"
         " --rdzv-backend=c10d"),
        (dict(nproc_per_node=2, nnodes=2, node_rank=1, master_addr="host", master_port=29500),
         "--nproc-per-node=2 --nnodes=2 --node-rank=1 --master-addr=host --master-port=29500"),
    ],
)  # fmt: skip
def test_torchruns_arguments(given, words):
    assert commands.make_torchrun_words(TorchrunArgs(**given)) == words.split()


def test_process_data_is_called_by_either_name_whether_or_not_its_module_has_been_imported(monkeypatch):
    """The second stage's words: `test_chats_tokenized_in_a_stage_before...`."""
    importlib.import_module("mini_trainer.process_data")
    from mini_trainer import data_process as dp

    called = []
    monkeypatch.setattr("mini_trainer.api.launch.run_child", lambda words: (ExitCode.DONE, called.append(words) or ""))
    given = DataProcessArgs(data_path="c.jsonl", data_output_path="d", model_path="m", max_seq_len=200,
                            chat_tmpl_path=None)  # fmt: skip
    assert mini_trainer.process_data(given) == Path("d/data.arrow")
    dp.main(given)  # as users of InstructLab call it
    words = ["process-data", *make_data_words(given)]
    assert called == [words, words]
    found = parse(ProcessDataOptions, words[1:])
    chosen = ("input_file", "output_file", "max_sample_num_tokens")
    assert [found[name] for name in chosen] == [("c.jsonl",), "d/data.arrow", 200]


def test_every_exit_code_of_a_failure_has_a_class_and_last_words_are_found():
    ended_well = {ExitCode.DONE, ExitCode.SAVED_AND_REQUEUE, ExitCode.STOPPED_BY_USER, ExitCode.INTERRUPTED}
    assert set(ExitCode) - ended_well - {ExitCode.FAILED} == set(ERRORS)
    assert len(set(ERRORS.values())) == len(ERRORS)
    report = "step 1\nerror: --a is wrong:\n  change it\nE0101 01:00 torch/x.py] failed\n"
    assert find_last_words(report) == "--a is wrong:\n  change it"
    assert find_last_words("a\nb\n") == "a\nb"


def test_a_directory_that_cannot_be_made_is_an_error_of_storage(tmp_path):
    (tmp_path / "file").touch()
    given = TrainingArgs(**NEEDED | dict(output_dir=str(tmp_path / "file" / "run")))
    with pytest.raises(StorageError, match=r"File exists.*file") as raised:
        run_training(training_args=given)
    assert raised.value.code == ExitCode.IO


def test_a_child_that_is_killed_is_said_to_be_with_its_last_words(tmp_path, monkeypatch):
    script = tmp_path / "child.py"
    script.write_text("import os, signal\nprint('step 7', flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setattr(children, "name_module", lambda module: [sys.executable, str(script)])
    assert children.run_child([]) == (137, "killed by SIGKILL; last output:\nstep 7")


SCRIPT = """
import json, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
from mini_trainer import TorchrunArgs, TrainingArgs, TrainingError, run_training
torchrun_args, training_args = json.loads(sys.argv[1]), json.loads(sys.argv[2])
try:
    result = run_training(torch_args=TorchrunArgs(**torchrun_args), train_args=TrainingArgs(**training_args))
    print("RESULT", result.code, result.reason, len(result.exports), result.last_metrics["step"], result.log_file)
except TrainingError as error:
    print("ERROR", type(error).__name__, error.code, error)
except KeyboardInterrupt:
    print("INTERRUPTED")
"""


@pytest.fixture(scope="module")
def chats(tmp_path_factory) -> dict[str, str]:
    """Arguments of a run from chats, InstructLab's names."""
    folder = tmp_path_factory.mktemp("api")
    save_model(FAMILIES["llama"], folder / "model")
    save_tokenizer(folder / "model")
    write_counting_chats(folder / "chats.jsonl")
    write_samples(folder / "samples.arrow", make_samples(40, vocab_size=VOCAB_SIZE))
    return dict(
        model_path=str(folder / "model"), data_path=str(folder / "chats.jsonl"), ckpt_output_dir=str(folder / "run"),
        data_output_dir=str(folder / "data"), max_seq_len=200, max_batch_len=512, effective_batch_size=4,
        learning_rate=1e-3,
    )  # fmt: skip


def call(torchrun_args: dict, training_args: dict, **changes) -> subprocess.Popen:
    command = [sys.executable, "-c", SCRIPT, json.dumps(torchrun_args), json.dumps(training_args | changes)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=ENV, stdout=pipe, stderr=subprocess.STDOUT, text=True, process_group=0)


@pytest.mark.long
@pytest.mark.slow
def test_a_run_from_chats_returns_what_it_left(chats):
    out, _ = call({}, chats, num_epochs=2).communicate(timeout=240)
    log_file = chats["ckpt_output_dir"] + ".console_node0.log"
    assert f"RESULT 0 done 1 6 {log_file}\n" in out
    assert Path(log_file).read_text() and Path(log_file).read_text() in out


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("ending", "num_ranks"), [("Ctrl-C", 1), wide("kill", 2)])
def test_ctrl_c_saves_and_a_caller_that_is_killed_leaves_nothing_behind(ending, num_ranks, chats):
    data = dict(data_path=chats["data_path"].replace("chats.jsonl", "samples.arrow"), process_data=False)
    chats = {name: value for name, value in chats.items() if name not in ("data_output_dir", "max_seq_len")}
    run = Path(chats["ckpt_output_dir"] + ending)
    caller = call({"nproc_per_node": num_ranks}, chats | data, ckpt_output_dir=str(run), num_epochs=100_000)
    wait_until(lambda: count_steps(run) > 0, seconds=240, by=caller, said=caller.communicate)
    (launcher,) = list_children(caller.pid)
    ranks = list_children(launcher)
    assert len(ranks) == (num_ranks if num_ranks > 1 else 0)  # one process needs no torchrun: it is the launcher
    if ending == "kill":
        caller.kill()
    else:
        os.killpg(caller.pid, signal.SIGINT)
    out, _ = caller.communicate(timeout=240)
    wait_until(lambda: not any(map(is_alive, [launcher, *ranks])), seconds=240)
    code = json.loads((run / "exit.json").read_text())["code"]
    assert code == (ExitCode.SAVED_AND_REQUEUE if ending == "kill" else ExitCode.STOPPED_BY_USER)
    assert len(list((run / "checkpoints").glob("step_*"))) == 1
    assert ("INTERRUPTED" in out) == (ending == "Ctrl-C")
