"""Every private name of torch's symmetric memory that odc touches, loaded on first use.

A release of torch that moves one is noticed here, with a message that names what is missing.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from odc.deadlines import STORE_LONGEST_POLL_S, STORE_POLL_S, Backoff, Deadline
from odc.errors import UnsupportedError, WaitTimeoutError

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


class NumberedStore(Store):
    """A store in which a group's exchanges are numbered from 0, in the order in which this process makes them.

    torch numbers the exchanges of a process, whatever their group is, and ranks meet at these numbers: a process that
    has come later, or has another model, would wait for keys that no rank sets.
    """

    def __init__(self, store: Any, check: Callable[[], object], timeout_s: float) -> None:
        super().__init__()
        self._store, self._check, self._timeout_s = store, check, timeout_s
        self._numbers: dict[str, int] = {}

    def _renamed(self, key: str) -> str:
        name, number, *rest = key.split("/")  # as torch has it: name/number/rank, or name/number and a suffix
        return "/".join([name, str(self._numbers.setdefault(number, len(self._numbers))), *rest])

    def set(self, key: str, value: str) -> None:
        self._store.set(self._renamed(key), value)

    def add(self, key: str, amount: int) -> int:
        value: int = self._store.add(self._renamed(key), amount)
        return value

    def get(self, key: str) -> bytes:
        self.wait([key])
        value: bytes = self._store.get(self._renamed(key))
        return value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def wait(self, keys: list[str], *unused: timedelta) -> None:
        names = [self._renamed(key) for key in keys]
        deadline, backoff = Deadline(self._timeout_s), Backoff(STORE_POLL_S, STORE_LONGEST_POLL_S)
        while not self._store.check(names):
            self._check()
            if deadline.passed():
                raise WaitTimeoutError(
                    f"the ranks that map each other's device memory have not in {self._timeout_s:g} s"
                )
            backoff.sleep()


class StoreGroup:
    """Ranks that torch finds in a part of a store, where no process group has exactly these, or had before them.

    `prefix` names the part, the same on all of its `ranks` ranks, of which this is number `me`. Does not wait. A wait
    of torch's for one of them calls `check`, which may raise, and ends with WaitTimeoutError after `timeout_s`.
    """

    def __init__(
        self, store: Any, prefix: str, me: int, ranks: int, check: Callable[[], object], timeout_s: float
    ) -> None:
        _module()
        from torch._C._distributed_c10d import _register_process_group

        self.group_name, self._ranks = f"{prefix}/{next(_numbers)}", ranks  # torch takes a name once
        untyped: Any = dist
        # Without backends: it only lists the ranks.
        self._store = NumberedStore(untyped.PrefixStore(prefix, store), check, timeout_s)
        self._group = untyped.ProcessGroup(self._store, me, ranks)
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
