"""Adds to peers over links with and without native atomics: atomics or the lock, and the same sums."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support.device import own_device
from support.ranks import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from odc import Settings, fully_shard
from odc.fsdp import live_roots, root_of
from odc.memory import device_links


def sums(rank: int, world: int) -> tuple[bool, list[torch.Tensor]]:
    """Whether peers are added to atomically, and this rank's gradients of three backwards of small integers."""
    device = own_device(rank)
    model: Any = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).to(device)
    nn.init.eye_(model[0].weight), nn.init.eye_(model[1].weight)
    settings = Settings(accumulate="direct")
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cuda", (world,)), settings=settings)
    fully_shard(model, mesh=init_device_mesh("cuda", (world,)), settings=settings)
    with model.minibatch():
        for number in range(3):
            model(torch.full((2, 64), float(1 + rank + number), device=device)).sum().backward()
    atomic = root_of(model).layout.heap.adds_atomically
    gradients = [parameter.grad.to_local().cpu() for parameter in model.parameters()]
    for root in live_roots():
        root.shut_down()
    return atomic, gradients


@pytest.mark.parametrize("native", [False, True])
def test_the_driver_decides_how_peers_are_added_to(native: bool) -> None:
    """Two emulated devices, whose driver is told what to answer; on others it answers as it finds."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (`odc doctor` says what is missing)")
    if "libemulated_cuda" not in os.environ.get("LD_PRELOAD", ""):
        if torch.cuda.device_count() < 2 or device_links.native_atomics(0, 1) != native:
            pytest.skip(f"needs two devices with native atomics between them: {native}")
    told = ("EMULATED_DEVICES", "2"), ("EMULATED_P2P_ATOMICS", str(int(native)))
    pool = RankPool(2, (("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1"), *told))
    try:
        found = pool.run(sums, timeout=240)
    finally:
        pool.close()
    assert [atomic for atomic, _ in found] == [native] * 2
    for _, gradients in found:
        for gradient in gradients:
            assert gradient.unique().tolist() == [2.0 * (1 + 2 + 3 + 2 + 3 + 4) / 2], "exact in any order"
