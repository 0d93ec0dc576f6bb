"""Data options: rows, tokenized data sets, and the samples that a run draws."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from mini_trainer.options.doors import NAMED_FORMATS, TEXT_FORMATS, WEIGHED_BY
from mini_trainer.options.fields import option, parse_column, parse_subset
from mini_trainer.options.places import USUAL

DEFAULT_BATCH_SIZE = 128
MAX_TOKENS = 8192  # of a micro-batch, where nothing is measured
TRAINING_DATA = "training-data"  # among validation sets: the run's own
DATA_CACHE_DIR = f"{USUAL}/data"


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Training data, and how much of it each step uses."""

    data_path: tuple[str, ...] = option((), may_differ=True, names_data=True)
    """Tokenized data sets written by process_data.py: .arrow, .parquet or .jsonl; or URLs of these, which are copied to
    --data-cache-dir. For raw rows use --input-file, --input-dataset or --mock-data."""
    data_weights: tuple[float, ...] = option((), decides="numbers")
    """Relative weights of several data sets, such as 7 3. Default: their sizes, so that an epoch contains every sample
    once."""
    data_weights_by: Literal[*WEIGHED_BY] = option("samples", needs="data_weights", decides="numbers")
    """Unit of the weights: samples drawn, or their tokens."""
    batch_size: int | None = option(None, at_least=1, decides="numbers")
    """Samples per optimizer step, over all ranks. Default, without --batch-tokens: on the command line chosen by the
    number of samples (docs/tasks/learning_rate.md), else 128."""
    batch_tokens: int | None = option(None, at_least=1, decides="numbers")
    """Instead of --batch-size: tokens (trained or masked) per optimizer step, over all ranks; at least the longest
    sample's. Samples stay whole: each belongs to the step in which its first token falls."""
    max_tokens_per_gpu: int | Literal["auto"] | None = option(None, at_least=1)
    """Maximum number of tokens in a micro-batch on one rank; determines activation memory. auto: the largest value that
    fits with a margin, measured at the start. Default: auto on CUDA, 8,192 on CPUs and with --drop-overlong."""
    drop_overlong: bool = False
    """Drop and count samples longer than --max-tokens-per-gpu, instead of refusing to start."""
    seed: int = option(42, at_least=0, decides="numbers")
    """Random seed for the sample order and dropout."""
    subset: str | None = option(None, parse=parse_subset)
    """Use a random subset of each data set, validation sets included: a number of samples (10) or a share (1%)."""

    @property
    def samples_per_step(self) -> int | None:
        """Samples of every step; None if steps are counted in tokens."""
        if self.batch_tokens is not None:
            return None
        return DEFAULT_BATCH_SIZE if self.batch_size is None else self.batch_size


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Rows to tokenize: location, format, conversion to samples (docs/reference/data.md)."""

    input_file: tuple[str, ...] = option((), may_differ=True)
    """Files or directories of rows: .jsonl, .json, .csv, .tsv, .parquet or .txt, also compressed (.gz, .zst); or URLs
    of these (s3://, gs://, hf:// or https://), also with wildcards."""
    input_dataset: str | None = option(None, may_differ=True)
    """Instead of files: a data set on the hub (NAME or NAME:CONFIG), streamed, or a local folder saved by the datasets
    library."""
    split: str | None = option(None, needs="input_dataset")
    """Split of --input-dataset. Default: train."""
    revision: str | None = option(None, needs="input_dataset")
    """Branch, tag or commit of --input-dataset on the hub. Default: its main branch."""
    mock_data: int | None = option(None, at_least=1)
    """Instead of rows: this many samples of random tokens, to measure training speed, each of --block-size tokens or
    2048; with --format preference or feedback, of two sequences each."""
    format: Literal[*TEXT_FORMATS, *NAMED_FORMATS] | None = None
    """Format of the rows. Default: detected from each file's first row; the last three are never detected."""
    columns: tuple[str, ...] = option((), parse=parse_column)
    """Other names of columns or keys, as NAME=COLUMN; dots select nested ones (messages=chat.turns). NAME: messages,
    prompt, completion, system, chosen, rejected, text, text_pair or label (docs/reference/data.md)."""
    feedback_from_pairs: bool = False
    """With --format preference: write each pair as a good and a bad answer, for --objective kto."""
    ignore_columns: tuple[str, ...] = ()
    """Columns, or keys of messages (messages.KEY), to ignore although they would change the training signal, such as
    score, label or rejected. A file with such a column is refused if its format does not read the column."""
    images: bool = False
    """Rows may have images; the model's own processor determines the tokens of each (docs/reference/vision.md). Needs
    the package pillow; transformers' processors import torch if it is installed."""
    chat_template: str | None = option(None, may_differ=True)
    """Chat template to use instead of the model's: chatml, llama3, zephyr, or a Jinja file. Saved, with the tokens it
    needs, in the tokenizer directory next to the output, which training uses."""
    add_special_tokens: tuple[str, ...] = ()
    """Special tokens to add to the vocabulary; saved in the same directory."""
    missing_stop_token: Literal["refuse", "append", "allow"] = "refuse"
    """If the chat template writes no stop token after a conversation's last turn, so that fewer than half of the rows
    have a trained one: refuse the data; append and train the token that ends earlier turns, or else the tokenizer's
    eos_token; or allow it, also after every turn, so that the model may not learn to stop."""
    thinking_prefix: Literal["as-rendered", "train-as-prompted"] = "as-rendered"
    """If the template's generation prompt has text that rendered rows lack, such as <think>: as-rendered trains answers
    as the template renders rows; train-as-prompted trains the last answer of each row after the prompt's own text,
    starting with the text that closes the reasoning."""
    max_sample_num_tokens: int | None = option(None, at_least=1)
    """Drop and count samples with more tokens than this."""
    truncate: bool = option(False, needs="max_sample_num_tokens")
    """Classification: truncate and count samples longer than --max-sample-num-tokens, instead of dropping them."""
    label_separator: str | None = None
    """Classification: separator of several labels in one text, such as ; in a table."""
    label_type: Literal["single", "multi", "regression"] | None = None
    """Classification: one label, several labels, or numbers to predict. Default: inferred from the labels."""
    label_names: tuple[str, ...] = ()
    """Classification: the labels, in class order. Default: all that occur, sorted."""
    labels_from: str | None = option(None, may_differ=True)
    """Classification: tokenized data set, or its sidecar, whose labels to reuse, such as the training set's for a
    validation set."""
    block_size: int | None = option(None, at_least=3)
    """Documents: cut their stream into blocks of this many tokens. --mock-data: tokens of a sample."""
    validation_share: float | None = option(None, above=0, below=1)
    """Write about this share of the rows to a second data set, OUTPUT.validation.ENDING. Which rows these are depends
    only on their content."""
    skip_invalid: bool = False
    """Skip rows that cannot be used and write them next to the output, instead of stopping."""
    num_proc: int = option(os.cpu_count() or 1, at_least=1, may_differ=True)
    """Number of tokenizing processes."""

    @property
    def document_block(self) -> int | None:
        """Tokens of the blocks that documents are cut into; None if they are not cut."""
        return self.block_size if self.mock_data is None else None

    def column(self, name: str) -> str | None:
        """The column that --columns names in place of `name`'s own."""
        return dict(map(parse_column, self.columns)).get(name)


def list_validation_data(given: Sequence[str], training: Sequence[str]) -> tuple[str, ...]:
    """The sets that a run validates on: those of --validation-data-path, with its own for `TRAINING_DATA`."""
    return tuple(dict.fromkeys(path for one in given for path in (training if one == TRAINING_DATA else [one])))


@dataclass(frozen=True, kw_only=True)
class ValidationOptions:
    """Validation on held-out data, and early stopping (docs/reference/validation.md)."""

    validation_data_path: tuple[str, ...] = option((), may_differ=True, names_data=True)
    """Tokenized validation sets, scored before the first step, after the last, and as set by the next two options;
    training-data: the run's own, whose loss says nothing about other data."""
    validate_every_steps: int | None = option(None, at_least=1)
    """Number of steps between validations."""
    validate_at_epoch: bool = False
    """Validate at the end of each epoch."""
    sample_prompts: str | None = option(None, may_differ=True)
    """File of up to 16 prompts, in the formats that generate.py reads. The model answers them at each validation,
    greedily and with at most 64 tokens, in OUTPUT_DIR/samples_0.jsonl. Each new token takes a forward pass over all
    prompts, which may have 4,096 tokens together."""
    export_best: bool = True
    """Export the model to hf_format/best whenever a validation is the best so far by --best-metric."""
    best_metric: str = "loss"
    """Metric of the best model and of early stopping: loss, perplexity or token_accuracy; for classifiers loss,
    accuracy, precision, recall, f1, f1_weighted or matthews; for regression loss, mse, mae, pearson or spearman; for
    preferences loss, rewards/accuracies or rewards/margins. METRIC:D, such as loss:0.01, counts only improvements of
    more than D."""
    early_stopping_patience: int | None = option(None, at_least=1)
    """Stop after this many validations in a row without improvement. A run that chooses its end has 2, at epochs."""

    @property
    def deciding(self) -> tuple[str, float]:
        """The metric of --best-metric, and the improvement that it has to exceed."""
        metric, _, least = self.best_metric.partition(":")
        return metric, float(least or 0)
