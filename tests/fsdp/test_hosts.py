"""Ranks on several hosts (network namespaces of this machine): what odc computes there is what FSDP2 computes."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.compare import differences
from support.exact import Exact, SignStep, await_sums_in_backward, batch, changed_by_rounding, train
from support.host_ranks import HostPools
from support.on_ranks import on_hosts
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import odc
from odc import Settings, fully_shard
from odc.errors import AbandonedMinibatchError, UnsupportedError
from odc.fsdp import default_store
from odc.runtime import Arena
from odc.runtime.daemon import ask_all


def same(rank: int, world: int, counts: tuple[tuple[int, ...], ...], settings: Settings, marks: str = "none") -> int:
    ours, theirs = train(fully_shard, rank, counts, marks, settings=settings), train(torch_fully_shard, rank, counts)
    wrong = differences(ours, theirs, None)
    assert not wrong, "\n".join(wrong)
    return sum(int(one.count_nonzero()) for one in ours.values() if one is not None)


SHAPES = [(2, 2, "last")] + [
    pytest.param(*shape, marked, marks=pytest.mark.thorough)
    for shape in ((2, 2), (3, 1), (2, 4), (3, 2))
    for marked in ("none", "last", "all")
    if (*shape, marked) != (2, 2, "last")
]
SETTINGS = {
    "server": Settings(timeout_s=60.0),
    "direct": Settings(timeout_s=60.0, accumulate="direct", prefetch=0, push_overlap=False),
    "reproducible": Settings(timeout_s=60.0, reproducible=True, second_buffer=True, engine="sockets"),
    "changes": Settings(timeout_s=60.0, changes="on"),
    "changes-kept": Settings(timeout_s=60.0, changes="on", second_buffer=True, accumulate="direct"),
    "views": Settings(timeout_s=60.0, gradient_views=True),
}


@pytest.mark.parametrize(("hosts", "per_host", "marked"), SHAPES)
def test_equal_to_fsdp2(host_ranks: HostPools, hosts: int, per_host: int, marked: str) -> None:
    """With uneven and no microbatches, evaluations between the steps, and backwards that are marked as the last."""
    world = hosts * per_host
    counts = tuple(tuple(row[rank % 4] for rank in range(world)) for row in ((1, 1, 1, 1), (2, 1, 3, 1), (0, 2, 0, 1)))
    found = host_ranks(hosts, per_host).run(same, counts, SETTINGS["server"], marked)
    assert min(found) > 1000


@pytest.mark.parametrize("per_host", [(3, 1), (2, 1, 1), pytest.param((4, 2), marks=pytest.mark.thorough)])
def test_hosts_with_unequally_many_ranks_equal_fsdp2(host_ranks: HostPools, per_host: tuple[int, ...]) -> None:
    world = sum(per_host)
    counts = tuple(tuple(row[rank % 4] for rank in range(world)) for row in ((1, 1, 1, 1), (2, 1, 3, 1), (0, 2, 0, 1)))
    found = host_ranks(len(per_host), per_host).run(same, counts, SETTINGS["server"], "last")
    assert min(found) > 1000


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer_sharding", ["mesh", "world"])
def test_replicas_of_unequal_hosts_equal_fsdp2(host_ranks: HostPools, optimizer_sharding: str) -> None:
    """Two replicas on the one, and one on the other."""
    host_ranks(2, (4, 2)).run(same_hybrid, 3, optimizer_sharding)


@pytest.mark.parametrize(
    "settings",
    [
        "changes",
        *(pytest.param(one, marks=pytest.mark.thorough) for one in SETTINGS if one not in ("server", "changes")),
    ],
)
def test_equal_with_other_settings(host_ranks: HostPools, settings: str) -> None:
    host_ranks(2, 2).run(same, ((1, 2, 1, 3), (2, 0, 2, 1)), SETTINGS[settings], "last")


def same_hybrid(rank: int, world: int, replicas: int, optimizer_sharding: str) -> None:
    """Shards within a host, replicas over hosts, and in an unchanged loop."""
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicas", "ranks"))
    theirs = mesh if optimizer_sharding == "mesh" else init_device_mesh("cpu", (world,))
    counts = ((1,) * world,) * 3
    wrong = differences(
        train(fully_shard, rank, counts, "each", mesh=mesh, optimizer_sharding=optimizer_sharding),
        train(torch_fully_shard, rank, counts, "each", mesh=theirs),
        None,
    )
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("hosts", "per_host", "replicas", "optimizer_sharding"),
    [
        (2, 2, 2, "mesh"),
        (2, 2, 2, "world"),
        *(pytest.param(*grid, marks=pytest.mark.thorough) for grid in ((3, 2, 3, "world"), (2, 4, 4, "mesh"))),
    ],
)
def test_hybrid_sharding_equals_fsdp2(
    host_ranks: HostPools, hosts: int, per_host: int, replicas: int, optimizer_sharding: str
) -> None:
    """Also with several replicas on a host."""
    host_ranks(hosts, per_host).run(same_hybrid, replicas, optimizer_sharding)


@on_hosts(2, 2)
def test_several_roots(rank: int, world: int) -> None:
    """Two models in one minibatch, with different counts, one of which is abandoned by a rank once."""
    results = []
    for shard in (fully_shard, torch_fully_shard):
        models = [Exact(), Exact()]
        for model in models:
            for layer in model.layers:
                shard(layer)
            shard(model)
        optimizers = [SignStep(model.parameters()) for model in models]
        for step in range(3):
            with odc.minibatch(*models) if shard is fully_shard else contextlib.nullcontext():
                for number, model in enumerate(models):
                    model(batch(rank, step, number)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        results.append([values.full_tensor() for model in models for values in model.state_dict().values()])
    for number, (one, other) in enumerate(zip(*results, strict=True)):
        assert torch.equal(one, other), f"rank {rank}: value {number}: {one.flatten()[:4]} {other.flatten()[:4]}"


@on_hosts(2, 2)
def test_a_minibatch_is_abandoned_on_every_host(rank: int, world: int) -> None:
    model = Exact()
    fully_shard(model)

    def give_up() -> None:
        with model.minibatch():
            model(batch(rank, 0, 0)).sum().backward()
            if rank == world - 1:
                model.abandon_minibatch("a sample cannot be read")

    with pytest.raises(AbandonedMinibatchError, match="a sample cannot be read"):
        give_up()
    assert all(parameter.grad is None for parameter in model.parameters())
    with model.minibatch():
        model(batch(rank, 1, 0)).sum().backward()
    reference = Exact()
    torch_fully_shard(reference)
    reference(batch(rank, 1, 0)).sum().backward()
    for one, other in zip(model.layers.parameters(), reference.layers.parameters(), strict=True):
        assert torch.equal(one.grad.full_tensor(), other.grad.full_tensor()), "what was abandoned has been summed"


def crossing(
    rank: int, world: int, microbatches: int, replicas: int = 1, sharding: Any = "mesh", changes: Any = "off"
) -> tuple[int, int]:
    """Bytes that this rank's host sends in a minibatch, and those of all parameters, in fp32; no weight changes."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4)))
    names = ("replicas", "ranks")[replicas == 1 :]
    mesh = init_device_mesh("cpu", (replicas, world // replicas)[replicas == 1 :], mesh_dim_names=names)
    for layer in model:
        fully_shard(layer, mesh=mesh, optimizer_sharding=sharding)
    fully_shard(model, mesh=mesh, optimizer_sharding=sharding, settings=Settings(changes=changes))

    def minibatch() -> None:
        with model.minibatch():
            for _ in range(microbatches):
                model(torch.ones(2, 512)).sum().backward()
        model.zero_grad()

    minibatch()
    dist.barrier()
    before = sent()
    dist.barrier()
    minibatch()
    dist.barrier()
    return sent() - before, sum(parameter.numel() for parameter in model.parameters()) * 4


def sent() -> int:
    """Bytes that the host's device has sent, with all headers."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "eth0":
            return int(numbers.split()[8])
    raise AssertionError("no device")


@pytest.mark.parametrize(
    ("per_host", "microbatches"), [(2, 3), *(pytest.param(*c, marks=pytest.mark.thorough) for c in ((1, 3), (2, 1)))]
)
def test_each_byte_crosses_the_network_once(host_ranks: HostPools, per_host: int, microbatches: int) -> None:
    """Whatever the microbatches and the ranks of a host: half of the shards, and half of the sums."""
    for found, model in host_ranks(2, per_host).run(crossing, microbatches):
        assert model < found < 1.05 * model, (found, model)


def test_shards_that_have_not_changed_do_not_cross_again(host_ranks: HostPools) -> None:
    """What is left are the sums."""
    for found, model in host_ranks(2, 2).run(crossing, 1, 1, "mesh", "auto"):
        assert model / 2 < found < 1.05 * model / 2, (found, model)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("hosts", "per_host", "sharding", "share"), [(3, 1, "mesh", 4 / 3), (3, 2, "mesh", 4 / 3), (2, 2, "world", 1.0)]
)
def test_replicas_read_each_other_by_parts(
    host_ranks: HostPools, hosts: int, per_host: int, sharding: str, share: float
) -> None:
    """2 (N-1)/N of the accumulators; with the optimizer over all ranks (N-1)/N of them and of the parameters."""
    for found, model in host_ranks(hosts, per_host).run(crossing, 2, hosts, sharding):
        assert share * model < found < 1.05 * share * model, (found, model)


@on_hosts(2, 2)
def test_every_host_knows_what_all_ranks_are_doing(rank: int, world: int) -> None:
    """What `odc status` reads on this host, once the others' words have come, of a root in its ninth epoch."""
    model = Exact()
    fully_shard(model)
    for step in range(9):
        with model.minibatch():
            model(batch(rank, step, 0)).sum().backward()
    deadline, found = time.monotonic() + 60, {}
    while len(found) < world or any(root["state"] != "closed" for _, root in found.values()):
        assert time.monotonic() < deadline, found
        roots = [(one, root) for one in ask_all() for root in one.roots if root["epoch"] == 9]
        found = {one.rank: (one, root) for one, root in roots}
    dist.barrier()
    for number, (one, root) in found.items():
        assert (root["host"], one.elsewhere) == (number // 2, number // 2 != rank // 2)
        assert root["fetched_bytes"] > 0


@on_hosts(2, 2)
def test_what_does_not_work_over_hosts_is_refused(rank: int, world: int) -> None:
    across = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("a", "b"))
    model = Exact()
    fully_shard(model, mesh=across)
    with pytest.raises(UnsupportedError, match=f"rank {rank}: .* this mesh are on 2 hosts, and .* each replica on one"):
        model(batch(rank, 0, 0))
    arena = Arena(default_store(), range(world), rank, 1 << 12, ["rows"], 60.0, "over hosts")
    with pytest.raises(UnsupportedError, match="are on different hosts"):
        arena.get("rows", 0, (rank + 2) % world)


@on_hosts(2, 2)
def test_sums_cross_while_backward_goes_on(rank: int, world: int) -> None:
    """The first layer's backward waits until the last layer's sums have come: they cross while backward goes on."""
    model = Exact()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    waited = await_sums_in_backward(model)
    model(batch(rank, 0, 0)).sum().backward()  # a minibatch of one backward
    model.set_requires_gradient_sync(False)
    model(batch(rank, 1, 0) * 0).sum()  # of a microbatch without a backward
    model.set_requires_gradient_sync(True)
    model(batch(rank, 1, 0)).sum().backward()
    with model.minibatch():
        model.set_is_last_backward(True)
        model(batch(rank, 2, 0)).sum().backward()
    assert waited == [1, 2, 3]


@on_hosts(2, 2)
def test_rounded_sums_equal_plain_torch(rank: int, world: int) -> None:
    """With bf16 sums each sum of another host's ranks is rounded once."""
    model, settings = Exact(), Settings(timeout_s=60.0, sums_dtype="bfloat16")
    for module in (*model.layers, model):
        fully_shard(module, settings=settings)
    with model.minibatch():
        for i in range(2):
            model.set_is_last_backward(i == 1)
            (model(batch(rank, 0, i)) * 57.0).sum().backward()
    total = torch.tensor(changed_by_rounding(model, rank, world, [(0, 0), (0, 1)]))
    dist.all_reduce(total)
    assert int(total) > 0, "nothing was rounded"
