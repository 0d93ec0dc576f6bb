"""All that is stored is read by one reader, and what it refuses.

Reads the program's own source: a bare `open` elsewhere would follow links, block on pipes, and read without a limit.
"""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked import run_forked
from processes import flags
from program import list_sources

from mini_trainer.options.reading import MOST_BYTES, open_own, open_regular, read_metrics, read_text

READERS = {"open", "safe_open", "pq.read_metadata", "pq.read_schema", "pq.read_table", "pq.ParquetFile",
           "os.open", "np.load", "torch.load", "pickle.load", "pickle.loads", "pa.OSFile", "pa.memory_map",
           "mmap.mmap", "json.load", "yaml.load", "yaml.safe_load"}  # fmt: skip
METHODS = {"read_text", "read_bytes", "write_text", "write_bytes"}
IN_OPEN_FILES = {"pq.read_metadata", "pq.read_schema", "pq.ParquetFile"}
# What else may open or read, and why.
ALLOWED = {
    "mini_trainer/options/reading.py": {"os.open", "mmap.mmap", "safe_open"},  # the one reader
    "mini_trainer/options/option_files.py": {"yaml.load"},  # of a text that was read
    "mini_trainer/distributed/world.py": {"pickle.loads"},  # between the ranks of a run, in memory
    "mini_trainer/data/stores/disk.py": {"os.open"},  # directories
    "mini_trainer/distributed/lock.py": {"os.open"},  # a directory
    "mini_trainer/run/preflight_nodes.py": {"os.open", "(made / TOKEN).write_text", "(own / TOKEN).write_text"},
    "mini_trainer/distributed/messages.py": {"os.open"},  # /dev/null
    "mini_trainer/run/write_pool.py": {"os.open"},  # new files of a checkpoint or an export
    "mini_trainer/data/stores/contents.py": {"open"},  # the same
    "mini_trainer/data/tokenized/index.py": {"mmap.mmap"},  # a file without a name
    "mini_trainer/data/rows/parts.py": {"pa.OSFile", "manifest.write_text"},  # written aside, as all that follow
    "mini_trainer/data/rows/writer.py": {"pa.OSFile"},
    "mini_trainer/data/tokenized/converted.py": {"pa.OSFile"},
    "mini_trainer/use/evaluation/results.py": {"results.write_text", "page.write_text", "beside.write_text"},
    "mini_trainer/use/pages/preview.py": {"path.write_text"},
    "mini_trainer/run/export.py": {"(directory / INDEX).write_text"},
    "mini_trainer/model/methods/adapter_files.py": {"(directory / BASE_FILE).write_text"},
    "mini_trainer/api/sent_callbacks.py": {"path.write_text"},  # in a directory made for it
    "mini_trainer/api/stub.py": {"STUB.write_text"},  # run by developers
}


def iterate_bare(tree: ast.AST) -> Iterator[str]:
    """The calls that open or read a file without the reader."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        name, arguments = ast.unparse(call.func), [*call.args, *(keyword.value for keyword in call.keywords)]
        texts = [node.value for node in arguments if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        is_open = name in IN_OPEN_FILES and ast.unparse(call.args[0]) in ("file", "unpacked")
        opens = method == "open" and any(re.fullmatch("[rwax][bt+]*|utf-?8", text) for text in texts)
        if (
            (name in READERS and not is_open)
            or opens
            or (method in METHODS and not name.startswith(("aside.", "aside[", "(aside / ")))
        ):
            yield name


def test_a_file_is_opened_without_the_one_reader():
    bare = {name: set(iterate_bare(ast.parse(source))) for name, source in list_sources().items()}
    found = {name: calls - ALLOWED.get(name, set()) for name, calls in bare.items()}
    assert not any(found.values()), {name: calls for name, calls in found.items() if calls}
    unused = [(name, call) for name, calls in ALLOWED.items() for call in calls - bare[name]]
    assert not unused, f"allowed in vain: {unused}"


@pytest.fixture(params=["pipe", "directory", "link"])
def other(request, tmp_path) -> Path:
    path = tmp_path / "file"
    if request.param == "pipe":
        os.mkfifo(path)
    elif request.param == "directory":
        path.mkdir()
    else:
        (tmp_path / "target").write_text("somebody else's")
        path.symlink_to(tmp_path / "target")
    return path


@pytest.mark.parametrize("mode", ["rb", "r+b", "w", "wb", "a", "ab"])
def test_a_file_of_ones_own_is_opened_through_a_link_or_blocks(other, mode):
    with pytest.raises(OSError, match=r"not a regular file|is a link, which is not followed|Is a directory"):
        open_own(other, mode)
    if other.is_symlink():
        assert other.read_text() == "somebody else's"
        with open_regular(other) as file:  # what users give may be links
            assert file.read() == b"somebody else's"


def test_the_metrics_of_another_run_are_read_through_a_link(other):
    with pytest.raises(OSError, match=r"not a regular file|is a link"):
        list(read_metrics(other))


def test_a_text_is_read_without_a_limit(tmp_path):
    (tmp_path / "large").touch(), (tmp_path / "latin").write_bytes(b"\xe4")
    os.truncate(tmp_path / "large", MOST_BYTES + 1)
    with pytest.raises(ValueError, match=rf"large: it has {MOST_BYTES + 1:,} bytes, allowed: {MOST_BYTES:,}"):
        read_text(tmp_path / "large")
    with pytest.raises(ValueError, match=r"latin: .*utf-8"):
        read_text(tmp_path / "latin")


def test_a_resumed_run_writes_through_links_of_its_directory(inputs, tmp_path):
    """An archive from elsewhere may hold links: here each file that a run writes leads to somebody else's."""
    run = tmp_path / "run"
    words = flags(**inputs, output_dir=run, batch_size=8, max_tokens_per_gpu=64, checkpoint_every_steps=1)
    words += flags(validation_data_path=inputs["data_path"], validate_every_steps=1, profile_steps="2:3")
    assert run_forked(0, "train.py", *words, "--max-steps", 3).returncode == 0
    own = [path for path in (*run.glob("*"), *run.glob("profile/*")) if path.is_file()]
    assert {"exit.json", "training_metrics_0.jsonl", "training_params.json"} <= {path.name for path in own}
    for path in own:
        theirs, content = tmp_path / f"of_others_{path.name}", path.read_bytes()
        theirs.write_bytes(content)
        path.unlink()
        path.symlink_to(theirs)
        done = run_forked(0, "train.py", *words, "--max-steps", 4)
        assert "Traceback" not in done.stderr and theirs.read_bytes() == content, path.name
        if path.is_symlink():
            path.unlink()
            path.write_bytes(content)
