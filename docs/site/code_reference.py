"""Reference pages on exit codes and the Python API, read from the source without importing it."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from mini_trainer.distributed.ending import ExitCode

ROOT = Path(__file__).resolve().parents[2]
ENDING = "mini_trainer/distributed/ending.py"
API = (
    "mini_trainer/api/arguments.py",
    "mini_trainer/run/hooks.py",
    "mini_trainer/api/launch.py",
    "mini_trainer/api/errors.py",
    "mini_trainer/api/trainer_callbacks.py",
    "mini_trainer/options/learning.py",
)


def make_pages() -> dict[str, str]:
    """The text of each page, by its file name."""
    return {"exit_codes.md": describe_exit_codes(), "python.md": describe_python()}


def describe_exit_codes() -> str:
    comments = {name: comment for name, _, comment in read_fields(ENDING, "ExitCode")}
    lines = [
        "# Exit codes",
        "",
        "Every script ends with one of these. `train.py` also writes it to `exit.json`, because torchrun itself always"
        " returns 1; `mini-trainer train` returns the run's. See [how a run ends](checkpoints.md#how-a-run-ends).",
        "",
        "| code | name in exit.json | meaning |",
        "| --- | --- | --- |",
        *(f"| {code.value} | {code.name.lower()} | {comments[code.name]} |" for code in ExitCode),
    ]
    return "\n".join([*lines, ""])


def describe_python() -> str:
    """Everything that `from mini_trainer import ...` offers."""
    assignments = (node for node in parse("mini_trainer/__init__.py").body if isinstance(node, ast.Assign))
    (names,) = (node.value for node in assignments if ast.unparse(node.targets[0]) == "__all__")
    lines = ["# Python", "", "How to use these: [the Python API](python_api.md).", ""]
    for name in sorted(ast.literal_eval(names), key=lambda name: (name[0].isupper(), name)):
        path = next(path for path in API if any(getattr(node, "name", "") == name for node in parse(path).body))
        node = find_definition(path, name)
        lines += [f"## {name}", ""]
        if isinstance(node, ast.FunctionDef):
            lines += ["```python", f"def {name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}", "```", ""]
        lines += ["```text", ast.get_docstring(node), "```", ""]
        if isinstance(node, ast.ClassDef) and (fields := list(read_fields(path, name))):
            lines += ["| field | | |", "| --- | --- | --- |"]
            lines += [f"| `{field}` | `{kind.replace('|', chr(92) + '|')}` | {note} |" for field, kind, note in fields]
            lines.append("")
    return "\n".join(lines)


def read_fields(path: str, name: str) -> Iterator[tuple[str, str, str]]:
    """Each field of a class: its name, its type and default as written, and the comment behind it, or text below it."""
    text, body = (ROOT / path).read_text().splitlines(), find_definition(path, name).body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if not isinstance(node, (ast.Assign, ast.AnnAssign)):
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        kind = ast.unparse(node).partition(": " if isinstance(node, ast.AnnAssign) else " = ")[2]
        comment = text[node.end_lineno - 1].partition("  # ")[2]
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            comment = " ".join(after.value.value.split())
        yield target.id, kind, comment


def find_definition(path: str, name: str) -> Any:
    (found,) = (node for node in parse(path).body if getattr(node, "name", "") == name)
    return found


@cache
def parse(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text())
