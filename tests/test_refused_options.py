"""Options out of range, without effect or against each other: each is the one problem that is found, by its name."""

import math
import re

import pytest

from mini_trainer.options import TrainOptions, group_options
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.options.tools import EvaluateOptions, GenerateOptions, ProcessDataOptions

NEEDED = {
    TrainOptions: dict(model_name_or_path="m", data_path="d", output_dir="o", max_steps=1),
    ProcessDataOptions: dict(model_name_or_path="m", input_file="i.jsonl", output_file="o.arrow"),
    EvaluateOptions: dict(output_dir="o"),
    GenerateOptions: dict(model="m"),
}
PAIRS = dict(objective="preference")
DECAYING = dict(continue_from="c/step_1", lr_scheduler="cosine", num_warmup_steps=2, schedule_steps=12)
VALIDATED = dict(validation_data_path="v", validate_every_steps=2)
BAD_ADDRESSES = ("localhost:8000/v1", "http://h/v1?api-key=s3cret", "http://u:s3cret/x@h/v1", "ftp://u:s3cret@h",
                 "http:///v1", "http://s3cret h/v1")  # fmt: skip
REFUSED = {
    TrainOptions: [
        (dict(learning_rate=2e4), "--learning-rate 20000.0: must be from 0 to 1"),  # 2e-4
        (dict(learning_rate_for=("lm_head*=2e4",)), "--learning-rate-for "),
        # Rows.
        (dict(data_path=()), ".*no data"),
        (dict(data_path=(), input_file="r", input_dataset="n"), "--input-file and --input-dataset "),
        (dict(columns=("messages=x",)), "--columns: "), (dict(subset="0%"), "--subset 0%: "),
        (dict(data_path=(), input_file="r", split="train"), "--split "), (dict(block_size=9), "--block-size: "),
        (dict(data_path=(), mock_data=9, format="messages"), "--format: "),
        (dict(data_path=(), input_file="r", columns=("messages=a", "text=b")), ".*different formats"),
        (dict(data_path=(), input_file="r", columns=("text=b",), format="messages"), "--columns text= has no effect"),
        (dict(data_path=(), input_file="r", format="messages", objective="token-classification"),
         ".*--format classification"),
        (dict(data_path=(), mock_data=9, objective="sequence-classification"),
         "--format: .*\n.*--format classification: --mock-data "),
        (dict(data_path=(), mock_data=9, objective="preference"), "--format: .*\n.*--format preference: --mock-data "),
        (dict(data_path=(), input_file="r", format="feedback", objective="preference"),
         "--objective preference needs "),
        (dict(data_path=(), input_file="r", format="preference"), ".*--objective preference or --objective reward"),
        (dict(data_path=(), input_file="r", format="classification"), "--format classification "),
        (dict(data_path=(), input_file="r", validation_share=0.1, validation_data_path="v"), ".*--validation-share"),
        # Preferences.
        (dict(preference_loss="ipo"), "--preference-loss: "),
        (dict(objective="reward", preference_beta=0.2, reward_centering=0.1), "--preference-beta: "),
        (PAIRS | dict(reward_centering=0.1), "--reward-centering: "),
        (PAIRS | dict(preference_beta=0.0), "--preference-beta 0.0: "),
        (PAIRS | dict(preference_gamma=1.0), "--preference-gamma "),
        (PAIRS | dict(preference_loss="ipo", label_smoothing=0.1), "--label-smoothing "),
        (PAIRS | dict(label_smoothing=0.5), "--label-smoothing 0.5: "),
        (PAIRS | dict(preference_nll_weight=-1.0), "--preference-nll-weight -1.0"),
        (PAIRS | dict(preference_loss="orpo", reference_model="m"), "--reference-model: "),
        (dict(objective="reward", label_smoothing=0.1), "--label-smoothing: "),
        (dict(objective="reward", reward_centering=-1.0), "--reward-centering -1.0"),
        # Classes.
        (dict(class_weights=("balanced",)), "--class-weights: no effect on --objective causal-lm"),
        (dict(label_smoothing=1.0), "--label-smoothing 1.0: must be at least 0 and below 1"),
        (dict(objective="token-classification", label_smoothing=1.0), ".*must be at least 0 and below 1"),
        (dict(objective="token-classification", router_aux_loss=0.1), ".*whose models have no such loss in transform"),
        (dict(objective="token-classification", router_loss_over="global-batch"), ".*whose models have no such loss"),
        # Adapters.
        (dict(lora_rank=8, base_quantization="nf4"), "--lora-rank, --base-quantization: "),
        (dict(lora=True, lora_rank=10**9), "--lora-rank 1000000000: "),
        (dict(lora=True, lora_rank=0), "--lora-rank 0: "), (dict(lora=True, lora_alpha=0.0), "--lora-alpha 0.0: "),
        (dict(lora=True, lora_dropout=1.0), "--lora-dropout 1.0: "),
        (dict(lora=True, master_weights="bfloat16"), "--master-weights bfloat16 "),
        (dict(lora=True, float8=True), "--float8 "),
        (dict(lora=True, lora_use_dora=True, base_quantization="nf4"), "--lora-use-dora "),
        (dict(lora=True, lora_adapter="a", lora_rank=4), "--lora-rank: "),
        # Memory and plans.
        (dict(context_parallel=1), "--context-parallel 1: .*at least 2"),
        (dict(context_parallel=2, compile=True), "--context-parallel 2: .*--compile"),
        (dict(context_parallel=2, objective="token-classification"), "--context-parallel 2: .*targets"),
        (dict(tiled_mlp=True, compile=True), ".*--tiled-mlp .*--compile"),
        (dict(offload_activations=True, activation_checkpointing="auto"), ".*--offload-activations .*auto"),
        (dict(offload_activations=True, activation_checkpointing="none"), ".*--offload-activations .*none"),
        (dict(plan_for="2"), "--plan-for .*--dry-run"),
        (dict(memory_budget_gb=3.0, activation_checkpointing="full", max_tokens_per_gpu=64), "--memory-budget-gb "),
        (dict(dry_run=True, memory_budget_gb=0.0), "--memory-budget-gb 0.0: "),
        (dict(dry_run=True, plan_for="0"), "--plan-for 0: "),
        (dict(max_tokens_per_gpu="auto", drop_overlong=True), "--drop-overlong .*--max-tokens-per-gpu auto"),
        # Mixtures and teachers.
        (dict(data_path=("a", "b", "c"), data_weights=(1, 2)), "--data-weights: 2 .* 3 .*--data-path"),
        (dict(data_path=("a", "b", "c"), data_weights=(1, 2, 0)), "--data-weights 1 2 0: "),
        (dict(data_weights=(1,)), "--data-weights .*single"),
        (dict(data_path=("a", "b"), data_weights_by="tokens"), "--data-weights-by .*--data-weights"),
        (dict(teacher_weight=1.5), "--teacher-weight 1.5: must be from 0 to 1"),
        (dict(teacher_weight=0.0, teacher_divergence="jsd"), "--teacher-divergence jsd needs "),
        (dict(teacher_model="t", teacher_temperature=2.0), "--teacher-temperature, --teacher-model: "),
        # Schedules and averages.
        (dict(lr_scheduler="wsd", lr_shape=2.5), "--lr-shape 2.5: must be a whole number .* wsd, .*steps"),
        (dict(lr_scheduler="cosine_with_restarts", lr_shape=0.5), "--lr-shape 0.5: must be a whole number .*cycles"),
        (dict(lr_scheduler="cosine", lr_shape=2.0), "--lr-shape has no effect with --lr-scheduler cosine"),
        (dict(weight_average="ema"), "--weight-average ema needs --average-over, .*samples"),
        (dict(weight_average="tail"), "--weight-average tail needs --average-over, .*steps"),
        (dict(weight_average="ema", average_over=0), "--average-over 0: "),
        (dict(average_over=2), "--average-over has no effect with --weight-average none"),
        # Ends, validations and samples.
        (dict(max_steps=None, objective="sequence-classification", lr_scheduler="cosine"),
         "--lr-scheduler cosine .*no end is given.*\nthe run has no end"),
        (DECAYING | dict(schedule_steps=None), "--continue-from with --lr-scheduler cosine needs --schedule-steps"),
        (DECAYING | dict(lr_scheduler="constant_with_warmup", num_warmup_steps=0.1, schedule_steps=None),
         "--continue-from with --num-warmup-steps 0.1 needs --schedule-steps"),
        (DECAYING | dict(lr_scheduler="constant_with_warmup"), "--schedule-steps .*--lr-scheduler constant_with"),
        (DECAYING | dict(resume="some/step_3"), "--continue-from and --resume some/step_3 "),
        (DECAYING | dict(schedule_steps=0), "--schedule-steps 0: "),
        (VALIDATED | dict(validation_data_path=()), "--validate-every-steps: .*--validation-data-path"),
        (VALIDATED | dict(validate_every_steps=0), "--validate-every-steps 0: "),
        (VALIDATED | dict(early_stopping_patience=0), "--early-stopping-patience 0: "),
        (dict(validation_data_path="v", early_stopping_patience=2),
         "--early-stopping-patience .*--validate-every-steps"),
        (dict(sample_prompts="p.jsonl"), "--sample-prompts: no effect without --validation-data-path"),
        (dict(sample_prompts="p.jsonl", validation_data_path="v", objective="sequence-classification"),
         ".*--objective sequence-classification, whose models write no text"),
        (dict(sample_prompts="p.jsonl", validation_data_path="v", objective="reward"),
         ".*--objective reward, whose models write no text"),
        (dict(sample_prompts="p.jsonl", validation_data_path="v", context_parallel=2),
         "--context-parallel 2: not with --sample-prompts"),
        # Trackers and hooks.
        (dict(track=("wandb", "wandb")), "--track wandb: given twice$"),
        (dict(callbacks=("a:B", "a:B")), "--callbacks a:B: given twice$"),
        *((dict(callbacks=(path,)), f"--callbacks {path}: .*package.module:Class")
          for path in ("a.b", "a/b.py:C", "a:", ":C", "a:b-c", "1a:B")),
        # Places.
        (dict(push_to_hub="a/b/c"), "--push-to-hub a/b/c: "), (dict(push_to_hub="-a"), "--push-to-hub -a: "),
        (dict(push_to_hub=""), "--push-to-hub : "), (dict(upload_to="runs/x"), "--upload-to runs/x: "),
        (dict(upload_to="hf://me/x"), ".*--push-to-hub"),
        (dict(upload_to="https://host/x"), "--upload-to https://host/x: web servers"),
        (dict(upload_to="s3://"), "--upload-to s3://: "), (dict(upload_to="s3://k:hunter2@b/x"), ".*password"),
        (dict(upload_to="gs://b/x"), ".*pip install gcsfs"), (dict(output_dir="s3://b/x"), "--output-dir s3://b/x: "),
        (dict(data_cache_dir="s3://b/x"), "--data-cache-dir s3://b/x: "),
        (dict(data_path="ftp://b/t.arrow"), "--data-path ftp://b/t.arrow: "),
        (dict(validation_data_path="s3://k:hunter2@b/t.arrow"),
         r"--validation-data-path s3://\*\*\*@b/t.arrow: has "),
    ],
    ProcessDataOptions: [
        (dict(output_file="o.csv", num_proc=0), "--num-proc 0: .*\n--output-file o.csv: "),
        (dict(output_file="s3://me:hunter2@b/t.arrow"), "--output-file .*: must be a local path: .*copy it with "),
        (dict(output_file="https://host/t.arrow"), "--output-file .*: must be a local path: .*copy it with "),
        *((dict(validation_share=share), f"--validation-share {share}: ")
          for share in (0, 1, -0.1, 1.5, math.nan, math.inf)),
        (dict(columns=("label=y",), truncate=True),
         "--truncate .*--max-sample-num-tokens\n--columns label= has no effect without --format.* classification.*"
         "\n--truncate: .*--format classification"),
        (dict(format="classification", label_names=("a", "a"), labels_from="t.arrow", block_size=9),
         "--block-size .*\n--label-names and --labels-from .*\n--label-names a a: "),
    ],
    EvaluateOptions: [
        (dict(task="t"), ".*no model"), (dict(model=("m", "m"), task="t"), "--model: "),
        (dict(model="m", data="d", metrics="bleu"), "--metrics "),
        (dict(model="m", data="d", engine="vllm"), ".*--engine hf"),
        (dict(model="m", task="t", num_samples=3, temperature=1.0), "--num-samples"),
    ],
    GenerateOptions: [
        (dict(output="a.jsonl"), ".*--prompts"), (dict(prompts="p.jsonl", output="a.json"), "--output a.json: "),
        (dict(top_p=0.5), ".*--temperature 0"), (dict(temperature=1.0, top_p=0.0), "--top-p 0.0"),
        (dict(base_url="http://x"), "--base-url "), (dict(engine="openai"), ".*--base-url"),
        *((dict(engine="openai", base_url=url, api_key_env="s3cret-key"),
           "--base-url: expected http://.*\n--api-key-env.*") for url in BAD_ADDRESSES),
        (dict(engine="openai", base_url="http://x", batch_size=2), "--batch-size"),
        (dict(max_new_tokens=0), "--max-new-tokens 0"),
        (dict(engine="vllm", engine_args=("max_model_len",)),
         "--engine-args: given 'max_model_len', allowed: NAME=VALUE, each name once$"),
        (dict(engine_args=("max_model_len=5",)), "--engine-args has no effect with --engine hf, only with vllm$"),
    ],
}  # fmt: skip


