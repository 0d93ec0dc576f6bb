"""A plugin of pytest (`-p at_once`) that prints a failure as it happens, for runs that may be cut off."""

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n=== {report.nodeid}\n{report.longreprtext[-3000:]}", flush=True)
