"""Models on the hub."""

import functools
from pathlib import Path

from mini_trainer.distributed.ending import log


def download(repo: str, *, revision: str | None, patterns: list[str], flag: str) -> Path:
    """Downloads the repository's files matching `patterns` to the hub's cache; uses only the cache if that fails."""
    from huggingface_hub import snapshot_download

    find = functools.partial(snapshot_download, repo, revision=revision, allow_patterns=patterns)
    try:
        return Path(find())
    except Exception as error:  # errors of the network, the hub and the disk
        reason = " ".join(str(error).split()) or type(error).__name__
    try:  # huggingface-hub 1 does not fall back to the cache if a commit is given
        path = Path(find(local_files_only=True))
    except Exception:
        raise ValueError(
            f"{flag} {repo}: there is no such directory, and it cannot be downloaded from the hub"
            f"{f' at --model-revision {revision}' if revision else ''}: {reason}"
        ) from None
    log.warning(f"warning: {repo} is read from the cache only: {reason}")
    return path
