"""Kills processes that make and join parts of a data set at random moments, starts them again until the data set is
there, and compares it with the one of a process that nobody disturbed.

    OMP_NUM_THREADS=1 python benchmarks/part_kills.py --num-kills 50

Data set and sidecar must be the same, byte for byte, and nothing else may be left.
"""

import argparse
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import paths
from tokenization import generate_messages, train_tokenizer

from mini_trainer.options.reading import hash_file

NUM_PARTS = 4


def start(root: Path, folder: Path, *words: str) -> subprocess.Popen:
    command = [sys.executable, str(paths.ROOT / "process_data.py"), "--input-file", str(root / "rows.jsonl")]
    command += ["--model-name-or-path", str(root / "tokenizer"), "--num-proc", "1", "--preview", "0"]
    command += ["--output-file", str(folder / "out.arrow"), *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def describe(folder: Path) -> dict[str, str]:
    """Hashes of the files in a folder."""
    return {path.name: hash_file(path)["sha256"] for path in sorted(folder.rglob("*")) if path.is_file()}


def make(root: Path, folder: Path, rng: random.Random) -> list[str]:
    """Makes the data set from its parts, all at once, with a kill of one process or of all in each start but every
    fifth; returns what was killed."""
    folder.mkdir()
    killed: list[str] = []
    for attempt in range(1, 100):
        children = {i: start(root, folder, "--shard", f"{i}/{NUM_PARTS}") for i in range(1, NUM_PARTS + 1)}
        time.sleep(rng.uniform(1, 14) if attempt % 5 else 0)
        running = [i for i, child in children.items() if child.poll() is None]
        chosen = rng.choice([running, rng.sample(running, 1)]) if running and attempt % 5 else []
        for i in chosen:
            children[i].send_signal(signal.SIGKILL)
        errors = {i: child.communicate()[1] for i, child in children.items()}
        failed = [errors[i] for i, child in children.items() if child.returncode > 0]
        assert not failed, failed
        if chosen:
            killed.append(f"{'all' if len(chosen) > 1 else f'part {chosen[0]}'} with {len(running)} running")
        if (folder / "out.arrow").exists():
            return killed
    raise AssertionError("100 starts have not made the data set")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-kills", type=int, default=50)
    parser.add_argument("--num-repeats", type=int, default=3, help="of 7,473 chats")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, num_kills, num_sets = random.Random(args.seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        content = generate_messages(root / "generated.jsonl").read_text()
        (root / "rows.jsonl").write_text(content * args.num_repeats)
        train_tokenizer(content.splitlines()[:2000], vocab_size=4000).save_pretrained(root / "tokenizer")
        (root / "alone").mkdir()
        alone = start(root, root / "alone")
        assert alone.wait() == 0, alone.communicate()[1]
        expected = describe(root / "alone")
        print(
            f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}: {expected}", flush=True
        )
        while num_kills < args.num_kills:
            killed, num_sets = make(root, root / "parts", rng), num_sets + 1
            num_kills += len(killed)
            found = describe(root / "parts")
            assert found == expected, f"after kills of {killed}: {found}"
            print(f"data set {num_sets}: the same after {len(killed)} kills: {'; '.join(killed)}", flush=True)
            shutil.rmtree(root / "parts")
    print(f"{num_kills} kills, {num_sets} data sets: 0 bytes different, no file left")


if __name__ == "__main__":
    main()
