"""Runs the scripts as child processes: streams their output, forwards Ctrl-C, and leaves no process behind."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mini_trainer.api import commands
from mini_trainer.api.arguments import DataProcessArgs, TorchrunArgs, TrainingArgs
from mini_trainer.api.errors import make_error
from mini_trainer.api.sent_callbacks import send_callbacks, write_modules
from mini_trainer.api.tokenized import derive_data, list_values, names_tokenized
from mini_trainer.data.stores.disk import identify_file, is_link_beside
from mini_trainer.distributed.children import run_child
from mini_trainer.distributed.ending import EXIT_FILE, ExitCode
from mini_trainer.distributed.messages import say
from mini_trainer.options import TrainOptions
from mini_trainer.options.reading import open_own, read_document, read_metrics
from mini_trainer.options.tools import ProcessDataOptions
from mini_trainer.run.file_names import EXPORTS_DIR, METRICS_FILE


@dataclass(frozen=True)
class TrainingResult:
    """The end of a run, and its outputs."""

    output_dir: Path
    code: int  # an `ExitCode`: 0 when the run is done; 3 or 10 when it was stopped and can be resumed
    reason: str
    exports: list[Path]  # complete ones, oldest first
    last_metrics: dict[str, Any] | None  # of the last step
    log_file: Path

    @property
    def is_done(self) -> bool:
        """False if the run was stopped early, by a time limit for example, with its state saved."""
        return self.code == ExitCode.DONE


def run_training(
    torchrun_args: TorchrunArgs | None = None,
    training_args: TrainingArgs | None = None,
    *,
    torch_args: TorchrunArgs | None = None,
    train_args: TrainingArgs | None = None,
    callbacks: Sequence[Any] | None = None,
) -> TrainingResult:
    """Tokenizes (unless `process_data` is False) and trains, in child processes whose output is streamed.

    Every machine calls this, with its own `node_rank`. However a run ended, calling this again with the same arguments
    resumes it. The output is also appended to {output_dir}.console_node{N}.log.

    Args:
        torchrun_args: Processes to start; None: one. InstructLab's name `torch_args` is also accepted.
        training_args: Training options. `train_args` is also accepted.
        callbacks: Classes derived from `Callback`, objects of them, or import paths: the field of `training_args` of
            this name.

    Raises:
        TrainingError: the subclass for the cause (`api.errors`).
        KeyboardInterrupt: after Ctrl-C, once the run has saved its state and ended.
    """
    torchrun_args = choose_one(torchrun_args, torch_args, "torchrun_args and torch_args") or TorchrunArgs()
    training_args = choose_one(training_args, train_args, "training_args and train_args")
    if training_args is None:
        raise TypeError("run_training() needs training_args")
    if callbacks is not None:
        own = list_values(training_args.callbacks) or None
        choose_one(own, callbacks, "callbacks and those of training_args")
        training_args = replace(training_args, callbacks=tuple(callbacks))
    launch_words = commands.make_torchrun_words(torchrun_args)
    commands.make_train_words(training_args)  # refused before anything is written or started
    for note in commands.list_notes(training_args):
        say(f"note: {note}")
    with raising_storage_errors():
        if names_tokenized(training_args) or not training_args.process_data:
            training_args = derive_data(training_args)
    values = commands.make_train_values(training_args)
    if commands.tokenizes_first(training_args):
        with raising_storage_errors():
            Path(training_args.data_output_dir).mkdir(parents=True, exist_ok=True)
        process_data(commands.make_data_args(training_args))
    output_dir = Path(values["output_dir"])
    log_file = output_dir.with_name(f"{output_dir.name}.console_node{torchrun_args.node_rank}.log")
    before = identify_file(output_dir / EXIT_FILE)
    with raising_storage_errors():
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log = open_own(log_file, "a")
    sent = send_callbacks(list_values(training_args.callbacks))
    with log, TemporaryDirectory(prefix="mini_trainer_callbacks_") as folder:
        sent_to = write_modules(sent, Path(folder))
        words = [*launch_words, *commands.make_words(TrainOptions, values)]
        code, last_words = run_child(["train", *words], log, more=commands.make_environment(training_args, sent_to))
    has_written_why = identify_file(output_dir / EXIT_FILE) not in (None, before)
    reason = read_document(output_dir / EXIT_FILE)["message"] if has_written_why else last_words
    if code not in (ExitCode.DONE, ExitCode.SAVED_AND_REQUEUE, ExitCode.STOPPED_BY_USER):
        raise make_error(code, commands.name_arguments(reason, training_args, values), log_file)
    rows = (row for _, _, row in read_metrics(output_dir / METRICS_FILE) if row is not None)  # without damaged ones
    last_metrics = next(iter(deque(rows, maxlen=1)), None)
    return TrainingResult(output_dir, code, reason, list_exports(output_dir), last_metrics, log_file)


@contextmanager
def raising_storage_errors() -> Iterator[None]:
    """Turns an OSError inside of it into a StorageError."""
    try:
        yield
    except OSError as error:
        raise make_error(ExitCode.IO, str(error)) from None


def process_data(args: DataProcessArgs) -> Path:
    """Tokenizes and masks chats in a child process whose output is streamed; returns the data set's file.

    Raises:
        BadInputError: for invalid rows or options.
        KeyboardInterrupt: after Ctrl-C; no output is left then.
    """
    values = commands.make_data_values(args)
    code, last_words = run_child(["process-data", *commands.make_words(ProcessDataOptions, values)])
    if code != ExitCode.DONE:
        raise make_error(code, commands.name_arguments(last_words, args, values))
    return Path(values["output_file"])


def choose_one(first: Any, second: Any, names: str) -> Any:
    if first is not None and second is not None:
        raise TypeError(f"{names} are two names of one argument: give only one of them")
    return second if first is None else first


def list_exports(output_dir: Path) -> list[Path]:
    """Complete exports, oldest first; unfinished ones have hidden names."""
    paths = (output_dir / EXPORTS_DIR).glob("[!.]*")
    exports = [path for path in paths if path.is_dir() and not is_link_beside(path)]
    return sorted(exports, key=lambda path: path.stat().st_mtime_ns)
