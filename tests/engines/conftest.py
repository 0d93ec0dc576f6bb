import os
from pathlib import Path

import pytest
from engine_exports import Exports
from engine_table import Table

TABLE = Table()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every export in every engine, not pairs of their properties")


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    return Exports(tmp_path_factory.mktemp("exports"))


@pytest.fixture
def table() -> Table:
    return TABLE


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct (README.md)."""
    return Path(os.environ["ENGINES_SMOLLM2"])


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A check that was skipped has failed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == 0 and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = {name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")}
    num_failed = counts["failed"] + counts["error"] + counts["skipped"]
    terminalreporter.write_line("")
    for line in TABLE.lines():
        terminalreporter.write_line(line)
    terminalreporter.write_line(f"engines: {counts['passed']} checks passed, {num_failed} failed or skipped")
