"""Every private name of torch's symmetric memory that odc touches, loaded on first use.

A release of torch that moves one is noticed here, with a message that names what is missing.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from odc.errors import UnsupportedError

SHARE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's switch: several ranks may be on one device
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


def may_share_devices() -> bool:
    """Whether the user has set torch's switch for several ranks on one device."""
    return os.environ.get(SHARE) == "1"


@contextmanager
def _switched(*names: str) -> Iterator[None]:
    """Set switches of torch inside the block; it reads them from the environment at every exchange."""
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _module() -> Any:
    try:
        from torch.distributed import _symmetric_memory

        if not hasattr(_symmetric_memory, "rendezvous"):
            raise ImportError("torch.distributed._symmetric_memory.rendezvous")
    except ImportError as error:
        raise UnsupportedError(f"torch {torch.__version__} lacks {error}, which odc's CUDA heap builds on") from error
    return _symmetric_memory


def require_nvml(library: str = "libnvidia-ml.so.1") -> None:
    """Raise `UnsupportedError` without NVML: torch (2.11) then allocates by calling a function that is not there."""
    try:
        ctypes.CDLL(library)
    except OSError as error:
        raise UnsupportedError(
            f"torch's symmetric memory needs NVIDIA's management library ({error}): install it with the driver; in a "
            "container let it in with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        ) from error


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [nbytes] on `device` that peers can map; not filled. Local: does not wait.

    Raises UnsupportedError where torch or the driver lacks a part, RuntimeError where torch cannot allocate it.
    """
    _module()
    require_nvml()
    from torch._C._distributed_c10d import _SymmetricMemory

    # The module's `empty()` allocates from a pool, but a heap is released whole.
    return _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)


class MappingGroup(Protocol):
    """What is asked of a process group."""

    @property
    def group_name(self) -> str: ...
    def size(self) -> int: ...


class StoreGroup:
    """Ranks that torch finds in a part of a store, where no process group has exactly these. Does not wait.

    `prefix` names the part, the same on all of its `ranks` ranks, of which this is number `me`.
    """

    def __init__(self, store: Any, prefix: str, me: int, ranks: int) -> None:
        _module()
        from torch._C._distributed_c10d import _register_process_group

        self.group_name, self._ranks = f"{prefix}/{next(_numbers)}", ranks  # torch takes a name once
        untyped: Any = dist
        # Without backends: it only lists the ranks.
        self._group = untyped.ProcessGroup(untyped.PrefixStore(prefix, store), me, ranks)
        _register_process_group(self.group_name, self._group)  # type: ignore[arg-type]

    def size(self) -> int:
        return self._ranks


_numbers = itertools.count()


def map_peers(local: torch.Tensor, group: MappingGroup, me: int, *, same_numbers: bool = False) -> list[torch.Tensor]:
    """uint8 [nbytes] of each rank of `group`, by its rank there; a collective of the group.

    `local` comes from `allocate`, equally large on every rank; `me` is this rank's index in the group; `same_numbers`:
    the ranks' devices differ although their numbers do not, which torch would refuse. Multicast objects, which odc does
    not use, are not made: on a misconfigured NVSwitch making them fails. Raises RuntimeError if torch cannot map a
    peer's memory.
    """
    with _switched(_NO_MULTICAST, *([SHARE] if same_numbers else [])):
        handle = _module().rendezvous(local, group.group_name)
    return [local if peer == me else _view(handle, peer, local) for peer in range(group.size())]


def _view(handle: Any, peer: int, local: torch.Tensor) -> torch.Tensor:
    """A peer's memory as a tensor on this rank's device. As long as a view of it lives, so does the mapping."""
    if not int(handle.buffer_ptrs[peer]):
        raise RuntimeError(f"rank {peer} of the group has no pointer here: it is on another host")
    seen: torch.Tensor = handle.get_buffer(peer, (local.numel(),), torch.uint8)
    storage: Any = seen.untyped_storage()
    storage.odc_mapping = handle  # torch's view does not hold it
    return seen


def collective(name: str, nbytes: int) -> Callable[..., torch.Tensor]:
    """One of torch's low-contention collectives over the world, with a workspace of `nbytes`; itself a collective."""
    symmetric = _module()  # registers the operators
    world: Any = dist.group.WORLD
    symmetric.get_symm_mem_workspace(world.group_name, nbytes)
    operator, wait = getattr(torch.ops.symm_mem, name), torch.ops._c10d_functional.wait_tensor
    return lambda tensor, *options: wait(operator(tensor, *options, world.group_name))
