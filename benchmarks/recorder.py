"""What torch's flight recorder costs the host for each collective, with one rank, so that nothing waits.

OMP_NUM_THREADS=1 python benchmarks/recorder.py     # results/recorder.txt
"""

import os
import statistics
import subprocess
import sys

NUM_PAIRS, NUM_CALLS = 8, 20_000
PROGRAM = f"""
import time, torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(10)
begin = time.perf_counter()
for _ in range({NUM_CALLS}):
    dist.all_reduce(tensor)
print((time.perf_counter() - begin) / {NUM_CALLS} * 1e6)
"""


def measure(size: str) -> float:
    """Microseconds of an all-reduce with a recorder of this size."""
    env = os.environ | {"TORCH_FR_BUFFER_SIZE": size}
    return float(subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True).stdout)


pairs = [(measure("0"), measure("2000")) for _ in range(NUM_PAIRS)]
off, on = map(statistics.median, zip(*pairs, strict=True))
print(
    f"without {off:.1f} us, with {on:.1f} us, difference {statistics.median(b - a for a, b in pairs):.1f} us (medians)"
)
