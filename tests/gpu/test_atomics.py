"""Adds to peers over links with and without native atomics: atomics or the lock, and the same sums."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from support.device import EMULATED, own_device
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
    settings = Settings(accumulate="direct", copy_engine_bytes=1)
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


@pytest.mark.parametrize(
    ("world", "pairs", "native"),
    [(2, "0", False), (2, "0-1", True), (3, "0-1,1-2", False), (3, "0-1,0-2,1-2", True)],
    ids=["a pair without", "a pair with", "one pair of three without", "three with"],
)
def test_the_driver_decides_how_peers_are_added_to(world: int, pairs: str, native: bool) -> None:
    """Emulated devices, whose driver is told of which pairs to say that atomics are native; others answer as they are.

    One pair without keeps all ranks from atomics: who adds under the lock must meet none that takes it not.
    """
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (`odc doctor` says what is missing)")
    if not EMULATED:
        if torch.cuda.device_count() < 2 or world > 2 or device_links.native_atomics(0, 1) != native:
            pytest.skip(f"needs two devices with native atomics between them: {native}")
    told = ("EMULATED_DEVICES", str(world)), ("EMULATED_P2P_ATOMICS", pairs)
    pool = RankPool(world, told)
    try:
        found = pool.run(sums, timeout=240)
    finally:
        pool.close()
    assert [atomic for atomic, _ in found] == [native] * world
    refuse_inexact(found)


def refuse_inexact(found: list[tuple[bool, list[torch.Tensor]]]) -> None:
    expected = 2.0 * sum(1 + rank + number for rank in range(len(found)) for number in range(3)) / len(found)
    for _, gradients in found:
        for gradient in gradients:
            assert gradient.unique().tolist() == [expected], "exact in any order"


def sums_beside_a_hidden_device(rank: int, world: int) -> tuple[tuple[bool, list[torch.Tensor]], str]:
    """`sums` in a process that sees one device, and which that is."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = names[rank]
    assert torch.cuda.device_count() == 1, "this process has used CUDA before"
    return sums(rank, world), device_links.device_uuid(0)


def test_ranks_map_devices_that_they_do_not_see_and_add_to_them_under_a_lock() -> None:
    """As Ray and some launchers start them; no process can ask what atomics between the two are."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (`odc doctor` says what is missing)")
    if not EMULATED and torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    pool = RankPool(2, (("EMULATED_DEVICES", "2"),))
    try:
        found, devices = zip(*pool.run(sums_beside_a_hidden_device, timeout=240), strict=True)
    finally:
        pool.close()
    assert len({*devices}) == 2 and [atomic for atomic, _ in found] == [False] * 2
    refuse_inexact(list(found))
