"""The sidecar OUTPUT.meta.json: a data set's sources, options and tokenizer."""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mini_trainer.data.columns.base import COLUMNS, DataTask
from mini_trainer.data.rows.files import Source
from mini_trainer.data.rows.labelled import CLASSIFICATION
from mini_trainer.data.rows.report import DROPPED, Totals
from mini_trainer.data.stores.contents import hash_once
from mini_trainer.data.stores.disk import read_object
from mini_trainer.data.stores.tokenizers import fingerprint_chat_template, fingerprint_tokenizer
from mini_trainer.data.tokenized.reader import FORMAT_VERSION
from mini_trainer.distributed.messages import hide_in
from mini_trainer.options import RowOptions
from mini_trainer.options.tools import ContentOptions, ProcessDataOptions


def describe_data_set(
    totals: Totals,
    task: DataTask,
    *,
    options: ProcessDataOptions,
    sources: Sequence[Source],
    tokenizer: Any,
    stop_token_id: int | None,
    added_tokens: dict[str, int],
) -> dict[str, Any]:
    """The sidecar's content; docs/reference/data.md explains each key. Independent of --num-proc."""
    columns = COLUMNS[task.objective]
    row_keys = ("blank_lines", "in", "kept", *DROPPED, *(("truncated",) if columns.has_labels else ()))
    return {
        "format_version": FORMAT_VERSION,
        "tokenizer_fingerprint": fingerprint_tokenizer(tokenizer),
        "chat_template_fingerprint": fingerprint_chat_template(tokenizer),
        "stop_token_id": stop_token_id,
        "max_token_id": totals.max_token_id,
        "num_samples": totals.num_samples,
        "num_tokens": totals.num_tokens,
        "num_loss_counted_tokens": totals.num_loss_counted_tokens,
        "num_trained_by_role": dict(sorted(totals.trained_by_role.items())),
        "max_len": max(totals.lengths),
        "rows": {key: totals.rows[key] for key in row_keys},
        "sources": list(map(describe_source, sources)),
        "options": hide_in(describe_options(options)),
        "versions": describe_versions(),
        "has_loss_weights": totals.has_weights,
        "added_special_tokens": added_tokens,
        "stop_tokens": {"rows_that_train_one": totals.stops["trained"], "appended": totals.stops["appended"]},
        **columns.describe_data(totals, task),
    }


def is_made_of(path: Path, sources: Sequence[Source], options: ProcessDataOptions, *, tokenizer: Any) -> bool:
    """Whether a sidecar describes the result of these local files with these options; reads the files for their hashes.
    Also False if it cannot show that: with options that it does not record, and for remote files.
    """
    try:
        sidecar = read_object(path)
    except ValueError:
        return False
    recorded = describe_options(options)
    given, defaults = vars(options.rows) | vars(options.contents), vars(RowOptions()) | vars(ContentOptions())
    unrecorded = given.keys() - recorded.keys() - {"input_file", "num_proc"} | {"labels_from"}
    found = {
        "format_version": FORMAT_VERSION,
        "tokenizer_fingerprint": fingerprint_tokenizer(tokenizer),
        "chat_template_fingerprint": fingerprint_chat_template(tokenizer),
        "options": hide_in(recorded),
        "versions": describe_versions(),
    }
    return (
        all(source.is_local for source in sources)
        and all(given[name] == defaults[name] for name in unrecorded)
        and all(sidecar.get(name) == value for name, value in found.items())
        and [(entry.get("file"), entry.get("sha256")) for entry in sidecar.get("sources", [])]
        == [(source.name, hash_once(source.path)) for source in sources]
    )


def describe_source(source: Source) -> dict[str, Any]:
    """A source's entry; with the address that its web server redirected to, if there was one."""
    redirected = {} if source.remote is None else source.remote.describe_redirect()
    return {"file": source.name, "format": source.format, "sha256": source.sha256} | redirected


def describe_options(options: ProcessDataOptions) -> dict[str, Any]:
    """The options that the data depends on; files and directories by their names only."""
    model, of_labels = Path(options.model_name_or_path), {}
    if options.rows.format == CLASSIFICATION:
        labels_from = None if options.rows.labels_from is None else Path(options.rows.labels_from).name
        of_labels = {name: getattr(options.rows, name) for name in ("truncate", "label_separator")}
        of_labels["labels_from"] = labels_from
    return {
        "model_name_or_path": model.resolve().name if model.is_dir() else options.model_name_or_path,
        "format": options.rows.format,
        "chat_template": None if options.rows.chat_template is None else Path(options.rows.chat_template).name,
        "add_special_tokens": list(options.rows.add_special_tokens),
        "max_sample_num_tokens": options.rows.max_sample_num_tokens,
        "block_size": options.rows.block_size,
        "validation_share": options.rows.validation_share,
        "skip_invalid": options.rows.skip_invalid,
        **of_labels,
        "missing_stop_token": options.rows.missing_stop_token,
        "columns": list(options.rows.columns),
        "ignore_columns": list(options.rows.ignore_columns),
        "thinking_prefix": options.rows.thinking_prefix,
        "strict_reasoning": options.contents.strict_reasoning,
        "control_tokens": options.contents.control_tokens,
        "template_args": list(options.contents.template_args),
        "as_chat": options.contents.as_chat,
    }


def describe_versions() -> dict[str, str]:
    import tokenizers
    import transformers

    return {
        "python": platform.python_version(),
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }
