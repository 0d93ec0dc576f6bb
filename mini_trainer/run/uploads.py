"""Uploads of exports to the hub or an object store, in a separate thread, with retries; failures never end a run.

{URL}/samples_{N}/    as in hf_format; best and average_samples_{N} next to it

A model is complete when its config.json is there: that file is written last, and removed first from what is replaced.
"""

import os
import shlex
import shutil
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mini_trainer.data.stores.disk import ASIDE
from mini_trainer.data.stores.remote import check_writable, describe_upload, is_final, list_remote, upload_directory
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


class Destination(Protocol):
    """Where exports are uploaded to. Only the thread of `Uploads` calls `prepare` and `upload`."""

    option: str  # the option and its value, for messages
    name: str  # such as "the hub"
    kinds: tuple[str, ...]  # of the exports that are uploaded
    newest_only: tuple[str, ...]  # kinds of which an export that still waits gives way to the next of the same name

    def prepare(self) -> None:
        """Raises an error if nothing can be uploaded."""

    def upload(self, upload: Upload) -> str:
        """Uploads an export; returns its URL."""

    def is_worth_another_try(self, error: BaseException) -> bool:
        """Whether the error of an upload may be transient."""

    def describe_command(self, export_dir: Path, kind: str) -> str:
        """The command that uploads an export by hand."""


class Uploads:
    """Uploads exports one at a time in a thread, on rank 0."""

    def __init__(self, place: Destination):
        self.place = place
        self.waiting: deque[Upload] = deque()
        self.changed, self.is_ending = threading.Condition(), False
        self.current: Upload | None = None  # the one in progress, also in `waiting`
        self.failed: list[Upload] = []
        self.has_told = False
        self.thread = threading.Thread(target=self._work, name="uploads", daemon=True)
        self.thread.start()

    def add(self, export_dir: Path, *, kind: str, message: str) -> None:
        """Queues an export for upload, in its current state, if the place takes its kind."""
        if kind not in self.place.kinds:
            return
        links = export_dir.with_name(f"{ASIDE[0]}upload_{export_dir.name}_{time.monotonic_ns()}")
        try:
            shutil.copytree(export_dir, links, copy_function=link_or_copy)
        except OSError as error:
            return self.tell(f"{export_dir} cannot be uploaded: {describe_error(error)}", export_dir, kind)
        with self.changed:
            waiting = [upload for upload in self.waiting if upload is not self.current]
            outdated = [upload for upload in waiting if upload.export_dir == export_dir]
            for upload in outdated if kind in self.place.newest_only else []:
                self.waiting.remove(upload)
                shutil.rmtree(upload.links, ignore_errors=True)
            self.waiting.append(Upload(export_dir, links, kind, message))
            self.changed.notify()

    def close(self, *, is_done: bool) -> None:
        """Waits a limited time for pending uploads, and prints commands for those that are left."""
        with self.changed:
            self.is_ending = True
            self.changed.notify()
        seconds = SECONDS_TO_UPLOAD if is_done else SECONDS_AT_A_STOP
        if self.thread.is_alive() and self.waiting:
            log.info(f"waiting for {len(self.waiting)} uploads to {self.place.name}, at most {seconds:.0f} s")
        self.thread.join(seconds)
        with self.changed:
            left = [*self.failed, *self.waiting]
        if left:
            commands = "\n  ".join(self.place.describe_command(upload.export_dir, upload.kind) for upload in left)
            log.warning(
                f"warning: exports that were not uploaded to {self.place.name}: {len(left)}. To upload them:\n "
                f" {commands}"
            )

    def tell(self, what: str, export_dir: Path | None = None, kind: str = REGULAR) -> None:
        """Warns once; later problems are reported together at the end."""
        if not self.has_told:
            self.has_told = True
            command = self.place.describe_command(export_dir or Path("EXPORT"), kind)
            log.warning(f"warning: {self.place.option}: {what}; training continues. To upload later: {command}")

    def _work(self) -> None:
        try:
            self.place.prepare()  # at the start of the run, so that problems show early
        except (Exception, SystemExit) as error:
            self.tell(f"cannot be used: {explain(error)}")
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.is_ending)
                if not self.waiting:
                    return
                self.current = upload = self.waiting[0]
            self._try_to_upload(upload)
            shutil.rmtree(upload.links, ignore_errors=True)
            with self.changed:
                self.current = None
                self.waiting.remove(upload)

    def _try_to_upload(self, upload: Upload) -> None:
        for attempt in range(len(SECONDS_TO_WAIT) + 1):
            try:
                url = self.place.upload(upload)
                return log.info(f"uploaded {upload.export_dir} to {url}")
            except (Exception, SystemExit) as error:
                if attempt == len(SECONDS_TO_WAIT) or not self.place.is_worth_another_try(error):
                    self.failed.append(upload)
                    what = f"{upload.export_dir.name} was not uploaded: {explain(error)}"
                    return self.tell(what, upload.export_dir, upload.kind)
                time.sleep(SECONDS_TO_WAIT[attempt])


def explain(error: BaseException) -> str:
    """The first line of an error, with its type unless it is one that we or a library raise for users."""
    return describe_error(error).removeprefix("ValueError: ")


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


BRANCHES = {REGULAR: "main", BEST: "best"}  # by the export's kind
MAIN = BRANCHES[REGULAR]
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")  # old files to delete from the repository


class Hub:
    """A repository: each export is a commit, the best ones by validation on a branch of their own."""

    name, kinds, newest_only = "the hub", (REGULAR, BEST), (BEST,)

    def __init__(self, options: HubOptions):
        self.options, self.repo_id = options, options.push_to_hub

    @property
    def option(self) -> str:
        return f"--push-to-hub {self.repo_id}"

    def prepare(self) -> None:
        """Creates the repository."""
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
        self._make_repository()

    def _make_repository(self) -> None:
        from huggingface_hub import HfApi

        private = True if self.options.hub_private else None
        self.repo_id = HfApi().create_repo(self.repo_id, private=private, exist_ok=True).repo_id

    def upload(self, upload: Upload) -> str:
        from huggingface_hub import HfApi

        self._make_repository()
        api, branch = HfApi(), BRANCHES[upload.kind]
        if branch != MAIN:
            api.create_branch(self.repo_id, branch=branch, exist_ok=True)
        return api.upload_folder(
            repo_id=self.repo_id,
            folder_path=upload.links,
            revision=branch,
            commit_message=upload.message,
            delete_patterns=list(WEIGHTS),
        ).commit_url

    def is_worth_another_try(self, error: BaseException) -> bool:
        """Whether the error may be transient: no network, a server error, too many requests."""
        from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

        if isinstance(error, (LocalTokenNotFoundError, OfflineModeIsEnabled, ValueError, TypeError)):
            return False
        if isinstance(error, HfHubHTTPError) and error.response is not None:
            return error.response.status_code >= 500 or error.response.status_code in (408, 429)
        return isinstance(error, Exception)

    def describe_command(self, export_dir: Path, kind: str) -> str:
        revision = [] if BRANCHES[kind] == MAIN else ["--revision", BRANCHES[kind]]
        return shlex.join(["hf", "upload", self.repo_id, str(export_dir), ".", *revision])


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


def open_uploads(hub: HubOptions, *, upload_to: str | None) -> list[Uploads]:
    """The uploads that the options ask for. `upload_to`: URL of a store."""
    stores = [] if upload_to is None else [Store(upload_to)]
    return [Uploads(place) for place in (*([] if hub.push_to_hub is None else [Hub(hub)]), *stores)]
