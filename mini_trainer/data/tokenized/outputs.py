"""Output paths: one or two data sets, the files that belong to each, and the order in which they appear."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mini_trainer.data.stores.disk import check_place
from mini_trainer.data.tokenized.index import keep_index
from mini_trainer.options.reading import read_document, read_object


@dataclass(frozen=True)
class DataSetFiles:
    """A data set and its other files, all named after it, so that it can be moved and used by itself."""

    data: Path

    @property
    def sidecar(self) -> Path:
        return self.data.with_name(f"{self.data.name}.meta.json")

    @property
    def tokenizer(self) -> Path:
        return self.data.with_name(f"{self.data.name}.tokenizer")

    @property
    def in_order(self) -> list[Path]:
        """The paths in the order in which they appear: the data set after its other files."""
        return [self.tokenizer, self.sidecar, self.data]

    def is_other_side_of(self, data: Path) -> bool:
        """Whether, according to its sidecar, the run that wrote `data` also wrote this data set."""
        try:
            return read_document(self.sidecar)["split"]["other_side"] == data.name
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return False


@dataclass(frozen=True)
class Outputs:
    """Output paths: the data set, its validation side if rows are split, and the preview page. Unusable rows have no
    side; their file is next to the training data."""

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
        """The data sets to write, in the order of SIDES."""
        return [self.training, self.validation] if self.is_split else [self.training]

    @property
    def rejected(self) -> Path:
        return self.data.with_name(f"{self.data.name}.rejected.jsonl")

    @cached_property
    def has_stale_validation(self) -> bool:
        """Whether an earlier run left a validation side that would seem to belong to this output."""
        return not self.is_split and self.validation.is_other_side_of(self.data)

    @cached_property
    def in_order(self) -> list[Path]:
        """The paths in the order in which they appear or are removed: a written data set after its other files; a stale
        one before them, its sidecar, which identifies it, last."""
        pages = [] if self.page is None else [self.page]
        files = self.validation
        stale = [files.data, files.tokenizer, files.sidecar] if self.has_stale_validation else []
        written = [path for files in reversed(self.data_sets) for path in files.in_order]
        return [*stale, *pages, self.rejected, *written]

    def finish(self) -> None:
        """Completes outputs that are in their places: makes the indexes of large data sets."""
        for files in self.data_sets:
            keep_index(files.data, sha256=read_object(files.sidecar)["file"]["sha256"])

    def check(self, inputs: Sequence[Path]) -> None:
        """ValueError for paths that could not be written later, or would overwrite something: one of the `inputs`."""
        for flag, path in (("--output-file", self.data), ("--preview-html", self.page)):
            if path is not None:
                check_place(path.parent, named=f"{flag} {path}")
        tokenizers = [self.training.tokenizer, self.validation.tokenizer]
        for path in self.in_order:
            if path.is_dir() and path not in tokenizers:
                raise ValueError(f"the output {path} is a directory; choose another name")
            if any(path.exists() and path.samefile(source) for source in inputs):
                raise ValueError(f"the output {path} would overwrite the input; choose another name")
            if path in tokenizers and path.exists() and not (path / "tokenizer_config.json").exists():
                raise ValueError(f"{path} would be replaced, but is not a tokenizer directory; rename it")
        if len({path.resolve() for path in self.in_order}) < len(self.in_order):
            raise ValueError(f"--preview-html {self.page}: is also another output; choose another name")
        validation = self.validation
        if self.is_split and validation.data.exists() and not validation.is_other_side_of(self.data):
            raise ValueError(
                f"--validation-share would overwrite {validation.data}, which was not split off"
                f" {self.data.name}; rename it, or choose another --output-file"
            )
