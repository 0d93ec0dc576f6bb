"""Makes a run's data local before it starts: tokenizes rows in a child process, and copies data sets at URLs."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mini_trainer.data.stores.disk import write_text
from mini_trainer.data.stores.made import MADE, is_as_made, record_made
from mini_trainer.data.stores.model_files import find_model
from mini_trainer.data.tokenized.detection import is_tokenized
from mini_trainer.data.tokenized.fetched import download_data_sets, fetch_sets, find_sets, locate_sets
from mini_trainer.data.tokenized.outputs import Outputs
from mini_trainer.data.tokenized.sidecar import find_outputs, locked
from mini_trainer.distributed.children import end_child, start_child
from mini_trainer.distributed.ending import ExitCode, log
from mini_trainer.distributed.hang import LONGEST
from mini_trainer.distributed.messages import hide_in, print_as_is
from mini_trainer.distributed.watch import RunControl
from mini_trainer.distributed.world import World, call_on_rank0
from mini_trainer.options import (
    SELF,
    RowOptions,
    TeacherOptions,
    TrainOptions,
    flatten_options,
    iterate_fields,
    list_data_sets,
    replace_options,
)
from mini_trainer.options.option_files import describe_options
from mini_trainer.options.places import expand
from mini_trainer.options.problems.finding import complete_rows
from mini_trainer.options.tools import ProcessDataOptions
from mini_trainer.options.urls import is_url
from mini_trainer.run.identity import unwrap

OPTIONS_FILE = "options.yaml"  # next to the data set: the options that made it


TEMPLATE_OPTIONS = ("chat_template", "add_special_tokens", "missing_stop_token", "thinking_prefix", "num_proc")


def find_data(options: TrainOptions) -> dict[str, Any]:
    """Paths of the tokenized data sets, by the options that take them, in place of rows, and of `SELF`; empty if the
    options name neither. ValueError with process_data.py's error message about the rows."""
    rows, found = options.rows, find_old(options)
    if rows.input_file or rows.input_dataset or rows.mock_data:
        rows = complete_rows(rows, options.classification.objective)
        outputs = tokenize(replace_options(options, format=rows.format))
        found["data_path"] = (str(outputs.data),)
        if outputs.is_split:
            found["validation_data_path"] = (str(outputs.validation.data),)
    return found


def find_old(options: TrainOptions) -> dict[str, Any]:
    """Data sets of what the model knows, in place of rows of --keep and of `SELF`."""
    found: dict[str, Any] = {}
    if options.osft.osft_calibration_data == SELF:
        from mini_trainer.run.own_samples import find_samples

        found["osft_calibration_data"] = find_samples(options, flag="--osft-calibration-data")
    if options.keep.keep:
        found["keep"] = tuple(find_kept(path, options) for path in options.keep.keep)
    return found


def find_kept(path: str, options: TrainOptions) -> str:
    """The data set that a value of --keep names: rows are tokenized with the run's template."""
    if path == SELF:
        from mini_trainer.run.own_samples import find_samples

        return find_samples(options, flag="--keep")
    if is_tokenized(path):
        return path
    if not is_url(path) and not Path(path).exists():
        raise ValueError(f"--keep {path}: no such file; self is what the model draws itself")
    of_template = {name: getattr(options.rows, name) for name in TEMPLATE_OPTIONS}
    return str(tokenize(replace(options, rows=RowOptions(input_file=(path,), **of_template))).data)


def tokenize(options: TrainOptions) -> Outputs:
    """The data set of the options' rows in the cache; makes it if it is not there."""
    rows, model, trust = options.rows, options.model, options.model.trust_remote_code
    model_dir = find_model(model.model_name_or_path, revision=model.model_revision, trust_remote_code=trust)
    outputs = find_outputs(rows, model_dir, cache_dir=expand(options.data_cache_dir), trust_remote_code=trust)
    with locked(outputs):
        record, key = outputs.data.with_name(MADE), outputs.data.parent.name
        if outputs.data.exists() and is_as_made(record, key):
            log.info(f"data: already tokenized, {outputs.data}")
        else:
            log.info(f"data: tokenizing to {outputs.data}")
            run_process_data(flatten_options(options), outputs.data)
            record_made(record, key, [path for one in outputs.data_sets for path in (one.data, one.sidecar)])
    return outputs


def run_process_data(values: Mapping[str, Any], output_file: Path) -> None:
    """Runs process_data.py with this run's options, by name, and forwards its output; ValueError with its message."""
    names = {option.name for option, _ in iterate_fields(ProcessDataOptions)} - {"config"}
    own = {name: value for name, value in values.items() if name in names}
    whole = {"output_file": str(output_file), "shard": "1/1"}  # the whole data set, not one part per process
    write_text(output_file.with_name(OPTIONS_FILE), describe_options(ProcessDataOptions, hide_in(own | whole)))
    with tempfile.TemporaryFile("w+", encoding="utf-8") as config:  # which may hold secrets, so it has no name
        config.write(describe_options(ProcessDataOptions, own | whole))
        config.seek(0)
        words = ["process-data", "--config", f"/dev/fd/{config.fileno()}"]
        child = start_child(words, None, errors=subprocess.PIPE, pass_fds=[config.fileno()])
    message: list[str] = []
    try:
        for line in child.stderr:
            if message or line.startswith("error: "):
                message.append(line)
            else:
                print_as_is(line, sys.stderr)
        code = child.wait()
    finally:
        end_child(child)
    if code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if code != ExitCode.DONE:
        by = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
        reason = "".join(message).removeprefix("error: ").strip()
        raise ValueError(reason or f"process_data.py ended with {by}, without a data set")


def make_data_local(options: TrainOptions, world: World, control: RunControl) -> TrainOptions:
    """The options with local paths of data sets in place of rows and URLs. All ranks call this."""
    with control.slow("the tokenization of the rows", least=LONGEST):  # by rank 0, while the others wait
        options = replace_options(options, **call_on_rank0(world, lambda: find_data(options)))
    with control.slow("the copying of data sets", least=LONGEST):
        beside, cache_dir = list_scores(options.teacher), options.data_cache_dir
        found = download_data_sets(list_data_sets(options), world, cache_dir=cache_dir, beside=beside)
    return replace_options(options, **unwrap(found, options))


def find_local_data(options: TrainOptions) -> dict[str, Any]:
    """The options changed by `make_data_local`, in a single process. ValueError if that fails."""
    changes: dict[str, Any] = find_data(options)
    options = replace_options(options, **changes)
    given = list_data_sets(options)
    found = find_sets(given, beside=list_scores(options.teacher))
    fetch_sets(found, options.data_cache_dir)
    return changes | unwrap(locate_sets(given, found, options.data_cache_dir), options)


def list_scores(teacher: TeacherOptions) -> list[str]:
    """Endings of a teacher's files next to data sets."""
    scores = f".{teacher.teacher_scores}.scores"
    return [] if teacher.teacher_weight is None else [scores, f"{scores}.json"]
