"""Memory of process_data.py by the number of rows: it shall stay flat.

    python benchmarks/data_memory.py                                 # up to 1,000,000 rows
    python benchmarks/data_memory.py --num-rows 10000 10000000       # of one's own choice; 10 million need 3 GB of disk

The chats are short, of a few shapes, and no two have the same texts. Each number of rows is a run of its own. Memory
is resident, summed over all processes of the run, and looked at four times a second: the median of the run's last
half, and the highest. Pages that forked processes share are counted for each, so the highest can show a fork.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "quickstart"))

from make_tiny_model import train_tokenizer

SECONDS_BETWEEN_LOOKS = 0.25


def write_rows(path: Path, num_rows: int) -> None:
    with open(path, "w", encoding="utf-8") as file:
        for i in range(num_rows):
            turns = [("system", "Short.")] if i % 10 == 0 else []
            for k in range(2 if i % 10 == 1 else 1):
                turns += [("user", f"{i}?"), ("assistant", f"{i + k}.")]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")


def count_resident_bytes(pid: int) -> int:
    """Of a process and all that it started. What ends meanwhile counts nothing."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in read_children(task)]
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(map(count_resident_bytes, children))


def read_children(task: Path) -> list[str]:
    return (task / "children").read_text().split()


def measure(command: list[str]) -> tuple[float, list[int]]:
    """Seconds of a run, and its memory at each look, in bytes."""
    looks, start = [], time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None:
        looks.append(count_resident_bytes(process.pid))
        time.sleep(SECONDS_BETWEEN_LOOKS)
    assert process.returncode == 0, f"process_data.py ended with code {process.returncode}"
    return time.monotonic() - start, looks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--num-proc", type=int, default=1)
    parser.add_argument("--ending", choices=(".arrow", ".parquet", ".jsonl"), default=".arrow")
    arguments = parser.parse_args()
    print(f"{arguments.num_proc} processes, {arguments.ending}")
    print(f"{'rows':>12}{'input MB':>10}{'seconds':>9}{'last half MB':>14}{'highest MB':>12}")
    for num_rows in arguments.num_rows:
        with tempfile.TemporaryDirectory() as directory:
            source, output, model = (Path(directory, name) for name in ("in.jsonl", f"out{arguments.ending}", "model"))
            train_tokenizer(["What is 12? 30. user assistant system Short."], vocab_size=400).save_pretrained(model)
            write_rows(source, num_rows)
            command = [sys.executable, ROOT / "process_data.py", "--input-file", source, "--output-file", output]
            command += ["--model-name-or-path", model, "--num-proc", arguments.num_proc]
            seconds, looks = measure(list(map(str, command)))
            size, middle = source.stat().st_size, statistics.median(looks[len(looks) // 2 :])
        print(
            f"{num_rows:>12,}{size / 1e6:>10,.0f}{seconds:>9,.0f}{middle / 1e6:>14,.0f}{max(looks) / 1e6:>12,.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
