"""Uploads of exports to the hub or an object store, in a separate thread, with retries; failures never end a run.

{URL}/samples_{N}/ as in hf_format; best and average_samples_{N} next to it

A model is complete when its config.json is there: that file is written last, and removed first when a model is
replaced.
"""

import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils import disable_progress_bars

from mini_trainer.data.stores.disk import ASIDE
from mini_trainer.data.stores.remote import check_writable, describe_upload, list_remote, retry, upload_directory
from mini_trainer.distributed.ending import log
from mini_trainer.distributed.messages import describe_error
from mini_trainer.options import HubOptions
from mini_trainer.run.file_names import AVERAGE, BEST, REGULAR

SECONDS_TO_WAIT = (10.0, 60.0)  # before the second and third attempts
SECONDS_TO_UPLOAD = 1800.0  # at the end of a finished run, for pending uploads
SECONDS_AT_A_STOP = 30.0  # at the end of a run that will be resumed: schedulers do not wait


@dataclass(frozen=True)
class Upload:
    """An export to upload, and links to its files that survive its replacement."""

    export_dir: Path
    links: Path
    kind: str
    message: str


BRANCHES = {REGULAR: None, BEST: "best"}  # by the export's kind; None: the main one
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")  # old files to delete from the repository


class Hub:
    """A repository: each export is a commit, the best ones by validation on their own branch."""

    name = "the hub"
    kinds = (REGULAR, BEST)  # of uploaded exports
    newest_only = (BEST,)  # kinds whose waiting exports are replaced by the next of the same name

    def __init__(self, options: HubOptions):
        self.options, self.repo_id = options, options.push_to_hub

    @property
    def option(self) -> str:
        return f"--push-to-hub {self.repo_id}"

    def prepare(self) -> None:
        """Creates the repository. Raises an error if nothing can be uploaded, as `Store.prepare` does."""
        disable_progress_bars()
        self.repo_id = HfApi().create_repo(self.repo_id, exist_ok=True).repo_id

    def upload(self, upload: Upload) -> str:
        api, branch = HfApi(), BRANCHES[upload.kind]

        def commit() -> str:
            self.prepare()
            if branch is not None:
                api.create_branch(self.repo_id, branch=branch, exist_ok=True)
            given = dict(revision=branch, commit_message=upload.message, delete_patterns=list(WEIGHTS))
            return api.upload_folder(repo_id=self.repo_id, folder_path=upload.links, **given).commit_url

        return retry(commit, SECONDS_TO_WAIT)

    def describe_command(self, export_dir: Path, kind: str) -> str:
        branch = BRANCHES[kind]
        command = describe_upload(export_dir, f"hf://{self.repo_id}")
        return command if branch is None else f"{command} --revision {branch}"


WRITTEN_LAST = ("adapter_config.json", "config.json")  # files that make a directory a model for loaders


class Store:
    """A URL below which each export has its directory."""

    kinds = newest_only = (REGULAR, BEST, AVERAGE)

    def __init__(self, url: str):
        self.name = url.rstrip("/")
        self.option = f"--upload-to {self.name}"

    def prepare(self) -> None:
        check_writable(self.name)
        if list_remote(self.name):
            log.info(f"{self.option}: has files already; exports of the same names will be replaced")

    def upload(self, upload: Upload) -> str:
        url = f"{self.name}/{upload.export_dir.name}"
        upload_directory(upload.links, url, last=WRITTEN_LAST, waits=SECONDS_TO_WAIT)
        return url

    def describe_command(self, export_dir: Path, kind: str) -> str:
        return describe_upload(export_dir, f"{self.name}/{export_dir.name}")


class Uploads:
    """Uploads exports one at a time, on rank 0, in a thread that alone calls the place's `prepare` and `upload`.
    A thread of an executor holds up an ordinary end of the process; runs end by `exit_process`, which does not wait."""

    def __init__(self, place: Hub | Store):
        self.place, self.has_told = place, False
        self.uploads: dict[Upload, Future[bool]] = {}  # whether they succeeded; without uploads replaced by newer ones
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="uploads")
        self.thread.submit(self._prepare)

    def add(self, export_dir: Path, *, kind: str, message: str) -> None:
        """Queues an export for upload, in its current state, if the place takes its kind."""
        if kind not in self.place.kinds:
            return
        links = export_dir.with_name(f"{ASIDE[0]}upload_{export_dir.name}_{time.monotonic_ns()}")
        try:
            shutil.copytree(export_dir, links, copy_function=link_or_copy)
        except OSError as error:
            return self.tell(f"{export_dir} cannot be uploaded", error, export_dir, kind)
        for older in list(self.uploads) if kind in self.place.newest_only else []:
            if older.export_dir == export_dir and self.uploads[older].cancel():  # it still waits
                shutil.rmtree(older.links, ignore_errors=True)
                del self.uploads[older]
        upload = Upload(export_dir, links, kind, message)
        self.uploads[upload] = self.thread.submit(self._upload, upload)

    def close(self, *, is_done: bool) -> None:
        """Waits a limited time for pending uploads, and prints commands for the others."""
        seconds = SECONDS_TO_UPLOAD if is_done else SECONDS_AT_A_STOP
        if pending := [future for future in self.uploads.values() if not future.done()]:
            log.info(f"waiting for {len(pending)} uploads to {self.place.name}, at most {seconds:.0f} s")
        wait(pending, seconds)
        left = [upload for upload, future in self.uploads.items() if not (future.done() and future.result())]
        self.thread.shutdown(wait=False, cancel_futures=True)
        if left:
            commands = "\n  ".join(self.place.describe_command(upload.export_dir, upload.kind) for upload in left)
            log.warning(
                f"warning: exports that were not uploaded to {self.place.name}: {len(left)}. To upload"
                f" them:\n  {commands}"
            )

    def tell(self, what: str, error: BaseException, export_dir: Path = Path("EXPORT"), kind: str = REGULAR) -> None:
        """Warns once; later problems are reported together at the end."""
        if not self.has_told:
            self.has_told = True
            reason = describe_error(error).removeprefix("ValueError: ").removeprefix("RunError: ")  # for users
            command = self.place.describe_command(export_dir, kind)
            log.warning(
                f"warning: {self.place.option}: {what}: {reason}; training continues. To upload later: {command}"
            )

    def _prepare(self) -> None:
        try:
            self.place.prepare()  # at the start of the run, so that problems show early
        except (Exception, SystemExit) as error:
            self.tell("cannot be used", error)

    def _upload(self, upload: Upload) -> bool:
        """Whether it succeeded; problems are reported."""
        try:
            log.info(f"uploaded {upload.export_dir} to {self.place.upload(upload)}")
            return True
        except (Exception, SystemExit) as error:
            self.tell(f"{upload.export_dir.name} was not uploaded", error, upload.export_dir, upload.kind)
            return False
        finally:
            shutil.rmtree(upload.links, ignore_errors=True)


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def open_uploads(hub: HubOptions, *, upload_to: str | None) -> list[Uploads]:
    """The uploads that the options ask for. `upload_to`: URL of a store."""
    stores = [] if upload_to is None else [Store(upload_to)]
    return [Uploads(place) for place in (*([] if hub.push_to_hub is None else [Hub(hub)]), *stores)]
