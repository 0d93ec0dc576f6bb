"""Uploads of exports to the Hugging Face hub, in a separate thread, with retries; failures never end a run."""

import os
import shlex
import shutil
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from disk import ASIDE
from lifecycle.trackers import describe
from options import HubOptions
from ranks.ending import log

MAIN, BEST = "main", "best"  # branches for regular exports and for the best one by validation
SECONDS_TO_WAIT = (10.0, 60.0)  # before the second and third attempts
SECONDS_TO_UPLOAD = 1800.0  # at the end of a finished run, for pending uploads
SECONDS_AT_A_STOP = 30.0  # at the end of a run that will be resumed: schedulers do not wait
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")  # old files to delete from the repository


@dataclass(frozen=True)
class Upload:
    """An export to upload, and links to its files that survive its replacement."""

    export_dir: Path
    links: Path
    branch: str
    message: str


class Uploads:
    """Uploads exports one at a time in a thread, on rank 0."""

    def __init__(self, options: HubOptions):
        self.options, self.repo_id = options, options.push_to_hub
        self.waiting: deque[Upload] = deque()
        self.changed, self.is_ending = threading.Condition(), False
        self.current: Upload | None = None  # the one in progress, also in `waiting`
        self.failed: list[Upload] = []
        self.has_told = False
        self.thread = threading.Thread(target=self._work, name="hub", daemon=True)
        self.thread.start()

    def add(self, export_dir: Path, *, branch: str, message: str) -> None:
        """Queues an export for upload, in its current state; for the best, only the newest is uploaded."""
        links = export_dir.with_name(f"{ASIDE[0]}upload_{export_dir.name}_{time.monotonic_ns()}")
        try:
            shutil.copytree(export_dir, links, copy_function=link_or_copy)
        except OSError as error:
            return self.tell(f"{export_dir} cannot be uploaded: {describe(error)}", export_dir, branch)
        with self.changed:
            waiting = [upload for upload in self.waiting if upload is not self.current]
            outdated = [upload for upload in waiting if branch == upload.branch == BEST]
            for upload in outdated:
                self.waiting.remove(upload)
                shutil.rmtree(upload.links, ignore_errors=True)
            self.waiting.append(Upload(export_dir, links, branch, message))
            self.changed.notify()

    def close(self, *, is_done: bool) -> None:
        """Waits a limited time for pending uploads, and prints commands for those that are left."""
        with self.changed:
            self.is_ending = True
            self.changed.notify()
        seconds = SECONDS_TO_UPLOAD if is_done else SECONDS_AT_A_STOP
        if self.thread.is_alive() and self.waiting:
            log.info(f"waiting for {len(self.waiting)} uploads to the hub, at most {seconds:.0f} s")
        self.thread.join(seconds)
        with self.changed:
            left = [*self.failed, *self.waiting]
        if left:
            commands = "\n  ".join(describe_command(self.repo_id, upload.export_dir, upload.branch) for upload in left)
            log.warning(f"warning: {len(left)} exports were not uploaded to the hub. To upload them:\n  {commands}")

    def tell(self, what: str, export_dir: Path | None = None, branch: str = MAIN) -> None:
        """Warns once; later problems are reported together at the end."""
        if not self.has_told:
            self.has_told = True
            command = describe_command(self.repo_id, export_dir or Path("EXPORT"), branch)
            log.warning(
                f"warning: --push-to-hub {self.repo_id}: {what}; training continues. To upload later: {command}"
            )

    def _work(self) -> None:
        self._prepare()
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

    def _prepare(self) -> None:
        """Creates the repository at the start of the run, so that problems show early."""
        try:
            from huggingface_hub.utils import disable_progress_bars

            disable_progress_bars()
            self._make_repository()
        except (Exception, SystemExit) as error:
            self.tell(f"cannot be used: {describe(error)}")

    def _make_repository(self) -> None:
        from huggingface_hub import HfApi

        private = True if self.options.hub_private else None
        self.repo_id = HfApi().create_repo(self.repo_id, private=private, exist_ok=True).repo_id

    def _try_to_upload(self, upload: Upload) -> None:
        for attempt in range(len(SECONDS_TO_WAIT) + 1):
            try:
                url = self._upload(upload)
                return log.info(f"uploaded {upload.export_dir} to {url}")
            except (Exception, SystemExit) as error:
                if attempt == len(SECONDS_TO_WAIT) or not is_worth_another_try(error):
                    self.failed.append(upload)
                    what = f"{upload.export_dir.name} was not uploaded: {describe(error)}"
                    return self.tell(what, upload.export_dir, upload.branch)
                time.sleep(SECONDS_TO_WAIT[attempt])

    def _upload(self, upload: Upload) -> str:
        from huggingface_hub import HfApi

        self._make_repository()
        api = HfApi()
        if upload.branch != MAIN:
            api.create_branch(self.repo_id, branch=upload.branch, exist_ok=True)
        return api.upload_folder(
            repo_id=self.repo_id,
            folder_path=upload.links,
            revision=upload.branch,
            commit_message=upload.message,
            delete_patterns=list(WEIGHTS),
        ).commit_url


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def is_worth_another_try(error: BaseException) -> bool:
    """Whether the error may be transient: no network, a server error, too many requests."""
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled

    if isinstance(error, (LocalTokenNotFoundError, OfflineModeIsEnabled, ValueError, TypeError)):
        return False
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        return error.response.status_code >= 500 or error.response.status_code in (408, 429)
    return isinstance(error, Exception)


def describe_command(repo_id: str, export_dir: Path, branch: str) -> str:
    revision = [] if branch == MAIN else ["--revision", branch]
    return shlex.join(["hf", "upload", repo_id, str(export_dir), ".", *revision])
