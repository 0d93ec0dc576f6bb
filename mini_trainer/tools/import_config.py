"""Converts a configuration of Axolotl, LLaMA-Factory or TRL into files for process_data.py and train.py.

    python -m mini_trainer import-config axolotl.yaml --output-dir configs --num-gpus 8

Writes data.yaml (one per kind of rows) and train.yaml, and prints for every key the option that replaces it, or why
there is none, which is also written as a comment. Configurations that ask for training that is not supported are
refused. If batches count packs, --tokenized-data measures how full these are, and so the batch that is equivalent.
"""

from pathlib import Path

from mini_trainer.options import TrainOptions, iterate_fields
from mini_trainer.options.command_line import parse_options
from mini_trainer.options.option_files import describe_options, read_yaml
from mini_trainer.options.tools import ImportConfigOptions, ProcessDataOptions

if __name__ == "__main__":
    options = parse_options(ImportConfigOptions)  # before the slow imports: --help and typos answer at once

import dataclasses

from mini_trainer.data.stores.disk import check_output_dir
from mini_trainer.distributed.ending import ending_with_message
from mini_trainer.distributed.messages import say
from mini_trainer.options.choices import check_choices
from mini_trainer.tools.importers.conversion import Conversion, convert
from mini_trainer.tools.importers.recognition import recognize


def import_config(options: ImportConfigOptions) -> None:
    check_choices(options)
    path, output_dir = Path(options.config_file), Path(options.output_dir)
    check_output_dir(output_dir)
    given = {str(key): value for key, value in read_yaml(path, named=str(path)).items()}
    try:
        trainer = options.trainer or recognize(given, path)
        to = convert(given, trainer, num_gpus=options.num_gpus, lengths=read_lengths(options.tokenized_data))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if options.tokenized_data:
        to.train["data_path"] = options.tokenized_data
    outputs = write_files(
        to, output_dir, head=describe_comment(f"From {path.name} ({trainer}), by mini-trainer import-config.")
    )
    say(f"{path}: read as {trainer}'s, for {options.num_gpus} GPU{'s' if options.num_gpus > 1 else ''}")
    width = max(map(len, to.told), default=0)
    for key, outcome in to.told.items():
        say(f"  {key:{width}}  {outcome}")
    say(f"without a counterpart, or different: {', '.join(key for key in to.told if key in to.noted) or 'none'}")
    say(f"wrote {' and '.join(map(str, outputs))}")


def read_lengths(paths: tuple[str, ...]):  # numpy.ndarray | None
    """Number of tokens of each sample in the tokenized data sets; None if there are no data sets."""
    if not paths:
        return None
    import numpy as np

    from mini_trainer.data.tokenized.reader import TokenizedData

    return np.concatenate([TokenizedData(path, option="--tokenized-data").lengths for path in paths])


def write_files(to: Conversion, output_dir: Path, *, head: str) -> list[Path]:
    """Writes the option files and the files that they refer to; existing files must be identical."""
    texts = {output_dir / name: text for name, text in to.files.items()}
    for output, source in zip(to.list_outputs(), to.sources, strict=True):
        if source.get("chat_template") in to.files:
            source["chat_template"] = str(output_dir / source["chat_template"])
        texts[output_dir / output.replace(".arrow", ".yaml")] = describe_file(ProcessDataOptions, source, head)
    notes = "".join(describe_comment(f"{key}: {told}") for key, told in to.told.items() if key in to.noted)
    texts[output_dir / "train.yaml"] = describe_file(TrainOptions, to.train, head + notes)
    there = [str(path) for path, text in texts.items() if path.exists() and path.read_bytes() != text.encode()]
    if there:
        raise ValueError(f"{', '.join(there)}: already exists with other contents; choose another --output-dir")
    output_dir.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)


def describe_comment(text: str) -> str:
    """A comment of one line, also where the text of someone else's file has several."""
    return f"# {' '.join(text.split())}\n"


def describe_file(options_class: type, values: dict, head: str) -> str:
    """YAML for a script, with comments on required options that are still missing."""
    needed = [option.name for option, _ in iterate_fields(options_class) if option.default is dataclasses.MISSING]
    if options_class is ProcessDataOptions and not {"input_file", "input_dataset"} & set(values):
        needed.append("input_file")
    head += "".join(f"# {name}: required\n" for name in needed if name not in values)
    return head + describe_options(options_class, values)


if __name__ == "__main__":
    with ending_with_message(when_interrupted="interrupted"):
        import_config(options)
