"""--preset: values for what is not given; and that a sanity run goes through everything there is to train."""

import json

import pytest
from breadth import long, wide
from in_process import train_here
from refusals import refuse
from small_runs import make_inputs
from tiny_classifiers import CLASSIFIERS, make_class_samples, save_classifier, write_classified
from tiny_models import FAMILIES, save_model, save_tokenizer
from tiny_pairs import write_pairs
from tiny_vision import make_rows, save_vision_model, tokenize

from mini_trainer.options import PRESETS, RowOptions, TrainOptions, flatten_options, group_options
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.objectives import OBJECTIVES
from mini_trainer.options.option_files import describe_options
from mini_trainer.options.problems.finding import find_problems
from mini_trainer.options.problems.training import complete_rows
from mini_trainer.tools.sweep.settings import read_train

NEEDED = ["--model-name-or-path", "m", "--data-path", "d.arrow", "--output-dir", "o"]


def parse(*words: str) -> dict:
    return flatten_options(parse_options(TrainOptions, [*NEEDED, *words]))


def test_a_preset_says_what_neither_flags_nor_yaml_say(tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text("preset: sanity\nmax_steps: 7\nexport_best: true\n")
    sanity = parse("--preset", "sanity")
    assert (
        sanity.items()
        >= dict(subset="10", max_steps=2, check_export=True, validation_data_path=("training-data",)).items()
    )
    explicit = parse("--config", str(config), "--batch-size", "3")
    assert explicit == sanity | dict(max_steps=7, export_best=True, batch_size=3, config=(str(config),))
    assert parse("--preset=toy", "--subset", "5").items() >= dict(subset="5", max_steps=100).items()
    assert parse("--preset", "full", "--max-epochs", "1") == parse("--max-epochs", "1") | dict(preset="full")


def test_batch_tokens_take_the_place_of_a_presets_batch_size_and_of_none_that_is_given(tmp_path, capfd):
    sizes = dict(batch_size=None, batch_tokens=512)
    assert parse("--preset", "sanity", "--batch-tokens", "512").items() >= sizes.items()
    assert parse("--batch_tokens=512", "--max-steps", "1").items() >= sizes.items()
    assert read_train(dict(preset="sanity", batch_tokens=512)).get("batch_size") is None  # a sweep's
    config = tmp_path / "c.yaml"
    config.write_text("batch_size: 128\nmax_steps: 1\n")
    given = ["--config", str(config), "--batch-tokens", "512"]
    assert parse(*given, "--batch-size", "None").items() >= sizes.items()
    message = refuse([*NEEDED, *given], capfd)
    assert "--batch-size 128 and --batch-tokens 512 " in message


@pytest.mark.parametrize("preset", PRESETS)
def test_the_printed_configuration_of_a_preset_is_taken_back(preset, tmp_path):
    values = parse("--preset", preset, "--max-epochs", "1")
    given = {name: value for name, value in values.items() if name not in ("config", "print_config")}
    config = tmp_path / "printed.yaml"
    config.write_text(describe_options(TrainOptions, given))
    assert "preset: " + preset in config.read_text() and ("max_steps: 100" in config.read_text()) == (preset == "toy")
    again = flatten_options(parse_options(TrainOptions, ["--config", str(config)]))
    assert again == values | dict(config=(str(config),))


OSFT = ["--osft", "--osft-unfreeze-rank-ratio", "0.5"]
QLORA = ["--lora", "--base-quantization", "nf4"]
RANDOM = {"preference": "preference", "kto": "feedback", "reward": "preference"}  # formats of random rows


@pytest.mark.parametrize(
    ("data_of", "method"),
    [
        ("causal-lm", []),
        ("causal-lm", ["--lora", "--lora-export", "both"]),
        ("causal-lm", OSFT),
        wide("sequence-classification", []),
        ("sequence-classification", ["--lora"]),
        ("token-classification", OSFT),
        wide("causal-lm", QLORA),
        wide("sequence-classification", OSFT),
        wide("token-classification", []),
        wide("token-classification", ["--lora"]),
        wide("images", []),
        long("images", ["--lora", "--lora-export", "both", "--lora-target-modules", "q_proj", "--freeze", "nothing"]),
        wide("images", OSFT),
        ("preference", []),
        long("preference", ["--lora"]),
        ("kto", []),
        ("reward", []),
        wide("preference", OSFT),
        wide("preference", QLORA),
    ],
)
def test_a_sanity_run_of_everything_there_is(data_of, method, world, tmp_path, caplog):
    if data_of == "causal-lm":
        inputs = make_inputs(tmp_path, "llama_tied_bias")
    elif data_of in RANDOM:
        model = save_tokenizer(save_model(FAMILIES["llama_tied_bias"], tmp_path / "model"))
        data = write_pairs(tmp_path / "d.arrow", model, size=20, good=RANDOM[data_of] == "feedback")
        inputs = dict(model_name_or_path=str(model), data_path=str(data), objective=data_of)
    elif data_of == "images":
        model = save_vision_model(tmp_path, "qwen2-vl")
        data = tokenize(2 * make_rows(tmp_path), model, tmp_path)
        inputs = dict(model_name_or_path=str(model), data_path=str(data))
    else:
        of_tokens = data_of == "token-classification"
        model = save_classifier(CLASSIFIERS["bert"], tmp_path / "model", of_tokens=of_tokens)
        samples = make_class_samples(20, of_tokens=of_tokens)
        data = write_classified(tmp_path / "d.arrow", samples, model, of_tokens=of_tokens)
        inputs = dict(model_name_or_path=str(model), data_path=str(data), objective=data_of)
    words = [word for name, value in inputs.items() for word in ("--" + name.replace("_", "-"), value)]
    output_dir = tmp_path / "run"
    words += ["--preset", "sanity", *method, *(["--osft-cache-dir", str(tmp_path / "osft")] if method == OSFT else [])]
    options = parse_options(TrainOptions, [*words, "--output-dir", str(output_dir)])
    caplog.set_level("INFO")
    train_here(world, **flatten_options(options))
    rows = (output_dir / "training_metrics_0.jsonl").read_text().splitlines()
    assert [json.loads(row)["num_samples"] for row in rows] == [5, 5]
    validations = (output_dir / "validation_metrics_0.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in validations] == [0, 2]
    assert [path.name for path in (output_dir / "hf_format").glob("*samples_*")] == ["samples_10"]
    assert "samples_10: loaded back" in caplog.text


def test_an_objective_implies_the_format_of_its_rows():
    formats = {"causal-lm": None, "sequence-classification": "classification", "token-classification": "classification",
               "preference": "preference", "kto": "feedback", "reward": "preference"}  # fmt: skip
    rows = RowOptions(input_file=("r",))
    assert {name: complete_rows(rows, name).format for name in OBJECTIVES | {"causal-lm": None}} == formats
    assert complete_rows(RowOptions(feedback_from_pairs=True), "kto").format == "preference"
    given = dict(output_dir="o", model_name_or_path="m", input_file="r", max_steps=1)
    for more in (
        dict(objective="sequence-classification", columns=("label=kind",)),
        dict(objective="preference", columns=("chosen=good",)),
        dict(objective="kto", feedback_from_pairs=True),
    ):
        assert find_problems(group_options(TrainOptions, **given, **more)) == []
