"""The preflight: what can be known before data and models are read, in a fifth of a second and without torch.

Whose the output directory is, whether the run in it is done, the model's files, caches, and whether the disk has room
for what the run writes. Later, on rank 0: whether the directory's file system supports a run, which mounted buckets
often do not.
"""

import contextlib
import errno
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from mini_trainer.data.stores.disk import check_output_dir, check_room, find_existing, remove_quietly
from mini_trainer.data.stores.model_files import MODEL_FLAG, check_model_path, check_weights, count_values
from mini_trainer.distributed.ending import EXIT_FILE, ExitCode, ending_with_message, exit_process
from mini_trainer.distributed.lifeline import is_one_node
from mini_trainer.distributed.messages import hide_in, say_note
from mini_trainer.options import (
    TrainOptions,
    flatten_options,
    iterate_fields,
    list_data_sets,
    list_identifying_options,
    names_raw_data,
)
from mini_trainer.options.places import expand
from mini_trainer.options.reading import open_own, read_bytes, read_json, read_text
from mini_trainer.options.urls import is_url
from mini_trainer.run import record
from mini_trainer.run.file_names import EXPORTS_DIR, LATEST, METRICS_FILE, STATE, find_checkpoints

# Options that a start settles, by the device and what it measures, if they are left out or auto.
SETTLED = {
    *("activation_checkpointing", "max_tokens_per_gpu", "kernels", "reshard_after_forward", "reshard_after_backward")
}
CHOSEN = {"batch_size", "max_epochs", "learning_rate"}  # by its data and model, if they are left out (run/choices.py)
STATE_BYTES = {"adamw": 8, "adamw8bit": 2, "muon": 4}  # of an optimizer, for each trained number, at least
VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
LANGUAGE = ("causal-lm", "preference", "kto")  # objectives that keep the head
DEFAULTS = {option.name: option.default for option, _ in iterate_fields(TrainOptions)}


def check_start(options: TrainOptions) -> str | None:
    """ValueError or OSError for what a run with these options would refuse or fail for; the message for a run that is
    done."""
    params = check_directory(options)
    if params is not None and params["finished"] and (message := describe_done(options, params)) is not None:
        return message
    values, output_dir = flatten_options(options), Path(options.output_dir)
    if os.environ.get("RANK", "0") != "0":  # only rank 0 reads weights and writes to the cache
        return None
    if names_raw_data(options):
        check_output_dir(expand(values["data_cache_dir"]), flag="--data-cache-dir")
    if check_model(values["model_name_or_path"]):
        resumes = bool(list_own_checkpoints(output_dir, options.checkpoints.resume))
        estimate_use(values, resumes=resumes).check(output_dir)
    return None


def begin(options: TrainOptions) -> None:
    """Ends this process with one message for what `check_start` refuses, and for a run that is done. Ranks of several
    nodes, which have other disks, ask together later."""
    if not is_one_node():
        return
    with ending_with_message(when_interrupted="interrupted"):
        done = check_start(options)
    if done is not None:
        if os.environ.get("RANK", "0") == "0":
            say_note(done)
        exit_process(ExitCode.DONE)


def check_directory(options: TrainOptions) -> dict[str, Any] | None:
    """The record of the run in --output-dir; None if it holds none. ValueError for what is not this run's."""
    output_dir, resume = Path(options.output_dir), options.checkpoints.resume
    check_output_dir(output_dir)
    params = None
    if checkpoints := list_own_checkpoints(output_dir, resume):
        with contextlib.suppress(OSError, ValueError):  # the start writes a new one, with a warning
            params = record.read_params(output_dir)
    else:
        own = [path for paths in list_data_sets(options).values() for path in paths]
        own += [*options.rows.input_file, options.data_cache_dir, options.osft.osft_cache_dir]
        params = record.find_owner(output_dir, resume, own)
    if params is None:
        return None
    changes: dict[str, str] = {}
    if not (options.checkpoints.allow_changed_options and checkpoints):
        identities = [read_identity(checkpoint) for checkpoint in checkpoints] or [params["identity"]]
        changes = min((find_option_changes(options, identity) for identity in identities), key=len)
    if changes:
        kind = "a finished run" if params["finished"] else "a run"
        raise ValueError(
            f"--output-dir {output_dir} holds {kind} with other {', '.join(changes.values())}: name a new directory, or"
            " give the same ones to resume it"
        )
    if params["finished"] and not checkpoints and describe_done(options, params) is None:
        raise ValueError(record.describe_finished(output_dir, params))
    return params


def list_own_checkpoints(output_dir: Path, resume: str) -> list[Path]:
    """The checkpoints that --resume names or can use, if this directory's run has written them."""
    found = find_checkpoints(output_dir / "checkpoints")
    if resume in ("auto", "strict"):
        return found
    return [path for path in found if path.absolute() == Path(resume).absolute()]


