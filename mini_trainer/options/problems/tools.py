"""Problems with the options of rows and their tokenization, and of the programs other than train.py."""

import os
from pathlib import Path
from urllib.parse import urlsplit

from mini_trainer.options import RowOptions, flag_name, parse_named_values, parse_shard, tools
from mini_trainer.options.problems.choices import find_unpaired
from mini_trainer.options.problems.finding import list_changed, list_row_sources
from mini_trainer.options.urls import hide_credentials, is_url


def find_data_problems(o: tools.ProcessDataOptions) -> list[str]:
    """Problems with the options of process_data.py."""
    problems = []
    if Path(o.output_file).suffix not in (".arrow", ".parquet", ".jsonl"):
        problems.append(f"--output-file {o.output_file}: must end in .arrow, .parquet or .jsonl")
    if is_url(o.output_file):
        problems.append(
            f"--output-file {hide_credentials(o.output_file)}: must be a local path: write it here, and copy it with"
            " the files next to it that begin with its name"
        )
    if o.preview_html is not None and is_url(o.preview_html):
        problems.append(f"--preview-html {o.preview_html}: must be a local path")
    if not list_row_sources(o.rows):
        problems.append("no rows are given: give --input-file or --input-dataset")
    problems += [*find_row_problems(o.rows), *find_content_problems(o)]
    if o.shard is not None:
        try:
            parse_shard(o.shard)
            problems += ["--shard has no effect with --join, which joins all parts"] if o.join else []
        except ValueError as error:
            problems.append(f"--shard {error}")
    if o.string_for_printing_masks is not None and o.preview == 0:
        problems.append("--string-for-printing-masks has no effect with --preview 0")
    if o.string_for_printing_masks is not None and o.rows.format == "classification":
        problems.append("--string-for-printing-masks: no effect with --format classification")
    return problems


def find_content_problems(o: tools.ProcessDataOptions) -> list[str]:
    """Problems with the options of `ContentOptions`."""
    given = [flag_name(name) for name in list_changed(o.contents)]
    if given and (o.rows.mock_data is not None or o.rows.format == "classification"):
        return [f"{', '.join(given)}: no effect on random and labelled rows"]
    problems = []
    try:
        parse_named_values(o.contents.template_args)
    except ValueError as error:
        problems.append(f"--template-args: {error}")
    return problems


def find_row_problems(o: RowOptions) -> list[str]:
    """Problems with row options: values out of range, options without effect, and several row sources."""
    problems, given = [], list_row_sources(o)
    if len(given) > 1:
        problems.append(f"{' and '.join(given)} both specify rows: give only one of them")
    if o.mock_data is not None:
        kept = ("mock_data", "block_size", "num_proc", "input_file", "input_dataset")
        given = [name for name in list_changed(o) if name not in kept]
        if given:
            problems.append(f"{', '.join(map(flag_name, given))}: no effect with --mock-data, which reads no rows")
        return problems
    if o.block_size is not None and o.max_sample_num_tokens is not None:
        problems.append("--max-sample-num-tokens has no effect with --block-size, which sets the length of samples")
    if o.block_size is not None and o.format not in (None, "messages", "document"):
        problems.append(f"--block-size has no effect with --format {o.format}: it cuts documents")
    if o.images and o.format == "classification":
        problems.append("--images has no effect with --format classification: classifiers do not support images")
    if o.images and o.format in ("preference", "feedback"):
        problems.append(f"--images cannot be used with --format {o.format}, which does not support images")
    if o.feedback_from_pairs and o.format != "preference":
        problems.append("--feedback-from-pairs: no effect without --format preference")
    if o.images and any(map(is_url, o.input_file)):
        problems.append("--images: image paths are relative to the rows' files, which therefore have to be local")
    if o.images and o.input_dataset is not None:
        problems.append("--images: image paths are relative to the rows' files: give these with --input-file")
    return [*problems, *find_column_problems(o), *find_classification_problems(o)]


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
    formats = FORMATS_OF_COLUMNS
    given = [name for column in o.columns if (name := column.partition("=")[0]) in formats]
    if len(set(given)) < len(given):
        return [f"--columns {' '.join(o.columns)}: a name is given twice"]
    if given and not set.intersection(*(set(formats[name]) for name in given)):
        return [f"--columns {' '.join(o.columns)}: are for different formats, but rows have one"]
    return [
        f"--columns {name}= has no effect {f'with --format {o.format}' if o.format else 'without --format'}, only with"
        f" {' and '.join(formats[name])}"
        for name in given
        if o.format not in (*formats[name], *([None] if name in DETECTED else []))
    ]


def find_classification_problems(o: RowOptions) -> list[str]:
    """Problems with options only for classifiers or only for language models, and with labels."""
    only_classification = (*("truncate", "label_separator", "label_type", "label_names", "labels_from"),)
    is_classification = o.format == "classification"
    useless = ("missing_stop_token", "thinking_prefix") if is_classification else only_classification
    given = [flag_name(name) for name in useless if name in list_changed(o)]
    problems = []
    if given:
        word = "with" if is_classification else "without"
        problems.append(f"{', '.join(given)}: no effect {word} --format classification")
    if o.label_names and o.labels_from is not None:
        problems.append("--label-names and --labels-from both set the labels: give only one")
    if len(set(o.label_names)) < len(o.label_names) or not all(name.strip() == name != "" for name in o.label_names):
        problems.append(f"--label-names {' '.join(o.label_names)}: has a duplicate or blank name")
    if o.label_separator is not None and o.label_type == "single":
        problems.append("--label-separator has no effect with --label-type single: each row has one label")
    if o.label_names and o.label_type == "regression":
        problems.append("--label-names has no effect with --label-type regression")
    return problems


