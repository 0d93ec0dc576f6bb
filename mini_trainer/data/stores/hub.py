"""Models on the hub."""

from pathlib import Path

from huggingface_hub import snapshot_download

from mini_trainer.distributed.messages import one_line


def download(repo: str, *, revision: str | None, patterns: list[str], flag: str) -> Path:
    """Downloads the repository's files matching `patterns` to the hub's cache; without network, finds them there."""
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    except Exception as error:  # errors of the network, the hub and the disk
        raise ValueError(
            f"{flag} {repo}: there is no such directory, and it cannot be downloaded from the hub"
            f"{f' at --model-revision {revision}' if revision else ''}: {one_line(error) or type(error).__name__}"
        ) from None
