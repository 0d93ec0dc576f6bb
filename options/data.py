"""The options of data: rows, the data sets made from them, and what a run draws."""

import os
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What it is trained on, and how much of that at a time."""

    data_path: tuple[str, ...] = ()
    """Tokenized data sets written by process_data.py: .arrow, .parquet or .jsonl. Or give rows, by --input-file,
    --input-dataset or --mock-data."""
    data_weights: tuple[float, ...] = ()
    """Of several data sets, how much is drawn of each beside the others, such as 7 3; none: as much as they hold, so
    that an epoch has every sample once."""
    data_weights_by: Literal["samples", "tokens"] = "samples"
    """What the weights count: the samples that are drawn, or their tokens."""
    batch_size: int = 128
    """Samples per optimizer step, over all ranks."""
    max_tokens_per_gpu: int | Literal["auto"] = 8192
    """Most tokens in one micro-batch on one rank; sets the memory that activations need. auto: measured at the start,
    the largest that leaves a margin."""
    drop_overlong: bool = False
    """Drop (and count) samples longer than max-tokens-per-gpu instead of refusing to start."""
    seed: int = 42
    """Seed of the sample order and of dropout."""
    subset: str | None = None
    """Use only so many samples of each data set (10), or this share of them (1%), drawn at random; also of validation
    sets."""


@dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Rows that are tokenized: where they are, what they hold, and how they become samples (docs/data.md)."""

    input_file: tuple[str, ...] = ()
    """Files or directories of rows: .jsonl, .json, .csv, .tsv, .parquet or .txt, also compressed (.gz, .zst)."""
    input_dataset: str | None = None
    """In place of files, a data set of the hub, NAME or NAME:CONFIG, read as it comes; or a local folder of the
    datasets library."""
    split: str | None = None
    """Of --input-dataset: which of its splits; train if not given."""
    revision: str | None = None
    """Of --input-dataset on the hub: branch, tag or commit; its main branch if not given."""
    mock_data: int | None = None
    """In place of rows, this many samples of random tokens, for trying how fast a model trains."""
    mock_length: int | None = None
    """Tokens of each of them; 2048 if not given."""
    format: Literal["messages", "sharegpt", "alpaca", "completion", "document", "classification"] | None = None
    """What the rows of every file are; None: each file's first row shows it, unless they are for classification."""
    messages_field: str | None = None
    """Where a row has its messages, if not in messages: a column or key, with dots for one in another (chat.turns)."""
    prompt_field: str | None = None
    """Where a row has its prompt, if not in prompt."""
    completion_field: str | None = None
    """Where a row has its completion, if not in completion or generation."""
    text_field: str | None = None
    """The column or key of the text: of a document, or what is classified, there also the list of words or the
    chat."""
    ignore_columns: tuple[str, ...] = ()
    """Columns, or keys of messages (messages.KEY), to ignore although they change what should be learned, such as
    score, label or rejected. Otherwise a file is refused if it has such a column and its format does not read it."""
    images: bool = False
    """Rows may have images: the model's own processor says how many tokens each one is (docs/vision.md). Needs the
    package pillow; transformers' processors import torch where it is installed."""
    allow_downloads: bool = False
    """With --images: fetch those whose rows give an address; the data set holds what was fetched."""
    chat_template: str | None = None
    """Template to use instead of the model's: chatml, llama3, zephyr, or a Jinja file. Saved, with the tokens it
    needs, in the tokenizer directory beside the output, which training uses."""
    add_special_tokens: tuple[str, ...] = ()
    """Special tokens to add to the vocabulary; saved in the same directory."""
    allow_missing_stop_token: bool = False
    """Train even if fewer than half of the rows train a stop token, because the chat template writes none after a
    conversation's last turn or after any turn. The model may not learn to stop."""
    append_stop_token: bool = False
    """If the chat template writes no stop token after a conversation's last turn, append and train the one that ends
    earlier turns, or else the tokenizer's eos_token."""
    thinking_prefix: Literal["as-rendered", "train-as-prompted"] = "as-rendered"
    """If the template's generation prompt has words that rows lack, such as <think>: as-rendered trains answers as the
    template renders rows; train-as-prompted trains the last answer of each row after the prompt's own words, beginning
    with the text that closes the reasoning."""
    strict_reasoning: bool = False
    """Refuse rows in which the chat template leaves out the reasoning of a trained answer, instead of counting them."""
    max_sample_num_tokens: int | None = None
    """Drop (and count) samples with more tokens than this."""
    truncate: bool = False
    """Classification: cut what is longer than --max-sample-num-tokens, and count it, instead of dropping it."""
    text_pair_field: str | None = None
    """Classification: the column or key of a second text; text_pair if not given, in rows that have it."""
    label_field: str | None = None
    """Classification: the column or key of the label, or of the words' labels; label or labels if not given."""
    label_separator: str | None = None
    """Classification: what stands between several labels in one text, such as ; in a table."""
    label_type: Literal["single", "multi", "regression"] | None = None
    """Classification: one label of several, several at once, or a number to predict; None: as the labels look."""
    label_names: tuple[str, ...] = ()
    """Classification: the labels, in the order of their classes; if not given, all that occur, sorted."""
    labels_from: str | None = None
    """Classification: a data set of this script, or its sidecar, whose labels these rows have, too, as a validation
    set has its training set's."""
    block_size: int | None = None
    """Documents only: cut their stream into blocks of this many tokens."""
    validation_share: float | None = None
    """Write about this share of the rows to a second data set, OUTPUT.validation.ENDING. A row's content alone decides
    where it goes."""
    skip_invalid: bool = False
    """Write rows that cannot be used beside the output and go on, instead of stopping."""
    num_proc: int = os.cpu_count() or 1
    """Worker processes that tokenize."""