MEANT = {
    TrainOptions: [
        dict(push_to_hub="me/a-model.v1"), dict(batch_tokens=4096), dict(callbacks=("a.b:C", "a:C.D")),
        dict(track=("tensorboard", "wandb", "mlflow")), dict(max_steps=None, min_samples_per_checkpoint=10),
        *(dict(max_steps=None, max_epochs=1, lr_scheduler=scheduler, min_lr_ratio=0.0)
          for scheduler in ("linear", "cosine", "polynomial", "wsd")),
    ],
    ProcessDataOptions: [dict(output_file="o.parquet"), dict(format="classification")],
}  # fmt: skip


def find(options_class: type, given: dict, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The problems where every package is installed but one."""
    monkeypatch.setattr("mini_trainer.options.problems.finding.is_installed", lambda module: module != "gcsfs")
    return find_problems(group_options(options_class, **NEEDED[options_class] | given))


@pytest.mark.parametrize(
    ("options_class", "given", "problem"), [(kind, *case) for kind, cases in REFUSED.items() for case in cases]
)
def test_options_that_cannot_be_meant_are_refused(options_class, given, problem, monkeypatch):
    found = "\n".join(find(options_class, given, monkeypatch))
    assert re.fullmatch(f"{problem}.*", found) and not re.search("hunter2|s3cret", found)


@pytest.mark.parametrize(("options_class", "given"), [(kind, case) for kind, cases in MEANT.items() for case in cases])
def test_options_that_can_be_meant_are_not(options_class, given, monkeypatch):
    assert find(options_class, given, monkeypatch) == []
