"""For hatchling (pyproject.toml): a wheel's package holds the root's seven files, which a checkout has beside it."""

from pathlib import Path
from runpy import run_path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RootFilesHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":  # copies would hide the checkout's
            return
        root_files = run_path(str(Path(self.root, "mini_trainer", "root_files.py")))
        for name in root_files["NAMES"]:
            build_data["force_include"][str(Path(self.root, f"{name}.py"))] = f"mini_trainer/{name}.py"