def read_identity(checkpoint: Path) -> dict[str, Any]:
    """That of the run that wrote the checkpoint; empty for a damaged one, which the start reports."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return dict(read_json(checkpoint / STATE)["identity"])
    return {}


def find_option_changes(options: TrainOptions, identity: Mapping[str, Any]) -> dict[str, str]:
    """The options that decide a run's numbers and differ from this identity's."""
    values = flatten_options(options)
    names = [name for name in list_identifying_options() if name not in CHOSEN or values[name] is not None]
    now = {record.name_in_identity(name): record.to_json(hide_in(values[name])) for name in names}
    before = {name: value for name, value in identity.items() if name in now}
    return record.find_changes(before, now) if before else {}


def describe_done(options: TrainOptions, params: dict[str, Any]) -> str | None:
    """What a finished run has made, if these are its options and what they name has not changed since; None: a start
    has to look closer."""
    values = {name: record.to_json(hide_in(value)) for name, value in flatten_options(options).items()}
    output_dir, models = Path(options.output_dir), Path(options.output_dir, EXPORTS_DIR)
    changed = {name for name, value in values.items() if value != params["options"].get(name)}
    settled = {name for name in (*SETTLED, *CHOSEN) if values[name] in (None, "auto")}
    if names_raw_data(options):  # which become data sets
        settled |= {"data_path"} if not values["data_path"] else set()
        settled |= {"validation_data_path"} if values["validation_share"] else set()
        if values["keep"]:
            from mini_trainer.data.tokenized.detection import may_become

            given, known = values["keep"], params["options"].get("keep") or ()
            is_same = len(given) == len(known) and all(map(may_become, given, known))
            settled |= {"keep"} if is_same else set()
    has_models = not (options.exports.save_final_checkpoint or options.exports.on_the_way) or (models / LATEST).is_dir()
    if changed - settled or not has_models or not is_one_node() or has_newer_inputs(params, values):
        return None
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # without the file, it is not known
        if read_json(output_dir / EXIT_FILE)["code"] != ExitCode.DONE:
            return None  # of a later start
    last, best = record.read_ends(output_dir / METRICS_FILE)[1], models / "best"
    result = ", ".join([f"{last.get('step', 0):,} steps", *record.describe_losses(output_dir, last.get("step", 0))])
    found = [f"best model: {best}"] if best.is_dir() else []
    if (models / LATEST).is_dir():
        found.append(f"model after the last step: {models / (models / LATEST).resolve().name}")
    return "\n".join([f"done already, since {params['finished']}: {result}", *found])


def has_newer_inputs(params: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Whether what the options name may have changed since the run's last start: files and directories that are newer,
    another directory that paths are relative to, and everything that is elsewhere."""
    try:
        directory, started = (params["starts"][-1][name] for name in ("directory", "started"))
        begun = datetime.strptime(started, "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except (LookupError, TypeError, ValueError):  # a damaged record
        return True
    is_elsewhere = not os.path.isdir(values["model_name_or_path"]) or values["input_dataset"] is not None
    texts = [text for value in values.values() for text in (value if isinstance(value, list) else [value])]
    named = [text for text in texts if isinstance(text, str)]
    if is_elsewhere or any(map(is_url, named)) or directory != os.getcwd():
        return True
    own = {values[name] for name in ("output_dir", "data_cache_dir", "osft_cache_dir")}  # which a start writes to
    paths = [path for path in named if os.path.exists(path) and path not in own]
    paths += [file.path for path in filter(os.path.isdir, paths) for file in os.scandir(path)]
    return any(max(os.stat(path).st_ctime, os.lstat(path).st_ctime) > begun for path in paths)


def check_model(model: str, *, flag: str = MODEL_FLAG) -> bool:
    """Whether the model is a directory; ValueError if its files cannot be a model's."""
    check_model_path(model, flag=flag)
    if not Path(model).is_dir():
        return False  # its name on the hub
    check_weights(Path(model))
    return True


@dataclass(frozen=True)
class DiskUse:
    """The largest files of a run: numbers of checkpoints and exports, bytes of each."""

    num_checkpoints: int
    checkpoint_bytes: int
    num_exports: int
    export_bytes: int

    @property
    def total(self) -> int:
        return self.num_checkpoints * self.checkpoint_bytes + self.num_exports * self.export_bytes

    def check(self, directory: Path, *, flag: str = "--output-dir ") -> None:
        """OSError if there is no room in this directory, or in those below it, which can be links or mounts."""
        files = {
            "checkpoints": (self.num_checkpoints, "checkpoint", self.checkpoint_bytes),
            EXPORTS_DIR: (self.num_exports, "export", self.export_bytes),
        }
        by_disk: dict[int, list[tuple[Path, int, str]]] = {}
        for name, (number, what, size) in files.items():
            place = directory / name if (directory / name).is_dir() else find_existing(directory)
            words = f"{number} {what}{'s' * (number > 1)} of {size:,} bytes"
            by_disk.setdefault(place.stat().st_dev, []).append((place, number * size, words))
        for found in by_disk.values():
            words = " and ".join(words for _, size, words in found if size)
            check_room(found[0][0], sum(size for _, size, _ in found), f"{words} in {flag}{directory}")


def check_runs(root: Path, runs: Sequence[tuple[Mapping[str, Any], int]], *, flag: str) -> None:
    """Checks the models of runs that will stand side by side in the directory `root`, and the room for their exports;
    `runs`: options that are given, and the number of runs that have them."""
    local = [(DEFAULTS | values, number) for values, number in runs if check_model(values["model_name_or_path"])]
    exports = [(estimate_use(values), number) for values, number in local]
    total = sum(use.num_exports * number * use.export_bytes for use, number in exports)
    if count := sum(use.num_exports * number for use, number in exports):
        DiskUse(0, 0, count, total // count).check(root, flag=flag)


def estimate_use(values: Mapping[str, Any], *, resumes: bool = False) -> DiskUse:
    """The least that a run writes, by the headers of its model's files and its options; one that resumes may need no
    other checkpoint, nor another export if it has one."""
    total, of_text = count_values(Path(values["model_name_or_path"]), has_head=values["objective"] in LANGUAGE)
    saved = 0 if values["lora"] else of_text
    trained = 0 if values["lora"] or values["osft"] or values["freeze"] != DEFAULTS["freeze"] else of_text
    weights = VALUE_BYTES[values["master_weights"]]
    exported = not values["lora"] or values["lora_export"] != "adapter"
    is_exported = values["save_final_checkpoint"] or values["checkpoint_at_epoch"]
    has_export = resumes and Path(values["output_dir"], EXPORTS_DIR, LATEST).exists()
    return DiskUse(
        num_checkpoints=int(values["checkpoint_every_steps"] is not None and not resumes),
        checkpoint_bytes=saved * weights + trained * STATE_BYTES[values["optimizer"]],
        num_exports=int((is_exported or values["min_samples_per_checkpoint"] is not None) and not has_export),
        export_bytes=(of_text * VALUE_BYTES[values["export_dtype"]] + (total - of_text) * 2) * exported,
    )


# What the file system of the output directory has to support.

MADE = ".disk_check.part"  # in the output directory; a later start ignores one left by a killed run
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
MOUNTS = Path("/proc/self/mounts")
ADVICE = (
    "Write to a file system that supports this: a local disk with --upload-to for the exports, or a network file"
    " system; a bucket needs a mount with a cache of files on a disk"
)


def check_disk(output_dir: Path) -> None:
    """ValueError if the directory is on a file system that cannot hold a run; OSError if that is full."""
    directory = output_dir / MADE
    remove_quietly(directory)
    try:
        directory.mkdir()
        failure = find_failure(directory)
    except OSError as error:
        raise OSError(f"--output-dir {output_dir}: cannot be written: {error}") from None
    finally:
        remove_quietly(directory)
    if failure is not None:
        raise ValueError(f"--output-dir {output_dir}: {failure}. {ADVICE}")


def find_failure(directory: Path) -> str | None:
    """The first operation that fails in the empty `directory`, with its error and the file system; leaves files.
    OSError if there is no space left."""
    operations: dict[str, Callable[[Path], None]] = {
        "append to a file that others read, as metrics are written": append,
        "replace a file by renaming another one, as settings are written": replace_file,
        "rename a directory, as checkpoints and exports are written": rename_directory,
    }
    for name, operation in operations.items():
        try:
            operation(directory)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise
            return f"cannot {name} ({describe_mount(directory)}): {error}"
    return None


def append(directory: Path) -> None:
    path = directory / "appended"
    for number in (1, 2):
        with open_own(path, "a") as file:
            file.write(f"{number}\n")
            file.flush()
            if not read_text(path).endswith(f"{number}\n"):
                raise OSError("appended bytes cannot be read")


def replace_file(directory: Path) -> None:
    path, aside = directory / "replaced", directory / "aside"
    for number in (1, 2):
        aside.write_text(str(number), encoding="utf-8")
        aside.replace(path)
    if read_text(path) != "2":
        raise OSError("the earlier one is still there")


def rename_directory(directory: Path) -> None:
    aside, target = directory / "writing", directory / "step"
    aside.mkdir()
    (aside / "file").write_text("1", encoding="utf-8")
    aside.rename(target)
    if read_text(target / "file") != "1":
        raise OSError("a file in it reads differently then")


def describe_mount(directory: Path) -> str:
    """Type and mount point of the directory's file system; known only on Linux."""
    place, kind = Path(directory.anchor), "its file system"
    path = directory.resolve()
    if MOUNTS.exists():
        for line in read_bytes(MOUNTS).decode(errors="replace").splitlines():
            _, mounted, found, *_ = line.split(" ")
            if path.is_relative_to(mounted) and len(mounted) >= len(str(place)):
                place, kind = Path(mounted), found
    return f"{kind} at {place}"
