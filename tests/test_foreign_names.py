"""Names of other trainers: each gets the option here or a reason, and never one that does the opposite."""

import dataclasses
import importlib
import re
from typing import get_origin

import names_table
import pytest
from refusals import refuse

from mini_trainer.options import TrainOptions, flag_name, list_types
from mini_trainer.options.answers import describe_unknown, describe_value
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.foreign_names import DATA_NAMES, TABLE, TRAIN_NAMES, find_option, find_row
from mini_trainer.options.tools import EvaluateOptions, GenerateOptions, ProcessDataOptions

TRAIN, DATA = list_types(TrainOptions), list_types(ProcessDataOptions)
GENERATE, EVALUATE = list_types(GenerateOptions), list_types(EvaluateOptions)
KNOWN = [*TRAIN, *(f"no_{name}" for name, kind in TRAIN.items() if kind is bool)]
REQUIRED = ["--model-name-or-path", "m", "--data-path", "d.arrow", "--output-dir", "o", "--max-steps", "5"]
TORCHRUN = {"nproc_per_node"}
# The command line of mini_trainer 0.9 of Red Hat's AI innovation team, and fields of InstructLab's TrainingArgs.
UPSTREAM = """model_name_or_path data_path batch_size max_tokens_per_gpu learning_rate num_warmup_steps lr_scheduler
    lr_scheduler_kwargs seed beta1 beta2 eps weight_decay use_liger_kernels osft osft_unfreeze_rank_ratio
    osft_target_patterns osft_upcast_dtype output_dir min_samples_per_checkpoint training_mode max_epochs max_steps
    max_tokens checkpoint_at_epoch save_final_checkpoint save_dtype train_dtype validation_split validation_data_path
    validation_frequency validate_at_epoch min_samples_per_validation validate_at_final save_best_val_loss
    val_loss_improvement_threshold trust_remote_code on_demand_checkpointing resume_from_full_state_checkpoint
    block_size pretraining_config wandb_project wandb_run_name wandb_entity mlflow_tracking_uri mlflow_experiment_name
    mlflow_run_name callbacks"""
INSTRUCTLAB = """model_path data_output_dir ckpt_output_dir max_seq_len max_batch_len num_epochs effective_batch_size
    save_samples warmup_steps random_seed adamw_weight_decay adamw_betas adamw_eps use_liger use_dolomite
    use_legacy_tmpl chat_tmpl_path mock_data mock_data_len deepspeed_options fsdp_options distributed_backend
    disable_flash_attn process_data keep_last_checkpoint_only accelerate_full_state_at_epoch log_level
    data_process_num_cpu_procs quantize_data_type cpu_offload_optimizer sharding_strategy cpu_offload_params nnodes
    nproc_per_node node_rank rdzv_id rdzv_endpoint"""
CONFIGS = ["transformers:TrainingArguments", "trl:SFTConfig", "trl:DPOConfig", "trl:ModelConfig"]


def answer(name: str) -> str:
    return describe_unknown(name, KNOWN, spell=flag_name)


def test_the_table_names_options_that_exist():
    options, given = TRAIN.keys() | DATA.keys() | GENERATE.keys(), TRAIN.keys() | DATA.keys()
    for row in TABLE:
        values = [name for ours in row.values.values() if isinstance(ours, dict) for name in ours]
        named = [option for name in row.list_names() for option in row.list_options(name)]
        assert {*named} <= options and {*values} <= given, row
        flags = re.findall(r"--([a-z][a-z\d-]+)", row.reason)
        assert {flag.replace("-", "_") for flag in flags} <= given | TORCHRUN, row
        assert row.options or row.reason, row


def test_the_python_api_s_names_have_an_option_or_a_reason():
    for names, known in ((TRAIN_NAMES, TRAIN), (DATA_NAMES, DATA)):
        assert [name for name in names if find_option(name, known) is None and not find_row(name).reason] == []


def test_the_page_has_the_table_s_names():
    text = names_table.PAGE.read_text()
    assert names_table.replace_table(text) == text, "python docs/site/names_table.py writes the table"


def find_unanswered(names: list[str]) -> list[str]:
    return [name for name in names if name not in TRAIN and find_row(name) is None]


@pytest.mark.parametrize("place", CONFIGS)
def test_every_name_of_transformers_and_trl_has_an_answer(place):
    module, _, name = place.partition(":")
    names = [field.name for field in dataclasses.fields(getattr(importlib.import_module(module), name))]
    assert len(names) > 15
    assert find_unanswered(names) == []


@pytest.mark.parametrize("names", [UPSTREAM, INSTRUCTLAB], ids=["upstream", "instructlab"])
def test_every_name_of_the_first_mini_trainer_and_of_instructlab_has_an_answer(names: str):
    assert find_unanswered(names.split()) == []


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("compile_model", "--compile?"),
        ("osft_memory_efficient_init", "one block's matrices"),
        ("column_name", "--columns text=COLUMN"),
        ("accelerator", "CUDA_VISIBLE_DEVICES"),
        ("galore_rank", "a method that is not here"),
        ("load_in_4bit", "--base-quantization nf4?"),
    ],
)
def test_names_of_red_hat_and_of_supertrainer_are_answered(name, told):
    assert told in answer(name)


