"""On 4 ranks: loss and gradients of one global batch, whole rows first, then rows that 2 and 4 ranks share.

torchrun ... shared_rows.py OUTPUT NAME=MODEL...
"""

import sys
from pathlib import Path

from sharing import BORDERS, run_rows
from small_runs import save_and_end
from tiny_models import build, make_osft

from mini_trainer.distributed.world import init_world, make_row_group
from mini_trainer.model import activation_memory
from mini_trainer.model.method import Full
from mini_trainer.model.methods.lora import LoRA
from mini_trainer.objectives.families.text import TextFamily
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.options import LoRAOptions

activation_memory.LEAST_TOKENS = 8  # so that parts have several tiles, and whole rows other ones
output, *models = sys.argv[1:]
world = init_world()
row_groups = {size or 1: make_row_group(world.rank, world.world_size, size) for size in (None, 2, 4)}
rows = [row for kind in BORDERS.values() for row in kind[:2]]
results = {}
for name, path in (model.split("=", 1) for model in models):
    objective = CausalLM(TextFamily(0.1 if "experts" in name else None))
    if name == "LoRA":
        method = LoRA(LoRAOptions(lora=True, lora_target_modules=("q_proj", "v_proj")), seed=0)
    else:
        method = make_osft(Path(output).parent, osft_unfreeze_rank_ratio=0.5) if name == "OSFT" else Full()
    model = build(path, world, objective=objective, method=method, tiled_mlp="tiled" in name)
    trained = {param_name: param for param_name, param in model.model.named_parameters() if param.requires_grad}
    for size, row_group in row_groups.items():
        sums = run_rows(model, objective, rows, world=world, row_group=row_group)
        results[name, size] = dict(
            loss=sums.loss_sum,
            grad_norm=sums.grad_norm,
            gradients={param_name: param.grad.full_tensor() for param_name, param in trained.items()},
            reports=sums.reports,
        )
        model.zero_grad()
save_and_end(results, output, world)
