"""CUDA over several hosts (namespaces of this machine): what odc computes on devices is what FSDP2 computes on the CPU.

Between hosts bytes go by plain TCP, through pinned memory at both ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import differences
from support.device import own_device
from support.exact import Exact, await_sums_in_backward, batch, changed_by_rounding, claimed, train
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from odc import Settings, fully_shard
from odc.errors import AbandonedMinibatchError, UnsupportedError
from odc.fsdp import live_roots
from odc.hosts.changes import ShardReads
from odc.net.engines import staging
from odc.protocol import HeapLayout, UnitSpec, Word

HostPools = Callable[[int, int], Any]
Counts = tuple[tuple[int, ...], ...]


def same(
    rank: int,
    world: int,
    counts: Counts,
    settings: Settings,
    shape: tuple[int, ...],
    sharding: str = "mesh",
    compute: torch.dtype | None = None,
) -> int:
    """Backwards are marked where shards span hosts, of two ranks all. With `sharding` "world" FSDP2 has a 1-D mesh.

    Sums are exact in the dtype `compute`, too.
    """
    own_device(int(os.environ.get("LOCAL_RANK", rank)))
    staging.CHUNK_BYTES = 512  # every shard takes several
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
    marks = "none" if len(shape) > 1 else "all" if world == 2 else "last"
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32 if compute else None)
    ours = train(
        fully_shard, rank, counts, marks, device="cuda", gathered=False,
        mesh=mesh, settings=settings, optimizer_sharding=sharding, mp_policy=policy,
    )  # fmt: skip
    layouts = [root.layout for root in live_roots()]
    saved = sum(layout.local(member).board.load(Word.SAVED) for layout in layouts for member in layout.grid.local)
    if settings.changes == "on" or settings.kernels == "torch":
        assert (saved > 0) == (settings.changes == "on"), f"{saved} bytes did not have to cross"
    for root in live_roots():
        root.shut_down()
    flat = shape if sharding == "mesh" else (world,)
    reference = init_device_mesh("cpu", flat, mesh_dim_names=("replicas", "shards")[-len(flat) :])
    theirs = train(torch_fully_shard, rank, counts, gathered=False, mesh=reference, mp_policy=policy)
    wrong = differences(ours, theirs, None)
    assert not wrong, "\n".join(wrong)
    return sum(int(one.count_nonzero()) for one in ours.values() if one is not None)


COUNTS = {
    2: ((1, 1), (2, 1), (0, 2)),
    3: ((1, 1, 2), (2, 0, 1)),
    4: ((1, 1, 1, 1), (2, 1, 3, 1), (0, 2, 0, 1)),
}
SETTINGS = {  # what goes by the copy engine where models are large goes by it here
    "server": Settings(timeout_s=120.0, copy_engine_bytes=1),
    "by torch": Settings(timeout_s=120.0, copy_engine_bytes=1, kernels="torch"),
    "direct": Settings(timeout_s=120.0, copy_engine_bytes=1, accumulate="direct", prefetch=0, push_overlap=False),
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


def same_by_changes(
    rank: int, world: int, counts: Counts, settings: Settings, shape: tuple[int, ...], compute: torch.dtype | None
) -> int:
    """How often this rank has read changes and applied them; all is as of FSDP2."""
    applied, patch = list[int](), HeapLayout.patch

    def note(self: HeapLayout, unit: UnitSpec, shard: torch.Tensor, packed: torch.Tensor) -> None:
        applied.append(unit.index)
        assert shard.is_cuda and packed.is_cuda
        patch(self, unit, shard, packed)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(HeapLayout, "patch", note)
        if settings.changes == "auto":  # so small a model says nothing of the link
            patched.setattr(ShardReads, "seconds", lambda self, nbytes: 1.0 * nbytes)
        same(rank, world, counts, settings, shape, "mesh", compute)
    return len(applied)


CHANGES = {
    "auto": Settings(timeout_s=120.0, copy_engine_bytes=1, check_protocol=True),
    "on": Settings(timeout_s=120.0, copy_engine_bytes=1, changes="on", check_protocol=True),
    "inline": Settings(
        timeout_s=120.0, copy_engine_bytes=1, changes="on", second_buffer=True, prefetch=0, push_overlap=False
    ),
}


@pytest.mark.parametrize(
    ("hosts", "per_host", "settings"), [(2, 1, "on"), (2, 2, "on"), (2, 2, "inline"), (3, 1, "on"), (2, 1, "auto")]
)
@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_changes_equal_fsdp2(
    pools: HostPools, hosts: int, per_host: int, settings: str, compute: torch.dtype | None
) -> None:
    """Packed and applied by kernels; checksums of shards are compared, too."""
    world = hosts * per_host
    found = pools(hosts, per_host).run(
        same_by_changes, COUNTS[world], CHANGES[settings], (world,), compute, timeout=240
    )
    assert min(sum(found[first : first + per_host]) for first in range(0, world, per_host)) > 0


def test_hybrid_sharding_equals_fsdp2(pools: HostPools) -> None:
    """Shards within a host, replicas over hosts."""
    pools(2, 2).run(same, COUNTS[4][:2], SETTINGS["server"], (2, 2), timeout=240)


@pytest.mark.parametrize(("hosts", "per_host"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("settings", ["server", "direct"])
def test_replicas_add_a_part_each(pools: HostPools, hosts: int, per_host: int, settings: str) -> None:
    """More than two, also some of them on one host."""
    world = hosts * per_host
    pools(hosts, per_host).run(same, COUNTS[world][:2], SETTINGS[settings], (world, 1), timeout=240)


def test_an_optimizer_over_all_hosts_equals_fsdp2(pools: HostPools) -> None:
    pools(2, 2).run(same, COUNTS[4], SETTINGS["server"], (2, 2), "world", timeout=240)


@pytest.mark.parametrize(("replicas", "sharding"), [(4, "mesh"), (2, "world"), (4, "world")])
def test_2d_meshes_on_one_host(ranks: Callable[[int], Any], replicas: int, sharding: str) -> None:
    """Replicas that add a part each; nodes on one host, with the optimizer over all."""
    ranks(4).run(same, COUNTS[4], SETTINGS["server"], (replicas, 4 // replicas), sharding, timeout=240)


@pytest.mark.parametrize("settings", ["by torch", "direct"])
def test_nodes_on_one_host_with_other_settings(ranks: Callable[[int], Any], settings: str) -> None:
    ranks(4).run(same, COUNTS[4][:2], SETTINGS[settings], (2, 2), "world", timeout=240)


def claimed_on_devices(rank: int, world: int, counts: Counts) -> list[list[int]]:
    own_device(int(os.environ.get("LOCAL_RANK", rank)))
    mesh, theirs_on = (init_device_mesh(kind, (world,)) for kind in ("cuda", "cpu"))
    found = claimed(rank, counts, mesh, theirs_on, Settings(timeout_s=120.0, copy_engine_bytes=1, queue_bytes=1 << 16))
    for root in live_roots():
        root.shut_down()
    return found


def test_a_queue_over_hosts_gives_each_microbatch_once(pools: HostPools) -> None:
    counts = ((1, 3, 0, 2), (0, 0, 3, 0))
    found = pools(2, 2).run(claimed_on_devices, counts, timeout=240)
    for step, row in enumerate(counts):
        assert sorted(number for numbers in found for number in numbers[step]) == list(range(sum(row)))


def sums_in_backward(rank: int, world: int, sums_dtype: Any) -> int:
    """The first layer's backward waits until the last layer's sums have come; then gradients are those of plain torch,
    where each sum of the other host's ranks is rounded once, if sums are. Returns how many numbers that has changed.
    """
    device = own_device(int(os.environ["LOCAL_RANK"]))
    model, settings = Exact().to(device), Settings(timeout_s=120.0, copy_engine_bytes=1, sums_dtype=sums_dtype)
    mesh = init_device_mesh("cuda", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, settings=settings)
    fully_shard(model, mesh=mesh, settings=settings)
    waited = await_sums_in_backward(model)
    changed = 0
    for step in range(2):
        with model.minibatch():
            model.set_is_last_backward(True)
            (model(batch(rank, step, 0).to(device)) * 57.0).sum().backward()
        changed += changed_by_rounding(model, rank, world, [(step, 0)], rounded=sums_dtype == "bfloat16")
        model.zero_grad()
    assert waited == [1, 2]
    for root in live_roots():
        root.shut_down()
    return changed


@pytest.mark.parametrize("sums_dtype", ["accumulator", "bfloat16"])
def test_sums_cross_while_backward_goes_on(pools: HostPools, sums_dtype: str) -> None:
    changed = sum(pools(2, 2).run(sums_in_backward, sums_dtype, timeout=240))
    assert bool(changed) == (sums_dtype == "bfloat16")


INT8 = Settings(timeout_s=120.0, copy_engine_bytes=1, sums_dtype="int8")


def int8_gradients(rank: int, world: int, kind: str) -> tuple[list[dict[str, torch.Tensor]], list[int]]:
    """Gradients of four minibatches, the second of which is abandoned first; and in which of them the last layer's sums
    came while the first layer's backward waited for them. What ranks push are whole numbers.
    """
    device = own_device(int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
    model, mesh = Exact().to(device), init_device_mesh(kind, (world,))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh, settings=INT8)
    waited, found = await_sums_in_backward(model), list[dict[str, torch.Tensor]]()

    def minibatch(step: int, give_up: bool) -> None:
        with model.minibatch():
            model.set_is_last_backward(True)
            (model(batch(rank, step, 0).to(device)) * 57.0).sum().backward()
            if give_up:
                model.abandon_minibatch("a sample cannot be read")

    for step in range(4):
        if step == 1:
            with pytest.raises(AbandonedMinibatchError):
                minibatch(step, rank == 0)
        minibatch(step, False)
        found.append(
            {name: one.grad.to_local().cpu() for name, one in model.named_parameters() if one.grad is not None}
        )
        model.zero_grad()
    for root in live_roots():
        root.shut_down()
    return found, waited


def as_on_the_cpu(rank: int, world: int) -> int:
    """How many numbers rounding has changed. Where ranks of a host add to what a residual has left, their order may
    decide between two codes; else gradients are the same bits.
    """
    staging.CHUNK_BYTES = 512
    (ours, waited), (theirs, _) = (int8_gradients(rank, world, kind) for kind in ("cuda", "cpu"))
    assert len(waited) >= 4
    changed = 0
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.keys() == other.keys()
        for name, one in mine.items():
            apart = (one - other[name]).abs()
            assert not apart.any() or (world > 2 and step), f"rank {rank}, step {step}: {name}"
            if one.numel():
                assert apart.max() <= 1.1 * (2 * world * one.abs().max() / 127) / world, f"rank {rank}: {name}"
            changed += int((one * world != (one * world).round()).sum())
    return changed


@pytest.mark.parametrize("per_host", [1, 2])
def test_int8_sums_are_those_of_the_cpu(pools: HostPools, per_host: int) -> None:
    """Rounded and read by kernels while backward goes on, with what the minibatches before have left."""
    assert min(pools(2, per_host).run(as_on_the_cpu, timeout=240)) > 100


def refused_without_kernels(rank: int, world: int) -> None:
    device = own_device(int(os.environ["LOCAL_RANK"]))
    settings = Settings(timeout_s=120.0, sums_dtype="int8", kernels="torch")
    model = fully_shard(Exact().to(device), mesh=init_device_mesh("cuda", (world,)), settings=settings)
    with pytest.raises(
        UnsupportedError, match=f"rank {rank}: .*'int8'.* by odc's kernels, and torch's copies are used"
    ):
        model(batch(rank, 0, 0).to(device))


def test_int8_sums_need_kernels(pools: HostPools) -> None:
    pools(2, 1).run(refused_without_kernels, timeout=240)