def find_plot_problems(o: tools.PlotOptions) -> list[str]:
    """Problems with the options of mini-trainer plot-metrics."""
    problems = [] if o.runs else ["no run is given: give the --output-dir of one or more runs"]
    if o.output is None:
        problems.append("no output is given: give --output page.html")
    elif Path(o.output).suffix.lower() != ".html":
        problems.append(
            f"--output {o.output}: must end in .html; for a picture, give the numbers of the runs' .jsonl files to a"
            " plotting library"
        )
    return problems


def find_board_problems(o: tools.BoardOptions) -> list[str]:
    """Problems with the options of mini-trainer board."""
    given = len(o.folder)
    problems = [] if given == 1 else [f"{given} directories are given: give one, with runs in it, such as their parent"]
    if not 0 <= o.port <= 65535:
        problems.append(f"--port {o.port}: must be from 1 to 65535, or 0 for any free one")
    return problems


def find_generate_problems(o: tools.GenerateOptions) -> list[str]:
    """Problems with the options of generate.py."""
    problems = [*find_engine_problems(o.engines), *find_sampling_problems(o.sampling)]
    if o.prompts and o.output is None:
        problems.append("--prompts needs --output, the file to write the answers to")
    if o.output is not None and not o.prompts:
        problems.append("--output has no effect without --prompts: a chat in the terminal is not saved")
    if o.output is not None and Path(o.output).suffix != ".jsonl":
        problems.append(f"--output {o.output}: must end in .jsonl")
    if not o.prompts and o.sampling.num_samples != 1:
        problems.append("--num-samples has no effect in a chat")
    if o.engines.engine == "openai" and (o.adapter is not None or o.model_revision is not None or o.trust_remote_code):
        problems.append("--adapter, --model-revision, --trust-remote-code: no effect with --engine openai")
    return problems


def find_engine_problems(o: tools.EngineOptions) -> list[str]:
    """Problems with engine options: for a different engine than the chosen one, or out of range."""
    problems = []
    try:
        parse_named_values(o.engine_args)
    except ValueError as error:
        problems.append(f"--engine-args: {error}")
    if o.engine == "openai" and o.base_url is None:
        problems.append("--engine openai needs --base-url, such as http://localhost:8000/v1")
    if o.base_url is not None and not is_address(o.base_url):
        problems.append(
            "--base-url: expected http:// or https://, a host, and no query (?...), which the client would not send:"
            " put keys in the environment variable that --api-key-env names"
        )
    is_named = o.api_key_env != tools.EngineOptions.api_key_env
    if o.engine == "openai" and is_named and o.api_key_env not in os.environ:  # it may be the key itself
        problems.append("--api-key-env: the environment has no such variable; give a variable's name, not the key")
    return problems


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


def find_sampling_problems(o: tools.SamplingOptions) -> list[str]:
    """Problems with sampling options: out of range, or without effect on greedy decoding."""
    if o.temperature == 0 and (o.top_p is not None or o.top_k is not None or o.num_samples > 1 or o.seed != 0):
        return ["--top-p, --top-k, --seed and --num-samples have no effect at --temperature 0, which decodes greedily"]
    return []


def find_evaluate_problems(o: tools.EvaluateOptions) -> list[str]:
    """Problems with the options of evaluate_model.py."""
    problems = [*find_engine_problems(o.engines), *find_sampling_problems(o.sampling)]
    if not o.model and o.run is None:
        problems.append("no model is given: give models with --model, or a run with --run")
    if not (o.data or o.task or o.lm_eval):
        problems.append("nothing to evaluate on: give --data, --task or --lm-eval")
    if len(set(o.model)) < len(o.model):
        problems.append("--model: a model is given twice")
    if o.sampling.num_samples != 1:
        problems.append("--num-samples has no effect: one answer per prompt is evaluated")
    if o.engines.engine != "hf" and (o.data or o.lm_eval):
        problems.append(f"--data and --lm-eval need --engine hf, not {o.engines.engine}")
    return problems


def find_score_problems(o: tools.ScoreDataOptions) -> list[str]:
    """Problems with the options of mini-trainer score-data."""
    problems = [] if o.data_path else ["no data is given: give tokenized data sets with --data-path"]
    if len(set(o.data_path)) < len(o.data_path):
        problems.append("--data-path: a data set is given twice")
    problems += find_unpaired(o.teacher_data, len(o.data_path))
    if not o.name or not all(letter.isalnum() or letter in "-_" for letter in o.name):
        problems.append(f"--name {o.name!r}: may have only letters, digits, - and _, as it becomes part of a file name")
    server = {"base_url": o.base_url, "api_key_env": o.api_key_env, "concurrency": o.concurrency}
    engine = tools.EngineOptions(engine=o.engine, **server)
    problems += find_engine_problems(engine)
    if o.engine == "openai" and o.temperature != 1:
        problems.append(f"--temperature {o.temperature}: a server's log-probabilities are those at temperature 1")
    return problems


def find_continual_problems(o: tools.ContinualOptions) -> list[str]:
    """Problems with the options of mini-trainer continual."""
    if o.compare:
        problems = ["--output-dir has no effect with --compare: give --output"] if o.output_dir is not None else []
        if not o.paths:
            problems.append("--compare: no output directory of an experiment is given")
        if o.output is not None and Path(o.output).suffix != ".html":
            problems.append(f"--output {o.output}: must end in .html")
        return problems
    if len(o.paths) != 1:
        return [f"{len(o.paths)} files are given, allowed: one YAML file; --compare takes output directories"]
    return []
