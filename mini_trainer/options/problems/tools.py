"""Problems with the options of rows and their tokenization, and of the programs other than train.py."""

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from mini_trainer.options import RowOptions, flag_name, parse_named_values, tools
from mini_trainer.options.problems.finding import list_changed, list_row_sources
from mini_trainer.options.urls import hide_credentials, is_url


def find_data_problems(o: tools.ProcessDataOptions) -> Iterator[str]:
    if Path(o.output_file).suffix not in (".arrow", ".parquet", ".jsonl"):
        yield f"--output-file {o.output_file}: must end in .arrow, .parquet or .jsonl"
    if is_url(o.output_file):
        yield (
            f"--output-file {hide_credentials(o.output_file)}: must be a local path: write it here, and copy it with"
            " the files next to it that begin with its name"
        )
    if o.preview_html is not None and is_url(o.preview_html):
        yield f"--preview-html {o.preview_html}: must be a local path"
    if not list_row_sources(o.rows):
        yield "no rows are given: give --input-file or --input-dataset"
    yield from find_row_problems(o.rows)
    given = [flag_name(name) for name in list_changed(o.contents)]
    if given and (o.rows.mock_data is not None or o.rows.format == "classification"):
        yield f"{', '.join(given)}: no effect on random and labelled rows"
    else:
        try:
            parse_named_values(o.contents.template_args)
        except ValueError as error:
            yield f"--template-args: {error}"
    if o.shard is not None and o.join:
        yield "--shard has no effect with --join, which joins all parts"
    if o.string_for_printing_masks is not None and o.preview == 0:
        yield "--string-for-printing-masks has no effect with --preview 0"
    if o.string_for_printing_masks is not None and o.rows.format == "classification":
        yield "--string-for-printing-masks: no effect with --format classification"


def find_row_problems(o: RowOptions) -> Iterator[str]:
    """Problems with row options: values out of range, options without effect, and several row sources."""
    given = list_row_sources(o)
    if len(given) > 1:
        yield f"{' and '.join(given)} both specify rows: give only one of them"
    if o.mock_data is not None:
        kept = ("mock_data", "block_size", "num_proc", "input_file", "input_dataset")
        given = [name for name in list_changed(o) if name not in kept]
        if given:
            yield f"{', '.join(map(flag_name, given))}: no effect with --mock-data, which reads no rows"
        return
    if o.block_size is not None and o.max_sample_num_tokens is not None:
        yield "--max-sample-num-tokens has no effect with --block-size, which sets the length of samples"
    if o.block_size is not None and o.format not in (None, "messages", "document"):
        yield f"--block-size has no effect with --format {o.format}: it cuts documents"
    if o.images and o.format == "classification":
        yield "--images has no effect with --format classification: classifiers do not support images"
    if o.images and o.format in ("preference", "feedback"):
        yield f"--images cannot be used with --format {o.format}, which does not support images"
    if o.feedback_from_pairs and o.format != "preference":
        yield "--feedback-from-pairs: no effect without --format preference"
    if o.images and any(map(is_url, o.input_file)):
        yield "--images: image paths are relative to the rows' files, which therefore have to be local"
    if o.images and o.input_dataset is not None:
        yield "--images: image paths are relative to the rows' files: give these with --input-file"
    yield from find_column_problems(o)
    yield from find_classification_problems(o)


# Names of --columns, by the formats that have them; of the first four, some are detected.
FORMATS_OF_COLUMNS = {
    "messages": ("messages", "sharegpt"),
    "prompt": ("completion", "alpaca", "preference", "feedback"),
    "completion": ("completion", "alpaca", "feedback"),
    "text": ("document", "classification"),
    "system": ("alpaca", "sharegpt"),
    "chosen": ("preference",),
    "rejected": ("preference",),
    "text_pair": ("classification",),
    "label": ("classification", "feedback"),
}
DETECTED = ("messages", "prompt", "completion", "text")


def find_column_problems(o: RowOptions) -> list[str]:
    """Problems with --columns: for several formats, or for a different one than --format."""
    given = [name for column in o.columns if (name := column.partition("=")[0]) in FORMATS_OF_COLUMNS]
    if len(set(given)) < len(given):
        return [f"--columns {' '.join(o.columns)}: a name is given twice"]
    if given and not set.intersection(*(set(FORMATS_OF_COLUMNS[name]) for name in given)):
        return [f"--columns {' '.join(o.columns)}: are for different formats, but rows have one"]
    return [
        f"--columns {name}= has no effect {f'with --format {o.format}' if o.format else 'without --format'}, only with"
        f" {' and '.join(FORMATS_OF_COLUMNS[name])}"
        for name in given
        if o.format not in (*FORMATS_OF_COLUMNS[name], *([None] if name in DETECTED else []))
    ]


def find_classification_problems(o: RowOptions) -> Iterator[str]:
    """Problems with options only for classifiers or only for language models, and with labels."""
    only_classification = (*("truncate", "label_separator", "label_type", "label_names", "labels_from"),)
    is_classification = o.format == "classification"
    useless = ("missing_stop_token", "thinking_prefix") if is_classification else only_classification
    given = [flag_name(name) for name in useless if name in list_changed(o)]
    if given:
        word = "with" if is_classification else "without"
        yield f"{', '.join(given)}: no effect {word} --format classification"
    if o.label_names and o.labels_from is not None:
        yield "--label-names and --labels-from both set the labels: give only one"
    if len(set(o.label_names)) < len(o.label_names) or not all(name.strip() == name != "" for name in o.label_names):
        yield f"--label-names {' '.join(o.label_names)}: has a duplicate or blank name"
    if o.label_separator is not None and o.label_type == "single":
        yield "--label-separator has no effect with --label-type single: each row has one label"
    if o.label_names and o.label_type == "regression":
        yield "--label-names has no effect with --label-type regression"


