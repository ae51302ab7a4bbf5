"""Every private name of torch's symmetric memory that odc touches.

Chose one file, as `odc.fsdp._torch_compat` is for FSDP2: torch keeps its symmetric memory in a private module, and a
release that moves it is met here, with a message that names what is missing, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] on `device` that peers can map; unfilled. Local: waits for nobody."""
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)


def collective(name: str, nbytes: int) -> Callable[..., torch.Tensor]:
    """One of torch's low-contention collectives over the world, with a workspace of `nbytes`; calls a collective."""
    from torch.distributed import _symmetric_memory as symmetric  # registers the operators

    world: Any = dist.group.WORLD
    symmetric.get_symm_mem_workspace(world.group_name, nbytes)
    operator, wait = getattr(torch.ops.symm_mem, name), torch.ops._c10d_functional.wait_tensor
    return lambda tensor, *options: wait(operator(tensor, *options, world.group_name))
