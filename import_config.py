"""Another trainer's configuration in, this one's out: Axolotl's YAML, LLaMA-Factory's, or TRL's (SFTConfig's names).

    python import_config.py axolotl.yaml --output-dir configs --num-gpus 8

Writes data.yaml, for process_data.py, and train.yaml, for train.py, and prints what became of every key: which option
says it, that it needs none here, or that it has no counterpart. What it does not know it says, too.
"""

import dataclasses
from pathlib import Path

from command_line import describe_options, parse_options, read_yaml
from options import ImportConfigOptions, ProcessDataOptions, TrainOptions, iterate_fields
from ranks.ending import exit_with_message
from ranks.messages import say
from trainers.conversion import convert, recognize
from trainers.rules import MISSING


def import_config(options: ImportConfigOptions) -> None:
    path, output_dir = Path(options.config_file), Path(options.output_dir)
    given = {str(key): value for key, value in read_yaml(path, named=str(path)).items()}
    try:
        trainer = options.trainer or recognize(given)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    to = convert(given, trainer, num_gpus=options.num_gpus)
    outputs = {
        output_dir / "data.yaml": (ProcessDataOptions, to.data),
        output_dir / "train.yaml": (TrainOptions, to.train),
    }
    there = [str(output) for output in outputs if output.exists()]
    if there:
        raise ValueError(f"{', '.join(there)}: there already; name another --output-dir")
    output_dir.mkdir(parents=True, exist_ok=True)
    for output, (options_class, values) in outputs.items():
        needed = [option.name for option, _ in iterate_fields(options_class) if option.default is dataclasses.MISSING]
        head = f"# From {path.name} ({trainer}), by import_config.py.\n"
        if options_class is ProcessDataOptions and not {"input_file", "input_dataset"} & set(values):
            needed.append("input_file")
        head += "".join(f"# {name}: has to be given\n" for name in needed if name not in values)
        output.write_text(head + describe_options(options_class, values))
    say(f"{path}: read as {trainer}'s, for {options.num_gpus} GPU{'s' if options.num_gpus > 1 else ''}")
    width = max(map(len, to.told))
    for key, what in to.told.items():
        say(f"  {key:{width}}  {what}")
    unsaid = [key for key, what in to.told.items() if what.startswith(MISSING)]
    num_said = len(to.told) - len(unsaid)
    say(f"{num_said} of {len(to.told)} keys are said or needless; no counterpart: {', '.join(unsaid) or 'none'}")
    say(f"wrote {' and '.join(map(str, outputs))}")


if __name__ == "__main__":
    options = parse_options(ImportConfigOptions)
    try:
        import_config(options)
    except (ValueError, OSError) as error:
        exit_with_message(str(error))
