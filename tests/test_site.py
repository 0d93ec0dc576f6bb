"""The documentation's site: its reference is complete, what an option needs is found, and links lead to files."""

import ast
import re
from pathlib import Path

import build_site
import code_reference
import option_reference
import pictures
import pytest
from program import ROOT

from mini_trainer.__main__ import CHAT, PROGRAMS
from mini_trainer.data.columns.base import COLUMNS
from mini_trainer.distributed.ending import ExitCode
from mini_trainer.options import TrainOptions, flag_name, iterate_fields


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build_site.gather_pages(folder)
    return folder


@pytest.mark.long
def test_the_reference_has_every_option_of_every_command(site):
    assert set(option_reference.COMMANDS) == set(PROGRAMS) - {CHAT}  # which has generate's options
    listed = (site / "reference" / "index.md").read_text()
    for command, options_class in option_reference.COMMANDS.items():
        flags = [flag_name(option.name) for option, _ in iterate_fields(options_class)]
        page = (site / "reference" / f"{command}.md").read_text()
        assert re.findall(r"^### `(--[\w-]+)`", page, flags=re.MULTILINE) == flags
        assert [flag for flag in flags if f"- `{flag}`: " not in listed] == []


@pytest.mark.long
def test_the_reference_has_exit_codes_columns_names_and_versions(site):
    codes = re.findall(r"^\| (\d+) \|", (site / "reference" / "exit_codes.md").read_text(), flags=re.MULTILINE)
    assert codes == [str(code.value) for code in ExitCode]
    assert set(code_reference.SCHEMAS) == {type(columns).__name__ for columns in COLUMNS.values()}
    for columns in COLUMNS.values():
        name = type(columns).__name__
        rows = code_reference.read_schema(code_reference.SCHEMAS[name][0], name)
        assert [column for column, _, _ in rows] == columns.schema.names
    package = (ROOT / "mini_trainer" / "__init__.py").read_text()
    offered = ast.literal_eval(re.search(r"__all__ = (\[.*?\])", package, flags=re.DOTALL)[1])
    names = re.findall(r"^## (\w+)$", (site / "reference" / "python.md").read_text(), flags=re.MULTILINE)
    assert sorted(names) == sorted(offered)
    assert "| torch | 2." in (site / "reference" / "versions.md").read_text()


def test_what_an_option_needs_is_found_by_trying():
    free = ("learning_rate", "seed", "input_file", "model_name_or_path")
    wanted = ("lora_rank", "num_decay_steps", "lora_alpha", *free)
    options = {option.name: option for option, _ in iterate_fields(TrainOptions) if option.name in wanted}
    needs = {name: " ".join(option_reference.find_needs("train", option)) for name, option in options.items()}
    assert needs.pop("lora_rank") == "**Needs** `--lora`"
    assert needs.pop("num_decay_steps") == "**Needs** `--lr-scheduler wsd`"
    assert needs.pop("lora_alpha") == "**Needs** `--lora`"
    assert needs == dict.fromkeys(free, "")


@pytest.mark.long
def test_every_link_of_a_page_leads_to_a_file_of_the_site(site):
    missing = []
    for page in site.rglob("*.md"):
        for _, target, _ in build_site.LINK.findall(page.read_text()):
            path = target.partition("#")[0]
            if "://" not in target and path and not (page.parent / path).exists():
                missing.append(f"{page.relative_to(site)}: {target}")
    assert missing == []


def test_links_are_moved_with_their_page_and_files_copied():
    copied = []
    text = (
        "[a](docs/concepts/masks.md#files) [b](CHANGELOG.md) [c](examples/recipes/trace.yaml) [d](https://x.y) [e](#f)"
    )
    moved = (
        "[a](concepts/masks.md#files) [b](changelog.md) [c](files/examples/recipes/trace.yaml) [d](https://x.y) [e](#f)"
    )
    assert build_site.move_links(text, Path("README.md"), copy=copied.append) == moved
    assert build_site.move_links("[a](../../SECURITY.md)", Path("docs/tasks/serve.md"), copy=copied.append) == (
        "[a](../security.md)"
    )
    assert copied == [Path("examples/recipes/trace.yaml")]


def test_the_pictures_are_those_that_the_program_draws():
    assert {name: (pictures.FOLDER / name).read_text() for name, _ in pictures.draw_all()} == dict(pictures.draw_all())


@pytest.mark.long
def test_every_page_is_in_the_navigation(site):
    named = set(re.findall(r"([\w/-]+\.md)$", (build_site.SITE / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    pages = {str(page.relative_to(site)) for page in site.rglob("*.md") if "files" not in page.parts}
    assert named == pages
