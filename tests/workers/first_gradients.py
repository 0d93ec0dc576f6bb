"""Under torchrun: the loss and the gradients of first global batches of several sizes, gathered and saved by rank 0.

Each with a model that is built in the plainest way, and then with one for long rows.

torchrun ... first_gradients.py MODEL DATA MAX_TOKENS_PER_GPU OUTPUT BATCH_SIZE...
"""

import itertools
import sys

from small_runs import save_and_end
from tiny_models import build

from mini_trainer.data.tokenized.mixture import Mixture
from mini_trainer.data.tokenized.reader import TokenizedData
from mini_trainer.distributed.world import init_world
from mini_trainer.model import activation_memory
from mini_trainer.model.optim.optimizers import local_gradients, reduce_step
from mini_trainer.objectives.next_tokens import CausalLM
from mini_trainer.options import DataOptions
from mini_trainer.run.step import run_backward
from mini_trainer.sampler import iterate_batches

model_path, data_path, max_tokens_per_gpu, output, *batch_sizes = sys.argv[1:]
activation_memory.LEAST_TOKENS = 8
FOR_LONG_ROWS = dict(activation_checkpointing="full", tiled_mlp=True, offload_activations=True)
world = init_world()
models = {"plain": build(model_path, world), "long rows": build(model_path, world, **FOR_LONG_ROWS)}
data = Mixture([TokenizedData(data_path)])
results = []
for (kind, model), batch_size in itertools.product(models.items(), batch_sizes):
    options = DataOptions(
        data_path=data_path, batch_size=int(batch_size), seed=0, max_tokens_per_gpu=int(max_tokens_per_gpu)
    )
    batch = next(iterate_batches(data, options, objective=CausalLM(), num_steps=1, attention_cost=0.0, world=world))
    sums = [run_backward(model, micro_batch, {"targets": batch.num_loss_tokens}) for micro_batch in batch.micro_batches]
    reduced = reduce_step(
        sums, local_gradients(model), device=world.device, num_shards=world.num_shards, data_wait_seconds=0.0
    )
    results.append(
        dict(
            kind=kind,
            gradients={name: param.grad.full_tensor() for name, param in model.model.named_parameters()},
            loss=reduced.loss_sum / batch.num_loss_tokens,
            grad_norm=reduced.grad_norm,
            num_idle=sum(not indices for row in batch.table for indices in row),
            sample_ids=batch.sample_ids.tolist(),
        )
    )
    model.zero_grad()
save_and_end(results, output, world)
