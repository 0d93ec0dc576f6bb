"""Under torchrun: the loss and the gradients of first global batches of several sizes, gathered and saved by rank 0.

torchrun ... first_gradients.py MODEL DATA MAX_TOKENS_PER_GPU OUTPUT BATCH_SIZE...
"""

import os
import sys

import torch
import torch.distributed as dist

from corpus.reader import TokenizedData
from lifecycle.training_log import reduce_step
from model.build import build_model, load_config
from optim.optimizers import local_gradients
from ranks.world import init_world
from sampler import iterate_batches

model_path, data_path, max_tokens_per_gpu, output, *batch_sizes = sys.argv[1:]
world = init_world()
config = load_config(model_path)
model = build_model(
    model_path,
    config,
    world=world,
    compute_dtype=torch.float32,
    attention="auto",
    activation_checkpointing="none",
    compile=False,
    use_liger_kernels=False,
)
results = []
for batch_size in batch_sizes:
    batch = next(
        iterate_batches(
            TokenizedData(data_path),
            batch_size=int(batch_size),
            seed=0,
            num_steps=1,
            max_tokens_per_gpu=int(max_tokens_per_gpu),
            attention_cost=0.0,
            rank=world.rank,
            world_size=world.world_size,
            vocab_size=config.vocab_size,
            pin_memory=False,
        )
    )
    losses = []
    for micro_batch in batch.micro_batches:
        loss_sum = model(micro_batch)
        (loss_sum / batch.num_loss_tokens).backward()
        losses.append(loss_sum.detach())
    sums = reduce_step(
        losses, local_gradients(model), device=world.device, num_shards=world.num_shards, data_wait_seconds=0.0
    )
    results.append(
        dict(
            gradients={name: param.grad.full_tensor() for name, param in model.model.named_parameters()},
            loss=sums.loss_sum / batch.num_loss_tokens,
            grad_norm=sums.grad_norm,
            num_idle=sum(not indices for row in batch.table for indices in row),
            sample_ids=batch.sample_ids.tolist(),
        )
    )
    model.zero_grad()
if world.rank == 0:
    torch.save(results, output)
dist.destroy_process_group()
os._exit(0)  # as train.py ends: gloo's threads and the interpreter's own end do not always go together
