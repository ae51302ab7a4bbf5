"""A queue instead of a plan; docs/balance.md explains it.

On the CPU: `CUDA_VISIBLE_DEVICES= torchrun --nproc-per-node 2 examples/claim.py`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from odc import Settings, fully_shard

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = torch.nn.Sequential(torch.nn.Embedding(256, 64), torch.nn.Linear(64, 256))
fully_shard(model, settings=Settings(queue_bytes=1 << 20, reproducible=True))
optimizer = torch.optim.AdamW(model.parameters())

for step in range(3):
    lengths = (900, 100, 80) if rank == 0 else (60, 40)  # what this rank's data loader gave it
    mine = [{"tokens": torch.randint(256, (length + 1,))} for length in lengths]
    total = torch.tensor(sum(lengths))
    dist.all_reduce(total)  # predicted tokens of the step over all ranks: the loss needs no more than that
    with model.minibatch():
        for microbatch in model.claim(mine):  # in place of `for microbatch in mine:`
            tokens = microbatch["tokens"]
            loss = cross_entropy(model(tokens[:-1]), tokens[1:], reduction="sum")
            (loss * world / total).backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: {int(total)} tokens", flush=True)
dist.destroy_process_group()
