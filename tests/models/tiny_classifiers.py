"""Tiny randomly initialised encoders and decoders to classify with, and tokenized data sets with classes."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from tiny_models import FAMILIES, VOCAB_SIZE, save_moved, save_tokenizer
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    ModernBertConfig,
    PreTrainedConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from mini_trainer.data.columns.base import COLUMNS, IGNORED
from mini_trainer.data.stores.tokenizers import fingerprint_tokenizer, load_tokenizer

NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
SHAPE = dict(
    vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=80, initializer_range=0.2, pad_token_id=0, type_vocab_size=2,
)  # fmt: skip

ENCODERS: dict[str, PreTrainedConfig] = {
    "bert": BertConfig(**SHAPE, **NO_DROPOUT),
    "roberta": RobertaConfig(**SHAPE | dict(pad_token_id=1), **NO_DROPOUT),
    "xlm_roberta": XLMRobertaConfig(**SHAPE | dict(pad_token_id=1), **NO_DROPOUT),
    "electra": ElectraConfig(**SHAPE, **NO_DROPOUT, embedding_size=16),
    "distilbert": DistilBertConfig(
        vocab_size=VOCAB_SIZE, dim=32, hidden_dim=48, n_layers=2, n_heads=4, max_position_embeddings=80,
        initializer_range=0.2, pad_token_id=0, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0,
    ),
    "modernbert": ModernBertConfig(
        **{name: value for name, value in SHAPE.items() if name != "type_vocab_size"}, local_attention=8,
        global_attn_every_n_layers=2, classifier_pooling="mean", bos_token_id=1, eos_token_id=2, cls_token_id=1,
        sep_token_id=2,
    ),
    "deberta_v2": DebertaV2Config(
        **SHAPE | dict(type_vocab_size=0), **NO_DROPOUT, relative_attention=True, position_buckets=8,
        norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type="p2c|c2p", max_relative_positions=-1,
        position_biased_input=False, pooler_dropout=0.0, pooler_hidden_size=32,
    ),
}  # fmt: skip
DECODERS = {name: FAMILIES[name] for name in ("llama", "qwen3", "gemma3", "gpt2")}
CLASSIFIERS = ENCODERS | DECODERS


def save_base(config: PreTrainedConfig, path: Path, *, seed: int = 0) -> Path:
    """Writes a randomly initialised fp32 model without a head, with its tokenizer; biases and norms are random too."""
    torch.manual_seed(seed)
    model = AutoModel.from_config(config, dtype=torch.float32)
    save_moved(model, path)
    return save_tokenizer(path)


def save_classifier(
    config: PreTrainedConfig, path: Path, *, num_labels: int = 3, of_tokens: bool = False, seed: int = 0
) -> Path:
    """As `save_base`, with a head for this many labels."""
    torch.manual_seed(seed)
    config = type(config).from_dict(config.to_dict() | dict(num_labels=num_labels))
    auto_class = AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
    config.classifier_dropout = 0.0  # which else is 0.1 where the config has none
    model = auto_class.from_config(config, dtype=torch.float32)
    save_moved(model, path)
    return save_tokenizer(path)


Triple = tuple[np.ndarray, np.ndarray, np.ndarray | None]  # input_ids, targets, and types of tokens


def make_class_samples(
    count: int, *, label_type: str = "single", num_labels: int = 3, of_tokens: bool = False, has_types: bool = False,
    longest: int = 40, seed: int = 0,
) -> list[Triple]:  # fmt: skip
    """Random tokens; the classes follow from them."""
    random = np.random.default_rng(seed)
    samples = []
    for length in random.integers(1, longest, count):
        ids = random.integers(3, VOCAB_SIZE, length).astype(np.int32)
        targets = {
            "single": np.array([ids[0] % num_labels], dtype=np.float32),
            "multi": (ids[0] // 2 ** np.arange(num_labels) % 2).astype(np.float32),
            "regression": random.standard_normal(num_labels).astype(np.float32),
        }[label_type]
        if of_tokens:
            targets = np.where(random.random(length) < 0.6, ids % num_labels, IGNORED).astype(np.int32)
        types = (np.arange(length) > length // 2).astype(np.int8) if has_types else None
        samples.append((ids, targets, types))
    return samples


def write_classified(
    path: Path, samples: Sequence[Triple], model_dir: Path, *, label_type: str = "single", num_labels: int = 3,
    of_tokens: bool = False,
) -> Path:  # fmt: skip
    """The data set and its sidecar, as process_data.py writes them for the model's tokenizer."""
    objective = "token-classification" if of_tokens else "sequence-classification"
    schema = COLUMNS[objective].schema
    counts = [int((targets != IGNORED).sum()) if of_tokens else 1 for _, targets, _ in samples]
    columns = [[ids for ids, _, _ in samples], [targets for _, targets, _ in samples],
               [len(ids) for ids, _, _ in samples], counts, [types for _, _, types in samples]]  # fmt: skip
    arrays = [pa.array(list(column), field.type) for column, field in zip(columns, schema, strict=True)]
    table = pa.table(arrays, schema=schema)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        writer.write_table(table)
    names = [] if label_type == "regression" else [f"class {i}" for i in range(num_labels)]
    if label_type == "multi":
        of_class = np.sum([targets for _, targets, _ in samples], axis=0)
    else:
        classes = np.concatenate([targets for _, targets, _ in samples]).astype(int)
        of_class = [int((classes == i).sum()) for i in range(num_labels)]
    sidecar = {
        "objective": objective, "label_type": label_type, "label_names": names, "num_labels": num_labels,
        "label_counts": {name: int(count) for name, count in zip(names, of_class, strict=bool(names))},
        "num_samples": len(samples), "num_loss_counted_tokens": sum(counts), "max_token_id": VOCAB_SIZE - 1,
        "tokenizer_fingerprint": fingerprint_tokenizer(load_tokenizer(str(model_dir), trust_remote_code=False)),
    }  # fmt: skip
    Path(f"{path}.meta.json").write_text(json.dumps(sidecar))
    return path


@torch.no_grad()
def predict_plainly(
    model_dir: str | Path, samples: Sequence[Triple], *, label_type: str = "single", of_tokens: bool = False,
) -> tuple[np.ndarray, np.ndarray, float]:  # fmt: skip
    """Targets, logits, and transformers' own loss, one sample at a time, weighted by its targets."""
    auto_class = AutoModelForTokenClassification if of_tokens else AutoModelForSequenceClassification
    model = auto_class.from_pretrained(model_dir).eval()
    targets, logits, losses = [], [], []
    for ids, target, _ in samples:
        kept = target != IGNORED if of_tokens else slice(None)
        if of_tokens and not kept.any():
            continue
        is_class = of_tokens or label_type == "single"
        labels = torch.from_numpy(target.astype(np.int64 if is_class else np.float32))
        labels = labels if is_class and not of_tokens else labels[None]
        outputs = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None], labels=labels)
        own = outputs.logits[0][kept] if of_tokens else outputs.logits
        targets.append(target[kept] if is_class else target[None])
        logits.append(own.numpy())
        losses.append(outputs.loss.item() * len(own))
    logits = np.concatenate(logits)
    return np.concatenate(targets), logits, sum(losses) / len(logits)
