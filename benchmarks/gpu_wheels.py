"""Fetches the wheels that a borrowed GPU machine lacks, for benchmarks/gpu.py: at most 52 MiB, to travel with the tree.

    python benchmarks/gpu_wheels.py    # into benchmarks/wheels, which git ignores

For Linux on x86-64, a Python of `PYTHON`, and a machine that has PyTorch, transformers, numba, pyarrow and pytest.
Versions are those of constraints.txt where it names them.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "benchmarks" / "wheels"
PYTHON = "3.12"
PACKAGES = ("tyro", "docstring-parser", "typeguard", "datasets", "dill", "multiprocess", "liger-kernel", "torchao",
            "bitsandbytes", "peft", "trl")  # fmt: skip
GLIBC_MINORS = (17, 24, 27, 28, 31, 34, 35)  # pip matches platform tags exactly
MAX_BYTES = 52 << 20


def main() -> None:
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in GLIBC_MINORS] + ["manylinux2014_x86_64"]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    options += [word for name in platforms for word in ("--platform", name)]
    WHEELS.mkdir(exist_ok=True)
    for wheel in WHEELS.glob("*.whl"):
        wheel.unlink()  # two versions of a package end the installation
    command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*command, "-d", str(WHEELS), *PACKAGES], check=True)
    sizes = {wheel.name: wheel.stat().st_size for wheel in sorted(WHEELS.glob("*.whl"))}
    for name, size in sizes.items():
        print(f"{size / 2**20:6.2f} MiB  {name}")
    total = sum(sizes.values())
    print(f"{total / 2**20:6.2f} MiB  together")
    if total > MAX_BYTES:
        sys.exit(f"more than {MAX_BYTES >> 20} MiB: leave out a package")


if __name__ == "__main__":
    main()
