"""Start-up time and memory of the data side of train.py, by the number of samples.

    python benchmarks/data_startup.py

For a tiny and for a large data set, each in a process of its own: seconds from opening the file to the first batch,
seconds a batch after that, and resident memory after 20 batches. Packing is compiled before the clock starts.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parent.parent))

from objectives.token_columns import TextColumns
from ranks.row_group import Place

VOCAB_SIZE = 32_000


def write_data(path: Path, num_samples: int) -> None:
    """Random samples of GSM8K-like lengths (median 160 tokens), in record batches of 1,000."""
    random = np.random.default_rng(0)
    with pa.OSFile(str(path), "wb") as file:
        writer = None
        for start in range(0, num_samples, 1000):
            lengths = np.clip(random.lognormal(5.1, 0.4, min(1000, num_samples - start)), 8, 2000).astype(np.int32)
            offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
            tokens = pa.array(random.integers(0, VOCAB_SIZE, lengths.sum(), dtype=np.int32))
            lists = pa.ListArray.from_arrays(offsets, tokens)
            columns = dict(input_ids=lists, labels=lists, len=pa.array(lengths))
            columns["num_loss_counted_tokens"] = pa.array(lengths - 1)
            columns["loss_weights"] = pa.nulls(len(lengths), TextColumns.schema.field("loss_weights").type)
            batch = pa.record_batch(columns, schema=TextColumns.schema)
            writer = writer or pa.ipc.new_file(file, TextColumns.schema)
            writer.write_batch(batch)
        writer.close()


def measure(path: str) -> None:
    """Prints the measurements of this process as JSON."""
    from batch_packer import pack_batch
    from corpus.mixture import Mixture
    from corpus.reader import TokenizedData
    from objectives.next_tokens import CausalLM
    from options import DataOptions
    from sampler import iterate_batches, prefetch

    pack_batch([1, 2], 4, 1)
    start = time.perf_counter()
    options = DataOptions(data_path=path, batch_size=256)
    data = Mixture([TokenizedData(path)])
    data.vocab_size = VOCAB_SIZE
    data.fit_to(options.max_tokens_per_gpu, drop_overlong=False)
    batches = prefetch(
        iterate_batches(
            data, options, objective=CausalLM(), num_steps=20, attention_cost=1e-4, world=Place(0, 8)
        )
    )  # fmt: skip
    next(batches)
    first = time.perf_counter() - start
    start = time.perf_counter()
    num_batches = sum(1 for _ in batches)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    result = dict(
        first_batch_s=first,
        later_batch_ms=(time.perf_counter() - start) / num_batches * 1e3,
        resident_mb=int(status["VmRSS"].split()[0]) / 1e3,
        anonymous_mb=int(status["RssAnon"].split()[0]) / 1e3,
        peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    )
    print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-samples", type=int, default=1_000_000)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args.measure)
        sys.exit()
    print("samples    file MB  first batch s  a batch ms  resident MB  anonymous MB  peak MB")
    with tempfile.TemporaryDirectory() as directory:
        for num_samples in (1000, args.num_samples):
            path = Path(directory) / f"{num_samples}.arrow"
            write_data(path, num_samples)
            command = [sys.executable, __file__, "--measure", str(path)]
            r = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            print(
                f"{num_samples:<10,} {path.stat().st_size / 1e6:7,.0f} {r['first_batch_s']:14.2f}"
                f" {r['later_batch_ms']:11.2f} {r['resident_mb']:12,.0f} {r['anonymous_mb']:13,.0f}"
                f" {r['peak_mb']:8,.0f}"
            )
