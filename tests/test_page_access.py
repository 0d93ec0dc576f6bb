"""Every page the project makes can be used without a mouse, and with a screen reader, as far as axe-core can see."""

import base64
import hashlib
import json
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from browser import needs_browser
from local_server import serving
from made_experiments import make_experiment
from made_pages import HOSTILE, make_results, make_sample, make_totals
from make_tiny_model import train_tokenizer
from processes import ROOT
from run_directories import write_run

from mini_trainer.continual.page import write_page as write_continual_page
from mini_trainer.data.columns.base import DataTask
from mini_trainer.use.evaluation.results import make_results_page
from mini_trainer.use.pages.preview import write_page as write_preview
from mini_trainer.use.plots.board import BoardServer
from mini_trainer.use.plots.curves import make_curves_page
from mini_trainer.use.plots.run_files import open_runs

# npm's package, by version and the hash that npm's registry gives for it.
AXE = "axe-core@4.14.1"
AXE_INTEGRITY = "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
VIOLATIONS = """axe.run(document, {resultTypes: ["violations"]}).then(found => found.violations.map(one =>
    `${one.id}: ${one.help}: ${one.nodes.map(node => node.target.join(" ")).join(", ")}`))"""


@pytest.fixture(scope="module")
def axe(tmp_path_factory) -> str:
    """The script of axe-core, fetched by npm; the tests are skipped where npm or its registry is not to be had."""
    if shutil.which("npm") is None:
        pytest.skip("not run: there is no npm, which fetches axe-core")
    folder = tmp_path_factory.mktemp("axe")
    command = ["npm", "pack", AXE, "--json", "--silent", "--fetch-retries=0", "--fetch-timeout=20000"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        pytest.skip(f"not run: npm could not fetch {AXE}: {(done.stderr or done.stdout).strip()[:200]}")
    package = folder / json.loads(done.stdout)[0]["filename"]
    digest = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
    assert f"sha512-{digest}" == AXE_INTEGRITY, f"{AXE} is not what it was"
    with tarfile.open(package) as archive:
        return archive.extractfile("package/axe.min.js").read().decode()


@contextmanager
def write_curves(folder: Path) -> Iterator[str]:
    runs = [write_run(folder / name, num_steps=60, seed=i, sources=("web", "code"), sets=("a", "b"), resumes=(20,))
            for i, name in enumerate(("first", HOSTILE))]  # fmt: skip
    (folder / "page.html").write_text(make_curves_page(open_runs(runs)))
    yield (folder / "page.html").as_uri()


@contextmanager
def serve_board(folder: Path) -> Iterator[str]:
    for name in ("first", "second"):
        write_run(folder / name, num_steps=20, sets=("held_out",), options={"max_steps": 40})
    failed = write_run(folder / HOSTILE, num_steps=7, finished=False)
    (failed / "exit.json").write_text(json.dumps({"code": 9, "name": "out_of_memory", "message": "out of memory"}))
    (write_run(folder / "running", num_steps=7, finished=False) / ".lock").touch()
    with serving(BoardServer(folder, port=0)) as server:
        yield server.address


@contextmanager
def write_results(folder: Path) -> Iterator[str]:
    result, samples = make_results("first", HOSTILE)
    (folder / "page.html").write_text(make_results_page(result, [samples]), encoding="utf-8")
    yield (folder / "page.html").as_uri()


@contextmanager
def write_continual(folder: Path) -> Iterator[str]:
    experiments = [make_experiment(name, kinds=("score", "loss"), seeds=(0, 1)) for name in ("ours", "replay")]
    write_continual_page(folder / "page.html", experiments)
    yield (folder / "page.html").as_uri()


@contextmanager
def write_data(folder: Path) -> Iterator[str]:
    tokenizer = train_tokenizer(["How many are 12 and 30? 42 user assistant system"] * 9, vocab_size=300)
    samples = [
        make_sample(tokenizer, f"How many are {i}?", "42 " * i, place=f"in:{i}", weight=0.5) for i in range(1, 9)
    ]
    totals = make_totals(samples, too_long=3, invalid=2)
    write_preview(folder / "page.html", totals, DataTask(), tokenizer=tokenizer, title="in.jsonl")
    yield (folder / "page.html").as_uri()


PAGES: dict[str, Callable[[Path], AbstractContextManager[str]]] = {
    "mini_trainer/use/plots/curves.html": write_curves,
    "mini_trainer/use/plots/board.html": serve_board,
    "mini_trainer/use/evaluation/results.html": write_results,
    "mini_trainer/continual/page.html": write_continual,
    "mini_trainer/use/pages/preview.html": write_data,
}


def test_every_page_has_its_test():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.html"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert {name for name in done.stdout.split() if (ROOT / name).exists()} == PAGES.keys()


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing(name, axe, browser, tmp_path):
    with PAGES[name](tmp_path) as url:
        found = []
        for width, is_dark in ((1280, False), (1280, True), (768, False), (390, False)):
            browser.open(url, width=width, is_dark=is_dark)
            browser.ask(axe + ";0")
            found += [f"{width} px, {'dark' if is_dark else 'light'}: {one}" for one in browser.ask(VIOLATIONS)]
            assert browser.ask("document.documentElement.scrollWidth") <= width
    assert found == [], "\n".join(found)


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_a_telephone_scrolls_no_page_sideways_and_breaks_no_number_of_a_table(name, browser, tmp_path):
    broken = """[...document.querySelectorAll('td, .told')].filter(cell => cell.firstChild).filter(cell => {
        const range = document.createRange();
        range.selectNodeContents(cell.firstChild);
        const lines = new Set([...range.getClientRects()].map(box => Math.round(box.top / 8)));
        return /^[−+-]?[\\d.,]+( ?[a-zA-Z%]{1,2})?$/.test(cell.textContent) && lines.size > 1;
    }).map(cell => cell.textContent)"""
    with PAGES[name](tmp_path) as url:
        browser.open(url, width=390)
        assert browser.ask("document.documentElement.scrollWidth") <= 390
        assert browser.ask(broken) == []
