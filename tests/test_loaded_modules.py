"""What a run loads: only what it uses. A new entry of a table (options/doors.py) is loaded by those that name it."""

import re
from pathlib import Path

import pytest
from processes import ROOT, flags, run_and_list
from program import list_sources
from small_runs import make_inputs
from tiny_pairs import write_pairs

from mini_trainer.root_files import NAMES

MOST_LINES = 17_150  # of our modules, in a run that trains all weights of a text model
STEPS = dict(batch_size=8, learning_rate=1e-3, max_tokens_per_gpu=64, validate_every_steps=5, checkpoint_every_steps=5)
OWN = {  # options -> beginnings of the names of what they alone load
    "lora": (
        dict(lora=True),
        ("model.methods.adapter", "model.methods.lora", "model.methods.nf4", "distributed.limits"),
    ),
    "osft": (
        dict(osft=True, osft_unfreeze_rank_ratio=0.5),
        ("osft", "model.methods.osft", "model.hashed_tensors"),
    ),
    "muon": (dict(optimizer="muon"), ("model.optim.muon", "model.optim.compact_adamw")),
    "dpo": (
        dict(objective="preference"),
        ("objectives.preferences", "data.columns.preference_columns", "run.references",
         "data.packers.images", "model.hashed_tensors"),
    ),
}  # fmt: skip
OF_OPTIONS = ("options.problems.", "model.methods.__init__", "data.stores.json_lines")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> dict[str, str]:
    given = make_inputs(tmp_path_factory.mktemp("inputs"), "llama")
    return given | dict(validation_data_path=given["data_path"])


def train_and_list(root: Path, **options: object) -> set[str]:
    """Our modules, without the package's name, at the end of a run of ten steps that is resumed after five."""
    found: set[str] = set()
    for max_steps in (5, 10):
        words = flags(**STEPS | options, output_dir=root / "run", max_steps=max_steps)
        found |= set(run_and_list(root / f"report_{max_steps}.json", "train.py", *words)["modules"])
    ours = {name.removeprefix("mini_trainer.") for name in found if name.startswith("mini_trainer.")}
    return {name for name in ours if name != "mini_trainer"} | {"train"}


def list_our_sources() -> dict[str, str]:
    """Sources by the module's name without the package's; those of packages by the package's."""
    named = {path.removesuffix(".py").replace("/", "."): text for path, text in list_sources().items()}
    return {name.removeprefix("mini_trainer.").removesuffix(".__init__"): text for name, text in named.items()}


@pytest.fixture(scope="module")
def loaded(inputs, tmp_path_factory) -> set[str]:
    return train_and_list(tmp_path_factory.mktemp("plain"), **inputs)


def test_a_text_model_s_run_loads_no_more_than_it_uses(loaded):
    assert {"train", "sampler", "batch_packer", "objectives.next_tokens", "run.export", "run.checkpointing"} <= loaded
    assert set(NAMES) & loaded == {"train", "sampler", "batch_packer"}
    rooms = ("data.chat", "data.rows", "use", "continual", "tools", "api", "run.plan", "model.methods")
    assert not {name for name in loaded if name.startswith(tuple(f"{room}." for room in rooms))}
    objectives = {name for name in loaded if name.startswith("objectives.") and "families" not in name}
    assert objectives == {"objectives.next_tokens", "objectives.objective"}
    assert 15_000 < sum(text.count("\n") for name, text in list_our_sources().items() if name in loaded) <= MOST_LINES


def test_the_training_path_of_the_documentation_is_what_a_run_loads(loaded):
    page = (ROOT / "docs" / "developers" / "architecture.md").read_text()
    table = page[page.index("## The training path") : page.index("## Doors")]
    named = set(re.findall(r"^\|.*", table, flags=re.MULTILINE))
    named = {name.rpartition("/")[2] for row in named for name in re.findall(r"`([\w/]+)\.py`", row)}
    assert {"train", "step", "build", "text_tower"} <= named <= {name.rpartition(".")[2] for name in loaded}
    assert len(named) <= 20


@pytest.mark.long
@pytest.mark.parametrize("name", OWN)
def test_a_choice_loads_its_own_modules_and_no_other_s(name, inputs, loaded, tmp_path):
    options, own = OWN[name]
    if name == "dpo":
        pairs = str(write_pairs(tmp_path / "pairs.arrow", Path(inputs["model_name_or_path"])))
        options = options | dict(data_path=pairs, validation_data_path=pairs)
    more = train_and_list(tmp_path, **inputs | options) - loaded
    assert {module for module in more if module.startswith(own)}
    assert not {module for module in more if not module.startswith((*own, *OF_OPTIONS))} - {"model.methods"}


def test_every_door_leads_somewhere():
    from mini_trainer.options import doors

    tables = [value for value in vars(doors).values() if isinstance(value, doors.Doors)]
    assert len(tables) >= 7
    for table in tables:
        assert all(table[name] is not None for name in table), table.data
