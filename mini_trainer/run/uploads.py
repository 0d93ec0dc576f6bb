"""Uploads of exports, in a separate thread, with retries; failures never end a run."""

import os
import shutil
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mini_trainer.data.stores.disk import ASIDE
from mini_trainer.distributed.ending import log
from mini_trainer.run.trackers import describe

REGULAR, BEST, AVERAGE = "regular", "best", "average"  # kinds of exports
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


class Place(Protocol):
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

    def __init__(self, place: Place):
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
            return self.tell(f"{export_dir} cannot be uploaded: {describe(error)}", export_dir, kind)
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
                f"warning: {len(left)} exports were not uploaded to {self.place.name}. To upload them:\n  {commands}"
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
    return describe(error).removeprefix("ValueError: ")


def link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)
