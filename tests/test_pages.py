"""What the pages say of files, names and counts is there; what the FAQ quotes is printed; the site is complete."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import build_site
import option_reference
import pytest
from program import ROOT, list_sources

from mini_trainer.__main__ import PROGRAMS
from mini_trainer.distributed.ending import ExitCode
from mini_trainer.objectives.keeping import METRICS
from mini_trainer.objectives.teachers import VALUES
from mini_trainer.options import TrainOptions, flag_name, iterate_fields
from mini_trainer.osft import OSFT
from mini_trainer.root_files import NAMES
from mini_trainer.run.metrics import SourceMetrics, StepMetrics

DOCS = ROOT / "docs"
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "SECURITY.md")] + sorted(DOCS.rglob("*.md"))
REFERENCE = DOCS / "reference"
ARCHITECTURE = DOCS / "developers" / "architecture.md"
PACKAGE = "mini_trainer/"
TWO_SCREENS = 90  # lines
MOST_WORDS = {"users'": 34_800, "developers'": 15_000}
# In backquotes, but no names of our modules: words of Python and torch, the package, columns of a data set.
NO_NAMES = {"None", "auto", "pass", "requires_grad", "mini_trainer"}
NO_NAMES |= {"input_ids", "labels", "len", "num_loss_counted_tokens", "loss_weights"}


def list_files() -> set[str]:
    done = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}


def find_headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def find_broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        file = page if path == "" else page.parent / path
        if "://" not in target and not (file.exists() and (not anchor or anchor in find_headings(file))):
            broken.append(target)
    return broken


def find_missing_modules(text: str, files: set[str]) -> list[str]:
    """Modules named in backquotes, by their path (from the root or the package) or name alone, that are not there."""
    names = {name.rpartition("/")[2] for name in files}
    paths = files | {name.removeprefix(PACKAGE) for name in files}
    named = set(re.findall(r"`([\w/]+\.(?:py|sbatch|yaml|toml))`", text))
    return sorted(name for name in named if name not in (paths if "/" in name else names))


def find_defined_names(sources: list[str]) -> set[str]:
    """Whatever a module names: functions, classes, parameters, variables, attributes and fields."""
    names = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            names |= {getattr(node, key) for key in ("name", "id", "attr", "arg") if hasattr(node, key)}
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_modules_of_a_page_are_there(page):
    text = page.read_text()
    assert find_broken_links(page, text) == []
    assert find_missing_modules(text, list_files()) == []


@pytest.mark.parametrize("index", [DOCS / "README.md", ROOT / "README.md"], ids=["docs", "root"])
def test_an_index_has_every_page(index):
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#\s]+\.md)\)", index.read_text())}
    pages = DOCS.rglob("*.md") if index.parent == DOCS else DOCS.glob("*.md")
    assert sorted(set(pages) - {DOCS / "README.md"} - linked) == []


def test_every_name_in_the_architecture_exists():
    text = re.sub(r"```.*?```", "", ARCHITECTURE.read_text(), flags=re.DOTALL)
    sources = [(ROOT / name).read_text() for name in list_files() if name.endswith(".py") and "tests/" not in name]
    named = set(re.findall(r"`([A-Za-z_]\w+)(?:\([^`]*\))?`", text)) - NO_NAMES
    assert {"Method", "find_due", "open_inputs", "MicroBatch"} <= named
    assert sorted(named - find_defined_names(sources)) == []


def test_the_architecture_has_every_room_and_every_file_of_the_root():
    ours = {name.removeprefix(PACKAGE) for name in list_files() if name.startswith(PACKAGE) and name.endswith(".py")}
    folders = {f"{name.rpartition('/')[0]}/" for name in ours if "/" in name}  # rooms, and rooms in rooms
    filled = {f"{name.rpartition('/')[0]}/" for name in ours if "/" in name and not name.endswith("/__init__.py")}
    files = {f"{name}.py" for name in NAMES}
    assert {"data/", "data/chat/", "tools/"} <= folders and {"data/chat/", "tools/"} <= filled and "data/" not in filled
    text = ARCHITECTURE.read_text()
    tables = text[text.index("## Rooms") : text.index("## Layers")]
    listed = re.findall(r"^\| `([\w/.]+)` \|", tables, flags=re.MULTILINE)
    assert sorted(listed) == sorted(folders | files)
    alone = {name for name in ours if "/" not in name}
    assert sorted(name for name in alone if f"`{name}`" not in text) == []
    layers = re.search(r"^## Layers$.*?```text(.*?)```", text, flags=re.MULTILINE | re.DOTALL).group(1).split()
    assert set(layers) - {"<", "with"} == (filled | files | alone) - {"__init__.py", "root_files.py"}


def test_the_first_page_fits_two_screens():
    num_lines = len((ROOT / "README.md").read_text().splitlines())
    assert num_lines <= TWO_SCREENS, f"README.md has {num_lines} lines"


def test_pages_stay_short(capsys):
    """Words of all pages. The changelog, the security policy and scripts' raw output (.txt) are no pages."""
    for_developers = {*(DOCS / "developers").glob("*.md"), *(ROOT / "benchmarks" / "results").glob("*.md")}
    for_users = {ROOT / "README.md", *DOCS.rglob("*.md")} - for_developers
    pages = {"users'": for_users, "developers'": for_developers}
    words = {part: sum(len(page.read_text().split()) for page in pages[part]) for part in pages}
    with capsys.disabled():
        print(" words:", ", ".join(f"{part} pages {count:,} of {MOST_WORDS[part]:,}" for part, count in words.items()))
    assert all(words[part] <= MOST_WORDS[part] for part in words)


