"""The private names of torch's symmetric memory, whose collectives are a baseline of the benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._symmetric_memory import get_symm_mem_workspace  # registers the operators


def collective(name: str, nbytes: int) -> Callable[..., torch.Tensor]:
    """One of torch's low-contention collectives over the world, with a workspace of `nbytes`; itself a collective."""
    world: Any = dist.group.WORLD
    get_symm_mem_workspace(world.group_name, nbytes)
    operator, wait = getattr(torch.ops.symm_mem, name), torch.ops._c10d_functional.wait_tensor
    return lambda tensor, *options: wait(operator(tensor, *options, world.group_name))
