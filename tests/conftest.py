import gc

gc.disable()  # until all is imported: it would look through a million objects a dozen times

import atexit
import getpass
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import heavy
import pytest
from fork_server import measure_server, share_server, silence, start_server, use_server
from hypothesis import settings
from turns import Floor

os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads than cores would make every test crawl
os.environ["HF_HUB_OFFLINE"] = "1"
# Not in the home directory: torch's own default.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}")
if "MINI_TRAINER_CACHE" not in os.environ:  # of this process and those that it starts
    os.environ["MINI_TRAINER_CACHE"] = tempfile.mkdtemp(prefix="mini_trainer_caches_")

    @atexit.register
    def remove_caches(folder: str = os.environ["MINI_TRAINER_CACHE"], pid: int = os.getpid()) -> None:
        if os.getpid() == pid:
            shutil.rmtree(folder, ignore_errors=True)


os.fsync = os.fstat  # no test cuts the power, and a run waits for the disk dozens of times
settings.register_profile("any machine", deadline=None)  # an example's time is the machine's, and no property of ours
settings.load_profile("any machine")

# Several ranks that have to be gone within seconds: nothing else may want the cores.
ALONE = {"test_faults.py"}
# On commands beside training, on pages and on what is loaded: left to `make test-rest`, also the tests that are short.
BESIDE = {
    "test_batch_lengths_to_minibatches.py", "test_board.py", "test_continual_front.py", "test_continual_matrix.py",
    "test_continual_page.py", "test_continual_settings.py", "test_evaluate.py", "test_evaluate_classes.py",
    "test_export_gguf.py", "test_export_run.py", "test_generate.py", "test_generate_servers.py", "test_gpu_stages.py",
    "test_image_files.py", "test_import_config.py", "test_loaded_modules.py", "test_page_access.py", "test_pages.py",
    "test_plots.py", "test_red_hat.py", "test_server_refusals.py", "test_sweep.py", "test_sweep_settings.py",
    "test_sweep_tasks.py", "test_trace.py",
}  # fmt: skip
# Takes long, mostly asleep, and keeps its promises beside any other test, also one that is else alone.
SLEEPING = {"test_run_control.py"}
# Objects that runs may leave until all are looked through, which takes a second or two.
MOST_FROZEN = 1_000_000

CPU: Counter[str] = Counter()  # seconds of each module


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu", action="store_true", help="CPU seconds of each module, and of all forked processes")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[pytest.TestReport]:
    report, before = (yield), item.config.cpu_before
    item.config.cpu_before = sum(os.times()[:4])  # children's, too
    report.cpu = item.config.cpu_before - before
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    CPU[report.nodeid.partition("::")[0]] += getattr(report, "cpu", 0.0)  # none if the worker crashed


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("--cpu"):
        for name, seconds in [("forked processes", measure_server()), *CPU.most_common()]:
            terminalreporter.write_line(f"{seconds:8.1f} CPU s  {name}")


def pytest_configure(config: pytest.Config) -> None:
    if "gpu" not in config.getoption("-m"):  # exactness is tested on the CPU, also where there is a GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if hasattr(config, "workerinput"):  # of pytest-xdist, which `pytest_configure_node` has filled
        config.floor = Floor(Path(config.workerinput["turns"]))
        use_server(config.workerinput["server"])


def pytest_sessionstart(session: pytest.Session) -> None:
    """Compiles the packer once, before several processes would at the same time, and make promised seconds long."""
    if not hasattr(session.config, "workerinput"):
        from mini_trainer.batch_packer import pack_batch

        pack_batch([2, 1], 2, 1)


@pytest.hookimpl(tryfirst=True)  # before those that `-m` does not choose are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules that take long come first, whole, so that all workers have done everything at about the same time: those
    with slow tests, then those with many."""
    for item in items:
        if any(getattr(value, "__module__", None) in heavy.MODULES for value in vars(item.module).values()):
            item.add_marker("heavy")
        if item.path.name in BESIDE:
            item.add_marker("long")
    slow, counts = {item.path for item in items if item.get_closest_marker("slow")}, Counter(i.path for i in items)

    def find_place(item: pytest.Item) -> tuple:
        path = item.path
        return path.name not in ALONE, path.name not in SLEEPING, path not in slow, -counts[path], path

    items.sort(key=find_place)


def pytest_collection_finish(session: pytest.Session) -> None:
    freeze(session.config)
    session.config.cpu_before = sum(os.times()[:4])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: object) -> None:
    """pytest-xdist: a directory for the workers to take turns in, and a server of processes, made by whoever starts
    them."""
    if not hasattr(node.config, "turns"):
        node.config.turns = tempfile.mkdtemp(prefix="mini_trainer_tests_")
        node.config.server = share_server()
    node.workerinput |= dict(turns=node.config.turns, server=node.config.server)


def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "turns"):
        shutil.rmtree(config.turns)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """A test and its fixtures in their turn; those that run alone follow one another."""
    floor = getattr(item.config, "floor", None)
    if floor is None or item.path.name in SLEEPING:
        return (yield)
    is_alone = item.path.name in ALONE
    floor.take(is_alone=is_alone)
    try:
        return (yield)
    finally:
        if not is_alone or nextitem is None or nextitem.path.name not in ALONE:
            floor.give_back()


@pytest.fixture(scope="module", autouse=True)
def collected(request: pytest.FixtureRequest) -> Iterator[None]:
    """Frees what runs have left, each of which froze what was there at its beginning; once that is much."""
    yield
    if gc.get_freeze_count() - request.config.num_frozen > MOST_FROZEN:
        gc.unfreeze()
        freeze(request.config)


def freeze(config: pytest.Config) -> None:
    """No garbage collection looks again at what is there now: a second each time, once all has been imported."""
    gc.collect()
    gc.freeze()
    gc.enable()
    config.num_frozen = gc.get_freeze_count()


@pytest.fixture(scope="session")
def world() -> Iterator:
    """A process group of one process, as `python train.py` makes it."""
    import torch.distributed as dist

    from mini_trainer.distributed.world import init_world

    yield init_world()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[Callable]:
    """Calls a function in a process of its own, since a simulation wants no other process group beside its own."""
    with ProcessPoolExecutor(1, mp_context=start_server(), initializer=silence) as pool:
        yield lambda function, *args: pool.submit(function, *args).result(timeout=240)


@pytest.fixture(scope="module")
def inputs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model of the family that the module names as `MODEL`, with its tokenizer, and a data set: as options."""
    from small_runs import make_inputs

    return make_inputs(tmp_path_factory.mktemp("inputs"), getattr(request.module, "MODEL", "llama"))


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the family that the module names as `MODEL`, with its tokenizer, which "tokenizer" has alone."""
    from tiny_models import FAMILIES, save_model, save_tokenizer

    path, family = tmp_path_factory.mktemp("models") / "model", getattr(request.module, "MODEL", "llama")
    if family == "tokenizer":
        request.getfixturevalue("tokenizer").save_pretrained(path)
        return path
    return save_tokenizer(save_model(FAMILIES[family], path))


@pytest.fixture(scope="module")
def tokenizer() -> object:
    """A tokenizer of transformers', with a chat template and the words of short chats."""
    from make_tiny_model import train_tokenizer

    return train_tokenizer(["How many are 12 and 30? 42 user assistant system"] * 9, vocab_size=300)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    from browser import Browser

    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def never_whole(monkeypatch) -> None:
    """Fails the test if a model is loaded as a whole."""

    def refuse(*args, **kwargs):
        raise AssertionError("the whole model was loaded")

    monkeypatch.setattr("mini_trainer.model.weights.read_whole", refuse)
