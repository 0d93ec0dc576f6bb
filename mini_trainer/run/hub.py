"""Uploads of exports to the Hugging Face hub (--push-to-hub)."""

import shlex
from pathlib import Path

from mini_trainer.options import HubOptions
from mini_trainer.run.uploads import BEST, REGULAR, Upload

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
