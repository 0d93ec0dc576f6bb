"""Problems with the options of the programs other than train.py and process_data.py."""

import os
from pathlib import Path
from urllib.parse import urlsplit

from mini_trainer.options import parse_named_values
from mini_trainer.options.problems.learning import find_unpaired
from mini_trainer.options.tools import (
    BoardOptions,
    ContinualOptions,
    EngineOptions,
    EvaluateOptions,
    GenerateOptions,
    PlotOptions,
    SamplingOptions,
    ScoreDataOptions,
)


def find_plot_problems(o: PlotOptions) -> list[str]:
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


def find_board_problems(o: BoardOptions) -> list[str]:
    """Problems with the options of mini-trainer board."""
    given = len(o.folder)
    problems = [] if given == 1 else [f"{given} directories are given: give one, with runs in it, such as their parent"]
    if not 0 <= o.port <= 65535:
        problems.append(f"--port {o.port}: must be from 1 to 65535, or 0 for any free one")
    return problems


def find_generate_problems(o: GenerateOptions) -> list[str]:
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


def find_engine_problems(o: EngineOptions) -> list[str]:
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
    is_named = o.api_key_env != EngineOptions.api_key_env
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


def find_sampling_problems(o: SamplingOptions) -> list[str]:
    """Problems with sampling options: out of range, or without effect on greedy decoding."""
    if o.temperature == 0 and (o.top_p is not None or o.top_k is not None or o.num_samples > 1 or o.seed != 0):
        return ["--top-p, --top-k, --seed and --num-samples have no effect at --temperature 0, which decodes greedily"]
    return []


def find_evaluate_problems(o: EvaluateOptions) -> list[str]:
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


def find_score_problems(o: ScoreDataOptions) -> list[str]:
    """Problems with the options of mini-trainer score-data."""
    problems = [] if o.data_path else ["no data is given: give tokenized data sets with --data-path"]
    if len(set(o.data_path)) < len(o.data_path):
        problems.append("--data-path: a data set is given twice")
    problems += find_unpaired(o.teacher_data, len(o.data_path))
    if not o.name or not all(letter.isalnum() or letter in "-_" for letter in o.name):
        problems.append(f"--name {o.name!r}: may have only letters, digits, - and _, as it becomes part of a file name")
    server = {"base_url": o.base_url, "api_key_env": o.api_key_env, "concurrency": o.concurrency}
    engine = EngineOptions(engine=o.engine, **server)
    problems += find_engine_problems(engine)
    if o.engine == "openai" and o.temperature != 1:
        problems.append(f"--temperature {o.temperature}: a server's log-probabilities are those at temperature 1")
    return problems


def find_continual_problems(o: ContinualOptions) -> list[str]:
    """Problems with the options of mini-trainer continual."""
    if o.compare:
        problems = ["--output-dir has no effect with --compare: give --output"] if o.output_dir is not None else []
        problems += ["--allow-env has no effect with --compare"] if o.allow_env else []
        if not o.paths:
            problems.append("--compare: no output directory of an experiment is given")
        if o.output is not None and Path(o.output).suffix != ".html":
            problems.append(f"--output {o.output}: must end in .html")
        return problems
    if len(o.paths) != 1:
        return [f"{len(o.paths)} files are given, allowed: one YAML file; --compare takes output directories"]
    return []
