"""Tokenizes one data set on the nodes of a Ray cluster: each task makes a part of it, and one joins them.

    python examples/clusters/tokenize_ray.py --parts 8 --cpus 16 --input-file /shared/rows \
        --output-file /shared/chats.arrow --model-name-or-path M

All other options go to process_data.py; its files, and mini_trainer, have to be on a file system that all nodes share.
A task whose node dies is started again by Ray. Started again after a failure, this makes only the parts that are
missing. Ray Data has no step of its own here: rows that its pipelines write as Parquet are an --input-file.

Tried with ray 2.60 on two local workers: the bytes are those of process_data.py alone.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import ray

SCRIPT = Path(__file__).resolve().parents[2] / "process_data.py"
NUM_RETRIES = 3  # if a node or a worker process dies; an error of process_data.py is not tried again


@ray.remote(max_retries=NUM_RETRIES)
def run_process_data(words: list[str]) -> str:
    """Its output; RuntimeError with its error message."""
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, required=True, help="number of parts, one or several for each node")
    parser.add_argument("--cpus", type=int, default=1, help="CPUs of each task")
    args, words = parser.parse_known_args()
    words += ["--num-proc", str(args.cpus)]
    ray.init()
    make = run_process_data.options(num_cpus=args.cpus)
    waiting = [make.remote([*words, "--shard", f"{index}/{args.parts}"]) for index in range(1, args.parts + 1)]
    while waiting:
        (done,), waiting = ray.wait(waiting)
        print(ray.get(done), end="", flush=True)


if __name__ == "__main__":
    main()
