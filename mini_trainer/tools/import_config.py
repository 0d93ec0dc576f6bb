"""Converts a configuration of Axolotl, LLaMA-Factory or TRL into files for process_data.py and train.py.

    python -m mini_trainer import-config axolotl.yaml --output-dir configs --num-gpus 8

Writes data.yaml (one per kind of rows) and train.yaml, and prints for every key the option that replaces it, or why
there is none, which is also written as a comment. Configurations that ask for training that is not supported are
refused.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mini_trainer.options import TrainOptions
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.option_files import describe_options, list_missing, read_yaml
from mini_trainer.options.tools import ImportConfigOptions, ProcessDataOptions

if __name__ == "__main__":
    options = parse_options(ImportConfigOptions)  # before the slow imports: --help and typos answer at once

from mini_trainer.data.stores.disk import check_output_dir, written_aside
from mini_trainer.distributed.ending import ending_with_message
from mini_trainer.distributed.messages import say
from mini_trainer.options.foreign_names import find_row
from mini_trainer.options.reading import read_bytes
from mini_trainer.tools.importers.conversion import Conversion, convert

# A file is a trainer's if it has all of the first keys, and one of the others. The last two are refused by name.
SIGNS = {
    "axolotl": ({"base_model"}, {"datasets", "micro_batch_size", "sequence_len", "adapter", "num_epochs", "rl"}),
    "llama-factory": ({"model_name_or_path"}, {"stage", "finetuning_type", "cutoff_len", "template", "export_dir"}),
    "LLaMA-Factory v1": ({"model"}, {"train_dataset", "peft_config", "quant_config", "sample_backend"}),
    "ms-swift": (set(), {"tuner_type", "train_type", "load_args", "rlhf_type", "sampler_engine"}),
    "trl": ({"model_name_or_path"}, {"dataset_name", "dataset_mixture", "dataset_mixer", "max_length", "use_peft",
                                     "num_train_epochs", "reward_funcs"}),
}  # fmt: skip
# TRL's trainers, with keys that only they have, and the words that stand for them in names of files and folders.
TRLS = {
    "trl-dpo": ({"loss_weights", "precompute_ref_log_probs", "rpo_alpha", "ld_alpha", "use_weighting"}, {"dpo"}),
    "trl-kto": ({"desirable_weight", "undesirable_weight"}, {"kto"}),
    "trl-orpo": (set(), {"orpo"}),
    "trl-cpo": ({"cpo_alpha", "simpo_gamma", "gamma_beta_ratio"}, {"cpo", "simpo"}),
    "trl-reward": ({"center_rewards_coefficient"}, {"reward", "rm"}),
}
LOSSES = {"simpo": "trl-cpo", "alphapo": "trl-cpo", "kto": "trl-kto", "apo_zero_unpaired": "trl-kto"}
SHARED_LOSSES = ("sigmoid", "hinge", "ipo", "nll", "chunked_nll", "dft")  # all others are DPO's


def import_config(options: ImportConfigOptions) -> None:
    path, output_dir = Path(options.config_file), Path(options.output_dir)
    check_output_dir(output_dir)
    given = {str(key): value for key, value in read_yaml(path, named=str(path)).items()}
    try:
        trainer = options.trainer or recognize(given, path)
        to = convert(given, trainer, num_gpus=options.num_gpus)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    head = describe_comment(f"From {path.name} ({trainer}), by mini-trainer import-config.")
    outputs = write_files(to, output_dir, head=head)
    say(f"{path}: read as {trainer}'s, for {options.num_gpus} GPU{'s' if options.num_gpus > 1 else ''}")
    width = max(map(len, to.told), default=0)
    for key, outcome in to.told.items():
        say(f"  {key:{width}}  {outcome}")
    say(f"without a counterpart, or different: {', '.join(key for key in to.told if key in to.noted) or 'none'}")
    say(f"wrote {' and '.join(map(str, outputs))}")


def recognize(given: Mapping[str, Any], path: Path | None = None) -> str:
    """The trainer's name; ValueError if it is none that is known, or one of several."""
    fitting = [name for name, (all_of, one_of) in SIGNS.items() if all_of <= given.keys() and one_of & given.keys()]
    if not fitting:
        raise ValueError("its keys are of no trainer known here (axolotl, llama-factory, trl): name it with --trainer")
    if fitting[0] in ("ms-swift", "LLaMA-Factory v1"):
        raise ValueError(f"a configuration of {fitting[0]}, which is not translated: axolotl, llama-factory, trl are")
    if fitting[0] != "trl":
        return fitting[0]
    # One of TRL's: by the keys that only it has, by its loss, or by the path's name; that for supervised fine-tuning if
    # no key compares answers.
    losses = given.get("loss_type", [])
    losses = [losses] if isinstance(losses, str) else losses
    found = {name for name, (own, _) in TRLS.items() if own & given.keys()}
    found |= {LOSSES.get(loss, "trl-dpo") for loss in losses if loss not in SHARED_LOSSES}
    found |= {"trl-reward"} if given.get("lora_task_type") == "SEQ_CLS" else set()
    if isinstance(given.get("loss_type"), list):
        found.add("trl-dpo")
    words = set(re.findall("[a-z]+", "/".join(path.absolute().parts[-2:]).lower())) if path else set()
    found = found or {name for name, (_, named) in TRLS.items() if named & words}
    if len(found) == 1:
        return found.pop()
    compares = [key for key in given if (row := find_row(key)) is not None and row.decides and "trl-dpo" in row.of]
    if not compares:
        return "trl"
    raise ValueError(f"{', '.join(compares)}: keys of several of TRL's trainers: name one with --trainer, as trl-dpo")


def write_files(to: Conversion, output_dir: Path, *, head: str) -> list[Path]:
    """Writes the option files and the files that they refer to; existing files must be identical."""
    texts = {output_dir / name: text for name, text in to.files.items()}
    for output, source in zip(to.list_outputs(), to.sources, strict=True):
        if source.get("chat_template") in to.files:
            source["chat_template"] = str(output_dir / source["chat_template"])
        texts[output_dir / output.replace(".arrow", ".yaml")] = describe_file(ProcessDataOptions, source, head)
    notes = "".join(describe_comment(f"{key}: {told}") for key, told in to.told.items() if key in to.noted)
    texts[output_dir / "train.yaml"] = describe_file(TrainOptions, to.train, head + notes)
    if there := [str(path) for path, text in texts.items() if path.exists() and read_bytes(path) != text.encode()]:
        raise ValueError(f"{', '.join(there)}: already exists with other contents; choose another --output-dir")
    output_dir.mkdir(parents=True, exist_ok=True)
    with written_aside(*texts) as asides:
        for aside, text in zip(asides, texts.values(), strict=True):
            aside.write_text(text, encoding="utf-8")
    return list(texts)


def describe_comment(text: str) -> str:
    """A comment of one line, also where the text of someone else's file has several."""
    return f"# {' '.join(text.split())}\n"


def describe_file(options_class: type, values: dict, head: str) -> str:
    """YAML for a script, with comments on required options that are still missing."""
    needed = list_missing(options_class, values)
    if options_class is ProcessDataOptions and not {"input_file", "input_dataset"} & set(values):
        needed.append("input_file")
    head += "".join(f"# {name}: required\n" for name in needed)
    return head + describe_options(options_class, values)


if __name__ == "__main__":
    with ending_with_message(when_interrupted="interrupted"):
        import_config(options)
