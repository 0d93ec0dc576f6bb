"""Options of the programs other than train.py."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_origin

from mini_trainer.options.data import DATA_CACHE_DIR, RowOptions
from mini_trainer.options.doors import DOUBTS, DTYPES, ENGINES, TEXT_FORMATS, TRAINERS
from mini_trainer.options.fields import flag_name, list_types, option, parse_shard

OF_SERVER = ("engine", ("openai",))

# Options that several programs share, listed after a program's own. `first_word`: the option whose value needs no flag.


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """An option file."""

    config: str | None = None
    """YAML file with any of these options; flags override it."""


@dataclass(frozen=True, kw_only=True)
class ReadingOptions:
    """Models, and whether their files are trusted."""

    model_revision: str | None = None
    """Branch, tag or commit of a model on the hub. Default: its main branch."""
    trust_remote_code: bool = False
    """Run code that comes with the model; for a model on the hub only with a commit as --model-revision."""
    skip_verification: bool = False
    """Use models and data sets without comparing their files to the hashes recorded when they were written."""


@dataclass(frozen=True, kw_only=True)
class ContentOptions:
    """Treatment of rows' texts (docs/reference/data.md); process_data.py alone has these options."""

    refuse: tuple[Literal[*DOUBTS], ...] = ()
    """Doubtful rows that are invalid, instead of counted: answers of which the chat template leaves out words, that end
    within their reasoning, or with tags that do not pair; calls that tools lack or without tools; results before calls;
    tools also in the system message; the template's markers in texts; null arguments (docs/reference/data.md)."""
    template_args: tuple[str, ...] = ()
    """Arguments of the chat template, as NAME=VALUE with a JSON value or a text: enable_thinking=false. A row's own
    chat_template_kwargs override them. Use the same for inference. date=YYYY-MM-DD: in place of today."""


