"""Reads of a device's memory over the network: from a device to a device, and to and from the host."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from support.device import own_device
from support.engines import SIZE, pattern, serving

from odc.net.engines.nixl import EXTRA, installed

_numbers = itertools.count()
NIXL = pytest.param("nixl", marks=pytest.mark.skipif(installed() is None, reason=f"needs NIXL: {EXTRA}"))


def reads(rank: int, world: int, engine: str, name: str) -> None:
    device, peer = own_device(rank), 1 - rank
    with serving(rank, engine, name) as mine:
        memory = pattern(rank).to(device)
        torch.cuda.current_stream().synchronize()
        mine.expose("device", memory)
        dist.barrier()
        whole = pattern(peer)
        for offset, nbytes in ((0, 0), (0, 1), (13, 4097), (1, 1 << 20), (0, SIZE)):
            for region, where in (("device", device), ("device", torch.device("cpu")), ("heap", device)):
                into = torch.full((nbytes + 2,), 7, dtype=torch.uint8, device=where)
                torch.cuda.current_stream().synchronize()
                mine.read(peer, region, offset, into[1:-1])
                found = into.cpu()
                assert torch.equal(found[1:-1], whole[offset : offset + nbytes]), (region, where, offset, nbytes)
                assert found[0] == found[-1] == 7, "bytes beside the destination have changed"
        dist.barrier()


@pytest.mark.parametrize("engine", ["sockets", NIXL])
def test_reads_of_device_memory(ranks, engine: str) -> None:
    ranks(2).run(reads, engine, f"devices{next(_numbers)}", timeout=120)
