"""Builds the documentation as a site that works offline: build/docs/site/index.html.

    python docs/site/build_site.py

Gathers the pages of docs/, the notebooks, the README and the files that they link to, adds the reference, which is
generated from the code, and runs Zensical with every broken link or anchor as an error. Needs Zensical (the extra
`docs`), and no torch.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SITE = Path(__file__).resolve().parent
ROOT = SITE.parent.parent
sys.path[:0] = [str(SITE), str(ROOT)]

import code_reference
import option_reference

OUT = ROOT / "build" / "docs"
# Pages that the site has elsewhere.
MOVED = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"  # the front matter of pages for developers
NOTEBOOKS = Path("examples/notebooks")
# The theme loads a script from a server that lets the search run in pages opened as files; the site has a copy.
SHIM = OUT / "site" / "assets" / "iframe-worker.js"
LOADED = re.compile(r'<(?:script|img|link|iframe)[^>]*(?:src|href)="?(https?://[^"\s>]+)')
LOADED_SHIM = re.compile(r'src="?https://unpkg.com/iframe-worker/shim"?')
LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def main() -> None:
    """Builds the site, or exits with an error."""
    gather_pages(OUT / "pages")
    shutil.copyfile(SITE / "mkdocs.yml", OUT / "mkdocs.yml")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(OUT / "mkdocs.yml")]
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(code)
    for page in (OUT / "site").rglob("*.html"):
        text = LOADED_SHIM.sub(f'src="{os.path.relpath(SHIM, page.parent)}"', page.read_text())
        page.write_text(text)
        if loaded := LOADED.findall(text):
            sys.exit(f"error: {page} loads from the network: {', '.join(loaded)}")
    print(f"written: {OUT / 'site' / 'index.html'}")


def gather_pages(out: Path) -> None:
    """Writes all pages of the site, and the files they link to, to the directory `out`, which is emptied."""
    shutil.rmtree(out, ignore_errors=True)
    for source in sorted({*(ROOT / name for name in MOVED), *(ROOT / "docs").rglob("*.md")}):
        path = source.relative_to(ROOT)
        hidden = NOT_SEARCHED if "developers" in path.parts else ""
        write(out / place(path), hidden + move_links(source.read_text(), path, copy=lambda file: copy_file(file, out)))
    for notebook in sorted((ROOT / NOTEBOOKS).glob("*.ipynb")):
        path = notebook.relative_to(ROOT)
        text = move_links(convert_notebook(notebook), path, copy=lambda file: copy_file(file, out))
        write((out / place(path)).with_suffix(".md"), text)
        copy_file(path, out)
    for name, text in {**option_reference.make_pages(), **code_reference.make_pages()}.items():
        write(out / "reference" / name, text)
    shutil.copytree(SITE / "assets", out / "assets")


def place(path: Path) -> Path:
    """Where the site has a file of the repository."""
    if str(path) in MOVED:
        return Path(MOVED[str(path)])
    if path.parent == NOTEBOOKS:
        return Path("notebooks") / path.name
    return path.relative_to("docs") if path.parts[0] == "docs" else Path("files") / path


def move_links(text: str, page: Path, *, copy: Callable[[Path], None]) -> str:
    """The text of `page` with links as the site has them; `copy` receives each linked file that is no page."""
    here = place(page).parent

    def move(match: re.Match) -> str:
        target, hash_sign, anchor = match[2].partition("#")
        if "://" in target or target == "":
            return match[0]
        linked = Path(os.path.normpath(page.parent / target))
        moved = place(linked)
        if linked.suffix == ".ipynb" and linked != page:
            moved = moved.with_suffix(".md")
        elif linked.suffix != ".md" or moved.parts[0] == "files":
            copy(linked)
        return f"{match[1]}{os.path.relpath(moved, here)}{hash_sign}{anchor}{match[3]}"

    return LINK.sub(move, text)


def copy_file(path: Path, out: Path) -> None:
    target = out / place(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / path, target)


def convert_notebook(path: Path) -> str:
    """A notebook's cells as Markdown, with a link to the notebook."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
    return "\n\n".join([*parts, f"[This page as a notebook]({path.name})", ""])


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


if __name__ == "__main__":
    main()
