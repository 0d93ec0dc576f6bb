"""Keeps questions that models are measured on out of replay, by their tokens, in any file and format."""

import hashlib
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from mini_trainer.continual.data import Prepared
from mini_trainer.continual.settings import ContinualSettings
from mini_trainer.data.columns.base import IGNORED
from mini_trainer.data.rows.prompts import Prompt, encode_prompt, read_prompts
from mini_trainer.data.stores.model_files import find_model
from mini_trainer.data.stores.tokenizers import load_tokenizer
from mini_trainer.data.tokenized.outputs import DataSetFiles
from mini_trainer.data.tokenized.reader import TokenizedData


class HeldOut:
    """The prompts of all tests and held-out sets, which are read when they are first needed."""

    def __init__(self, prepared: Iterable[Prepared], settings: ContinualSettings):
        self.prepared, self.settings = list(prepared), settings
        self.counts: dict[Path, int] = {}  # of `count_rows`

    @cached_property
    def tokenizer(self) -> Any:
        """The data's tokenizer: next to the data if process-data has changed the model's."""
        beside = [DataSetFiles(one.train).tokenizer for one in self.prepared if one.train is not None]
        changed = [path for path in beside if path.is_dir()]
        found = changed[0] if changed else find_model(self.settings.model, revision=None, trust_remote_code=False)
        return load_tokenizer(str(found))

    @cached_property
    def digests(self) -> set[bytes]:
        """Digests of the prompts' tokens; those of a chat of several turns end before its last answer."""
        data_format = self.settings.evaluate.get("format")
        found = set()
        for one in self.prepared:
            if one.test is not None:
                prompts = read_prompts([str(one.test)], data_format, flag="test:")
                found |= {digest(encode_prompt(prompt, self.tokenizer)) for prompt in prompts}
            if one.held_out is not None:
                found |= {list(row)[-1] for row in iterate_digests(one.held_out)}
        return found

    def has(self, prompt: Prompt) -> bool:
        return digest(encode_prompt(prompt, self.tokenizer)) in self.digests

    def count_rows(self, data: Path) -> int:
        """Rows of a data set that contain one of the prompts."""
        if data not in self.counts:
            self.counts[data] = sum(not self.digests.isdisjoint(row) for row in iterate_digests(data))
        return self.counts[data]


def iterate_digests(data: Path) -> Iterator[list[bytes]]:
    """Yields each row's digests of the tokens before each of its trained parts."""
    samples = TokenizedData(data)
    for row in range(len(samples.lengths)):
        sample = samples.read(row)
        is_trained = np.asarray(sample["labels"]) != IGNORED
        starts = np.flatnonzero(is_trained & ~np.concatenate([[False], is_trained[:-1]]))
        yield [digest(sample["input_ids"][:start]) for start in starts]


def digest(ids: Any) -> bytes:
    return hashlib.sha256(np.asarray(ids, np.int64).tobytes()).digest()
