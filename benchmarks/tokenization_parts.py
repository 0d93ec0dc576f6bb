"""Compares one process of process_data.py with several that make parts: bytes, time, and a part killed and made again.

    python benchmarks/tokenization_parts.py --messages-file gsm8k.jsonl --num-repeats 50 --num-parts 4

The parts run one after the other, each alone as on a machine of its own; the last joins. So the time of the slowest
part and that of the join is what as many machines would take. CPU seconds are of processes and their workers, and less
disturbed than wall seconds by what else the machine does.
"""

import argparse
import os
import platform
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "quickstart"), str(ROOT / "benchmarks")]

from tokenization import generate_messages, train_tokenizer

from disk import hash_file


def run(words: list[str], *, kill_at: Path | None = None) -> tuple[float, float]:
    """Wall and CPU seconds of process_data.py; with `kill_at` it is killed when a part of that name has been begun."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while kill_at is not None and not any(one.stat().st_size for one in kill_at.parent.glob(f".{kill_at.name}.*")):
        assert child.poll() is None, child.communicate()[1].decode()
        time.sleep(0.05)
    if kill_at is not None:
        child.send_signal(signal.SIGKILL)
    errors = child.communicate()[1].decode()
    assert kill_at is not None or child.returncode == 0, errors
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages-file", help="default: generated chats of GSM8K's lengths")
    parser.add_argument("--num-repeats", type=int, default=50)
    parser.add_argument("--num-parts", type=int, default=4, help="at least 3")
    parser.add_argument("--num-proc", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        messages = Path(args.messages_file) if args.messages_file else generate_messages(work / "generated.jsonl")
        content = messages.read_bytes()
        source = work / "rows.jsonl"
        with open(source, "wb") as file:
            for _ in range(args.num_repeats):
                file.write(content)
        model = work / "model"
        train_tokenizer(content.decode().splitlines()[:2000], vocab_size=4000).save_pretrained(model)
        print(f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
        print(f"{len(content.splitlines()) * args.num_repeats:,} rows, {source.stat().st_size / 1e6:,.0f} MB")
        compare(source, model, work, args)


def compare(source: Path, model: Path, work: Path, args: argparse.Namespace) -> None:
    def words(name: str, *more: str) -> list[str]:
        paths = ["--input-file", str(source), "--output-file", str(work / name), "--model-name-or-path", str(model)]
        how = ["--num-proc", str(args.num_proc), "--preview", "0"]
        return [sys.executable, str(ROOT / "process_data.py"), *paths, *how, *more]

    def report(name: str, seconds: tuple[float, float]) -> None:
        print(f"{name:<28}{seconds[0]:>10.1f}{seconds[1]:>12.1f}", flush=True)

    print(f"{'':<28}{'seconds':>10}{'CPU seconds':>12}")
    report("one process", run(words("one.arrow")))
    parts = work / "many.arrow.parts"
    killed = 2
    for index in range(1, args.num_parts + 1):
        shard = f"{index}/{args.num_parts}"
        kill_at = parts / f"part_{index}_of_{args.num_parts}.rows" if index == killed else None
        seconds = run(words("many.arrow", "--shard", shard), kill_at=kill_at)
        report(f"part {shard}" + (", killed" if kill_at else ""), seconds)
    assert not (work / "many.arrow").exists(), "joined without the killed part"
    assert subprocess.run(words("many.arrow", "--join"), capture_output=True).returncode == 2
    print(f"--join without part {killed} is refused")
    other = parts / f"part_{args.num_parts}_of_{args.num_parts}.meta.json"
    other.rename(work / other.name)  # away, so that the join is measured by itself
    report(f"part {killed}/{args.num_parts} again", run(words("many.arrow", "--shard", f"{killed}/{args.num_parts}")))
    (work / other.name).rename(other)
    report("join", run(words("many.arrow", "--join")))
    for name in ("", ".meta.json"):
        first, second = hash_file(work / f"one.arrow{name}"), hash_file(work / f"many.arrow{name}")
        print(f"one.arrow{name}: {first['size']:,} bytes; parts: {'the same' if first == second else 'OTHER'} bytes")


if __name__ == "__main__":
    main()
