"""The installed program, from any directory: `mini-trainer WORD ...`, or `python -m mini_trainer WORD ...`.

    mini-trainer process-data --input-file chats.jsonl --output-file chats.arrow --model-name-or-path M
    mini-trainer train --model-name-or-path M --data-path chats.arrow --output-dir D

A word starts the program of its name. One process becomes the program. Several are torchrun's, which this process
becomes: it hands on signals, waits for the ranks to save, and ends with the exit code of train.py, where the command
`torchrun` always returns 1.
"""

import difflib
import importlib.metadata
import json
import os
import runpy
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple, NoReturn


class Program(NamedTuple):
    """What a word starts."""

    module: str  # in this package
    options: str  # the class of its options: "module:name", in options/
    purpose: str

    def read_options(self) -> type:
        from mini_trainer.options.doors import open_door

        return open_door(f"mini_trainer.options.{self.options}")


PROGRAMS = {
    "train": Program("train", "training:TrainOptions", "fine-tune a model; one process per GPU of this machine"),
    "process-data": Program("process_data", "tools:ProcessDataOptions", "tokenize chats, completions or documents"),
    "chat": Program("generate", "tools:GenerateOptions", "chat with a model in the terminal"),
    "serve": Program("tools.serve", "tools:ServeOptions", "serve a model with an OpenAI-compatible API"),
    "generate": Program("generate", "tools:GenerateOptions", "generate answers to prompts from files"),
    "evaluate": Program(
        "evaluate_model", "tools:EvaluateOptions", "evaluate and compare models: losses, tasks, a page of samples"
    ),
    "export": Program(
        "tools.export_run", "tools:ExportRunOptions", "export a model from a stopped run's newest checkpoint"
    ),
    "export-gguf": Program(
        "tools.export_gguf", "tools:ExportGgufOptions", "convert a model to GGUF for llama.cpp and Ollama"
    ),
    "merge-adapter": Program(
        "tools.merge_adapter", "tools:MergeAdapterOptions", "merge a LoRA adapter into its base model"
    ),
    "import-config": Program(
        "tools.import_config", "tools:ImportConfigOptions", "convert a configuration of Axolotl, LLaMA-Factory or TRL"
    ),
    "sweep": Program("tools.sweep.__main__", "tools:SweepOptions", "search hyperparameters"),
    "continual": Program(
        "tools.continual", "tools:ContinualOptions", "train on tasks in a row, and measure what is forgotten"
    ),
    "score-data": Program(
        "tools.score_data", "tools:ScoreDataOptions", "save a teacher's top-k tokens for distillation"
    ),
    "draw-samples": Program(
        "tools.draw_samples", "tools:DrawSamplesOptions", "draw samples from a model, for train --keep self"
    ),
    "board": Program("tools.board", "tools:BoardOptions", "a live table of all runs in a directory, in the browser"),
    "plot-metrics": Program("tools.plot_metrics", "tools:PlotOptions", "plot the curves of runs: a page or a picture"),
    "verify": Program("tools.verify", "tools:VerifyOptions", "compare stored files to their recorded hashes"),
}
PARALLEL = ("train", "generate", "evaluate", "score-data", "export")  # words that can be given several processes
BAD_INPUT, INTERRUPTED = 2, 130  # as in `ExitCode`
ENDS_WITH_PARENT = "MINI_TRAINER_PARENT"  # in the environment, by the Python API: its process
COMMAND = "MINI_TRAINER_COMMAND"  # in the environment, for messages: see distributed/command.py

# Options of torchrun that `PARALLEL` words take beside their own; each has one value.
TORCHRUN_OPTIONS = (
    *("nproc-per-node", "nnodes", "max-restarts", "node-rank", "rdzv-id", "rdzv-backend", "rdzv-endpoint", "rdzv-conf"),
    *("master-addr", "master-port", "local-addr", "log-dir", "redirects", "tee", "local-ranks-filter"),
    "signals-to-handle",
)
# Distributions on the package index that install a package named mini_trainer, and are not this project.
NAMESAKES = ("mini-trainer", "rhai-innovation-mini-trainer")
# The first sign of a driver for GPUs: NVIDIA's, Windows' as WSL shows it, AMD's.
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def main() -> None:
    """Starts what the command line names. Returns only after `--help`."""
    if ENDS_WITH_PARENT in os.environ:
        end_with(int(os.environ.pop(ENDS_WITH_PARENT)))
    refuse_mixed_installation()
    # The installed script imports this module; python -m runs it, under a spec of another name than its own.
    is_module = __name__ == "__main__" and __spec__ is not None and __spec__.name != "__main__"
    os.environ[COMMAND] = json.dumps([os.getpid(), sys.argv, is_module])
    word, *argv = sys.argv[1:] or [""]
    if word in ("-h", "--help"):
        tell(describe_words())
        return
    if word == "--version":
        from mini_trainer.distributed.command import describe_version

        tell(describe_version())
        return
    if word not in PROGRAMS:
        close = difflib.get_close_matches(word, PROGRAMS, n=1)
        meant = f"; did you mean {close[0]}?" if close else ""
        given = f"{word!r} is not one of mini-trainer's commands" if word else "mini-trainer needs a command"
        refuse(f"{given}: {', '.join(PROGRAMS)}{meant} (mini-trainer --help says what they do)")
    if word not in PARALLEL or {"-h", "--help"} & set(argv):
        become_program(word, argv)
    torchrun_options, argv = split_options(argv)
    num_processes = torchrun_options.pop("nproc-per-node", None)
    if num_processes is None:
        num_processes = str(max(1, count_gpus())) if word == "train" else "1"
    if num_processes not in ("gpu", "cpu", "auto") and not (num_processes.isdecimal() and int(num_processes) > 0):
        refuse(f"--nproc-per-node {num_processes}: must be a number of at least 1, or gpu, cpu or auto")
    if num_processes == "1" and not torchrun_options:
        if word == "train" and ("self" in argv or any(one.startswith("--config") for one in argv)):
            from mini_trainer.options.command_line import parse_options

            sys.argv[1:] = argv
            draw_own_samples(parse_options(PROGRAMS[word].read_options()))
        become_program(word, argv)
    sys.exit(run_under_torchrun(word, {"nproc-per-node": num_processes} | torchrun_options, argv))


