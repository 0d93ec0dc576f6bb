"""Values in a model's JSON files that no model can be made of: one message with file and key, and no memory taken."""

import json
import shutil
from pathlib import Path

import pytest
from forked import run_forked
from processes import flags
from tiny_data import make_samples, write_samples
from tiny_models import FAMILIES, VOCAB_SIZE, change_json
from transformers import GPT2Config

from mini_trainer.data.stores.model_files import check_values, find_model
from mini_trainer.data.stores.tokenizers import load_tokenizer
from mini_trainer.model.config import load_config, load_generation_config
from mini_trainer.model.methods.adapter_files import read_generation_config
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.use.inference.loading import find_answering_model

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
WRONG = [
    *((CONFIG, "hidden_size", value) for value in (-1, 0, 10**12, "x", 8.5, True)),
    *((CONFIG, "num_hidden_layers", value) for value in ("two", -1, 10**9, {"a": 1})),
    *((CONFIG, "vocab_size", value) for value in (0, -5, 10**12)),
    *((CONFIG, "num_attention_heads", value) for value in (0, -4, "4", [4, 0])),
    *((CONFIG, "intermediate_size", value) for value in (-1, 10**12)),
    *((CONFIG, "text_config", {"hidden_size": value}) for value in (-1, 10**12)),
    *((CONFIG, "attention_dropout", value) for value in (-1, 1.5)),
    *((CONFIG, "architectures", value) for value in (5, [5])),
    *((GENERATION, "eos_token_id", value) for value in ("x", [1, "a"], {}, 10**12, -2)),
    *((GENERATION, key, "x") for key in ("temperature", "top_p", "max_new_tokens", "max_length")),
    *((TOKENIZER, "model_max_length", value) for value in ("x", [1])),
]
# Values that transformers' own code refuses.
REFUSED_BY_TRANSFORMERS = [
    ("hidden_size", None), ("hidden_size", [32]), ("num_attention_heads", None), ("vocab_size", None),
    ("rms_norm_eps", "x"), ("rope_parameters", []), ("layer_types", 5), ("dtype", "float99"), ("model_type", 5),
]  # fmt: skip


@pytest.fixture
def model(model, tmp_path) -> Path:
    return shutil.copytree(model, tmp_path / "model")


@pytest.mark.parametrize(("name", "key", "value"), WRONG, ids=lambda value: str(value)[:24])
def test_a_value_out_of_range_is_refused_where_every_program_finds_its_model(name, key, value, model):
    change_json(model / name, **{key: value})
    shown = f"{key} is " if key != "text_config" else "hidden_size is "
    with pytest.raises(ValueError, match=f"^{model / name}: {shown}"):
        find_model(str(model), revision=None, trust_remote_code=False)


@pytest.mark.parametrize(("key", "value"), REFUSED_BY_TRANSFORMERS, ids=str)
def test_what_transformers_refuses_is_one_message_with_the_file(key, value, model):
    change_json(model / CONFIG, **{key: value})
    loads = [lambda: load_config(str(model), TextFamily()), lambda: find_answering_model(str(model))]
    if key in ("hidden_size", "num_attention_heads"):  # a tokenizer does without some of the others
        loads.append(lambda: load_tokenizer(str(model)))
    for load in loads:
        with pytest.raises(ValueError, match=f"{model}: .*{CONFIG}: .") as refused:
            load()
        assert "\n" not in str(refused.value)


def test_a_generation_config_that_transformers_refuses_is_named(model):
    change_json(model / GENERATION, max_new_tokens=-5)
    config = load_config(str(model), TextFamily())
    for read in (lambda: load_generation_config(str(model), config), lambda: read_generation_config(model)):
        with pytest.raises(ValueError, match=f"{model / GENERATION}: .*max_new_tokens"):
            read()


def test_real_configs_are_not_refused():
    for config in (*FAMILIES.values(), GPT2Config()):
        check_values(json.loads(config.to_json_string()), Path(CONFIG))
    values = {"intermediate_size": [8, 16], "num_key_value_heads": None, "num_experts": 0, "vocab_size": 262_208}
    check_values(values, Path(CONFIG))
    check_values({"eos_token_id": [1, 2], "pad_token_id": -1, "temperature": 0, "top_k": -1}, Path(GENERATION))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    write_samples(folder / "data.arrow", make_samples(4, vocab_size=VOCAB_SIZE))
    return folder


def list_programs(model: Path, data: Path, folder: Path) -> dict[str, list[object]]:
    train = flags(model_name_or_path=model, data_path=data / "data.arrow", output_dir=folder / "run", max_steps=1)
    rows, tokenized = data / "rows.jsonl", data / "data.arrow"
    process = flags(input_file=rows, output_file=folder / "d.arrow", model_name_or_path=model)
    return {
        "train": ["train.py", *train],
        "plan": ["train.py", *train, "--dry-run"],
        "process_data": ["process_data.py", *process],
        "generate": ["generate.py", *flags(model=model, prompts=rows, output=folder / "answers.jsonl")],
        "evaluate": ["evaluate_model.py", *flags(model=model, data=tokenized, output_dir=folder / "evaluation")],
    }


ALL = tuple(list_programs(Path(), Path(), Path()))
NAMED = [
    (CONFIG, "hidden_size", 10**12, "config.json: hidden_size is"),
    (GENERATION, "eos_token_id", "x", "generation_config.json: eos_token_id is"),
]
BY_CODE = [  # only code finds these out
    (CONFIG, "num_attention_heads", None, "Field 'num_attention_heads' expected int"),
    (CONFIG, "hidden_act", "nonsense", "config.json: cannot be used: KeyError: 'nonsense'"),
    (GENERATION, "max_new_tokens", -5, "`max_new_tokens`"),
]
PROGRAMS = [(program, *case) for program in ALL for case in NAMED]
PROGRAMS += [(program, *case) for program in ("train", "generate") for case in BY_CODE]
PROGRAMS += [("evaluate", *case) for case in BY_CODE[:2]]  # which does not read the third


@pytest.mark.parametrize(("program", "name", "key", "value", "shown"), PROGRAMS)
def test_every_program_ends_with_one_message(program, name, key, value, shown, model, data, tmp_path):
    change_json(model / name, **{key: value})
    done = run_forked(0, *list_programs(model, data, tmp_path)[program])
    text = done.stdout + done.stderr
    assert done.returncode == 2 and (f"{model}/{shown}" if shown.startswith(name) else shown) in text
    assert "Traceback" not in text
    assert not list(tmp_path.glob("*.arrow")) and not list(tmp_path.glob("answers*"))
