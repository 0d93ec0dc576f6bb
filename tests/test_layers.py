"""Rooms and layers (docs/developers/architecture.md): every import leads downwards, and none round in a circle."""

import ast
import functools
import subprocess
import sys
from importlib.metadata import requires

import pytest
from program import ROOT, list_dependencies, list_sources, name_packages

from mini_trainer.root_files import NAMES

parse = functools.cache(ast.parse)  # all sources take seconds

# Bottom up. A room is a folder of the package, or a file of the root; those on one line may know each other's modules,
# without a circle.
LAYERS = [
    {"options", "distributed"},
    {"data.stores", "data.packers", "batch_packer"},
    {"data.chat", "data.columns"},
    {"data.rows"},
    {"data.tokenized"},
    {"objectives.families"},
    {"objectives"},
    {"sampler"},
    {"model"},
    {"model.optim"},
    {"model.scoring"},
    {"model.methods", "osft"},
    {"run"},
    {"run.plan"},
    {"use.pages"},
    {"use.plots"},
    {"use.inference"},
    {"use.exporters"},
    {"use.evaluation"},
    {"continual"},
    {"tools"},
    {"api"},
    # Scripts: nothing imports them.
    {
        *("train", "process_data", "generate", "evaluate_model", "data_process", "__main__"),
        *("api_train", "callbacks", "osft_utils", "training_types"),
    },
]
EVERYWHERE = {"mini_trainer", "root_files"}  # import nothing of the rooms
PACKAGE = "mini_trainer."
PACKAGES = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
    "mlflow": "mlflow-skinny",
    "llama_cpp": "llama-cpp-python",
}  # by their modules
LEVELS = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
MOST_ROOMS, MOST_LINES, MOST_PARAMETERS = 10, 500, 8

Imports = dict[str, set[str]]  # name of a module -> full names of what it imports, ours and others'


def list_modules() -> dict[str, str]:
    """Name and source of every module of the package."""
    return {name_module(path): source for path, source in list_sources().items()}


def name_module(path: str) -> str:
    name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    return PACKAGE + name if name in NAMES else name


def read_imports(source: str, modules: set[str]) -> set[str]:
    """What a module imports, anywhere in it: modules by their full name, also those given as names of a room."""
    names = set()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found = {f"{node.module}.{alias.name}" for alias in node.names} & modules
            names |= found or {node.module}
    return names


def read_all(sources: dict[str, str]) -> Imports:
    return {name: read_imports(source, set(sources)) for name, source in sources.items()}


def room_of(module: str) -> str | None:
    """The innermost of LAYERS' rooms that holds a module; None for one that is not ours."""
    name = module.removeprefix(PACKAGE)
    if name == module or name in EVERYWHERE:
        return name if name in EVERYWHERE else None
    while name and name not in LEVELS:
        name = name.rpartition(".")[0]
    return name or None


def find_upward(imports: Imports) -> list[str]:
    """Imports of what is not below, with both levels."""
    wrong = []
    for name, targets in imports.items():
        for target in targets:
            here, there = room_of(name), room_of(target)
            if here in EVERYWHERE or there is None or there in EVERYWHERE or here == there:
                continue
            is_script = LEVELS[there] == len(LAYERS) - 1
            if LEVELS[there] > LEVELS[here] or is_script:
                wrong.append(f"{name} (level {LEVELS[here]}) imports {target} (level {LEVELS[there]})")
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
    """Everything that importing `start` can bring in, with the way there; packages come with their modules."""
    found, waiting = {}, [(start, [start])]
    while waiting:
        module, path = waiting.pop()
        if module not in found:
            found[module] = path
            targets = imports.get(module, set())
            parents = {target.rpartition(".")[0] for target in (module, *targets)} & imports.keys()
            waiting += [(target, [*path, target]) for target in sorted(targets | parents)]
    return found


@pytest.fixture(scope="module")
def imports() -> Imports:
    return read_all(list_modules())


def test_every_module_has_its_level_and_every_room_its_page(imports):
    assert {room_of(name) for name in imports} == LEVELS.keys() | EVERYWHERE | {None}
    assert {name for name in imports if room_of(name) is None} == {"mini_trainer.data", "mini_trainer.use"}
    rooms = [path for path in (ROOT / "mini_trainer").iterdir() if path.is_dir() and path.name != "__pycache__"]
    assert len(rooms) <= MOST_ROOMS
    for path in rooms:
        assert len(ast.get_docstring(ast.parse((path / "__init__.py").read_text())).splitlines()) >= 3, path


