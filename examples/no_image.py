"""One rank has no image, on CPUs.

`CUDA_VISIBLE_DEVICES= torchrun --nproc-per-node 2 examples/no_image.py odc` ends, with `fsdp2` it hangs.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

if sys.argv[1] == "odc":
    from odc import fully_shard
else:
    from torch.distributed.fsdp import fully_shard


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.vision, self.llm = torch.nn.Linear(32, 32), torch.nn.Linear(32, 32)

    def forward(self, text, image=None):
        if image is not None:
            text = torch.cat([self.vision(image), text])
        return self.llm(text).square().mean()


dist.init_process_group("gloo", timeout=timedelta(seconds=20))
torch.manual_seed(0)
model = Model()
for module in (model.vision, model.llm, model):
    fully_shard(module)
image = torch.randn(4, 32) if dist.get_rank() == 0 else None  # rank 1 has no image
model(torch.randn(6, 32), image).backward()
print(f"rank {dist.get_rank()}: vision gradient {model.vision.weight.grad.full_tensor().norm():.4f}", flush=True)
dist.destroy_process_group()
