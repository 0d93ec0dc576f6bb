"""--continue-from: the checkpoint of another run, whose weights and optimizer state this one starts with."""

from pathlib import Path

from mini_trainer.run.checkpointing import Checkpoint, read_checkpoint
from mini_trainer.run.identity import is_checkpoint_of


def read_origin(path: Path, output_dir: Path) -> Checkpoint:
    """Opens the checkpoint of --continue-from, like `read_checkpoint`; ValueError if it is a run's own."""
    if is_checkpoint_of(output_dir, path):
        raise ValueError(
            f"--continue-from {path}: is a checkpoint of --output-dir {output_dir}, from which the same command"
            " resumes without --continue-from: choose a new --output-dir to start another run"
        )
    try:
        return read_checkpoint(path)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"--continue-from {path}: is not a valid checkpoint (a run's directory checkpoints/step_N): {error}"
        ) from None