def test_the_tables_of_the_first_page_have_the_numbers_of_the_results():
    page, results = (ROOT / "README.md").read_text(), ROOT / "benchmarks" / "results"
    on_gpu = (results / "gpu.txt").read_text()
    on_cpu = (results / "train_step.txt").read_text().split("\npython ")
    (medium,) = (text for text in on_cpu if "--methods ours padded grouped trl --shape medium" in text)
    for text, names in ((on_gpu, ("trl", "plain")), (on_cpu[1], ("trl", "padded")), (medium, ("trl", "padded"))):
        rows = [re.findall(rf"^ *\| {name} \|.*", text, flags=re.MULTILINE)[-1].split("|") for name in names]
        faster = [cells[8].strip() for cells in rows]  # than others, by what factor
        assert f"| {' | '.join(faster)} |\n" in page
    speeds = re.findall(r"^  (.*): tokens_per_second ([\d.]+)", on_gpu, flags=re.MULTILINE)
    measured = {name: f"{float(speed):,.0f}" for name, speed in speeds}
    for name in ("8B, LoRA, Liger", "8B, selective recomputation, Liger", "1.5B, 16k tokens, Liger"):
        assert measured[name] in page, name
    masks = (results / "chat_templates.txt").read_text()
    num_templates = int(re.search(r"^(\d+) templates x", masks, flags=re.MULTILINE).group(1))
    num_refused = int(re.search(r"^templates refused whole: (\d+)", masks, flags=re.MULTILINE).group(1))
    num_rows = re.search(r"^([\d,]+) kept, 0 wrong", masks, flags=re.MULTILINE).group(1)
    assert f"0 of {num_rows} rows wrong, {num_refused} of {num_templates} cases refused" in page
    front = read_front((results / "keeping.txt").read_text())
    of_methods = [front[name][1:5] for name in ("full", "lora", "keep_data", "osft", "replay")]
    whole = (DOCS / "tasks" / "keep_knowledge.md").read_text()
    for table, rows in ((page, zip(*of_methods, strict=True)), (whole, front.values())):
        assert [cells for cells in rows if f" | {' | '.join(cells)} |\n" not in table] == []
    soak = re.search(
        r"^\| all \| (\d+) \|.* (\d+) \| 0 \| 0 \|$", (results / "soak.txt").read_text(), flags=re.MULTILINE
    )
    assert f"{soak[2]} of {soak[2]} runs, {soak[1]} random kills" in page


def read_front(text: str) -> dict[str, list[str]]:
    """Each method's rate, right answers to its tasks (after each, at the end), and losses, without their intervals."""
    table = text[text.index("The rate that the other half chose") : text.index("More than full")]
    rows = [[cell.split(" [")[0] for cell in line.strip("| ").split(" | ")] for line in table.splitlines()[4:-1]]
    return {name: [rate, f"{learnt} → {end}", *lost] for name, rate, _, learnt, end, *lost in rows}


def test_every_metric_is_explained():
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", (REFERENCE / "metrics.md").read_text(), flags=re.MULTILINE)
    told = [name for row in rows for name in re.findall(r"\w+", row)]
    now_and_then = ["sources", "router_aux_loss", "expert_balance", *METRICS, *VALUES[1:], *OSFT.metrics]
    assert told == [*(field.name for field in fields(StepMetrics)), *now_and_then]
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", (REFERENCE / "validation.md").read_text(), flags=re.MULTILINE)
    assert {field.name for field in fields(SourceMetrics)} <= set(re.findall(r"\w+", " ".join(rows)))


# What the program fills in; in a quote also a part of a message that is left out.
GAP = "…"


def iterate_texts(source: str) -> Iterator[str]:
    """Every string of a module, with GAP for each value that is filled in."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else GAP for part in node.values)


def is_quoted(message: str, texts: list[str]) -> bool:
    """Whether one text has the quote's pieces, in order, and nothing but filled-in values for its gaps."""
    pieces = [re.escape(piece) for piece in message.split(GAP)]
    pattern = re.compile("(?:[^a-zA-Z]*…[^a-zA-Z]*)+?".join(pieces).replace(r"\ ", r"\s+"))
    return any(pattern.search(text) for text in texts)


