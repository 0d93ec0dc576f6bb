"""Imports `mini_trainer.NAME` for the modules beside this package's folder, whose own imports have bare names.

Each is one module under both names: `mini_trainer.sampler is sampler`.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent
PACKAGE = __package__.rpartition(".")[0]
ROOT_MODULES = ("train", "process_data", "generate", "evaluate_model", "batch_packer", "sampler", "osft")


class RootModules(MetaPathFinder, Loader):
    """Finds and loads these modules; `install` puts it before other finders, which would load a second copy."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        package, _, name = fullname.rpartition(".")
        if package != PACKAGE or name not in ROOT_MODULES:
            return None
        return importlib.util.spec_from_loader(fullname, self, origin=str(FOLDER / f"{name}.py"))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        name = spec.name.rpartition(".")[2]
        module = import_root_module(name)
        spec.loader_state = module.__spec__
        return module

    def get_code(self, fullname: str) -> CodeType:
        """The module's code, for `python -m mini_trainer.NAME`."""
        add_folder()
        name = fullname.rpartition(".")[2]
        return SourceFileLoader(fullname, str(FOLDER / f"{name}.py")).get_code(fullname)

    def exec_module(self, module: ModuleType) -> None:
        """Restores the module's spec, in whose place the import system has put that of the other name."""
        module.__spec__ = module.__spec__.loader_state


class CallableModule(ModuleType):
    """The module process_data, which takes the place of `mini_trainer.process_data` when it is imported."""

    def __call__(self, args: Any) -> Path:
        return importlib.import_module(f"{PACKAGE}.api.launch").process_data(args)


def install() -> None:
    """Lets `import mini_trainer.NAME` find the modules; once, also if the package is reloaded."""
    if not any(type(finder).__module__ == __name__ for finder in sys.meta_path):
        sys.meta_path.insert(0, RootModules())


def import_root_module(name: str) -> ModuleType:
    """The module by its bare name; ImportError if another program's module has that name, or one that it imports."""
    add_folder()
    module = sys.modules.get(name)
    if module is None:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException as error:
            del sys.modules[name]
            if isinstance(error, ImportError) and (taken := find_taken()):
                raise ImportError(describe_taken(name, taken)) from error
            raise
    elif not is_ours(module):
        raise ImportError(describe_taken(name, [name]))
    if name == "process_data":
        module.__class__ = CallableModule
    return module


def add_folder() -> None:
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))  # at the end: it must not hide the caller's own modules


def is_ours(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None)
    return file is not None and Path(file).resolve().is_relative_to(FOLDER)


def find_taken() -> list[str]:
    """Names of the root's modules and folders that modules of other programs have."""
    names = {path.stem for path in FOLDER.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    return sorted(name for name in names - {"__main__"} if name in sys.modules and not is_ours(sys.modules[name]))


def describe_taken(name: str, taken: list[str]) -> str:
    file = getattr(sys.modules[taken[0]], "__file__", None)
    return (
        f"{PACKAGE}.{name} imports the module {taken[0]} by that name, which another one has here ({file}): rename that"
        f" one, or start Python in another folder"
    )
