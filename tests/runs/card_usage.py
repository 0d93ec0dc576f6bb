"""The code in a model card, run where its reader would."""

import re
from pathlib import Path

import pytest


def run_usage(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (export / "README.md").read_text(), flags=re.DOTALL)
    monkeypatch.chdir(export)
    exec(compile(code, "README.md", "exec"), {})
