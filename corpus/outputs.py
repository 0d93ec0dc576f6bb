"""What is written where: a data set or two, the files that belong to each, and the order in which they appear."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path


@dataclass(frozen=True)
class DataSetFiles:
    """A data set and what belongs to it, all called like it, so that it can be moved and used by itself."""

    data: Path

    @property
    def sidecar(self) -> Path:
        return self.data.with_name(f"{self.data.name}.meta.json")

    @property
    def tokenizer(self) -> Path:
        return self.data.with_name(f"{self.data.name}.tokenizer")

    @property
    def in_order(self) -> list[Path]:
        """As they take their places: the data set when all that belongs to it is there."""
        return [self.tokenizer, self.sidecar, self.data]

    def is_other_side_of(self, data: Path) -> bool:
        """Whether its sidecar says that a run that wrote `data` wrote it, too."""
        try:
            split = json.loads(self.sidecar.read_bytes())["split"]
            return split["other_side"] == data.name
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False


@dataclass(frozen=True)
class Outputs:
    """What is written: the data set, its validation side where rows are split, and what is to be looked at.

    Rows that cannot be used have no side: they lie beside the training data.
    """

    data: Path
    page: Path | None
    is_split: bool

    @property
    def training(self) -> DataSetFiles:
        return DataSetFiles(self.data)

    @property
    def validation(self) -> DataSetFiles:
        return DataSetFiles(self.data.with_name(f"{self.data.stem}.validation{self.data.suffix}"))

    @property
    def data_sets(self) -> list[DataSetFiles]:
        """Those that are written, in the order of SIDES."""
        return [self.training, self.validation] if self.is_split else [self.training]

    @property
    def rejected(self) -> Path:
        return self.data.with_name(f"{self.data.name}.rejected.jsonl")

    @cached_property
    def has_stale_validation(self) -> bool:
        """Whether an earlier run split rows, whose validation side would look as if it belonged to this output."""
        return not self.is_split and self.validation.is_other_side_of(self.data)

    @cached_property
    def in_order(self) -> list[Path]:
        """As they take their places, the data set last, when all that belongs to it is there. Of what goes, because it
        is not written, a data set goes first, and its sidecar, which tells whose it is, last."""
        pages = [] if self.page is None else [self.page]
        files = self.validation
        stale = [files.data, files.tokenizer, files.sidecar] if self.has_stale_validation else []
        written = [path for files in reversed(self.data_sets) for path in files.in_order]
        return [*stale, *pages, self.rejected, *written]

    def check(self, inputs: Sequence[Path]) -> None:
        """Raises ValueError for what would fail or destroy something after the work."""
        for flag, path in (("--output-file", self.data), ("--preview-html", self.page)):
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"{flag} {path}: there is no directory {path.parent}; create it first")
            if path is not None and not os.access(path.parent, os.W_OK):
                raise ValueError(f"{flag} {path}: no permission to write in {path.parent}")
        tokenizers = [self.training.tokenizer, self.validation.tokenizer]
        for path in self.in_order:
            if path.is_dir() and path not in tokenizers:
                raise ValueError(f"{path}, which is to be written, is a directory; choose another name")
            if any(path.exists() and path.samefile(source) for source in inputs):
                raise ValueError(f"{path}, which is to be written, would overwrite the input; choose another name")
            if path in tokenizers and path.exists() and not (path / "tokenizer_config.json").exists():
                raise ValueError(f"{path} would be replaced, and is no tokenizer directory; rename it")
        if len({path.resolve() for path in self.in_order}) < len(self.in_order):
            raise ValueError(f"--preview-html {self.page}: is written for another purpose; choose another name")
        validation = self.validation
        if self.is_split and validation.data.exists() and not validation.is_other_side_of(self.data):
            raise ValueError(
                f"--validation-share would overwrite {validation.data}, which was not split off {self.data.name};"
                " rename it, or choose another --output-file"
            )