def describe_words() -> str:
    lines = [f"  {word:15}{purpose}" for word, (_, _, purpose) in PROGRAMS.items()]
    last = "mini-trainer WORD --help lists options, mini-trainer --version says which version this is."
    own = ", ".join(f"--{name}" for name in TORCHRUN_OPTIONS)
    several = f"{', '.join(PARALLEL)} also take options of torchrun (torchrun --help): {own}"
    several = textwrap.fill(several, 80, break_on_hyphens=False)
    return "\n".join(["usage: mini-trainer WORD [options]", "", *lines, "", last, several])


def tell(text: str) -> None:
    from mini_trainer.distributed.messages import print_as_is

    print_as_is(f"{text}\n", sys.stdout)


def refuse(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(BAD_INPUT)


def refuse_mixed_installation() -> None:
    """Refuses to run where another distribution has installed files of its own into this package's folder."""
    for name in NAMESAKES:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        folder = Path(__file__).resolve().parent
        if Path(distribution.locate_file("mini_trainer")).resolve() == folder:
            refuse(
                f"the package {name} {distribution.version} is another project's, and is installed into this one's"
                f" folder, {folder}: files of both have the same names. pip uninstall {name}, and install this project"
                " again, or give each an environment of its own"
            )


def become_program(word: str, argv: list[str]) -> NoReturn:
    sys.argv[1:] = argv
    runpy.run_module(f"mini_trainer.{PROGRAMS[word].module}", run_name="__main__", alter_sys=True)
    sys.exit()


def split_options(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """torchrun's options among `argv`, with their values, and the words that are left, in order."""
    torchrun_options, others = {}, []
    words = iter(argv)
    for word in words:
        flag, has_value, value = word.partition("=")
        name = flag.removeprefix("--").replace("_", "-")
        if not flag.startswith("--") or name not in TORCHRUN_OPTIONS:
            others.append(word)
            continue
        if name in torchrun_options:
            refuse(f"given more than once: --{name}")
        value = value if has_value else next(words, "")
        if not value or value.startswith("--"):
            refuse(f"--{name} needs a value")
        torchrun_options[name] = value
    return torchrun_options, others


def count_gpus() -> int:
    """GPUs that train.py would see, as torch counts them; 0 without importing it where there is no driver."""
    if not any(map(os.path.exists, GPU_DRIVERS)):
        return 0
    import torch

    return torch.cuda.device_count()


def draw_own_samples(options: Any) -> None:
    """Draws the samples of `train --keep self`, in a process of its own, if the cache does not have them. `options`: of
    train."""
    from mini_trainer.options import SELF

    if SELF not in (*options.keep.keep, options.osft.osft_calibration_data) or options.plan.dry_run:
        return
    from mini_trainer.distributed.children import end_child, start_child
    from mini_trainer.run.own_samples import list_draw_words, locate_samples, make_draw_options

    if locate_samples(make_draw_options(options)).exists():
        return
    child = start_child(["draw-samples", *list_draw_words(options)], None, errors=None, pass_fds=())
    try:
        code = child.wait()
    finally:
        end_child(child)
    if code:
        sys.exit(code)


def run_under_torchrun(word: str, torchrun_options: dict[str, str], argv: list[str]) -> int:
    """Runs a script in several processes, waits for them, and returns the exit code of the run."""
    from mini_trainer.data.stores.disk import identify_file
    from mini_trainer.distributed.children import find_this_package, hand_on_warning, name_module
    from mini_trainer.distributed.ending import EXIT_FILE
    from mini_trainer.distributed.launcher import count_machines, launch
    from mini_trainer.distributed.process import raise_open_file_limit
    from mini_trainer.options.command_line import parse_options
    from mini_trainer.options.reading import read_document

    if word == "train":
        hand_on_warning()
    raise_open_file_limit()  # on the first machine torchrun holds a connection to every rank
    sys.argv[1:] = argv
    # What cannot be used is refused once, and not by every rank.
    options = parse_options(PROGRAMS[word].read_options())
    exit_file = Path(options.output_dir) / EXIT_FILE if word == "train" else None  # train.py alone writes one
    if word == "train" and count_machines(torchrun_options) == 1 and not options.plan.dry_run:
        from mini_trainer.run.preflight import begin

        begin(options)
    if word == "train":
        draw_own_samples(options)
    before = exit_file and identify_file(exit_file)
    os.environ |= find_this_package()

    def find_end() -> tuple[int, int] | None:
        """The file in which the ranks of a run, which end together, have written why."""
        found = exit_file and identify_file(exit_file)
        return None if found == before else found

    words = [*name_module(f"mini_trainer.{PROGRAMS[word].module}"), *argv]
    code, message = launch(torchrun_options, words, find_end=find_end)
    if find_end() is not None:  # for torchrun, a stop that was asked for is no failure
        return read_document(exit_file)["code"]
    if message:
        print(f"error: {message}", file=sys.stderr)
    return code


def end_with(parent: int) -> None:
    """Has this process, and what it becomes, asked to end (SIGTERM) when process `parent`, which started it, is gone.
    Only Linux can do that."""
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1  # of linux/prctl.h
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if os.getppid() != parent:  # it has gone before that
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