def test_every_package_that_is_imported_is_a_dependency(imports):
    """Ours or transformers': what others happen to need may be gone in their next release, as httpx was."""
    modules = {target.partition(".")[0] for targets in imports.values() for target in targets}
    foreign = modules - sys.stdlib_module_names - {"mini_trainer", "hatchling"}  # which builds the wheel
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
        ("process_data", {"data.chat.masking", "data.rows.writer", "options"}),
        ("tools.plot_metrics", {"use.plots.curves", "use.pages.page"}),
        ("tools.board", {"use.plots.board", "use.pages.page"}),
    ],
)
def test_nothing_that_these_scripts_import_has_torch(script, some, imports):
    closure = find_closure(f"{PACKAGE}{script}", imports)
    assert {f"{PACKAGE}{name}" for name in (script, *some)} <= closure.keys()  # the closure is not empty
    heavy = {"safetensors.torch", "accelerate", "peft"}
    ways = [" -> ".join(path) for name, path in closure.items() if name in heavy or name.partition(".")[0] == "torch"]
    assert not ways, "\n".join(ways)


# Where a run or a plan is opened: everything else takes the groups of options that it needs.
TAKE_ALL_OPTIONS = {
    "train": {"train"},
    "run.preflight": {"begin", "check_directory", "check_start", "describe_done", "find_option_changes"},
    "run.start": {
        *("open_inputs", "make_data_local", "choose_objective", "choose_settings", "choose_method", "settle_by_device")
    },
    "run.raw_rows": {"find_data", "find_old", "find_kept", "tokenize", "make_data_local", "find_local_data"},
    "run.own_samples": {"make_draw_options", "find_samples", "list_draw_words"},
    "run.identity": {"flatten_with_urls", "unwrap"},
    "run.plan.planner": {"plan_run", "look_at_run", "choose_step_options", "list_changes"},
}


def test_functions_take_the_groups_of_options_that_they_need():
    found: dict[str, set[str]] = {}
    for name, source in list_modules().items():
        for node in ast.walk(parse(source)):
            if isinstance(node, ast.FunctionDef) and any(
                argument.annotation is not None and ast.unparse(argument.annotation) == "TrainOptions"
                for argument in (*node.args.args, *node.args.kwonlyargs)
            ):
                found.setdefault(name.removeprefix(PACKAGE), set()).add(node.name)
    assert {name: names for name, names in found.items() if not name.startswith("options.")} == TAKE_ALL_OPTIONS


def find_shared_tests(sources: dict[str, str]) -> list[str]:
    """Which of the modules in tests/, given by name, import from a module of tests."""
    imports = {name: read_imports(source, set(sources)) for name, source in sources.items()}
    return sorted(
        f"{name} imports {target.partition('.')[0]}"
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


def test_the_root_has_few_entries():
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    listed = {name.partition("/")[0] for name in done.stdout.splitlines() if (ROOT / name).exists()}
    papers = {"README.md", "CHANGELOG.md", "SECURITY.md", "LICENSE"}
    settings = {"Makefile", "pyproject.toml", "tox.ini", "constraints.txt", ".gitignore", ".dockerignore", ".ci"}
    folders = {"mini_trainer", "tests", "benchmarks", "docs", "examples"}
    assert listed == papers | settings | folders | {f"{name}.py" for name in NAMES}


def find_long_signatures(source: str) -> list[str]:
    """Functions with more than MOST_PARAMETERS, but for what is bound to a method; kernels in Triton may take any."""
    found = []
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.FunctionDef) and not any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
            given = node.args
            variadic = [one for one in (given.vararg, given.kwarg) if one is not None]
            names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, *variadic)]
            if len(names) - (names[:1] in (["self"], ["cls"], ["ctx"])) > MOST_PARAMETERS:
                found.append(node.name)
    return found


def test_no_function_but_a_kernel_takes_many_parameters():
    signatures = {name: find_long_signatures(source) for name, source in list_modules().items()}
    kernels = signatures.pop("mini_trainer.model.attention")  # transformers calls it, with a parameter for all there is
    assert {name: found for name, found in signatures.items() if found} == {}
    assert kernels == ["attention"]
    assert find_long_signatures("class A:\n    def f(self, a, b, c, /, d, e, *, f, g, h): pass") == []
    assert find_long_signatures("def f(a, b, c, /, d, e, *f, g, h, **i): pass") == ["f"]


def test_a_module_can_be_read_in_one_sitting():
    lengths = {path: source.count("\n") for path, source in list_sources().items()}
    longer = {path for path, length in lengths.items() if length > MOST_LINES}
    assert longer == set()


def complete(text: str) -> str:
    """A test's code or name with the package's name in front of our modules'."""
    return text.replace("~", PACKAGE)


