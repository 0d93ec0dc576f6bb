"""The order of rooms and layers: every import leads downwards, and none round in a circle (docs/architecture.md)."""

import ast
import subprocess
import sys
from importlib.metadata import requires

import pytest
from program import ROOT, list_dependencies, list_sources, name_packages

# Bottom up. A room is a folder, or a module of the root; those on one level do not know each other.
LAYERS = [
    {"options", "disk", "packers", "pages"},
    {"ranks", "batch_packer"},
    {"contents"},
    {"chat", "command_line", "api", "pretrained"},
    {"families"},
    {"objectives"},
    {"corpus"},
    {"sampler"},
    {"model", "optim"},
    {"methods", "osft", "scoring"},
    {"lifecycle"},
    {"plan", "plots", "inference", "importers", "exporters"},
    {"evaluation"},
    {"continual", "sweep"},
]
# Rooms of one level that are one subject: they may import each other's modules, without a circle.
TOGETHER = ({"methods", "osft"},)
# Whatever else is at the root is a script: it imports from below, and nothing imports it.
SCRIPTS = {"train", "process_data", "generate", "evaluate_model", "data_process", "__main__"}
PACKAGES = {"PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml", "mlflow": "mlflow-skinny"}  # by their modules
LEVELS = {room: level for level, rooms in enumerate(LAYERS) for room in rooms} | dict.fromkeys(
    SCRIPTS | {"tools"}, len(LAYERS)
)
MOST_PARAMETERS = 8

Imports = dict[str, set[str]]  # name of a module -> full names of what it imports, ours and others'


def list_modules() -> dict[str, str]:
    """Name and source of every module of the package."""
    return {path.removesuffix(".py").replace("/", "."): source for path, source in list_sources().items()}


def read_imports(name: str, source: str, modules: set[str]) -> set[str]:
    """What module `name` imports, anywhere in it: modules by their full name, also those given as names of a room."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level > 0:  # relative: from the package, which for a module of the root is the root itself
                parents = name.split(".")[: -node.level]
                base = ".".join([*parents, base] if base else parents)
            inner = {f"{base}.{alias.name}".lstrip(".") for alias in node.names}
            found = inner & modules
            names |= found or {base}
    return names - {""}


def read_all(sources: dict[str, str]) -> Imports:
    return {name: read_imports(name, source, set(sources)) for name, source in sources.items()}


def room_of(module: str) -> str:
    return module.split(".")[0]


def find_upward(imports: Imports) -> list[str]:
    """Imports of what is not below, with both levels."""
    wrong = []
    for name, targets in imports.items():
        for target in targets:
            here, there = room_of(name), room_of(target)
            if there not in LEVELS or here == there or any({here, there} <= rooms for rooms in TOGETHER):
                continue
            level = 4 if here == "__init__" else LEVELS[here]  # the package imports what imports nothing heavy
            if LEVELS[there] >= level:
                wrong.append(f"{name} (level {level}) imports {target} (level {LEVELS[there]})")
    return sorted(wrong)


def find_circles(imports: Imports) -> list[str]:
    """Circles of modules: none if there is none, else at least one of those that share modules."""
    circles, done = [], set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            circles.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for target in sorted(imports[module] & imports.keys()):
                visit(target, [*path, module])
            done.add(module)

    for module in sorted(imports):
        visit(module, [])
    return circles


def find_closure(start: str, imports: Imports) -> dict[str, list[str]]:
    """Everything that importing `start` can bring in, with the way there."""
    found, waiting = {}, [(start, [start])]
    while waiting:
        module, path = waiting.pop()
        if module not in found:
            found[module] = path
            inits = {f"{room_of(target)}.__init__" for target in imports.get(module, ())} & imports.keys()
            waiting += [(target, [*path, target]) for target in sorted(imports.get(module, set()) | inits)]
    return found


@pytest.fixture(scope="module")
def imports() -> Imports:
    return read_all(list_modules())


def test_every_module_has_its_level(imports):
    assert {room_of(name) for name in imports} - {"__init__"} == LEVELS.keys()


def test_every_package_that_is_imported_is_a_dependency(imports):
    """Ours or transformers': what others happen to need may be gone in their next release, as httpx was."""
    modules = {room_of(target) for targets in imports.values() for target in targets}
    foreign = modules - LEVELS.keys() - sys.stdlib_module_names - {"__init__", "mini_trainer"}
    imported = {PACKAGES.get(name, name).replace("_", "-") for name in foreign}
    assert {"numba", "pillow", "openai"} <= imported
    known = list_dependencies() | name_packages(requires("transformers"))
    assert imported - {name.replace("_", "-") for name in known} == set()


