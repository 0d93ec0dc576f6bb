"""Peak memory of tools/export_gguf.py on random models in bf16 (Qwen2.5-1.5B's shape, with fewer layers).

    OMP_NUM_THREADS=1 nice python benchmarks/exporting_gguf.py --work-dir /tmp/exporting

anon: RssAnon, memory of the process's own, its peak sampled every 10 ms, without the pages of mapped files.
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "quickstart")]
from harness import describe_versions, read_status, watch_memory
from make_tiny_model import train_tokenizer
from merging import write_model

import exporters.gguf_file  # noqa: F401  what is imported is not what the export needs
from options import ExportGgufOptions
from tools.export_gguf import export_gguf


def export(work_dir: Path, dtype: str) -> None:
    """In a process that has done nothing else."""
    output = work_dir / "model.gguf"
    options = ExportGgufOptions(model_name_or_path=str(work_dir / "model"), output=str(output), dtype=dtype)
    at_start, start = read_status("RssAnon"), time.process_time()
    with watch_memory() as peak:
        export_gguf(options)
    print(
        f"  {dtype}: {output.stat().st_size / 1e9:.2f} GB written; anon at start {at_start:.2f} GB, peak {peak[0]:.2f}"
        f" GB; {time.process_time() - start:.0f} CPU s"
    )
    output.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True)
    parser.add_argument("--num-layers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dtype is not None:
        export(args.work_dir, args.dtype)
        return
    print(describe_versions("torch", "safetensors", "gguf"))
    for num_layers in args.num_layers:
        num_bytes, num_params = write_model(args.work_dir / "model", num_layers=num_layers, seed=0)
        train_tokenizer([__doc__], vocab_size=400).save_pretrained(args.work_dir / "model")  # one with merges
        print(f"{num_params / 1e9:.2f} billion parameters, {num_bytes / 1e9:.2f} GB in bf16:", flush=True)
        for dtype in ("bf16", "q8_0"):
            command = [sys.executable, __file__, "--work-dir", str(args.work_dir), "--dtype", dtype]
            subprocess.run(command, check=True)
        shutil.rmtree(args.work_dir / "model")


if __name__ == "__main__":
    main()
