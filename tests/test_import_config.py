"""Other trainers' configurations: what becomes of their keys, and that nothing is left out without a word."""

import json
import math
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml
from typeguard import check_type

from mini_trainer.options import TrainOptions, flatten_options, list_types
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.doors import TRAINERS
from mini_trainer.options.foreign_names import TABLE
from mini_trainer.options.tools import ProcessDataOptions
from mini_trainer.tools.import_config import recognize
from mini_trainer.tools.importers.conversion import convert

ROOT = Path(__file__).parent.parent
AXOLOTL = """
base_model: meta-llama/Llama-3.2-1B
load_in_4bit: true
datasets:
  - path: chats.jsonl
    type: chat_template
    field_messages: conversations
val_set_size: 0.05
output_dir: out
adapter: qlora
sequence_len: 2048
sample_packing: false
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 1
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
wandb_project: mine
mystery: 3
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
finetuning_type: lora
lora_target: all
dataset: identity
template: llama3
cutoff_len: 4096
output_dir: out
save_steps: 500
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
"""
TRL = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: trl-lib/Capybara
output_dir: out
packing: false
use_peft: true
assistant_only_loss: true
"""


@pytest.fixture(autouse=True)
def every_package_is_installed(monkeypatch):
    """For the scripts that read what was written; the importer itself asks for none."""
    monkeypatch.setattr("mini_trainer.options.problems.finding.is_installed", lambda module: True)


def run_import(tmp_path: Path, text: str, *words: str) -> subprocess.CompletedProcess:
    (tmp_path / "theirs.yaml").write_text(text)
    words = ("--output-dir", str(tmp_path), *words)
    command = [sys.executable, "-m", "mini_trainer", "import-config", str(tmp_path / "theirs.yaml"), *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def read_options(tmp_path: Path) -> tuple[dict, dict]:
    """What the scripts read of the files that were written."""
    train = parse_options(TrainOptions, ["--config", str(tmp_path / "train.yaml")])
    data = ["--config", str(tmp_path / "data.yaml")]
    if not {"input_file", "input_dataset"} & set(yaml.safe_load((tmp_path / "data.yaml").read_text())):
        data += ["--input-file", "chats.jsonl"]
    return flatten_options(train), flatten_options(parse_options(ProcessDataOptions, data))


def test_axolotls_file_becomes_two_that_the_scripts_take(tmp_path, monkeypatch):
    done = run_import(tmp_path, AXOLOTL, "--num-gpus", "8")
    assert done.returncode == 0, done.stderr
    assert "axolotl" in done.stdout and " 8 GPUs" in done.stdout
    assert all(f"  {key} " in done.stdout for key, value in yaml.safe_load(AXOLOTL).items() if value)
    assert ": lora_target_linear, wandb_project, mystery, evals_per_epoch\n" in done.stdout
    assert "\n# mystery: no counterpart\n" in (tmp_path / "train.yaml").read_text()
    train, data = read_options(tmp_path)
    assert train.items() >= dict(
        model_name_or_path="meta-llama/Llama-3.2-1B", lora=True, base_quantization="nf4", lora_rank=32, lora_alpha=16,
        lora_target_modules=(), batch_size=64, max_tokens_per_gpu=4096, max_epochs=1, optimizer="adamw8bit",
        learning_rate=2e-4, num_warmup_steps=0.1, checkpoint_at_epoch=True, track=("wandb",),
        validation_data_path=("data.validation.arrow",), adam_beta2=0.999,
    ).items()  # fmt: skip
    assert data.items() >= dict(input_file=("chats.jsonl",), max_sample_num_tokens=2048, validation_share=0.05).items()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LLAMA_FACTORY, dict(lora_rank=8, max_tokens_per_gpu=4096, checkpoint_every_steps=500, lr_scheduler="cosine",
                             learning_rate=1e-4)),
        (TRL, dict(lora_rank=16, lora_alpha=32, lora_dropout=0.05, lora_target_modules=("q_proj", "v_proj"),
                   max_tokens_per_gpu=8192, lr_scheduler="linear", learning_rate=2e-5)),
    ],
)  # fmt: skip
def test_what_is_left_out_keeps_the_other_trainers_default(text, expected, tmp_path):
    done = run_import(tmp_path, text)
    assert done.returncode == 0, done.stderr
    assert "  default of " in done.stdout
    train, data = read_options(tmp_path)
    assert train.items() >= (expected | dict(lora=True, batch_size=8, max_epochs=3, adam_beta2=0.999)).items()
    is_named = "dataset_name" in text
    assert ("# input_file: required\n" in (tmp_path / "data.yaml").read_text()) == (not is_named)
    assert data["input_dataset"] == ("trl-lib/Capybara" if is_named else None)
    assert data["max_sample_num_tokens"] in (4096, 1024)


@pytest.mark.parametrize("trainer", [name for name in TRAINERS if name.startswith("trl")])
def test_trls_defaults_are_those_of_its_package(trainer):
    from trl import DPOConfig, KTOConfig, ModelConfig, RewardConfig, SFTConfig
    from trl.experimental.cpo import CPOConfig
    from trl.experimental.orpo import ORPOConfig

    classes = {"trl": SFTConfig, "trl-dpo": DPOConfig, "trl-kto": KTOConfig, "trl-orpo": ORPOConfig,
               "trl-cpo": CPOConfig, "trl-reward": RewardConfig}  # fmt: skip
    config, model = classes[trainer](output_dir="unused", bf16=False, report_to="none"), ModelConfig()
    peer = TRAINERS[trainer]
    ours = dict([peer.batch, peer.length, peer.epochs]) | peer.defaults
    assert ours.pop("lora_target_modules") == ("q_proj", "v_proj") and model.lora_target_modules is None
    ours.pop("preference_loss", None)
    theirs = {"lr_scheduler": "lr_scheduler_type", "lora_rank": "lora_r", "preference_beta": "beta"}
    for name, value in ours.items():
        key = theirs.get(name, name)
        there = getattr(config if hasattr(config, key) else model, key)
        assert getattr(there, "value", there) == value, name


VALUES = (
    *(True, False, 2, 0.5, -1, 0, math.inf, "", "3", "1e-4", "many", "all", "lora", "x.jinja", "steps", "epoch"),
    *([], ["a"], [7, {}], [{"path": "p", "type": "t"}], [{"type": "t"}], [{"path": 7}]),
    *({}, {"a": 1}, {1: {2: 3}, "a": 1}, {"min_lr": "low"}, {"min_lr": [1]}, [{"a": 1}], [[1]], 10**400),
    [{"path": "p", "field_messages": ["a"], "roles_to_train": 7}],
    [{"path": "p", "roles_to_train": [{}], 1: 2, "a": 3}],
)


@pytest.mark.long
@pytest.mark.parametrize("trainer", ["axolotl", "llama-factory", "trl-dpo"])
def test_whatever_a_key_has_is_said_so_that_the_scripts_take_it_or_is_refused(trainer):
    names = {name for row in TABLE if row.belongs_to(trainer) for name in row.list_names() if "*" not in name}
    num_said = 0
    for i, key in enumerate(sorted({*names, *TRAINERS[trainer].data_keys})):
        for value in VALUES[i % 12 :: 12]:  # each value with every twelfth key
            try:
                to = convert({key: value}, trainer, num_gpus=2)
            except ValueError:
                continue
            for options_class, values in ((TrainOptions, to.train), (ProcessDataOptions, to.data)):
                types = list_types(options_class)
                for name, said in values.items():
                    check_type(said, types[name])
                    num_said += 1
    assert num_said > len(names)


def test_a_value_that_is_none_for_its_key_is_told_and_leaves_nothing(tmp_path):
    values = dict(base_model="x", learning_rate="fast", seed=2.5, weight_decay=[1], adam_beta1=7)
    done = run_import(tmp_path, yaml.safe_dump(values, sort_keys=False), "--trainer", "axolotl")
    assert done.returncode == 0, done.stderr
    for told in ("learning_rate cannot be 'fast'", "seed cannot be 2.5", "adam_beta1 must be"):
        assert told in done.stdout and f": {told}" in (tmp_path / "train.yaml").read_text()
    written = yaml.safe_load((tmp_path / "train.yaml").read_text())
    assert not {"learning_rate", "seed", "weight_decay", "adam_beta1"} & written.keys()
    done = run_import(tmp_path, yaml.safe_dump(values | dict(micro_batch_size="many")), "--trainer", "axolotl")
    assert done.returncode == 2 and "micro_batch_size must be a number, given 'many'" in done.stderr


def test_a_list_of_data_sets_that_is_none_is_told(tmp_path):
    for content in ("{", "[]", '{"a": 7}', '{"a": {"file_name": 7}}', '{"a": {"columns": {"prompt": [1]}}}'):
        (tmp_path / "dataset_info.json").write_text(content)
        with pytest.raises(ValueError, match="dataset: "):
            convert(dict(dataset="a", dataset_dir=str(tmp_path)), "llama-factory", num_gpus=1)


def test_what_is_off_or_so_anyway_is_not_mentioned():
    off = dict(load_in_8bit=False, fp16=None, tensor_parallel_size=1, strict=False, trust_remote_code=False)
    anyway = dict(shuffle_dataset=True, assistant_only_loss=True, do_train=True, lora_task_type="CAUSAL_LM")
    assert not off.keys() & convert(off, "axolotl", num_gpus=1).told.keys()
    assert not anyway.keys() & convert(anyway, "trl", num_gpus=1).told.keys()
    for trainer in BASIC:
        assert "label_smoothing" not in convert({"label_smoothing_factor": 0}, trainer, num_gpus=1).train


def test_what_cannot_be_read_gets_one_message_and_files_that_are_there_stay(tmp_path):
    """Also one that is no text."""
    for text, words, reason in (("- 1", (), "got list"), ("a: [", (), "valid YAML"), ("nothing: 1", (), "--trainer"),
                                (AXOLOTL, ("--num-gpus", "0"), "--num-gpus 0")):  # fmt: skip
        done = run_import(tmp_path, text, *words)
        assert done.returncode == 2 and reason in done.stderr and "Traceback" not in done.stderr
        assert not (tmp_path / "train.yaml").exists()
    (tmp_path / "train.yaml").write_bytes(b"mine \xff")
    done = run_import(tmp_path, TRL)
    assert done.returncode == 2 and f"{tmp_path}/train.yaml: already exists" in done.stderr
    assert (tmp_path / "train.yaml").read_bytes() == b"mine \xff" and not (tmp_path / "data.yaml").exists()


BASIC = ("axolotl", "llama-factory", "trl")
CHATS = [dict(path="c.jsonl", type="chat_template")]


@pytest.mark.parametrize(
    ("trainer", "given", "reason"),
    [
        ("axolotl", dict(process_reward_model=True), "process_reward_model: "),
        ("axolotl", dict(datasets=[dict(path="c.jsonl", type="input_output")]), "type 'input_output'"),
        ("axolotl", dict(datasets=[dict(path="c.jsonl", type={"field_output": "a"})]), "datasets: type .*custom"),
        ("axolotl", dict(datasets=[CHATS[0] | dict(roles_to_train=["user"])]), r"roles_to_train \['user'\]"),
        ("axolotl", dict(datasets=[CHATS[0] | dict(train_on_eos="last")]), "train_on_eos 'last'"),
        ("axolotl", dict(datasets=CHATS, train_on_inputs=True), "train_on_inputs: "),
        ("axolotl", dict(datasets=CHATS, plugins=["axolotl.integrations.kd.KDPlugin"]),
         r"plugins: axolotl\.integrations\.kd\.KDPlugin: "),
        ("axolotl", dict(processor_type="AutoProcessor", datasets=CHATS),
         "processor_type: rows with images are not translated"),
        ("axolotl", dict(adapter="lora", peft_init_lora_weights="pissa", datasets=CHATS), "'pissa': "),
        ("axolotl", dict(datasets=CHATS, my_loss="mine"), "my_loss: decides what is learned"),
        ("axolotl", dict(adapter="lora", lora_target_linear=True, lora_target_modules=["lm_head"]),
         "lora_target_linear: .*lm_head"),
        ("llama-factory", dict(stage="ppo"), "stage: 'ppo'"),
        ("llama-factory", dict(export_dir="out"), "export_dir: "),
        ("trl", dict(reward_funcs=["a"], num_generations=4), "reward_funcs: .*num_generations: "),
        ("trl", dict(beta=0.1), "beta: .*--trainer"),
        ("llama-factory", dict(stage="sft", use_eaft_loss=True, eaft_alpha=2.0), "eaft_alpha: 2"),
        *((trainer, dict(neftune_noise_alpha=5), "neftune_noise_alpha: .*noise on embeddings") for trainer in BASIC),
        # Losses.
        *(("trl-dpo", dict(loss_type=loss), f"loss_type: {loss}: ") for loss in ("sppo_hard", "robust", "hinge")),
        ("axolotl", dict(rl="dpo", dpo_loss_type="apo_down"), "dpo_loss_type: apo_down"),
        ("trl-dpo", dict(loss_type=["sigmoid", "bco_pair", "sft"]), "loss_type: sigmoid, bco_pair, sft: "),
        ("trl-dpo", dict(loss_type=["sigmoid", "sft"], loss_weights=[0.8, 1]), "loss_type: .*0.8 of sigmoid"),
        ("trl-dpo", dict(use_weighting=True), "use_weighting: "),
        ("trl-dpo", dict(cpo_alpha=1), "cpo_alpha: .*--trainer"),
        ("trl-kto", dict(loss_type="apo_zero_unpaired"), "loss_type: .*'apo_zero_unpaired'"),
        ("trl-cpo", {}, "CPO's loss 'sigmoid'"),
        ("trl-cpo", dict(loss_type="simpo", label_smoothing=0.1), "label_smoothing: "),
        ("axolotl", dict(rl="dpo", trl=dict(beta=0.1)), "^trl: "),
        ("llama-factory", dict(stage="dpo", pref_loss="kto_pair"), "pref_loss: .*'kto_pair'"),
        ("llama-factory", dict(stage="kto", pref_ftx=0.1), "pref_ftx: .*KTO"),
        ("llama-factory", dict(stage="dpo", ref_model="m", ref_model_adapters="a"),
         "ref_model_adapters: .*merge-adapter"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_as_it_is_asked_is_refused_by_its_key(trainer, given, reason):
    with pytest.raises(ValueError, match=reason):
        convert(given, trainer, num_gpus=1)


@pytest.mark.parametrize(
    ("trainer", "given", "train"),
    [
        ("llama-factory", dict(additional_target="embed_tokens,lm_head"),
         dict(lora_modules_to_save=("embed_tokens", "lm_head"), lora=True)),
        ("axolotl", dict(adapter="lora", lora_target_linear=True, lora_target_modules=["q_proj"]), dict(lora=True)),
        ("axolotl", dict(optimizer="paged_adamw_8bit"), dict(optimizer="adamw8bit")),
        ("axolotl", dict(max_steps=100), dict(num_warmup_steps=3, max_steps=100)),
        ("axolotl", {}, dict(num_warmup_steps=0.03, max_tokens_per_gpu=512)),
        ("axolotl", dict(context_parallel_size=2, micro_batch_size=3), dict(batch_size=12)),
        ("axolotl", dict(batch_size=8, micro_batch_size=2), dict(batch_size=64)),
        ("axolotl", dict(adapter="lora", lora_model_dir="a", lora_r=8, lora_alpha=4), dict(lora_adapter="a")),
        ("llama-factory", dict(adapter_name_or_path="a", lora_target="q_proj"), dict(lora_adapter="a")),
        ("trl", dict(max_grad_norm=0), dict(max_grad_norm=None)),
        ("trl", dict(warmup_steps=0.03), dict(num_warmup_steps=0.03)),
        ("trl", dict(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.1}),
         dict(lr_scheduler="cosine", min_lr_ratio=0.1)),
        ("trl", dict(learning_rate=1e-3, lr_scheduler_type="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr": 1e-4}),
         dict(min_lr_ratio=0.1)),
        ("trl", dict(loss_type="dft"), dict(loss_weighting="dft")),
        ("llama-factory", dict(stage="sft", use_dft_loss=True), dict(loss_weighting="dft")),
        ("axolotl", dict(datasets=CHATS, use_eaft=True, eaft_k=20), dict(loss_weighting="eaft")),
        *((trainer, dict(neftune_noise_alpha=0, label_smoothing_factor=0.1), dict(label_smoothing=0.1))
          for trainer in BASIC),
    ],
)  # fmt: skip
def test_keys_mean_what_they_mean_there(trainer, given, train):
    to = convert(given, trainer, num_gpus=8)
    assert to.train.items() >= train.items()
    if "lora_target_linear" in given:
        assert "lora_target_modules" not in to.train


def test_every_data_set_keeps_its_type_its_split_and_its_place():
    sets = [
        dict(path="a/chats", type="chat_template", split="train[:10%]", field_messages="turns"),
        dict(path="b/shared", type="chat_template", message_property_mappings={"role": "from", "content": "value"},
             field_messages="conversations"),
        dict(path="books.jsonl", type="completion", field="body"),
        dict(path="c.jsonl", type="alpaca"),
        dict(path="d.jsonl", type="alpaca"),
    ]  # fmt: skip
    to = convert(dict(base_model="m", datasets=sets, sequence_len=256), "axolotl", num_gpus=1)
    assert to.train["data_path"] == ("data_1.arrow", "data_2.arrow", "data_3.arrow", "data_4.arrow")
    expected = [
        dict(input_dataset="a/chats", split="train[:10%]", format="messages", columns=("messages=turns",)),
        dict(input_dataset="b/shared", format="sharegpt"),
        dict(input_file=("books.jsonl",), format="document", columns=("text=body",), block_size=256),
        dict(input_file=("c.jsonl", "d.jsonl"), format="alpaca", max_sample_num_tokens=256),
    ]
    for source, values in zip(to.sources, expected, strict=True):
        assert source.items() >= values.items()
    assert "datasets" in to.noted


def test_batches_of_packs_become_tokens_as_many_as_full_packs_hold():
    given = dict(base_model="m", sequence_len=2048, sample_packing=True, micro_batch_size=2, num_epochs=1.5)
    to = convert(given | dict(gradient_accumulation_steps=4, datasets=CHATS), "axolotl", num_gpus=1)
    assert to.train["batch_tokens"] == 8 * 2048 and "batch_size" not in to.train
    assert "8 full packs of 2,048 tokens have (2 x 4 x 1 GPUs)" in to.told["batch_tokens"]
    assert to.train["max_epochs"] == 2 and to.noted >= {"batch_tokens", "num_epochs"}


PAIRS = dict(objective="preference", preference_beta=0.1)
DPO = dict(rl="dpo", rl_beta=0.2)


@pytest.mark.parametrize(
    ("trainer", "given", "train"),
    [
        ("trl-dpo", {}, PAIRS | dict(preference_loss="dpo", learning_rate=1e-6, batch_size=8)),
        ("trl-dpo", dict(beta=0.3, loss_type="apo_zero"), dict(preference_beta=0.3, preference_loss="apo-zero")),
        ("trl-dpo", dict(loss_type=["sft", "sigmoid"], loss_weights=[0.2, 1]),
         dict(preference_loss="dpo", preference_nll_weight=0.2)),
        ("trl-dpo", dict(loss_type="ipo", rpo_alpha=0.5), dict(preference_loss="ipo", preference_nll_weight=0.5)),
        ("trl-dpo", dict(use_peft=True, disable_dropout=False), dict(lora_dropout=0.05)),
        ("trl-kto", dict(desirable_weight=2, undesirable_weight=0.5),
         dict(objective="kto", preference_beta=0.1, kto_weight_ratio=4.0)),
        ("trl-orpo", {}, PAIRS | dict(preference_loss="orpo", learning_rate=1e-6)),
        ("trl-cpo", dict(loss_type="simpo"),
         PAIRS | dict(preference_loss="simpo", preference_gamma=0.5, preference_nll_weight=1)),
        ("trl-cpo", dict(loss_type="alphapo", simpo_gamma=1), dict(preference_loss="simpo", preference_gamma=1)),
        ("trl-cpo", dict(gamma_beta_ratio=0.3), dict(preference_beta=2, preference_gamma=0.6)),
        ("trl-cpo", dict(gamma_beta_ratio=0.5, beta=2.5, sft_weight=0.1),
         dict(preference_beta=2.5, preference_gamma=1.25, preference_nll_weight=0.1)),
        ("trl-reward", dict(center_rewards_coefficient=0.01),
         dict(objective="reward", reward_centering=0.01, learning_rate=1e-4)),
        ("axolotl", DPO | dict(dpo_loss_type=["apo_zero"]), dict(preference_beta=0.2, preference_loss="apo-zero")),
        ("axolotl", dict(rl="simpo", rl_beta=2, simpo_gamma=1),
         dict(preference_loss="simpo", preference_beta=2, preference_gamma=1, preference_nll_weight=1)),
        ("axolotl", dict(rl="kto", kto_desirable_weight=0.2), dict(objective="kto", kto_weight_ratio=0.2)),
        ("axolotl", DPO | dict(cpo_alpha=1, simpo_gamma=2, orpo_alpha=3, kto_desirable_weight=4),
         dict(preference_beta=0.2)),
        ("axolotl", dict(reward_model=True, center_rewards_coefficient=0.1),
         dict(objective="reward", reward_centering=0.1)),
        ("llama-factory", dict(stage="dpo"), PAIRS | dict(preference_loss="dpo", learning_rate=5e-5)),
        ("llama-factory", dict(stage="dpo", pref_loss="orpo", pref_ftx=0.5), dict(preference_nll_weight=1.5)),
        ("llama-factory", dict(stage="dpo", dpo_label_smoothing=0.1, ref_model="m"),
         dict(label_smoothing=0.1, reference_model="m")),
        ("llama-factory", dict(stage="kto", pref_beta=0.2, kto_rejected_weight=3),
         dict(objective="kto", preference_beta=0.2, kto_weight_ratio=1 / 3)),
    ],
)  # fmt: skip
def test_preferences_have_their_loss_and_its_numbers(trainer, given, train):
    to = convert(given, trainer, num_gpus=1)
    assert to.train.items() >= train.items()
    only_asked = {"preference_nll_weight", "preference_gamma", "label_smoothing", "kto_weight_ratio", "lora_dropout"}
    assert not (only_asked - train.keys()) & to.train.keys()
    assert to.sources[0]["format"] == ("feedback" if to.objective == "kto" else "preference")


@pytest.mark.parametrize(
    ("trainer", "given"),
    [
        *((f"trl-{name}", dict(max_length=128)) for name in ("dpo", "kto", "reward")),
        *(("llama-factory", dict(stage=stage, cutoff_len=128)) for stage in ("dpo", "kto", "rm")),
        *(("axolotl", key | dict(sequence_len=128)) for key in (DPO, dict(rl="kto"), dict(reward_model=True))),
    ],
)
def test_rows_are_pairs_and_both_sequences_of_one_fit(trainer, given):
    given = given | {"micro_batch_size" if trainer == "axolotl" else "per_device_train_batch_size": 2}
    to = convert(given | dict(gradient_accumulation_steps=4, packing=True, sample_packing=True), trainer, num_gpus=8)
    assert to.train["batch_size"] == 2 * 4 * 8 and "batch_tokens" not in to.train
    assert to.train["max_tokens_per_gpu"] == 2 * 2 * 128 and to.sources[0]["max_sample_num_tokens"] == 2 * 128


@pytest.mark.parametrize(
    ("trainer", "given", "key", "told"),
    [
        ("trl-dpo", dict(label_smoothing=0.1), "label_smoothing", "ignored by this loss"),
        ("trl-dpo", dict(max_length=64), "max_length", "together, there each is cut"),
        ("trl-kto", {}, "objective", "the point of reference"),
        ("trl-reward", dict(use_peft=True), "objective", "the head "),
        ("axolotl", dict(rl="orpo"), "preference_loss", "the added likelihood"),
        ("llama-factory", dict(stage="dpo", pref_ftx=0.1), "pref_ftx", "each answer's mean"),
        ("llama-factory", dict(stage="dpo", adapter_name_or_path="a"), "adapter_name_or_path", "without it"),
        ("trl", {}, "assistant_only_loss", "there whole chats"),
        # What has no counterpart.
        ("axolotl", dict(deepspeed="zero3.json"), "deepspeed", "FSDP2 always shards"),
        ("trl", dict(lr_scheduler_kwargs={"num_cycles": 2}), "lr_scheduler_kwargs", "no counterpart: num_cycles"),
        ("llama-factory", dict(dataset="identity"), "dataset", "give its file as input_file"),
        ("axolotl", dict(datasets=[dict(path="c.jsonl", type="alpaca", shards=2)]), "datasets", "keys shards"),
        ("axolotl", dict(load_in_8bit=True, adapter="lora"), "load_in_8bit", "8-bit base models"),
        ("axolotl", dict(mystery=3), "mystery", "no counterpart"),
    ],
)
def test_what_differs_there_or_has_no_counterpart_becomes_a_comment(trainer, given, key, told):
    to = convert(given, trainer, num_gpus=1)
    assert told in to.told[key] and key in to.noted
    assert not {"cpu_offload", "min_lr_ratio", "base_quantization"} & to.train.keys()


@pytest.mark.parametrize(
    ("rl", "kind", "expected"),
    [
        ("dpo", dict(type="chat_template.default", field_messages="turns", field_chosen="good"),
         dict(columns=("chosen=good", "prompt=turns"))),
        ("dpo", dict(type="chat_template.argilla_chat", chat_template="chatml"), dict(chat_template="chatml")),
        ("dpo", dict(type="chatml.intel"), dict(chat_template="chatml")),
        ("simpo", dict(type="llama3.ultra"), dict(chat_template="llama3")),
        ("dpo", {}, {}),
        ("dpo", dict(type="chatml.icr"), r"'chatml\.icr': .*chatml\.intel.*column to question, "),
        ("dpo", dict(type=dict(prompt_format="Q: {prompt}")), "prompt_format"),
        ("kto", dict(type="chat_template.default"), r"'chat_template\.default': "),
        (None, dict(type="bradley_terry.chat_template"), r"'bradley_terry\.chat_template': .*question, "),
        (None, {}, {}),
        ("dpo", dict(type="chat_template", message_property_mappings=dict(role="who")), "who and content"),
    ],
)  # fmt: skip
def test_axolotls_types_of_preferences(rl, kind, expected):
    given = dict(datasets=[dict(path="a.jsonl") | kind]) | (dict(rl=rl) if rl else dict(reward_model=True))
    with pytest.raises(ValueError, match=expected) if isinstance(expected, str) else nullcontext():
        (source,) = convert(given, "axolotl", num_gpus=1).sources
        fields = {name: value for name, value in source.items() if name in ("columns", "chat_template")}
        assert fields == expected and source["input_file"] == ("a.jsonl",)


SHARED_TURNS = dict(formatting="sharegpt", ranking=True)
ANSWERS = dict(chosen="chosen", rejected="rejected")


@pytest.mark.parametrize(
    ("stage", "entry", "expected"),
    [
        ("sft", dict(columns={"prompt": "question", "response": "answer"}),
         dict(format="completion", columns=("prompt=question", "completion=answer"))),
        ("sft", dict(columns={"prompt": "instruction", "query": "input", "response": "output"}), dict(format="alpaca")),
        ("sft", dict(formatting="sharegpt", columns={"messages": "turns"}), dict(columns=("messages=turns",))),
        ("dpo", SHARED_TURNS | dict(columns=ANSWERS | dict(messages="conversations")), {}),
        ("rm", SHARED_TURNS | dict(columns=dict(messages="turns", chosen="good", rejected="rejected")),
         dict(columns=("prompt=turns", "chosen=good"))),
        ("kto", dict(formatting="sharegpt", columns=dict(messages="messages", kto_tag="good"),
                     tags=dict(role_tag="role", content_tag="content")), dict(columns=("label=good",))),
        ("kto", dict(columns=dict(prompt="instruction", response="output", kto_tag="kto_tag")),
         dict(columns=("completion=output",))),
        ("dpo", dict(columns=dict(prompt="instruction")), "a has no ranking "),
        ("dpo", dict(ranking=True, columns=ANSWERS | dict(prompt="text")), "columns text and input"),
        ("dpo", SHARED_TURNS | dict(columns=ANSWERS | dict(messages="m", images="images")), "a: rows with images"),
        ("dpo", dict(ranking=True, columns=ANSWERS | dict(prompt="question", history="h")), "history"),
        ("kto", dict(formatting="sharegpt", columns=dict(messages="completion", kto_tag="label")), "completion "),
        ("sft", SHARED_TURNS | dict(columns=ANSWERS), "stage sft"),
    ],
)  # fmt: skip
def test_llama_factorys_columns_are_named(stage, entry, expected, tmp_path):
    (tmp_path / "dataset_info.json").write_text(json.dumps({name: entry | {"file_name": name} for name in "ab"}))
    given = dict(stage=stage, dataset="a, b", dataset_dir=str(tmp_path))
    with pytest.raises(ValueError, match=expected) if isinstance(expected, str) else nullcontext():
        (source,) = convert(given, "llama-factory", num_gpus=1).sources
        assert source["input_file"] == (str(tmp_path / "a"), str(tmp_path / "b"))
        assert source.items() >= expected.items() and ("columns" in source) == ("columns" in expected)


IN_COMMON = dict(model_name_or_path="m", dataset_name="d", output_dir="o", max_length=64, learning_rate=1e-6)


@pytest.mark.parametrize(
    ("given", "expected", "path"),
    [
        ({}, "trl", None),
        (dict(beta=0.1, loss_type="apo_zero"), "trl-dpo", None),
        (dict(beta=0.1, desirable_weight=2), "trl-kto", None),
        (dict(beta=2, loss_type="simpo"), "trl-cpo", None),
        (dict(center_rewards_coefficient=0.01), "trl-reward", None),
        (dict(use_peft=True, lora_task_type="SEQ_CLS"), "trl-reward", None),
        (dict(beta=0.1), "beta: .*--trainer", None),
        ({}, "trl-dpo", "dpo_config.yaml"),
        (dict(beta=0.1), "trl-orpo", "examples/recipes/orpo/config_full.yaml"),
        ({}, "trl", "examples/recipes/sft/config.yaml"),
        (dict(beta=0.1, loss_type="sigmoid"), "trl-cpo", "simpo.yaml"),
        ({}, "trl", "dpo/lora/config.yaml"),
    ],
)
def test_trls_trainers_are_told_apart_by_their_keys_values_and_files_names(given, expected, path):
    place = () if path is None else (Path(path),)
    with nullcontext() if expected.startswith("trl") else pytest.raises(ValueError, match=expected):
        assert recognize(IN_COMMON | given, *place) == expected


def test_files_of_other_trainers_are_refused_by_name():
    with pytest.raises(ValueError, match="LLaMA-Factory v1"):
        recognize(dict(model="m", train_dataset="a.yaml", peft_config={}, cutoff_len=2))
    with pytest.raises(ValueError, match="--trainer"):
        recognize(dict(base_model="m", a=1, b=2, c=3))