def test_no_import_leads_up(imports):
    upward = find_upward(imports)
    assert not upward, "\n".join(upward)


def test_no_modules_import_each_other_in_a_circle(imports):
    circles = find_circles(imports)
    assert not circles, "\n".join(circles)


@pytest.mark.parametrize(
    ("script", "some"),
    [
        ("process_data", {"mini_trainer.data.chat.masking", "mini_trainer.data.rows.writer", "options"}),
        ("mini_trainer.tools.plot_metrics", {"mini_trainer.use.plots.page", "mini_trainer.use.pages.page"}),
        ("mini_trainer.tools.board", {"mini_trainer.use.plots.board", "mini_trainer.use.pages.page"}),
    ],
)
def test_nothing_that_these_scripts_import_has_torch(script, some, imports):
    closure = find_closure(script, imports)
    assert {script} | some <= closure.keys()  # the closure is not empty
    heavy = {"safetensors.torch", "accelerate", "peft"}
    ways = [" -> ".join(path) for name, path in closure.items() if name in heavy or room_of(name) == "torch"]
    assert not ways, "\n".join(ways)


def find_shared_tests(sources: dict[str, str]) -> list[str]:
    """Which of the modules in tests/, given by name, import from a module of tests."""
    imports = {name: read_imports(name, source, set(sources)) for name, source in sources.items()}
    return sorted(
        f"{name} imports {room_of(target)}"
        for name, targets in imports.items()
        for target in targets
        if target.startswith("test_")
    )


def test_no_module_of_tests_is_imported():
    sources = {path.stem: path.read_text() for path in (ROOT / "tests").rglob("*.py")}
    assert {"test_layers", "small_runs", "conftest"} <= sources.keys()
    assert find_shared_tests(sources) == []
    turned = {"test_a": "from small_runs import x", "test_b": "def f():\n    from test_a import x"}
    assert find_shared_tests(turned) == ["test_b imports test_a"]


def test_the_root_holds_the_scripts_and_what_the_project_is_known_for():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = [name for name in done.stdout.splitlines() if "/" not in name and (ROOT / name).exists()]
    known_for = {"batch_packer", "sampler", "osft", "command_line", "contents", "disk", "__init__"}
    papers = {"README.md", "CHANGELOG.md", "SECURITY.md", "LICENSE", "Makefile", "pyproject.toml", "tox.ini"}
    others = {"constraints.txt", ".gitignore", ".dockerignore", "py.typed"}
    allowed = papers | others | {f"{name}.py" for name in known_for | SCRIPTS}
    assert set(listed) - allowed == set()


