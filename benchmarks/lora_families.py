"""LoRA by families of models: how far a run is from a plain loop of transformers and peft, and its exports from peft.

    OMP_NUM_THREADS=1 python benchmarks/lora_families.py

Tiny models in fp32, a few steps. The columns: the largest difference of a loss, relative; of a tensor of the adapter,
relative to how far training moved it; whether peft loads the exported adapter bit for bit; how far a logit of the
merged export is from the base model with the adapter beside it, and from what peft merges.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "quickstart")]
from peft_runs import TABLE, run_beside_peft
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from ranks.world import init_world


def main() -> None:
    set_verbosity_error()
    disable_progress_bar()
    world = init_world()
    print("| model | options | loss | adapter | peft loads it | merged, not merged | merged by us, by peft |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for family, options in TABLE:
        with tempfile.TemporaryDirectory() as directory:
            found = run_beside_peft(family, options, Path(directory), world=world)
        loads = "bit for bit" if found.loads_bit_for_bit else "**differs**"
        given = ", ".join(f"`--{name.replace('_', '-')}`" for name in options)
        cells = [
            f"{found.loss:.0e}",
            f"{found.adapter:.0e}",
            loads,
            f"{found.merged:.0e}",
            f"{found.merged_by_peft:.0e}",
        ]
        print(f"| {family} | {given} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
