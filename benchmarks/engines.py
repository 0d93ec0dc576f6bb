"""Throughput of generate.py's engines on one machine: the same questions, the same model, greedy.

    transformers serve --port 8765    # in another terminal: a server that runs on a CPU, too
    OMP_NUM_THREADS=1 python benchmarks/engines.py --model runs/quickstart/run/hf_format/samples_7584 \
        --prompts runs/quickstart/held_out.jsonl --base-url http://localhost:8765/v1

Each way is a process of its own, or two under torchrun, from its start to its end. Seconds of CPU are those of all its
processes, and of the server's while it answers: other work on the machine moves them little.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TICKS = os.sysconf("SC_CLK_TCK")  # a second


def read_cpu_seconds(pid: int | None) -> float:
    """Of this process's children that have ended, and of the process `pid`."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = usage.ru_utime + usage.ru_stime
    if pid is None:
        return own
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return own + (int(fields[11]) + int(fields[12])) / TICKS


def answer(words: list[str], output: Path, *, server: int | None) -> tuple[list[str], float, float, str]:
    """The answers, seconds, seconds of CPU, and what generate.py says of its speed once the model is there."""
    start, cpu = time.monotonic(), read_cpu_seconds(server)
    done = subprocess.run(
        [sys.executable, *words, "--output", str(output)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    speed = re.search(r"tokens in ([\d.]+) s", done.stderr)
    answers = [json.loads(line)["answer"] for line in output.read_text(encoding="utf-8").splitlines()]
    return answers, time.monotonic() - start, read_cpu_seconds(server) - cpu, speed[1] if speed else "?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--base-url", help="of a server that has the model; without it no server is asked")
    parser.add_argument("--server-pid", type=int, help="the server's process, where it runs on this machine")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    args = parser.parse_args()
    common = ["generate.py", "--model", args.model, "--prompts", args.prompts]
    common += ["--max-new-tokens", str(args.max_new_tokens)]
    ways = {
        "hf, one by one": [*common, "--batch-size", "1"],
        "hf, batches of 32": [*common, "--batch-size", "32"],
        "hf, batches of 32, 2 processes": [*TORCHRUN, *common, "--batch-size", "32"],
    }
    if args.base_url:
        openai = [*common, "--engine", "openai", "--base-url", args.base_url]
        ways |= {f"openai, {n} at once": [*openai, "--concurrency", str(n)] for n in (1, 16)}
    first: list[str] = []
    print(f"{'':32}{'seconds':>9}{'of them answering':>19}{'CPU seconds':>13}{'same answers':>14}")
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, words) in enumerate(ways.items()):
            is_server = name.startswith("openai")
            answers, seconds, cpu, own = answer(
                words, Path(folder) / f"{i}.jsonl", server=args.server_pid if is_server else None
            )
            first = first or answers
            same = sum(a == b for a, b in zip(first, answers, strict=True))
            print(f"{name:32}{seconds:9.1f}{own:>19}{cpu:13.1f}{same:>8} of {len(first)}", flush=True)


if __name__ == "__main__":
    main()