def test_every_quoted_message_is_in_the_source():
    texts = [text for source in list_sources().values() for text in iterate_texts(source) if len(text) > 8]
    messages = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "reference" / "faq.md").read_text(), flags=re.MULTILINE)
    assert len(messages) >= 20
    assert [message for message in messages if not is_quoted(message, texts)] == []


BEGINNINGS = re.compile(r"(Of|As|Those|By|Whatever)\b")
BANNED = {
    r"\bmend(s|ed|ing)?\b": "fix",
    r"\bwhatever\b": "any",
    r"\b(goes|go|going|went) on\b(?! (the|a|its|with the))": "continue, resume",
    r"\b(is|are|was|were) told\b": "report, raise, say",
    r"\b(tell|tells|told) of\b": "report",
    r"\bask(s|ed)? a model\b": "generate from",
    r"\banew\b": "again",
    r"\bfor ever\b": "forever",
    r"\btime-outs?\b": "timeout",
    r", too\b(?=[.,;:])": "also",
    r"\bonce an? (sequence|layer|step|file|rank|epoch)\b": "once per",
    r"\bwithout a word\b": "silently, without a report",
    r"\bthere already\b": "already exists",
    r"\bof no matter\b": "irrelevant",
}


def list_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of docstrings, also of the fields of options."""
    for node in ast.walk(ast.parse(source)):
        for child in getattr(node, "body", ()) if isinstance(getattr(node, "body", None), list) else ():
            if (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            ):
                yield child.lineno, child.value.value


def list_comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def find_faults(path: str, source: str) -> list[str]:
    docstrings = list(list_docstrings(source))
    found = [f"{path}:{line}: begins with {text.split()[0]}" for line, text in docstrings if BEGINNINGS.match(text)]
    for line, text in [*docstrings, *list_comments(source)]:
        for word, better in BANNED.items():
            if match := re.search(word, text, re.IGNORECASE):
                found.append(f"{path}:{line}: {match.group()!r}: write {better}")
    return found


def test_docstrings_and_comments_are_in_the_fields_words():
    faults = [fault for path, source in list_sources().items() for fault in find_faults(path, source)]
    assert not faults, "\n".join(faults)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build_site.gather_pages(folder)
    return folder


@pytest.mark.long
def test_the_reference_has_every_option_of_every_command(site):
    assert set(option_reference.COMMANDS) == set(PROGRAMS) - {"chat"}  # which has generate's options
    listed = (site / "reference" / "index.md").read_text()
    for command, options_class in option_reference.COMMANDS.items():
        flags = [flag_name(option.name) for option, _ in iterate_fields(options_class)]
        page = (site / "reference" / f"{command}.md").read_text()
        assert re.findall(r"^### `(--[\w-]+)`", page, flags=re.MULTILINE) == flags
        assert [flag for flag in flags if f"- `{flag}`: " not in listed] == []


@pytest.mark.long
def test_the_reference_has_exit_codes_and_names(site):
    codes = re.findall(r"^\| (\d+) \|", (site / "reference" / "exit_codes.md").read_text(), flags=re.MULTILINE)
    assert codes == [str(code.value) for code in ExitCode]
    package = (ROOT / "mini_trainer" / "__init__.py").read_text()
    offered = ast.literal_eval(re.search(r"__all__ = (\[.*?\])", package, flags=re.DOTALL)[1])
    names = re.findall(r"^## (\w+)$", (site / "reference" / "python.md").read_text(), flags=re.MULTILINE)
    assert sorted(names) == sorted(offered)


def test_the_reference_says_what_an_option_needs():
    groups = {option.name: group for option, group in iterate_fields(TrainOptions)}
    wanted = dict.fromkeys(("learning_rate", "seed", "input_file", "model_name_or_path", "lora"), "")
    wanted |= {"lora_rank": "**Needs** `--lora`", "shard_size": "**Needs** `--sharding hybrid`"}
    assert {name: option_reference.find_needs(TrainOptions, name, groups[name]) for name in wanted} == wanted


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


@pytest.mark.long
def test_every_page_is_in_the_navigation(site):
    named = set(re.findall(r"([\w/-]+\.md)$", (build_site.SITE / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    pages = {str(page.relative_to(site)) for page in site.rglob("*.md") if "files" not in page.parts}
    assert named == pages


def test_the_logo_leads_to_a_page_and_not_to_a_folder_which_offline_is_a_listing():
    assert re.search(r"^extra: .*homepage: index.html", (build_site.SITE / "mkdocs.yml").read_text(), re.MULTILINE)
