"""Start-up time and memory of the data side of train.py, by the number of samples.

    python benchmarks/data_startup.py                                               # up to 1,000,000 samples
    python benchmarks/data_startup.py --num-samples 1000000 100000000 --max-length 3      # 4.9 GB of disk

Each number of samples in a process of its own: CPU seconds (and seconds) from opening the file to the first batch, of
later batches, and of resumes in the middle; memory at the end, and the highest. Packing is compiled before the clock
starts. A large data set is opened once before, which makes its index, and at the end by two processes, which share it.
`--max-length`: samples so short that the index, and not the tokens, takes the disk; without it GSM8K-like. `--pairs`:
pairs of a chosen and a rejected sequence of such lengths, without the batches.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parent.parent))

from objectives.columns import PREFERENCE
from objectives.preference_columns import PreferenceColumns
from objectives.token_columns import TextColumns
from ranks.row_group import Place

VOCAB_SIZE, ORDER_CHUNK = 32_000, 1 << 20


def write_data(path: Path, num_samples: int, max_length: int | None, *, pairs: bool) -> None:
    """Random samples in record batches of 1,000: of GSM8K-like lengths (median 160 tokens), or of at most
    `max_length` tokens; as `pairs`, the half of which is the chosen sequence."""
    random, schema = np.random.default_rng(0), (PreferenceColumns if pairs else TextColumns).schema
    with pa.OSFile(str(path), "wb") as file:
        writer = None
        for start in range(0, num_samples, 1000):
            size = min(1000, num_samples - start)
            if max_length is None:
                lengths = np.clip(random.lognormal(5.1, 0.4, size), 8, 2000).astype(np.int32)
            else:
                lengths = random.integers(2, max_length + 1, size, dtype=np.int32)
            lengths *= 1 + pairs
            offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
            tokens = pa.array(random.integers(0, VOCAB_SIZE, lengths.sum(), dtype=np.int32))
            lists = pa.ListArray.from_arrays(offsets, tokens)
            columns = dict(input_ids=lists, labels=lists, len=pa.array(lengths))
            columns["num_loss_counted_tokens"] = pa.array(lengths - 1)
            if pairs:
                bounds = pa.array(np.arange(0, 2 * size + 1, 2, dtype=np.int32))
                columns["sequence_lengths"] = pa.ListArray.from_arrays(bounds, pa.array(np.repeat(lengths // 2, 2)))
            columns |= {field.name: pa.nulls(size, field.type) for field in schema if field.name not in columns}
            batch = pa.record_batch(columns, schema=schema)
            writer = writer or pa.ipc.new_file(file, schema)
            writer.write_batch(batch)
        writer.close()
    if pairs:
        Path(f"{path}.meta.json").write_text(json.dumps({"objective": PREFERENCE}))


def measure(path: str) -> None:
    """Prints the measurements of this process as JSON."""
    from batch_packer import pack_batch
    from corpus.mixture import Mixture
    from corpus.reader import TokenizedData
    from model.fingerprints import fingerprint_data
    from objectives.next_tokens import CausalLM
    from options import DataOptions, EndOptions
    from sampler import Batching, RunPosition, choose_batching, count_steps, draw_samples, iterate_batches

    pack_batch([1, 2], 4, 1)
    measured: dict[str, Any] = {}

    def note(name: str, function: Callable[[], Any], *, per: int = 1) -> Any:
        cpu, clock = time.process_time(), time.perf_counter()
        result = function()
        cpu, clock = (time.process_time() - cpu) / per, (time.perf_counter() - clock) / per
        measured[name] = f"{cpu:.4f} ({clock:.4f})"
        return result

    def open_data() -> Mixture:
        data = Mixture([TokenizedData(path)])
        data.vocab_size = VOCAB_SIZE
        data.fit_to(options.max_tokens_per_gpu, drop_overlong=False)
        data.check_trained("--data-path")
        assert data.num_tokens > 0
        return data

    def iterate(options: DataOptions, position: int, batching: Batching | None = None) -> Any:
        start, costs = RunPosition(0, position), dict(num_steps=21, attention_cost=1e-4)
        return iterate_batches(
            data, options, objective=CausalLM(), batching=batching, start=start, world=Place(0, 8), **costs
        )

    def draw_epoch() -> None:
        for first in range(0, num_samples, ORDER_CHUNK):
            draw_samples(data, seed=options.seed, start=first, count=min(ORDER_CHUNK, num_samples - first))

    options = DataOptions(data_path=path, batch_size=256)
    data = note("open", open_data)
    num_samples = len(data.kept)
    if data.has_sequences:
        note("longest sequence", lambda: data.longest_sequence)
        rows = draw_samples(data, seed=options.seed, start=0, count=options.batch_size)
        note("sequences of a batch", lambda: data.list_sequences(rows))
        data.release_pages()
        measured["memory at the end"] = describe_memory()
        measured["highest resident MB"] = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:,.0f}"
        return print(json.dumps(measured))
    batches = iterate(options, 0)
    note("first batch", lambda: next(batches))
    note("a later batch (mean of 20)", lambda: list(batches), per=20)
    measured["memory at the end"] = describe_memory()
    note("first batch of a resume in the middle", lambda: next(iterate(options, num_samples // 2)))
    source = data.sources[0]
    note("digest", lambda: fingerprint_data(source.path, source=None, lengths=source.lengths, kept=source.kept))
    data.release_pages()
    mean = int(source.lengths[:ORDER_CHUNK].mean())
    by_tokens = DataOptions(data_path=path, batch_size=None, batch_tokens=max(data.longest, 256 * mean))
    batching, end = note("by tokens: opening", lambda: choose_batching(data, by_tokens)), EndOptions(max_epochs=1)
    seed = by_tokens.seed
    note("by tokens: number of steps of 1 epoch", lambda: count_steps(data, batching, end, seed=seed))
    note("by tokens: first batch", lambda: next(iterate(by_tokens, 0, batching)))
    note("by tokens: first batch in the middle", lambda: next(iterate(by_tokens, num_samples // 2, batching)))
    note("order of a whole epoch", draw_epoch)
    measured["highest resident MB"] = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:,.0f}"
    print(json.dumps(measured))


def describe_sharing(path: Path) -> str:
    """What each of two processes holds of the index, once both have read all of it."""
    command = [sys.executable, __file__, "--hold", str(path)]
    readers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = []
    for reader in readers:
        assert reader.stdout.readline() == "ready\n"
    for reader in readers:
        reader.stdin.write("\n")
        reader.stdin.flush()
        found.append(json.loads(reader.stdout.readline()))
    for reader in readers:
        reader.communicate()
    return "; ".join(f"{held['Rss']:,.1f} resident, {held['Pss']:,.1f} proportional" for held in found)


def hold(path: str) -> None:
    """Reads the whole index; prints its megabytes in this process when asked, and stays until the input ends."""
    from corpus.reader import TokenizedData

    data = TokenizedData(path)
    whole = [data.lengths, data.num_loss_tokens]
    whole += [] if data.sequences is None else [data.sequences.firsts, data.sequences.lengths]
    assert all(values.sum(dtype=np.int64) > 0 for values in whole)
    print("ready", flush=True)
    sys.stdin.readline()
    held, is_index = Counter(dict.fromkeys(("Rss", "Pss"), 0.0)), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):  # a mapping's addresses, and its file
            is_index = rest.endswith(f"{path}.index")
        elif is_index and first[:-1] in held:
            held[first[:-1]] += int(rest.split()[0]) / 1e3
    print(json.dumps(held), flush=True)
    sys.stdin.read()


def describe_memory() -> str:
    """Megabytes: private, proportional (shared pages divided by those that share them) and resident."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    sizes = {name: int(rest.split()[0]) / 1e3 for name, rest in (line.split(":", 1) for line in lines)}
    private = sizes["Private_Clean"] + sizes["Private_Dirty"]
    return f"{private:,.0f} private, {sizes['Pss']:,.0f} proportional, {sizes['Rss']:,.0f} resident MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-samples", type=int, nargs="+", default=[1000, 1_000_000])
    parser.add_argument("--max-length", type=int)
    parser.add_argument("--pairs", action="store_true")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--hold", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        return measure(args.measure)
    if args.hold:
        return hold(args.hold)
    print(f"$ OMP_NUM_THREADS=1 python {' '.join(sys.argv)}")
    print(f"python {platform.python_version()}, numpy {np.__version__}, pyarrow {pa.__version__}, {platform.machine()}")
    print("CPU seconds (seconds, on a machine with other work)")
    for num_samples in args.num_samples:
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "data.arrow"
            write_data(path, num_samples, args.max_length, pairs=args.pairs)
            print(f"\n{num_samples:,} samples, {path.stat().st_size / 1e6:,.0f} MB", flush=True)
            command = [sys.executable, "-c", OPEN, str(path)]
            subprocess.run(command, check=True)
            command = [sys.executable, __file__, "--measure", str(path)]
            found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            for name, value in found.items():
                print(f"  {name}: {value}", flush=True)
            if Path(f"{path}.index").exists():
                print(f"  MB of the index, read whole by two processes: {describe_sharing(path)}", flush=True)


OPEN = """
import resource, sys, time
from corpus.reader import TokenizedData
cpu, clock = time.process_time(), time.perf_counter()
TokenizedData(sys.argv[1])
seconds = f"{time.process_time() - cpu:.4f} ({time.perf_counter() - clock:.4f})"
most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
print(f"  open for the first time: {seconds}, at most {most:,.0f} MB")
"""


if __name__ == "__main__":
    main()
