"""CUDA over several hosts (namespaces of this machine): what odc computes on devices is what FSDP2 computes on the CPU.

Between hosts bytes go by plain TCP, through pinned memory at both ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.device import own_device
from support.exact import Exact, SignStep, batch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from odc import Settings, fully_shard
from odc.fsdp import live_roots
from odc.runtime.engines import staging

HostPools = Callable[[int, int], Any]
Counts = tuple[tuple[int, ...], ...]
HERE = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "TMPDIR": "/dev/shm",  # torch names its sockets by process numbers, which differ within a host only
}


def train(shard: Callable[..., Any], rank: int, mesh: DeviceMesh, counts: Counts, **options: Any) -> list[torch.Tensor]:
    """This rank's shards of gradients and parameters after every step, and what an evaluation gives between them."""
    device = torch.device(mesh.device_type)
    model, mine = Exact().to(device), shard is fully_shard
    for layer in model.layers:
        shard(layer, mesh=mesh, **options)
    shard(model, mesh=mesh, **options)
    optimizer, found = SignStep(model.parameters()), list[torch.Tensor]()
    for step, row in enumerate(counts):
        if mine:
            with model.minibatch():
                for i in range(row[rank]):
                    model(batch(rank, step, i).to(device)).sum().backward()
        else:
            most = max(row)
            for i in range(most):
                model.set_requires_gradient_sync(i == most - 1)
                (model(batch(rank, step, i)).sum() * float(i < row[rank])).backward()
        used = [*model.layers.parameters()]
        found += [p.grad.to_local().cpu() for p in used]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(model(batch(rank, step, 99).to(device)).cpu())
        found += [p.to_local().detach().cpu().clone() for p in used]
    return found


def same(rank: int, world: int, counts: Counts, settings: Settings, shape: tuple[int, ...]) -> int:
    os.environ.update(HERE)
    own_device(int(os.environ["LOCAL_RANK"]))
    staging.CHUNK_BYTES = 512  # every shard takes several
    names = ("replicas", "shards")[-len(shape) :]
    ours = train(fully_shard, rank, init_device_mesh("cuda", shape, mesh_dim_names=names), counts, settings=settings)
    for root in live_roots():
        root.shut_down()
    theirs = train(torch_fully_shard, rank, init_device_mesh("cpu", shape, mesh_dim_names=names), counts)
    assert len(ours) == len(theirs)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(one, other), f"rank {rank}: value {number}: {one.flatten()[:4]} {other.flatten()[:4]}"
    return sum(int(one.count_nonzero()) for one in ours)


COUNTS = {2: ((1, 1), (2, 1), (0, 2)), 4: ((1, 1, 1, 1), (2, 1, 3, 1), (0, 2, 0, 1))}
SETTINGS = {
    "server": Settings(timeout_s=120.0),
    "by torch": Settings(timeout_s=120.0, kernels="torch"),
    "direct": Settings(timeout_s=120.0, accumulate="direct", prefetch=0, push_overlap=False),
    "per source": Settings(timeout_s=120.0, accumulate="per_source", second_buffer=True),
}


@pytest.fixture
def pools(request: pytest.FixtureRequest) -> HostPools:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (`odc doctor` says what is missing)")
    return request.getfixturevalue("host_ranks")


@pytest.mark.parametrize("per_host", [1, 2])
def test_equal_to_fsdp2(pools: HostPools, per_host: int) -> None:
    """With uneven and no microbatches, and evaluations between the steps."""
    world = 2 * per_host
    found = pools(2, per_host).run(same, COUNTS[world], SETTINGS["server"], (world,), timeout=240)
    assert min(found) > 1000


@pytest.mark.parametrize("settings", [name for name in SETTINGS if name != "server"])
def test_equal_with_other_settings(pools: HostPools, settings: str) -> None:
    pools(2, 2).run(same, COUNTS[4], SETTINGS[settings], (4,), timeout=240)


def test_hybrid_sharding_equals_fsdp2(pools: HostPools) -> None:
    """Shards within a host, replicas over hosts."""
    pools(2, 2).run(same, COUNTS[4][:2], SETTINGS["server"], (2, 2), timeout=240)
