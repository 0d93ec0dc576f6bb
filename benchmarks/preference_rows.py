"""Bad rows of preferences and feedback, and what process_data.py says of each; written to results/preference_rows.txt.

OMP_NUM_THREADS=1 python benchmarks/preference_rows.py --work-dir /tmp/rows
"""

import argparse
import json
from pathlib import Path

import paths
from bad_preference_rows import BAD_FEEDBACK, BAD_PAIRS
from forked import run_forked
from processes import flags
from tiny_models import FAMILIES, save_model, save_tokenizer

RESULTS = paths.ROOT / "benchmarks/results/preference_rows.txt"
PLACE = "rows.jsonl:1: "


def read_message(row: dict, form: str, folder: Path) -> str:
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    options = dict(format=form, input_file=folder / "rows.jsonl", output_file=folder / "data.arrow",
                   model_name_or_path=folder / "model", num_proc=1)  # fmt: skip
    done = run_forked(0, "process_data.py", *flags(**options))
    assert done.returncode == 2, done.stderr
    return next(line.partition(PLACE)[2] for line in done.stderr.splitlines() if PLACE in line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True, help="a directory to make")
    folder = parser.parse_args().work_dir
    folder.mkdir(parents=True)
    save_tokenizer(save_model(FAMILIES["llama"], folder / "model"))
    lines = ["| --format | row | message |", "| --- | --- | --- |"]
    for form, rows in (("preference", BAD_PAIRS), ("feedback", BAD_FEEDBACK)):
        for row, _ in rows:
            lines.append(f"| {form} | `{json.dumps(row)}` | {read_message(row, form, folder)} |")
            print(lines[-1], flush=True)
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
