"""Tokenizes one data set on the executors of a Spark cluster: each task makes a part of it, and one joins them.

    spark-submit examples/clusters/tokenize_spark.py --parts 8 --input-file /shared/rows \
        --output-file /shared/chats.arrow --model-name-or-path M

All other options go to process_data.py; its files, and mini_trainer, have to be on a file system that all nodes share.
A task whose executor dies is started again by Spark. Started again after a failure, this makes only the parts that are
missing. Rows of a DataFrame: write them as Parquet first (`frame.write.parquet`), which is an --input-file.

Tried with pyspark 4.3 on two local workers: the bytes are those of process_data.py alone.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from pyspark.sql import SparkSession

SCRIPT = Path(__file__).resolve().parents[2] / "process_data.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, required=True, help="number of parts, one or several for each executor")
    args, words = parser.parse_known_args()
    script, count = str(SCRIPT), args.parts

    def make_part(index: int) -> str:
        shard = [*words, "--shard", f"{index}/{count}"]
        done = subprocess.run([sys.executable, script, *shard], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        return done.stdout

    context = SparkSession.builder.appName("tokenize").getOrCreate().sparkContext
    for output in context.parallelize(range(1, count + 1), count).map(make_part).collect():
        print(output, end="", flush=True)


if __name__ == "__main__":
    main()
