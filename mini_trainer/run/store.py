"""Uploads of exports to object stores (--upload-to).

    {URL}/samples_{N}/    as in hf_format; best and average_samples_{N} next to it

A model is complete when its config.json is there: that file is written last, and removed first from what is replaced.
"""

from pathlib import Path

from mini_trainer.data.stores.remote import is_final
from mini_trainer.data.stores.uploading import check_writable, describe_upload, list_remote, upload_directory
from mini_trainer.distributed.ending import log
from mini_trainer.run.uploads import AVERAGE, BEST, REGULAR, Upload

WRITTEN_LAST = ("adapter_config.json", "config.json")  # files by which loaders take a directory for a model


class Store:
    """A URL below which each export has its directory."""

    kinds = newest_only = (REGULAR, BEST, AVERAGE)

    def __init__(self, url: str):
        self.name = url.rstrip("/")
        self.option = f"--upload-to {self.name}"
        self.done: dict[Path, set[str]] = {}  # files that an attempt has written, by the upload's links

    def prepare(self) -> None:
        check_writable(self.name)
        if list_remote(self.name):
            log.info(f"{self.option}: has files already; exports of the same names will be replaced")

    def upload(self, upload: Upload) -> str:
        url = f"{self.name}/{upload.export_dir.name}"
        done = self.done.setdefault(upload.links, set())
        upload_directory(upload.links, url, last=WRITTEN_LAST, done=done)
        del self.done[upload.links]
        return url

    def is_worth_another_try(self, error: BaseException) -> bool:
        return not is_final(error.__cause__)

    def describe_command(self, export_dir: Path, kind: str) -> str:
        return describe_upload(export_dir, f"{self.name}/{export_dir.name}")