@pytest.mark.parametrize(
    ("option", "value", "meant"),
    [
        ("lr_scheduler", "cosine_with_min_lr", "; did you mean cosine with --min-lr-ratio?"),
        ("lr_scheduler", "warmup_stable_decay", "; did you mean wsd?"),
        ("optimizer", "adamw_bnb_8bit", "; did you mean adamw8bit?"),
        ("optimizer", "lion", ""),
    ],
)
def test_values_of_other_trainers_are_answered(option, value, meant, capfd):
    assert describe_value(option, value) == meant
    assert meant in refuse([*REQUIRED, flag_name(option), value], capfd)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("use_lora", "--lora"),
        ("enable_compile", "--compile"),
        ("disable_compile", "--no-compile"),
        ("no_use_lora", "--no-lora"),
        ("no_osf", "--no-osft"),
        ("no_gradient_checkpointing", "--activation-checkpointing"),
        ("lr", "--learning-rate"),
        ("save_steps", "--checkpoint-every-steps"),
        ("bach_size", "--batch-size"),
        *((unlike, None) for unlike in ("foo", "launcher", "export_kind", "sharding_of_weights", "megatron_config")),
    ],
)
def test_a_switch_keeps_its_sense_and_a_typo_its_word(name, meant):
    """And a name unlike any option gets no suggestion."""
    assert answer(name) == ("" if meant is None else f"; did you mean {meant}?")


def test_programs_answer_by_their_own_options():
    assert describe_unknown("data", DATA, spell=flag_name) == "; did you mean --input-file?"
    read = ": read from the model's own config and tokenizer"
    assert describe_unknown("tokenizer_path", DATA, spell=flag_name) == read
    assert describe_unknown("lora_r", DATA, spell=flag_name) == "; --lora-rank is an option of train.py"
    assert describe_unknown("batch_size", DATA, spell=flag_name) == "; --batch-size is an option of train.py"
    assert "--compute-dtype of train.py" in describe_unknown("bf16", EVALUATE, spell=flag_name)
    assert describe_unknown("lora_r", TRAIN, spell=repr) == "; did you mean 'lora_rank'?"


@pytest.mark.parametrize("word", ["--fp16", "--no_bf16", "--do_train=True", "--max-seq-len", "--packing"])
def test_the_command_line_gives_the_answer(word, capfd):
    flag = word.partition("=")[0].replace("_", "-")
    name = flag.removeprefix("--").replace("-", "_")
    assert f"unknown option {flag}{answer(name)}\n" in refuse([*REQUIRED, word], capfd)


LISTS = [flag_name(name) for name, kind in TRAIN.items() if get_origin(kind) is tuple]
SPACED = ("--lora-target-modules q_proj, v_proj", "--track=wandb,mlflow", "--config a.yaml,b.yaml",
          "--validation-data-path s3://bucket/a.arrow,s3://bucket/b.arrow")  # fmt: skip


@pytest.mark.parametrize("words", [*SPACED, *(f"{flag} a,b" for flag in LISTS)])
def test_lists_with_commas_are_explained(words, capfd):
    flag, values = re.split("[ =]", words, maxsplit=1)
    parts = " ".join(values.replace(", ", ",").split(","))
    expected = f"{flag} {values}: values of a list are separated by spaces: {flag} {parts}"
    given = [word for word in REQUIRED if word not in ("--data-path", "d.arrow")]
    assert expected in refuse([*given, *words.split()], capfd)


def test_commas_within_a_value_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a,b.arrow").touch()
    kept = {
        "--lora-target-modules": ["(q|v)_proj{1,2}", "layers.[0,1].*"],
        "--add-special-tokens": ["<|a,b|>", ","],
        "--validation-data-path": ["a,b.arrow", "s3://bucket/a,b.arrow", "https://host/x?columns=1,2"],
    }
    words = [word for flag, values in kept.items() for word in (flag, *values)]
    required = ["--model-name-or-path", "m", "--input-file", "i.jsonl", "--output-dir", "o", "--max-steps", "5"]
    options = parse_options(TrainOptions, [*required, "--lora", *words])
    assert options.lora.lora_target_modules == tuple(kept["--lora-target-modules"])
    assert options.rows.add_special_tokens == tuple(kept["--add-special-tokens"])
    labels = "--objective sequence-classification --format classification --label-names 1,000 2,000"
    assert parse_options(TrainOptions, [*required, *labels.split()]).rows.label_names == ("1,000", "2,000")
    assert options.validation.validation_data_path == tuple(kept["--validation-data-path"])