def find_long_signatures(source: str) -> list[str]:
    """The functions that take more than MOST_PARAMETERS, but for what is bound to a method."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            given = node.args
            variadic = [one for one in (given.vararg, given.kwarg) if one is not None]
            names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, *variadic)]
            if len(names) - (names[:1] in (["self"], ["cls"], ["ctx"])) > MOST_PARAMETERS:
                found.append(node.name)
    return found


def test_no_function_but_a_kernel_takes_many_parameters():
    signatures = {name: find_long_signatures(source) for name, source in list_modules().items()}
    kernels = signatures.pop(
        "mini_trainer.model.attention"
    )  # what transformers calls, with a parameter for all there is
    assert {name: found for name, found in signatures.items() if found} == {}
    assert kernels == ["attention"]
    assert find_long_signatures("class A:\n    def f(self, a, b, c, /, d, e, *, f, g, h): pass") == []
    assert find_long_signatures("def f(a, b, c, /, d, e, *f, g, h, **i): pass") == ["f"]


@pytest.mark.parametrize(
    ("name", "line", "found"),
    [
        (
            "mini_trainer.data.chat.masking",
            "from mini_trainer.run import record",
            "data.chat.masking (level 3) imports run.record (level 10)",
        ),
        (
            "mini_trainer.data.chat.masking",
            "import mini_trainer.data.rows.files as files",
            "data.chat.masking (level 3) imports data.rows.files (level 6)",
        ),
        (
            "mini_trainer.model.optim.optimizers",
            "from mini_trainer.model.build import x",
            "model.optim.optimizers (level 8) imports model.build (level 8)",
        ),
        (
            "options",
            "def f():\n    from mini_trainer.data.stores import disk",
            "options (level 0) imports disk (level 0)",
        ),
        (
            "disk",
            "if TYPE_CHECKING:\n    import mini_trainer.distributed.world",
            "disk (level 0) imports distributed.world (level 1)",
        ),
        (
            "mini_trainer.run.plan.planner",
            "from mini_trainer.train from mini_trainer import train",
            "run.plan.planner (level 11) imports train (level 14)",
        ),
        ("train", "from mini_trainer.process_data import x", "train (level 14) imports process_data (level 14)"),
        ("__init__", "from .sampler import prefetch", "__init__ (level 4) imports sampler (level 7)"),
        (
            "mini_trainer.distributed.lock",
            "from .. from mini_trainer import sampler",
            "distributed.lock (level 1) imports sampler (level 7)",
        ),
    ],
)
def test_an_import_that_is_turned_round_is_found(name, line, found):
    sources = dict.fromkeys(
        [
            "mini_trainer.run.record",
            "mini_trainer.data.rows.files",
            "mini_trainer.model.build",
            "sampler",
            "train",
            "process_data",
        ],
        "",
    )
    turned = read_all(sources | {"disk": "", "mini_trainer.distributed.world": "", name: line})
    assert find_upward(turned) == [found]


def test_an_import_that_leads_down_is_not_found():
    sources = {
        "sampler": "from mini_trainer.data.tokenized.reader import Data\nimport options",
        "mini_trainer.data.tokenized.reader": "import numpy",
    }
    sources |= {
        "mini_trainer.model.methods.osft_calibration": "from mini_trainer.osft import x",
        "__init__": "from .options import x",
        "options": "",
    }
    assert find_upward(read_all(sources | {"osft": "import torch.nn"})) == []


def test_circles_are_found():
    sources = {
        "model.a": "import model.b",
        "model.b": "from mini_trainer.model import c",
        "model.c": "from mini_trainer.model.a import x",
    }
    circle = "model.a -> model.b -> model.c -> model.a"
    assert find_circles(read_all(sources | {"model.d": "import model.a"})) == [circle]
    assert find_circles(read_all(sources | {"model.c": "import model.d", "model.d": ""})) == []


def test_torch_is_found_however_far_away():
    sources = {
        "process_data": "from mini_trainer.data.rows import files",
        "mini_trainer.data.rows.files": "def f():\n    from torch import nn",
    }
    closure = find_closure("process_data", read_all(sources))
    assert closure["torch"] == ["process_data", "mini_trainer.data.rows.files", "torch"]
    sources = {
        "process_data": "from mini_trainer.data.rows import files",
        "mini_trainer.data.rows.files": "",
        "corpus.__init__": "import torch",
    }
    assert "torch" in find_closure("process_data", read_all(sources))


# Modules that print texts of others themselves, and why that is safe.
PRINT = {
    "mini_trainer.distributed.printing": "what its callers have cleaned",
    "mini_trainer.distributed.messages": "what is clean",
    "mini_trainer.distributed.ending": "stacks of this program's threads",
    "mini_trainer.distributed.monitor": "what is clean, on a line of its own",
    "mini_trainer.use.pages.preview": "segments that are made visible, in our colours",
    "mini_trainer.use.inference.terminal": "pieces of answers, each made visible",
    "mini_trainer.run.training_log": "JSON in ASCII",
    "command_line": "the user's options as YAML",
    "__main__": "the user's own words",
    "mini_trainer.distributed.children": "lines of a script, which are clean",
    "mini_trainer.run.raw_rows": "lines of a script, which are clean",
}


def test_modules_print_through_what_cleans():
    """A print of anything but a literal stands only in modules that are known to need no cleaning."""
    printing = set()
    for name, source in list_modules().items():
        for node in ast.walk(ast.parse(source)):
            is_name = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            is_print = is_name and node.func.id in ("print", "print_as_is")
            if is_print and not all(isinstance(value, ast.Constant) for value in node.args):
                printing.add(name)
    assert printing == PRINT.keys()