def find_plot_problems(o: tools.PlotOptions) -> Iterator[str]:
    if not o.runs:
        yield "no run is given: give the --output-dir of one or more runs"
    if o.output is None:
        yield "no output is given: give --output page.html"
    elif Path(o.output).suffix.lower() != ".html":
        yield (
            f"--output {o.output}: must end in .html; for a picture, give the numbers of the runs' .jsonl files to a"
            " plotting library"
        )


def find_board_problems(o: tools.BoardOptions) -> Iterator[str]:
    if len(o.folder) != 1:
        yield f"{len(o.folder)} directories are given: give one, with runs in it, such as their parent"
    if not 0 <= o.port <= 65535:
        yield f"--port {o.port}: must be from 1 to 65535, or 0 for any free one"


def find_generate_problems(o: tools.GenerateOptions) -> Iterator[str]:
    yield from find_engine_problems(o.engines)
    yield from find_sampling_problems(o.sampling)
    if o.prompts and o.browser:
        yield "--prompts and --browser: answer prompts, or chat; give only one"
    if o.prompts and o.output is None:
        yield "--prompts needs --output, the file to write the answers to"
    if o.output is not None and not o.prompts:
        yield "--output has no effect without --prompts: a chat in the terminal is not saved"
    if o.output is not None and Path(o.output).suffix != ".jsonl":
        yield f"--output {o.output}: must end in .jsonl"
    if not o.prompts and o.sampling.num_samples != 1:
        yield "--num-samples has no effect in a chat"
    if o.engines.engine == "openai" and (o.adapter is not None or o.model_revision is not None or o.trust_remote_code):
        yield "--adapter, --model-revision, --trust-remote-code: no effect with --engine openai"


def find_engine_problems(o: tools.EngineOptions) -> Iterator[str]:
    """Problems with engine options: for a different engine than the chosen one, or out of range."""
    try:
        parse_named_values(o.engine_args)
    except ValueError as error:
        yield f"--engine-args: {error}"
    if o.engine == "openai" and o.base_url is None:
        yield "--engine openai needs --base-url, such as http://localhost:8000/v1"
    if o.base_url is not None and not is_address(o.base_url):
        yield (
            "--base-url: expected http:// or https://, a host, and no query (?...), which the client would not send:"
            " put keys in the environment variable that --api-key-env names"
        )
    is_named = o.api_key_env != tools.EngineOptions.api_key_env
    if o.engine == "openai" and is_named and o.api_key_env not in os.environ:  # it may be the key itself
        yield "--api-key-env: the environment has no such variable; give a variable's name, not the key"


def is_address(text: str) -> bool:
    """Whether `text` is a server's URL without parts that the client would drop."""
    if any(map(str.isspace, text)):
        return False
    try:
        parts = urlsplit(text)
        parts.port  # noqa: B018  (ValueError if it is not a number)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)


def find_sampling_problems(o: tools.SamplingOptions) -> Iterator[str]:
    """Problems with sampling options: out of range, or without effect on greedy decoding."""
    if o.temperature == 0 and (o.top_p is not None or o.top_k is not None or o.num_samples > 1 or o.seed != 0):
        yield "--top-p, --top-k, --seed and --num-samples have no effect at --temperature 0, which decodes greedily"


def find_evaluate_problems(o: tools.EvaluateOptions) -> Iterator[str]:
    yield from find_engine_problems(o.engines)
    yield from find_sampling_problems(o.sampling)
    if not o.model:
        yield "no model is given: name one or more models or runs first"
    if not (o.data or o.task or o.lm_eval):
        yield "nothing to evaluate on: give --data, --task or --lm-eval"
    if len(set(o.model)) < len(o.model):
        yield "--model: a model is given twice"
    if o.sampling.num_samples != 1:
        yield "--num-samples has no effect: one answer per prompt is evaluated"
    if o.engines.engine != "hf" and (o.data or o.lm_eval):
        yield f"--data and --lm-eval need --engine hf, not {o.engines.engine}"


def find_score_problems(o: tools.ScoreDataOptions) -> Iterator[str]:
    if not o.data_path:
        yield "no data is given: give tokenized data sets with --data-path"
    if len(set(o.data_path)) < len(o.data_path):
        yield "--data-path: a data set is given twice"
    if o.teacher_data and len(o.teacher_data) != len(o.data_path):
        yield f"--teacher-data: {len(o.teacher_data)} for {len(o.data_path)} data sets of --data-path"
    if not o.name or not all(letter.isalnum() or letter in "-_" for letter in o.name):
        yield f"--name {o.name!r}: may have only letters, digits, - and _, as it becomes part of a file name"


def find_continual_problems(o: tools.ContinualOptions) -> Iterator[str]:
    if not o.compare:
        if len(o.paths) != 1:
            yield f"{len(o.paths)} files are given, allowed: one YAML file; --compare takes output directories"
        return
    if o.output_dir is not None:
        yield "--output-dir has no effect with --compare: give --output"
    if not o.paths:
        yield "--compare: no output directory of an experiment is given"
    if o.output is not None and Path(o.output).suffix != ".html":
        yield f"--output {o.output}: must end in .html"