@pytest.mark.parametrize(
    ("name", "line", "found"),
    [
        ("data.chat.masking", "from ~run import identity", "level 2) imports run.identity (level 12)"),
        ("data.chat.masking", "import ~data.rows.files as x", "level 2) imports data.rows.files (level 3)"),
        ("model.build", "from ~model.optim.optimizers import x", "level 8) imports model.optim.optimizers (level 9)"),
        ("options.fields", "def f():\n    import ~data.stores.disk", "level 0) imports data.stores.disk (level 1)"),
        ("run.plan.planner", "from ~train import train", "level 13) imports train (level 22)"),
        ("train", "from ~process_data import x", "level 22) imports process_data (level 22)"),
        ("run.start", "if TYPE_CHECKING:\n    from ~ import train", "level 12) imports train (level 22)"),
    ],
)  # fmt: skip
def test_an_import_that_is_turned_round_is_found(name, line, found):
    others = ("run.identity", "data.rows.files", "model.optim.optimizers", "data.stores.disk", "train", "process_data")
    sources = dict.fromkeys([f"{PACKAGE}{other}" for other in others], "")
    line = complete(line).replace("mini_trainer. import", "mini_trainer import")
    turned = read_all(sources | {f"{PACKAGE}{name}": line})
    assert [wrong.replace(PACKAGE, "") for wrong in find_upward(turned)] == [f"{name} ({found}"]


def find_missing_names(sources: dict[str, str]) -> list[str]:
    """Names that modules take from a module (`module.name`) that has none such; the type checker does not look."""
    trees = {module: parse(source) for module, source in sources.items()}
    missing = []
    for module, tree in trees.items():
        nodes = list(ast.walk(tree))
        bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
        bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
        imported = [(node.module, name) for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names]
        taken = {name.asname or name.name: f"{of}.{name.name}" for of, name in imported}
        taken = {name: full for name, full in taken.items() if full in trees and name not in bound}
        for node in nodes:
            is_taken = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in taken
            if is_taken and node.attr not in list_names(trees[taken[node.value.id]]) | {"__file__"}:
                missing.append(f"{module}:{node.lineno}: {node.value.id}.{node.attr}")
    return missing


@functools.cache
def list_names(tree: ast.Module) -> set[str]:
    """Names that a module binds, but for those inside of functions and classes."""
    names, nodes = set(), list(tree.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        else:
            names |= {node.id} if isinstance(node, ast.Name) else set()
            nodes += ast.iter_child_nodes(node)
    return names


def test_a_name_is_taken_from_a_module_that_does_not_have_it():
    assert find_missing_names(list_modules()) == []
    sources = {"a.b": "def known(): pass\nSIZE: int = 1", "c": "from a import b\nb.known(b.SIZE)\nb.unknown"}
    assert find_missing_names(sources) == ["c:3: b.unknown"]


def test_circles_are_found():
    sources = {"model.a": "import model.b", "model.b": "from model import c", "model.c": "from model.a import x"}
    circle = "model.a -> model.b -> model.c -> model.a"
    assert find_circles(read_all(sources | {"model.d": "import model.a"})) == [circle]
    assert find_circles(read_all(sources | {"model.c": "import model.d", "model.d": ""})) == []


def test_torch_is_found_however_far_away():
    sources = {"process_data": "from corpus import files", "corpus.files": "def f():\n    from torch import nn"}
    assert find_closure("process_data", read_all(sources))["torch"] == ["process_data", "corpus.files", "torch"]
    sources = {"process_data": "from corpus import files", "corpus.files": "", "corpus": "import torch"}
    assert "torch" in find_closure("process_data", read_all(sources))


# Modules that print texts of others themselves, and why that is safe.
PRINT = {
    "distributed.messages": "what is clean, and what its callers have cleaned",
    "distributed.ending": "stacks of this program's threads",
    "distributed.watch": "what is clean, on a line of its own",
    "use.pages.preview": "segments that are made visible, in our colours",
    "use.inference.terminal": "pieces of answers, each made visible",
    "run.training_log": "JSON in ASCII",
    "options.command_line": "the user's options as YAML",
    "options.help": "our own texts",
    "__main__": "the user's own words",
    "distributed.children": "lines of a script, which are clean",
    "run.raw_rows": "lines of a script, which are clean",
    "tools.slurm_job": "a path for the shell",
}


def test_modules_print_through_what_cleans():
    """A print of anything but a literal stands only in modules that are known to need no cleaning."""
    printing = set()
    for name, source in list_modules().items():
        for node in ast.walk(parse(source)):
            is_name = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            is_print = is_name and node.func.id in ("print", "print_as_is")
            if is_print and not all(isinstance(value, ast.Constant) for value in node.args):
                printing.add(name.removeprefix(PACKAGE))
    assert printing == PRINT.keys()
