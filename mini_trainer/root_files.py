"""The seven scripts and modules beside this package's folder in a checkout are modules of the package.

`mini_trainer.sampler` is sampler.py of the root. An installed package holds these files itself.
"""

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("train", "process_data", "generate", "evaluate_model", "batch_packer", "sampler", "osft")


class RootFiles(MetaPathFinder):
    """Finds each of them under its one name; one that is asked for without the package's is another program's."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if name not in NAMES or package not in ("", "mini_trainer"):
            return None
        if package:
            return importlib.util.spec_from_file_location(fullname, ROOT / f"{name}.py")
        found = PathFinder.find_spec(name, [entry for entry in sys.path if not is_checkout(Path(entry))])
        if found is None and PathFinder.find_spec(name) is not None:
            raise ModuleNotFoundError(f"No module named {name!r}; did you mean 'mini_trainer.{name}'?", name=name)
        return found


def is_checkout(root: Path) -> bool:
    return all((root / name).is_file() for name in ("pyproject.toml", *(f"{name}.py" for name in NAMES)))


def install() -> None:
    if is_checkout(ROOT) and not any(isinstance(finder, RootFiles) for finder in sys.meta_path):
        sys.meta_path.insert(0, RootFiles())
