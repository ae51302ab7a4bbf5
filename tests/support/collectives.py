"""Which collectives a piece of code calls, on any thread.

There are two checks. Every public name of torch.distributed and every method of ProcessGroup that communicates is
wrapped, which says who called. The groups' own counters, kept in C++ under every path into a backend, are compared;
they miss nothing but say only how many calls there were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d

_FUNCTIONS = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "batch_isend_irecv",
    "broadcast", "broadcast_object_list", "gather", "gather_object", "irecv", "isend", "monitored_barrier", "new_group",
    "new_subgroups", "new_subgroups_by_enumeration", "recv", "recv_object_list", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list",
    "split_group",
)  # fmt: skip
_METHODS = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced",
    "alltoall", "alltoall_base", "barrier", "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource",
    "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip


def counters() -> dict[str, int]:
    """Collectives begun on every process group of this rank so far."""
    return {
        group.group_name: group._get_sequence_number_for_group()
        for group in distributed_c10d._world.pg_map
        if isinstance(group, dist.ProcessGroup)
    }


@contextlib.contextmanager
def collectives() -> Iterator[list[str]]:
    """The names of collectives called inside, filled in until the end; `counter of <group>` when only counted."""
    called: list[str] = []

    def spy(place: Any, name: str) -> Any:
        real = getattr(place, name)

        def spied(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return real(*args, **kwargs)

        return mock.patch.object(place, name, spied)

    before = counters()
    with contextlib.ExitStack() as stack:
        for place, names in ((dist, _FUNCTIONS), (distributed_c10d, _FUNCTIONS), (dist.ProcessGroup, _METHODS)):
            for name in names:
                if hasattr(place, name):  # some came with a later torch
                    stack.enter_context(spy(place, name))
        yield called
    after = counters()
    called += [f"counter of {name}" for name in after if after[name] != before.get(name, 0)]
