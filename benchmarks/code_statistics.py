"""Counts what a style shows in: sizes of modules and functions, signatures, comments, docstrings.

    python benchmarks/code_statistics.py            # of this tree
    python benchmarks/code_statistics.py OTHER_TREE --also tests

Counted are the Python files of a tree without tests, benchmarks and examples, then lines by folder. A function's lines
are those from `def` to its end, with its docstring; inner functions count too. Parameters are all of them, with `self`.
"""

import argparse
import ast
import io
import statistics
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

LEFT_OUT = ("tests", "benchmarks", "examples")
MANY_LINES, MANY_PARAMETERS, LARGE_MODULE = 25, 8, 500  # more lines; as many parameters; more lines

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
WITH_DOCSTRING = (ast.Module, ast.ClassDef, *FUNCTIONS)


@dataclass
class Counts:
    """Of a tree."""

    module_lines: dict[str, int] = field(default_factory=dict)
    function_lines: list[int] = field(default_factory=list)
    num_parameters: list[int] = field(default_factory=list)
    num_comment_lines: int = 0  # with nothing but a comment
    num_docstring_lines: int = 0
    num_import_lines: int = 0

    def add_module(self, name: str, source: str) -> None:
        self.module_lines[name] = source.count("\n")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, FUNCTIONS):
                self.function_lines.append(node.end_lineno - node.lineno + 1)
                self.num_parameters.append(count_parameters(node.args))
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.num_import_lines += node.end_lineno - node.lineno + 1
            if isinstance(node, WITH_DOCSTRING):
                self.num_docstring_lines += count_docstring_lines(node)
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        self.num_comment_lines += sum(
            token.type == tokenize.COMMENT and token.line.lstrip().startswith("#") for token in tokens
        )

    def large_modules(self) -> dict[str, int]:
        """Name and lines of each, the largest first."""
        large = {name: count for name, count in self.module_lines.items() if count > LARGE_MODULE}
        return dict(sorted(large.items(), key=lambda item: -item[1]))

    def rows(self) -> dict[str, str]:
        """The table, label and value."""
        total, lines = sum(self.module_lines.values()), self.function_lines
        p90 = statistics.quantiles(lines, n=10, method="inclusive")[-1]
        num_long = sum(count > MANY_LINES for count in lines)
        num_wide = sum(count >= MANY_PARAMETERS for count in self.num_parameters)
        return {
            "lines / files": f"{total:,}/{len(self.module_lines)}",
            "function: median / p90": f"{statistics.median(lines):.0f}/{p90:.0f}",
            f"over {MANY_LINES} lines": f"{100 * num_long / len(lines):.0f} %",
            f"most parameters; functions with {MANY_PARAMETERS} or more": f"{max(self.num_parameters)}; {num_wide}",
            f"modules over {LARGE_MODULE} lines": str(len(self.large_modules())),
            "comments on a line of their own": f"{100 * self.num_comment_lines / total:.1f} %",
            "docstrings": f"{100 * self.num_docstring_lines / total:.1f} %",
            "imports": f"{100 * self.num_import_lines / total:.1f} %",
        }


def count_parameters(args: ast.arguments) -> int:
    several = len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs)
    return several + (args.vararg is not None) + (args.kwarg is not None)


def count_docstring_lines(node: ast.AST) -> int:
    """Lines of the docstring of one of `WITH_DOCSTRING`, with its quotes."""
    if ast.get_docstring(node) is None:
        return 0
    return node.body[0].end_lineno - node.body[0].lineno + 1


def count_parts(tree: Path) -> dict[str, int]:
    """Lines of the program, of the package's JavaScript and CSS, of the tests and of the benchmarks."""
    scripts = [path for suffix in ("js", "css") for path in (tree / "mini_trainer").rglob(f"*.{suffix}")]
    paths = {
        "program": [tree / path for path in find_modules(tree, LEFT_OUT)],
        "JavaScript and CSS": scripts,
        **{part: (tree / part).rglob("*.py") for part in ("tests", "benchmarks")},
    }
    return {part: sum(path.read_text().count("\n") for path in found) for part, found in paths.items()}


def count_rooms(module_lines: dict[str, int]) -> dict[str, str]:
    """Lines and modules of each folder, subfolders apart."""
    lines, modules = Counter(), Counter()
    for name, count in module_lines.items():
        room = str(Path(name).parent)
        lines[room] += count
        modules[room] += 1
    return {room: f"{lines[room]:,} / {modules[room]}" for room in sorted(lines)}


def find_modules(tree: Path, left_out: tuple[str, ...]) -> list[Path]:
    """The Python files of `tree`, relative to it; not those in hidden, built or left-out folders."""
    paths = [path.relative_to(tree) for path in sorted(tree.rglob("*.py"))]
    skipped = (*left_out, "build", "dist", "__pycache__")
    return [path for path in paths if not any(part.startswith(".") or part in skipped for part in path.parts[:-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", nargs="?", type=Path, default=Path(__file__).parent.parent)
    parser.add_argument("--also", nargs="*", default=[], choices=LEFT_OUT, help="count these folders too")
    args = parser.parse_args()
    counts = Counts()
    for path in find_modules(args.tree, tuple(name for name in LEFT_OUT if name not in args.also)):
        counts.add_module(str(path), (args.tree / path).read_text())
    parts = {name: f"{count:,}" for name, count in count_parts(args.tree).items()}
    for label, value in (counts.rows() | parts | count_rooms(counts.module_lines)).items():
        print(f"| {label} | {value} |")
    large = [f"{name} {count}" for name, count in counts.large_modules().items()]
    print(f"\nmodules over {LARGE_MODULE} lines: {', '.join(large) or 'none'}")


if __name__ == "__main__":
    main()
