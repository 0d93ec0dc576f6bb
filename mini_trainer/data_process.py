"""InstructLab's entry for tokenizing: `mini_trainer.data_process.main(DataProcessArgs(...))`."""

from pathlib import Path

from mini_trainer.api.arguments import DataProcessArgs
from mini_trainer.api.launch import process_data


def main(args: DataProcessArgs) -> Path:
    """Tokenizes with `process_data`; returns the data set's file, in `data_output_path`."""
    if isinstance(args.data_output_path, str) and not Path(args.data_output_path).suffix:
        Path(args.data_output_path).mkdir(parents=True, exist_ok=True)
    return process_data(args)
