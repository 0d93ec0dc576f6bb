"""The options of the programs beside training."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What computes the answers."""

    engine: Literal["hf", "vllm", "openai"] = "hf"
    """hf: transformers, on this machine; vllm: the package of that name (pip install vllm); openai: a server that
    speaks its protocol, such as those of vLLM, SGLang or llama.cpp."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Data type to compute in; auto: the one that the weights are stored in."""
    batch_size: int = 32
    """hf: the most prompts that are answered at once."""
    base_url: str | None = None
    """openai: address of the server, such as http://localhost:8000/v1."""
    api_key_env: str = "OPENAI_API_KEY"
    """openai: environment variable that holds the key; servers of one's own often need none."""
    concurrency: int = 16
    """openai: requests that are under way at once."""


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How an answer's tokens are chosen."""

    max_new_tokens: int = 512
    """Longest answer, in tokens."""
    temperature: float = 0.0
    """0: always the likeliest token; above, drawn at random, the more so the higher."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together have this share of the probability."""
    top_k: int | None = None
    """Draw from this many of the likeliest tokens."""
    num_samples: int = 1
    """Answers to each prompt."""
    seed: int = 0
    """Seed of what is drawn. An answer depends on it, on the prompt's place and on its own number, not on what else is
    in its batch."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Ask a model: prompts from files, or a chat in the terminal."""

    model: str
    """Directory of a model, an export or an adapter, or a name on the hub; openai: the model's name at the server."""
    adapter: str | None = None
    """Directory of a LoRA adapter to put onto the model, as peft writes it."""
    model_revision: str | None = None
    """Of a model on the hub: branch, tag or commit; its main branch if not given."""
    trust_remote_code: bool = False
    """Run the code that the model brings along. Of a model on the hub only with the commit as --model-revision."""
    prompts: tuple[str, ...] = ()
    """Files or directories of prompts: rows as process_data.py reads them, or lines of text (.txt). None: a chat in
    the terminal."""
    output: str | None = None
    """File to write the answers to: .jsonl."""
    format: Literal["messages", "sharegpt", "alpaca", "completion", "document"] | None = None
    """What the rows of every file are; None: each row shows it."""
    config: str | None = None
    """YAML file with any of these options; flags win over it."""
    engines: EngineOptions = field(default_factory=EngineOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Measure models, one beside the other: losses on tokenized sets, answers to tasks, EleutherAI's harness."""

    output_dir: str
    """Directory for results.json, the samples of each model, and the page. What is there already is not computed
    again."""
    model: tuple[str, ...] = ()
    """Directories of models, exports or adapters, or names on the hub; the first is what others are compared with."""
    run: str | None = None
    """Output directory of train.py: all its exports, beside the models of --model."""
    data: tuple[str, ...] = ()
    """Tokenized data sets written by process_data.py: loss, perplexity and token accuracy; of classifiers macro F1,
    accuracy and loss."""
    task: tuple[str, ...] = ()
    """Files of prompts with references: the last answer of a chat, completion, answer, or choices with the right
    one's number."""
    lm_eval: tuple[str, ...] = ()
    """Tasks of EleutherAI's harness, by name or YAML file (pip install lm_eval)."""
    metrics: tuple[str, ...] = ()
    """Measures of the answers: exact_match, normalised_match, contains, number, token_f1, label, rouge_1, rouge_2,
    rouge_l, bleu, chrf; none: those that suit the references. Choices are always measured by their likelihood."""
    model_revision: str | None = None
    """Of a model on the hub: branch, tag or commit; its main branch if not given."""
    trust_remote_code: bool = False
    """Run the code that the models bring along. Of a model on the hub only with the commit as --model-revision."""
    format: Literal["messages", "sharegpt", "alpaca", "completion", "document"] | None = None
    """What the rows of every task are; None: each row shows it."""
    max_tokens_per_gpu: int = 8192
    """Tokens that are scored at once in --data."""
    num_resamples: int = 10_000
    """Draws of the bootstrap intervals and of the permutation tests."""
    config: str | None = None
    """YAML file with any of these options; flags win over it."""
    engines: EngineOptions = field(default_factory=EngineOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)


@dataclass(frozen=True, kw_only=True)
class MergeAdapterOptions:
    """Add a LoRA adapter to the weights of its model, and write a model like any other."""

    adapter: str
    """Directory of the adapter, as peft writes it."""
    output_dir: str
    """Directory to write, which must not be there."""
    model_name_or_path: str | None = None
    """The model that the adapter belongs to; None: the one that the adapter names."""
    model_revision: str | None = None
    """Of a model on the hub: branch, tag or commit; None: the adapter's, or the main branch."""
    trust_remote_code: bool = False
    """Run the code that the model brings along. Of a model on the hub only with the commit as --model-revision."""
    config: tuple[str, ...] = ()
    """YAML files with any of these options: of several, the later ones win, and flags win over all. ${NAME} in a value
    is the environment's."""
    export_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type of the weights that are written."""


@dataclass(frozen=True, kw_only=True)
class MergeModelsOptions:
    """Mix models of one architecture, tensor by tensor, in fp32."""

    model: tuple[str, ...]
    """Directories of two models or more; config, tokenizer and data types are the first one's."""
    output_dir: str
    """Directory to write, which must not be there."""
    weights: tuple[float, ...] = ()
    """How much each model counts. Without --base they sum to 1; none: each counts as much."""
    base: str | None = None
    """Directory of the model that the others were trained from: what is written is it, plus the weighted sum of their
    differences from it (task vectors)."""
    config: str | None = None
    """YAML file with any of these options; flags win over it."""


@dataclass(frozen=True, kw_only=True)
class ImportConfigOptions:
    """Turn another trainer's configuration into files for process_data.py and train.py."""

    config_file: str
    """Axolotl's YAML, LLaMA-Factory's, or TRL's."""
    output_dir: str = "."
    """Directory for data.yaml and train.yaml."""
    num_gpus: int = 1
    """GPUs of the run, to turn samples per GPU into samples per step."""
    tokenized_data: tuple[str, ...] = ()
    """Your data sets, written by process_data.py. Their lengths turn batches of packs into batches of samples, and
    epochs that are not whole into samples."""
    trainer: Literal["axolotl", "llama-factory", "trl"] | None = None
    """Whose the file is; None: its keys show it."""


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """Draw the curves of training runs, laid over each other: a page for a browser, or a picture for papers."""

    runs: tuple[str, ...]
    """Output directories of train.py, of runs that have ended or go on."""
    output: str | None = None
    """File to write: .html, a page that needs no network; .png, .svg or .pdf, a picture."""
    follow: bool = False
    """Serve the page to browsers of this machine until Ctrl-C, and keep it up to date while runs go on."""
    port: int | None = None
    """Port of --follow; 8765 if not given."""
    smoothing: int | None = None
    """Steps over which noisy curves are averaged, 1 for none; on the page that is where its slider stands at first. By
    default what suits the longest run."""
