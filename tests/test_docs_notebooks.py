"""The notebooks of examples/ run from the first cell to the last; what they promise is asserted in their cells."""

import shutil
from pathlib import Path

import pytest
from heavy import need
from processes import ENV, ROOT

nbformat, NotebookClient = need("nbformat"), need("nbclient").NotebookClient

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
SHORT = "look_at_your_masks"  # the others train


def read_notebook(path: Path) -> "nbformat.NotebookNode":
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize(
    "path", [pytest.param(path, id=path.stem, marks=[pytest.mark.long] * (path.stem != SHORT)) for path in NOTEBOOKS]
)
def test_a_notebook_runs(path, tmp_path):
    """In a folder that looks like the repository to it, so that nothing is left behind."""
    here = tmp_path / "examples" / "notebooks"
    here.mkdir(parents=True)
    shutil.copytree(ROOT / "examples" / "quickstart", tmp_path / "examples" / "quickstart")
    env = ENV | {"HOME": str(tmp_path), "MPLCONFIGDIR": str(Path.home() / ".cache" / "matplotlib")}
    client = NotebookClient(
        read_notebook(path), timeout=500, kernel_name="python3", resources={"metadata": {"path": here}}
    )
    client.execute(env=env)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    cells = [cell for cell in read_notebook(path).cells if cell.cell_type == "code"]
    assert cells and all(cell.outputs == [] and cell.execution_count is None for cell in cells)
    assert path.stat().st_size < 10_000
