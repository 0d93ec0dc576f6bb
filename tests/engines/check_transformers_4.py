"""Exports in transformers 4.57, which clusters still pin. ENGINES_TRANSFORMERS_4 is its environment's python."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_exports import DTYPES, FAMILIES, Exports, ask_chats, make_chats
from engine_table import BOUNDS, Said, Table, describe_pictures, expect, list_frequencies, score
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LM

from mini_trainer.data.stores.older_keys import add_older_keys

PYTHON = os.environ.get("ENGINES_TRANSFORMERS_4", "")
KINDS = ("full", "osft", "lora_merged", "grown", *FAMILIES)
CASES = [(kind, list(DTYPES)[i % 2]) for i, kind in enumerate(KINDS)]


def send(folder: Path, **request: Any) -> Any:
    """What asked_transformers.py writes of a request."""
    output, script = folder / "said.json", Path(__file__).with_name("asked_transformers.py")
    done = subprocess.run(
        [PYTHON, script], input=json.dumps(request | {"output": str(output)}, default=str), capture_output=True,
        text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(output.read_text())


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_an_export_answers_otherwise_in_transformers_4(kind, dtype, exports: Exports, table: Table, tmp_path):
    name, asked = (kind if dtype == "fp32" else f"{kind}_bf16"), dict(chats=ask_chats(), dtype=DTYPES[dtype])
    said = send(tmp_path, model=exports[name], adapter=None, **asked)
    table.compare("transformers 4.57", name, expect(exports[name], **asked), [Said(**one) for one in said],
                  BOUNDS[DTYPES[dtype]])  # fmt: skip


# Types whose classes there refuse such a config, and one that applies a scaling in another way.
REFUSED = {"chameleon", "csm", "dbrx", "llama4_text", "olmo", "olmo2", "phimoe", "recurrent_gemma"}
OTHERS = {"nemotron"}
SCALINGS = {"default": {}, "yarn": dict(factor=4.0, original_max_position_embeddings=64)}


def make_positions(model_type: str, scaling: str) -> dict[str, Any] | None:
    """A config as JSON, with positions unlike its class's; None if it has none of one kind, or refuses these."""
    try:
        config = CONFIG_MAPPING[model_type]()
        rope = config.rope_parameters
        parts = {name: rope[name] for name in ("partial_rotary_factor", "mrope_section") if name in rope}
        if any(isinstance(part, dict) for part in rope.values()) or (parts.get("mrope_section") and scaling == "yarn"):
            return None
        config.rope_parameters = parts | dict(rope_type=scaling, rope_theta=123457.0) | SCALINGS[scaling]
        values = json.loads(config.to_json_string()) | {"model_type": model_type}
        return values if list_frequencies(values) else None
    except Exception:  # of a hundred classes, some have no positions, or need more to be made
        return None


@pytest.mark.parametrize("scaling", SCALINGS)
def test_positions_of_any_model_type_differ_in_transformers_4(scaling, table: Table, tmp_path):
    made = {name: make_positions(name, scaling) for name in CAUSAL_LM}
    made = {name: values for name, values in made.items() if values is not None}
    expected = [list_frequencies(values) for values in made.values()]
    assert all(map(add_older_keys, made.values()))
    said = send(tmp_path, configs=list(made.values()))
    pairs = {name: pair for name, *pair in zip(made, expected, said, strict=True) if pair[1]}
    refused = {name: said for name, (_, said) in pairs.items() if isinstance(said, str)}
    compared = {name: pair for name, pair in pairs.items() if name not in refused}
    others = {name for name, (own, other) in compared.items() if not np.allclose(own, other, rtol=1e-6, atol=0)}
    table(engine="transformers 4.57", kind=f"positions, {scaling}", greedy=f"{len(compared)} types")
    assert len(compared) > 30 and others <= OTHERS and refused.keys() <= REFUSED, (others, refused)


def test_an_adapter_answers_otherwise_in_transformers_4(exports: Exports, table: Table, tmp_path):
    asked = dict(chats=ask_chats(), dtype="float32", adapter=exports["lora_r4"])
    said = send(tmp_path, model=exports.base(), **asked)
    table.compare("transformers 4.57, peft", "lora_r4", expect(exports.base(), **asked), [Said(**one) for one in said])


@pytest.mark.parametrize("kind", ["classifier", "reward"])
def test_a_classifier_or_reward_model_scores_otherwise_in_transformers_4(kind, exports, table: Table, tmp_path):
    rows = [row["messages"] for row in make_chats()] if kind == "reward" else ["one", "eleven is long"]
    logits = score(exports[kind], rows)
    largest = (torch.tensor(send(tmp_path, model=exports[kind], rows=rows)) - logits).abs().max().item()
    table(engine="transformers 4.57", kind=kind, greedy=f"{logits.numel()} scores", logprob=largest)
    assert largest < 1e-5


def test_a_model_sees_otherwise_in_transformers_4(exports: Exports, table: Table, tmp_path):
    chats = [json.loads(line)["messages"][:1] for line in exports.pictures.read_text().splitlines()]
    pictures = [str(exports.folder / f"{i}.png") for i in range(len(chats))]
    expected = describe_pictures(exports["vision"], chats, pictures)
    said = send(tmp_path, model=exports["vision"], chats=chats, pictures=pictures)
    table(engine="transformers 4.57", kind="vision", greedy=f"{len(said)} answers")
    assert said == expected and len({tuple(one) for one in said}) > 1