@dataclass(frozen=True, kw_only=True)
class ProcessDataOptions:
    """Tokenize chats, completions, documents or labelled texts; of chats, only the assistant's turns are trained on."""

    first: ClassVar = (
        *("input_file", "output_file", "model_name_or_path", "format", "chat_template", "validation_share"),
        *("max_sample_num_tokens", "skip_invalid", "preview", "preview_html", "num_proc"),
    )

    output_file: str
    """Tokenized data set to write: .arrow, .parquet or .jsonl."""
    model_name_or_path: str
    """Model or tokenizer directory or hub name, for its tokenizer and chat template."""
    model_revision: str | None = None
    """Branch, tag or commit of a model on the hub. Default: its main branch."""
    trust_remote_code: bool = False
    """Run code that comes with the model; for a model on the hub only with a commit as --model-revision."""
    config: tuple[str, ...] = ()
    """YAML files with any of these options; later files override earlier ones, and flags override all. ${NAME} in a
    value is an environment variable: HOME, USER, SCRATCH, TMPDIR or SLURM_*."""
    preview: int = option(2, at_least=0)
    """Number of samples to print at the end, with trained tokens in colour, or in brackets without a terminal."""
    preview_html: str | None = None
    """HTML page to write, with the report and samples to browse."""
    string_for_printing_masks: str | None = None
    """Text to print for each run of masked tokens, instead of the tokens."""
    shard: str | None = option(None, parse=parse_shard)
    """Make only part I of N (3/8) of the output; the process that makes the last part joins them. Under torchrun or
    srun each process makes one part by default; 1/1 makes everything."""
    join: bool = False
    """Only join the parts that --shard made; all other options must be the same."""
    rows: RowOptions = field(default_factory=RowOptions)
    contents: ContentOptions = field(default_factory=ContentOptions)


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Inference engine."""

    engine: Literal[*ENGINES] = "hf"
    """hf: transformers; vllm: the package (pip install vllm); openai: a server with an OpenAI-compatible API, such as
    those of vLLM, SGLang or llama.cpp."""
    dtype: Literal["auto", *DTYPES] = option("auto", only_with=("engine", ("hf", "vllm")))
    """Data type of computation; auto: the stored weights' data type."""
    engine_args: tuple[str, ...] = option((), only_with=("engine", ("vllm",)))
    """vllm: arguments of its engine, as NAME=VALUE by vLLM's own names, with a JSON value or a text:
    tensor_parallel_size=4 max_model_len=8192 quantization=fp8."""
    batch_size: int = option(32, at_least=1, only_with=("engine", ("hf",)))
    """hf: maximum number of prompts in a batch."""
    base_url: str | None = option(None, only_with=OF_SERVER)
    """openai: URL of the server, such as http://localhost:8000/v1."""
    api_key_env: str = option("OPENAI_API_KEY", only_with=OF_SERVER)
    """openai: environment variable with the API key; self-hosted servers often need none."""
    concurrency: int = option(16, at_least=1, only_with=OF_SERVER)
    """openai: number of concurrent requests."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Sampling."""

    max_new_tokens: int = option(512, at_least=1)
    """Maximum number of tokens in an answer."""
    temperature: float = option(0.0, at_least=0)
    """Sampling temperature; 0: greedy decoding."""
    top_p: float | None = option(None, above=0, at_most=1)
    """Nucleus sampling: sample from the most probable tokens with this total probability."""
    top_k: int | None = option(None, at_least=1)
    """Sample from this many of the most probable tokens."""
    num_samples: int = option(1, at_least=1)
    """Number of answers per prompt."""
    seed: int = 0
    """Random seed. An answer depends on it, on the prompt's index and on its own number, not on the rest of its
    batch."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(ConfigOptions, ReadingOptions):
    """Generate from a model: prompts from files, or a chat in the terminal."""

    first_word: ClassVar = "model"
    model: str
    """Directory of a model, an export, an adapter or a run, or a name on the hub; openai: its name on the server."""
    adapter: str | None = None
    """Directory of a LoRA adapter for the model, in peft's format."""
    prompts: tuple[str, ...] = ()
    """Files or directories of prompts: rows as process_data.py reads them, or lines of text (.txt). Default: a chat in
    the terminal."""
    output: str | None = None
    """File for the answers: .jsonl."""
    browser: bool = False
    """Chat on a page in the browser, which this machine alone can open (pip install gradio)."""
    port: int = option(7860, at_least=1, at_most=65535, needs="browser")
    """Port of the page."""
    format: Literal[*TEXT_FORMATS] | None = option(None, needs="prompts")
    """Format of the rows. Default: detected for each row."""
    engines: EngineOptions = field(default_factory=EngineOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(ConfigOptions, ReadingOptions):
    """Evaluate models side by side: losses on tokenized sets, answers to tasks, EleutherAI's harness."""

    first_word: ClassVar = "model"
    model: tuple[str, ...] = ()
    """Directories of models, exports, adapters or runs, or names on the hub; the first is the baseline."""
    output_dir: str
    """Directory for results.json, each model's samples, and the page. Existing results are reused."""
    data: tuple[str, ...] = ()
    """Tokenized data sets written by process_data.py, or URLs of these: loss, perplexity and token accuracy; for
    classifiers macro F1, accuracy and loss."""
    data_cache_dir: str = DATA_CACHE_DIR
    """Cache directory for copies of data sets at URLs."""
    task: tuple[str, ...] = ()
    """Files of prompts with references: the last answer of a chat, a completion, or an answer."""
    lm_eval: tuple[str, ...] = ()
    """Tasks of EleutherAI's harness, by name or YAML file (pip install lm_eval)."""
    metrics: tuple[str, ...] = option((), needs="task")
    """Metrics of the answers: exact_match, first_line, normalised_match, contains, number, token_f1, label, rouge_1,
    rouge_2, rouge_l, bleu, chrf, edit_similarity. Default: those that suit the references."""
    format: Literal[*TEXT_FORMATS] | None = option(None, needs="task")
    """Format of the tasks' rows. Default: detected for each row."""
    max_tokens_per_gpu: int = option(8192, at_least=1)
    """Maximum number of tokens in a micro-batch of --data."""
    num_resamples: int = option(10_000, at_least=100)
    """Number of resamples of bootstrap intervals and permutation tests."""
    engines: EngineOptions = field(default_factory=EngineOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)


@dataclass(frozen=True, kw_only=True)
class DrawSamplesOptions(ConfigOptions, ReadingOptions):
    """Draw samples from a model, at temperature 1 and with nothing asked: what it knows, for train --keep self."""

    first_word: ClassVar = "model_name_or_path"
    model_name_or_path: str
    """Directory of a model, an export or a run, or a name on the hub."""
    output_file: str | None = None
    """File for the samples, a data set: .jsonl. Default: in the cache, where train --keep self finds those that were
    drawn with the defaults."""
    num_samples: int = option(256, at_least=1)
    """Number of samples: chats, with and without the system line of the model's chat template, and texts."""
    max_new_tokens: int = option(128, at_least=2)
    """Maximum number of tokens of a turn, or of a text."""
    seed: int = 0
    """Random seed. A sample depends on it and its own number, not on the rest of its batch."""
    batch_size: int = option(64, at_least=1)
    """Maximum number of samples drawn at once."""
    dtype: Literal["auto", *DTYPES] = "auto"
    """Data type of computation; auto: the stored weights' data type."""
    data_cache_dir: str = DATA_CACHE_DIR
    """Cache directory, as of train."""


@dataclass(frozen=True, kw_only=True)
class ScoreDataOptions(ConfigOptions, ReadingOptions):
    """Score tokenized data sets with a model: a teacher's most probable tokens."""

    first_word: ClassVar = "model_name_or_path"
    model_name_or_path: str
    """Directory of a model, an export, an adapter or a run, or a name on the hub."""
    data_path: tuple[str, ...] = ()
    """Tokenized data sets written by process_data.py, or URLs of these. The scores are written next to each data set,
    or next to its local copy, to DATA.NAME.scores."""
    data_cache_dir: str = DATA_CACHE_DIR
    """Cache directory for copies of data sets at URLs."""
    teacher_data: tuple[str, ...] = ()
    """Data sets that the teacher reads instead, one for each --data-path: rows with the same trained tokens after other
    prompts."""
    name: str = "teacher"
    """Name of the scores: train.py --teacher-scores."""
    top_k: int = option(32, at_least=1, at_most=256)
    """Number of most probable tokens to keep for each position, 1 to 256."""
    temperature: float = option(1.0, above=0)
    """Temperature of the distributions: train.py --teacher-temperature."""
    max_tokens_per_gpu: int = option(8192, at_least=1)
    """Maximum number of tokens in a micro-batch."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of computation; auto: bfloat16 on a GPU, float32 on the CPU."""


@dataclass(frozen=True, kw_only=True)
class ExportRunOptions:
    """Export a model from the newest checkpoint of a run that was stopped."""

    first_word: ClassVar = "run"
    run: str
    """Output directory of train.py."""
    trust_remote_code: bool = False
    """Run code that comes with the model, if the run did."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(ReadingOptions):
    """Serve a model on this machine, with an OpenAI-compatible API."""

    first_word: ClassVar = "model"
    model: str
    """Directory of a model, an export, an adapter (with vLLM) or a run, or a name on the hub."""
    adapter: str | None = None
    """Directory of a LoRA adapter for the model, in peft's format."""
    engine: Literal["hf", "vllm"] | None = None
    """Server: vllm serve (pip install vllm), or hf for transformers serve (pip install "transformers[serving]").
    Default: vllm if it is installed."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0: the whole network. Anyone who reaches it can use the model, unless the environment
    variable MINI_TRAINER_API_KEY has a key, which clients then have to send."""
    port: int = option(8000, at_least=1, at_most=65535)
    """Port to listen on."""
    allowed_hosts: tuple[str, ...] = ()
    """Names by which clients may reach transformers serve, as in a request's Host header, without the port. Default:
    localhost, 127.0.0.1 and [::1] on a loopback address, and any name elsewhere."""
    dtype: Literal["auto", *DTYPES] = "auto"
    """Data type of computation; auto: the stored weights' data type."""
    engine_args: tuple[str, ...] = ()
    """Further arguments of the server, as NAME=VALUE by its own names: max_model_len=8192."""
    trust_remote_code: bool = False
    """Run code that comes with the model, in vLLM only; for a model on the hub only with a commit as
    --model-revision."""


@dataclass(frozen=True, kw_only=True)
class MergeAdapterOptions(ReadingOptions):
    """Merge a LoRA adapter into its base model's weights."""

    first_word: ClassVar = "adapter"
    adapter: str
    """Directory of the adapter, in peft's format, or of a run with --lora."""
    output_dir: str
    """Output directory, which must not exist."""
    model_name_or_path: str | None = None
    """The adapter's base model. Default: the one named in its config."""
    model_revision: str | None = None
    """Branch, tag or commit of a model on the hub. Default: the adapter's, or the main branch."""
    config: tuple[str, ...] = ()
    """YAML files with any of these options; later files override earlier ones, and flags override all. ${NAME} in a
    value is an environment variable: HOME, USER, SCRATCH, TMPDIR or SLURM_*."""
    export_dtype: Literal[*DTYPES] = "bfloat16"
    """Data type of the merged weights."""


@dataclass(frozen=True, kw_only=True)
class ExportGgufOptions(ConfigOptions):
    """Write a model as one GGUF file for llama.cpp, Ollama and LM Studio."""

    first_word: ClassVar = "model_name_or_path"
    model_name_or_path: str
    """Directory of a run, an export, or any other model in the Hugging Face format."""
    output: str
    """File to write (.gguf), which must not exist. Its name without the ending is the model's name."""
    dtype: Literal["bf16", "f16", "f32", "q8_0"] = "bf16"
    """Data type of the matrices. q8_0: 8 bits, in blocks of 32. For smaller types, run llama.cpp's llama-quantize on
    the output."""
    modelfile: bool = False
    """Also write a Modelfile for `ollama create` into the output's folder, with stop tokens and sampling defaults."""
    skip_verification: bool = False
    """Use the model without comparing its files to the hashes recorded when they were written."""


@dataclass(frozen=True, kw_only=True)
class ImportConfigOptions:
    """Convert another trainer's configuration to files for process_data.py and train.py."""

    first_word: ClassVar = "config_file"
    config_file: str
    """YAML file of Axolotl, LLaMA-Factory or TRL."""
    output_dir: str = "."
    """Directory for data.yaml and train.yaml."""
    num_gpus: int = option(1, at_least=1)
    """Number of GPUs, to convert samples per GPU to samples per step."""
    trainer: Literal[*TRAINERS] | None = None
    """Trainer that the file is for; trl is its SFT trainer. Default: detected from its keys."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Compare stored files to the hashes recorded when they were written, or a reader's answers to the trainer's."""

    first_word: ClassVar = "path"
    path: tuple[str, ...]
    """Data sets, scores, exports, checkpoints, runs, or directories that contain any of these."""
    against: str | None = None
    """Compares what the run recorded that an export answers with what transformers, vllm, llama.cpp, a file made of it
    (.gguf) or a server (http://HOST:PORT/v1) answers."""


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """Plot the curves of several training runs as an HTML page."""

    first_word: ClassVar = "runs"
    runs: tuple[str, ...]
    """Output directories of train.py, of finished or running runs."""
    output: str | None = None
    """File to write: a self-contained page, .html."""


@dataclass(frozen=True, kw_only=True)
class BoardOptions:
    """Serve a live table of all runs in a directory, and their curves, on this machine, until Ctrl-C."""

    first_word: ClassVar = "folder"
    folder: tuple[str, ...]
    """A directory with output directories of train.py, at any depth."""
    port: int = 8766
    """Port of the page, 0 for any free one."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions:
    """Search hyperparameters: train with different options, and rank them by validation (docs/reference/sweeps.md)."""

    first_word: ClassVar = "config_file"
    config_file: str
    """YAML file of the sweep."""
    output_dir: str | None = None
    """Output directory. Default: the file's output_dir."""
    print_command: bool = False
    """Print the command of each trial, and exit."""
    task: str | None = None
    """Run one of N shares of the trials, I/N, as a task of an array job (docs/reference/sweeps.md). Default: all of
    them; under srun with several tasks, each runs its share."""


@dataclass(frozen=True, kw_only=True)
class ContinualOptions:
    """Train on tasks one after the other, and measure what is learned and forgotten (docs/tasks/continual.md)."""

    first_word: ClassVar = "paths"
    paths: tuple[str, ...]
    """YAML file of the tasks; with --compare, output directories of experiments."""
    output_dir: str | None = None
    """Output directory. Default: the file's output_dir."""
    compare: bool = False
    """Compare experiments with the same tasks, instead of running one."""
    output: str | None = option(None, needs="compare")
    """--compare only: page to write (.html), in addition to the tables."""


def name_first_word(words: list[str], options_class: type) -> list[str]:
    """The words with the flag of the program's first word before all that are no flag's values."""
    types, free, others, room = list_types(options_class), [], [], 0
    for word in words:
        if word.startswith("--"):
            flag, equals, _ = word.partition("=")
            kind = types.get(flag.removeprefix("--").replace("-", "_"), bool if flag.startswith("--no-") else str)
            room = 0 if equals or kind is bool else len(words) if get_origin(kind) is tuple else 1
        elif room == 0:
            free.append(word)
            continue
        else:
            room -= 1
        others.append(word)
    return [flag_name(options_class.first_word), *free, *others] if free else words
