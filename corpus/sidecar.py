"""The sidecar OUTPUT.meta.json: what a data set was made from, how, and for which tokenizer."""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chat.masking import ChatMasker, fingerprint_chat_template, fingerprint_tokenizer
from corpus.files import Source
from corpus.report import DROPPED, Totals
from options import ProcessDataOptions

FORMAT_VERSION = 2


def describe_data_set(
    totals: Totals,
    *,
    options: ProcessDataOptions,
    sources: Sequence[Source],
    masker: ChatMasker,
    added_tokens: dict[str, int],
    tokenizer_dir: str | None,
    split: dict[str, Any] | None,
) -> dict[str, Any]:
    """What the sidecar says; docs/data.md explains each key. The same for every --num-proc."""
    return {
        "format_version": FORMAT_VERSION,
        "tokenizer_fingerprint": fingerprint_tokenizer(masker.tokenizer),
        "chat_template_fingerprint": fingerprint_chat_template(masker.tokenizer),
        "stop_token_id": masker.find_stop_token(),
        "max_token_id": totals.max_token_id,
        "num_samples": totals.num_samples,
        "num_tokens": totals.num_tokens,
        "num_loss_counted_tokens": totals.num_loss_counted_tokens,
        "num_trained_by_role": dict(sorted(totals.trained_by_role.items())),
        "max_len": max(totals.lengths),
        "rows": {key: totals.rows[key] for key in ("blank_lines", "in", "kept", *DROPPED)},
        "sources": [{"file": source.name, "format": source.format, "sha256": source.sha256} for source in sources],
        "options": describe_options(options),
        "versions": describe_versions(),
        "has_loss_weights": totals.has_weights,
        "added_special_tokens": added_tokens,
        "tokenizer_dir": tokenizer_dir,
        "split": split,
    }


def describe_options(options: ProcessDataOptions) -> dict[str, Any]:
    """The options that the data depends on; of files and directories only the names."""
    model = Path(options.model_name_or_path)
    return {
        "model_name_or_path": model.resolve().name if model.is_dir() else options.model_name_or_path,
        "format": options.format,
        "chat_template": None if options.chat_template is None else Path(options.chat_template).name,
        "add_special_tokens": list(options.add_special_tokens),
        "max_sample_num_tokens": options.max_sample_num_tokens,
        "block_size": options.block_size,
        "validation_share": options.validation_share,
        "skip_invalid": options.skip_invalid,
        "allow_missing_stop_token": options.allow_missing_stop_token,
    }


def describe_versions() -> dict[str, str]:
    import tokenizers
    import transformers

    return {
        "python": platform.python_version(),
        "transformers": transformers.__version__,
        "tokenizers": tokenizers.__version__,
    }
