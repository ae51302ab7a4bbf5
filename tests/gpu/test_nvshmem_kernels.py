"""Kernels that reach peers by NVSHMEM's device calls, over a heap in its memory.

One device is enough: with as many ranks as devices (at most two), each rank reaches every rank, itself too, as if no
pointer led there.
"""

from __future__ import annotations

import uuid

import pytest
import torch
import torch.distributed as dist
from support.device import own_device
from support.heaps import shm_group
from support.ranks import spawn_ranks
from support.waiting import until

from odc import Settings

pytest.importorskip("triton", reason="needs triton: pip install 'odc-fsdp[kernels]'")
pytest.importorskip("nvshmem.core", reason="needs nvshmem4py: pip install 'odc-fsdp[nvshmem]'")

ELEMENTS = 5000
REGION = 4 * ELEMENTS + 64  # values, then words
SENT = 4 * ELEMENTS


def values_of(rank: int, device: torch.device) -> torch.Tensor:
    return torch.arange(ELEMENTS, dtype=torch.float32, device=device) + 10_000 * rank


def reaches_peers_without_pointers(rank: int, world: int, identity: str, port: int) -> None:
    from odc import kernels
    from odc.memory import SymmetricHeap, nvshmem
    from odc.memory.cuda_lanes import CudaLanes
    from odc.memory.nvshmem_heap import NvshmemHeap
    from odc.runtime.nvshmem import end_nvshmem, placer

    device = own_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    nvshmem.initialize_kernels()
    place = placer(store, identity, tuple(range(world)), Settings(timeout_s=60.0), rank, world, device)

    def meet() -> None:
        torch.cuda.synchronize(device)
        dist.barrier()

    outer: list[SymmetricHeap] = []
    with shm_group(identity, tuple(range(world)), rank, 60.0, outer) as host:
        heap = NvshmemHeap(host, device, CudaLanes(device), place)
        outer.append(heap)
        heap.allocate("region", REGION)
        heap.seal()
        own = heap.tensor(rank, "region", torch.uint8)
        assert not own.any(), "a new heap is zero"
        symmetric = heap.symmetric(kernels.Symmetric)
        nowhere = torch.zeros(world, dtype=torch.int64, device=device)
        start = heap.layout.offset("region")
        own[: 4 * ELEMENTS].view(torch.float32).copy_(values_of(rank, device))
        meet()
        outs = torch.empty(world, ELEMENTS, device=device)
        for peer in range(world):
            kernels.get(outs[peer], nowhere, peer, start, symmetric=symmetric)
            assert torch.equal(outs[peer], values_of(peer, device)), f"get from rank {peer}"
        kernels.gather([outs.view(-1).zero_()], [start], nowhere, symmetric=symmetric)
        assert torch.equal(outs, torch.stack([values_of(peer, device) for peer in range(world)])), "gather"
        meet()
        to, source = (rank + 1) % world, (rank - 1) % world
        arrived = torch.zeros(1, dtype=torch.int32, device=device)
        for i in range(1, 4):  # one tensor, by NVSHMEM's own put with signal; several, counted by the kernel
            sent = values_of(rank, device) * i
            parts = [sent] if i == 1 else [sent[:33], sent[33:]]
            kernels.put(parts, nowhere, to, start, signal=kernels.Signal(start + SENT, i, arrived), symmetric=symmetric)
            until(lambda i=i: int(own[SENT : SENT + 8].view(torch.int64)) >= i, f"rank {source} to put")
            found = own[: 4 * ELEMENTS].view(torch.float32)
            assert torch.equal(found, values_of(source, device) * i), f"put {i} from rank {source}"
            meet()
        assert heap.whole(rank).data_ptr() == own.data_ptr() - start, "the own memory has its address"
        meet()
        heap.close()
        end_nvshmem(failed=False)


def test_kernels_reach_peers_without_pointers() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (`odc doctor` says what is missing)")
    world = min(2, torch.cuda.device_count())
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with spawn_ranks(world, reaches_peers_without_pointers, uuid.uuid4().hex[:12], store.port) as ranks:
        outcomes = ranks.wait(240)
    failed = [outcome.describe() for outcome in outcomes if outcome.exit_code != 0 or outcome.error]
    assert not failed, "\n".join(failed)
