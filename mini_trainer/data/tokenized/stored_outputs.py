"""Outputs of process_data.py at object stores: written to a local directory first, then uploaded.

The data sets at the store are removed first and written last, after their other files: an existing one is complete.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mini_trainer.data.stores.disk import hash_json, remove, written_aside
from mini_trainer.data.stores.remote import (
    check_writable,
    describe_upload,
    list_remote,
    look_up_remote,
    remove_remote,
    upload_directory,
    upload_file,
)
from mini_trainer.data.tokenized.cache import KEY_LENGTH
from mini_trainer.data.tokenized.outputs import Outputs
from mini_trainer.distributed.messages import say
from mini_trainer.options.urls import is_url


@contextmanager
def open_outputs(output_file: str, *, page: Path | None, is_split: bool) -> Iterator[Outputs]:
    """The outputs at a path or URL. ValueError for a URL below which nothing can be written."""
    if not is_url(output_file):
        yield Outputs(Path(output_file), page, is_split)
        return
    folder, _, name = output_file.rpartition("/")
    try:
        check_writable(folder)
    except ValueError as error:
        raise ValueError(f"--output-file {folder}: {error}") from None
    # Leftovers of a killed process are removed by the next one with the same output.
    place = Path(tempfile.gettempdir()) / f"mini_trainer_{hash_json(output_file)[:KEY_LENGTH]}"
    with written_aside(place) as (staging,):
        staging.mkdir()
        outputs = StoredOutputs(staging / name, page, is_split, folder)
        outputs.look_up()
        yield outputs
        remove(staging)


@dataclass(frozen=True)
class StoredOutputs(Outputs):
    """Outputs that belong below a URL, in a directory of this process."""

    folder: str  # URL

    def name(self, path: Path) -> str:
        return str(path) if path == self.page else f"{self.folder}/{path.relative_to(self.data.parent)}"

    def look_up(self) -> None:
        """Mirrors the store's file names in the local directory, where they are found as an earlier run's files."""
        sidecar = look_up_remote(self.name(self.validation.sidecar))
        if sidecar is not None:
            self.validation.sidecar.write_bytes(sidecar.open().read())
        if look_up_remote(self.name(self.validation.data)) is not None:
            self.validation.data.touch()
        for files in (self.training, self.validation):
            names = list_remote(self.name(files.tokenizer))
            if names:
                files.tokenizer.mkdir()
            if "tokenizer_config.json" in names:
                (files.tokenizer / "tokenizer_config.json").touch()

    def check(self, inputs: Sequence[Path], urls: Sequence[str] = ()) -> None:
        for path in self.in_order:
            if self.name(path) in urls:
                raise ValueError(f"the output {self.name(path)} would overwrite the input; choose another name")
        super().check(inputs)
        for path in self.validation.in_order:
            if path not in self.in_order:
                remove(path)  # another run's

    def finish(self) -> None:
        """Uploads everything; if that fails, ValueError says where it lies."""
        files = [path for path in self.data.parent.rglob("*") if path.is_file()]
        say(f"uploading {sum(path.stat().st_size for path in files):,} bytes to {self.folder}")
        try:
            self._upload()
        except ValueError as error:
            kept = Path(tempfile.mkdtemp(prefix="mini_trainer_"))
            self.data.parent.replace(kept)
            raise ValueError(
                f"{error}\nthe store has no data set. It was made, and is in {kept}; to upload it:\n"
                f"  {describe_upload(kept, self.folder)}"
            ) from None

    def _upload(self) -> None:
        for files in self.data_sets:
            remove_remote(self.name(files.data))
        directories = [files.tokenizer for files in (self.training, self.validation)]
        for path in self.in_order:
            if path == self.page:
                continue
            url = self.name(path)
            if path in directories:  # also one that is not there: an older one's files go
                upload_directory(path, url)
            elif path.is_file():
                upload_file(path, url)
            else:
                remove_remote(url)