@dataclass(frozen=True, kw_only=True)
class ValidationOptions:
    """Whether it learns: losses on data that it is not trained on (docs/validation.md)."""

    validation_data_path: tuple[str, ...] = ()
    """Tokenized data sets to measure the model on, before the first step, after the last, and as the next two say."""
    validate_every_steps: int | None = None
    """Measure each time this many steps have been taken."""
    validate_at_epoch: bool = False
    """Measure at the first step that completes an epoch."""
    validate_training_data: bool = False
    """Measure on the training data, too."""
    export_best: bool = True
    """Export the model to hf_format/best whenever its validation is the best so far, by --best-metric."""
    best_metric: str = "loss"
    """What tells the best model, and when to stop: loss, perplexity or token_accuracy; of classifiers loss, accuracy,
    precision, recall, f1, f1_weighted or matthews; of regression loss, mse, mae, pearson or spearman."""
    write_predictions: bool = False
    """Classifiers: write what each validation predicts to output-dir/predictions_samples_N.jsonl."""
    early_stopping_patience: int | None = None
    """End the run when this many validations in a row have not been better than the best."""

    @property
    def is_asked(self) -> bool:
        """Whether the model is measured at all."""
        return bool(self.validation_data_path) or self.validate_training_data


@dataclass(frozen=True, kw_only=True)
class ProcessDataOptions:
    """Tokenize chats, completions or documents for training; of chats only the assistant's tokens are trained."""

    output_file: str
    """Tokenized data set to write; the ending chooses the format: .arrow, .parquet or .jsonl."""
    model_name_or_path: str
    """Model or tokenizer directory or hub name, for its tokenizer and chat template."""
    model_revision: str | None = None
    """Of a model on the hub: branch, tag or commit; its main branch if not given."""
    trust_remote_code: bool = False
    """Run the code that the model brings along. Of a model on the hub only with the commit as --model-revision."""
    config: tuple[str, ...] = ()
    """YAML files with any of these options: of several, the later ones win, and flags win over all. ${NAME} in a value
    is the environment's."""
    preview: int = 2
    """Samples to print at the end, trained tokens in colour, or in brackets where there is no terminal."""
    preview_html: str | None = None
    """Page to write, for a browser: the report, and samples to look through."""
    string_for_printing_masks: str | None = None
    """In samples printed, put this for each run of masked tokens instead of their text."""
    rows: RowOptions = field(default_factory=RowOptions)
