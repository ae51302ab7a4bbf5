"""What each rank would work out anew in its first optimizer step: imported by the process that forks ranks.

How an operation is sharded torch works out once for each mesh and list of sharded tensors, which costs half a second of
processor time for an optimizer step and a clipping of `support.models.Tiny`, and then keeps it. No rank runs here: the
process group is torch's fake one, whose collectives do nothing, and it is gone when the ranks are forked.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from support.models import Case, adamw, build, clip

# Those that most tests use; a rank works out the others as ever.
MESHES: tuple[tuple[tuple[int, ...], tuple[str, ...] | None], ...] = (
    ((2,), None),
    ((4,), None),
    ((2, 2), ("outer", "inner")),
)
CASE = Case(counts=((1,),))

for shape, names in MESHES:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=torch.Size(shape).numel())
    model = build(fully_shard, CASE, init_device_mesh("cpu", shape, mesh_dim_names=names))
    optimizer = adamw(model)
    for _ in range(2):  # the second time there are states
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        # No operation in these takes a shape; only of such what torch keeps depends on the rank.
        clip(model, CASE.norm)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
