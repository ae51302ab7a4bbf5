"""The drop-in on CUDA: equal to the unsharded model, in bounded memory, with few launches a fetch."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from support.device import device_work, own_device
from support.on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from odc import Settings, fully_shard, shutdown
from odc.errors import StaleParametersError
from odc.fsdp import live_roots, root_of
from odc.handover import Reader, read_groups, version, weight_handle
from odc.movers import driver
from odc.movers.choice import device_mover
from odc.protocol import Gradient

WIDTH, BLOCKS, STEPS = 64, 4, 3


def block(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))


def model_of(blocks: int, width: int, device: torch.device) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(block(width) for _ in range(blocks))).to(device)


def microbatches(step: int, rank: int, width: int, device: torch.device) -> list[torch.Tensor]:
    """Unequal counts; in the first step rank 0 has none."""
    torch.manual_seed(1000 + 100 * step + rank)
    return [torch.randn(8, width, device=device) for _ in range((rank + step) % 3)]


def leave() -> None:
    for root in live_roots():
        root.shut_down()


def equals_the_whole_model(rank: int, world: int, settings: Settings, low: bool) -> float:
    """How far three steps lead from where they lead the unsharded model, as a share of the way; of the own shards.

    Shards are not gathered: gloo's gather of a DTensor reads device memory from the host.
    """
    device = own_device(rank)
    whole, model = model_of(BLOCKS, WIDTH, device), model_of(BLOCKS, WIDTH, device)
    start = [parameter.detach().clone() for parameter in whole.parameters()]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low else None, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cuda", (world,))
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy, settings=settings)
    fully_shard(model, mesh=mesh, mp_policy=policy, settings=settings)
    by_kernels = device_mover(root_of(model).layout.mover).atomic
    assert by_kernels or find_spec("triton") is None, "kernels were given up for torch's copies"
    optimizers = [torch.optim.SGD(one.parameters(), lr=1.0) for one in (whole, model)]
    for step in range(STEPS):
        for other in range(world):
            for x in microbatches(step, other, WIDTH, device):
                with torch.autocast("cuda", torch.bfloat16, enabled=low):
                    (whole(x).float().square().mean() / world).backward()
        with model.minibatch():
            for x in microbatches(step, rank, WIDTH, device):
                model(x).float().square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    apart = way = 0.0
    for before, after, shard in zip(start, whole.parameters(), model.parameters(), strict=True):
        before, after = (one.detach().chunk(world)[rank] for one in (before, after))
        apart += float((after - shard.detach().to_local()).square().sum())
        way += float((after - before).square().sum())
    leave()
    assert way > 1e-6, "nothing was learnt"
    assert not driver._refused, f"the driver refused a batch of copies: CUDA error {driver._refused}"
    return (apart / way) ** 0.5


#: As of a large model, whose pieces are above `copy_engine_bytes`: here a weight's shard has 16 KiB on 2 ranks.
BY_ENGINE = {"copy_engine_bytes": 1}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "settings",
    [
        Settings(**BY_ENGINE),
        Settings(),  # kernels alone
        Settings(copy_engine_bytes=4096),  # weights by the copy engine, biases by kernels
        Settings(prefetch=0, push_overlap=False, **BY_ENGINE),
        Settings(accumulate="direct", **BY_ENGINE),
        Settings(reproducible=True, **BY_ENGINE),
        Settings(staging_block_bytes=4096, **BY_ENGINE),  # a weight's shard goes through a slot in parts
        Settings(gradient_views=True, **BY_ENGINE),
    ],
    ids=["engine", "kernels", "both", "no overlap", "direct", "reproducible", "small slots", "gradient views"],
)
def test_fp32_equals_the_unsharded_model(ranks, world: int, settings: Settings) -> None:
    assert max(ranks(world).run(equals_the_whole_model, settings, False, timeout=240)) < 1e-4


def test_bf16_is_as_near_as_autocast(ranks) -> None:
    assert max(ranks(2).run(equals_the_whole_model, Settings(**BY_ENGINE), True, timeout=240)) < 0.1


@pytest.mark.parametrize("accumulate", ["server", "direct"])
def test_kernels_equal_torch(ranks, accumulate: str) -> None:
    pytest.importorskip("triton", reason="needs triton: pip install 'odc-fsdp[kernels]'")
    settings = Settings(kernels="triton", accumulate=accumulate, **BY_ENGINE)
    assert max(ranks(2).run(equals_the_whole_model, settings, False, timeout=280)) < 1e-4


def peak(rank: int, world: int, blocks: int, width: int) -> tuple[int, int, int]:
    """(peak of torch's allocator over a minibatch of two microbatches, bytes of a unit, bytes of all units), fp32.

    Without what cuBLAS keeps for itself in each thread that multiplies: 64 MiB on a Hopper.
    """
    device = own_device(rank)
    plain = block(width).to(device)
    plain(torch.randn(8, width, device=device)).square().sum().backward()
    del plain
    before = torch.cuda.memory_allocated(device)
    model = model_of(blocks, width, device)
    for layer in model:
        fully_shard(layer, mesh=init_device_mesh("cuda", (world,)))
    fully_shard(model, mesh=init_device_mesh("cuda", (world,)))
    unit = 4 * (2 * 2 * width * width + 3 * width)
    for step in range(3):
        if step == 1:
            torch.cuda.reset_peak_memory_stats(device)
        with model.minibatch():
            for _ in range(2):
                model(torch.randn(8, width, device=device)).square().sum().backward()
        model.zero_grad()
    ledger = root_of(model).layout.ledger()
    bound = blocks * unit // world
    assert ledger["published"] <= bound * 1.01 and ledger["accumulator"] <= bound * 1.01, ledger
    assert ledger["staging"] <= (world - 1) * 2 * unit * 1.01 / world + (1 << 20), ledger
    leave()
    return torch.cuda.max_memory_allocated(device) - before, unit, blocks * unit


def test_memory_is_bounded(ranks) -> None:
    """Shards, their gradients, and a few units in transit; never a whole model. The heap is held to its own account."""
    world, blocks = 2, 24
    for used, unit, whole in ranks(world).run(peak, blocks, 512, timeout=800):
        bound = 2 * whole // world + 8 * unit + (8 << 20)
        assert used <= bound, f"{used / unit:.1f} units at the peak, {bound / unit:.1f} allowed"


def one_unit(rank: int, world: int, width: int) -> list[tuple[list[str], list[str]]]:
    """What the device is asked for by one fetch of a unit and by one push of it: kernels, and copies."""
    device = own_device(rank)
    model = fully_shard(block(width).to(device), mesh=init_device_mesh("cuda", (world,)), settings=Settings(prefetch=0))
    model.unshard()
    model.reshard()
    root = root_of(model)
    (unit,) = root.layout.units
    lanes = root.layout.heap.lanes
    into = [torch.empty(world * spec.numel, dtype=spec.dtype, device=device) for spec in unit.params]
    sent = [Gradient(i, torch.ones_like(one)) for i, one in enumerate(into)]
    torch.cuda.synchronize()

    def fetch() -> None:
        with lanes.lane("fetch"):
            root.member.shards.fetch(unit, into)

    def push() -> None:
        with lanes.lane("push"):
            root.member.pusher.push(unit, sent)

    fetch(), push()  # compiles
    found = [device_work(fetch), device_work(push)]
    root.minibatch.done()
    root.minibatch.collect()
    leave()
    return found


@pytest.mark.parametrize("mib", [1, 400])
def test_a_whole_unit_takes_few_launches(ranks, mib: int) -> None:
    """The large pieces of one peer are copies by the engine; the server's add of a peer's push may fall into both."""
    for fetch, push in ranks(2).run(one_unit, int((mib * (1 << 20) / 16) ** 0.5), timeout=240):
        tables = 3
        fetch[0][:] = [name for name in fetch[0] if name != "add_kernel"]
        assert len(fetch[0]) <= 2 and len(fetch[1]) <= 2 + tables, fetch
        assert len(push[0]) <= 3 and len(push[1]) <= 2 + 2 * tables, push


def contexts(rank: int, world: int) -> list[bool]:
    """Of which devices this process has a context after a minibatch, and after it has read the weights on a thread."""
    device = own_device(rank)
    model = fully_shard(block(64).to(device), mesh=init_device_mesh("cuda", (world,)))
    for _ in range(2):
        with model.minibatch():
            model(torch.randn(2, 64, device=device)).sum().backward()
    with Reader(weight_handle(model)) as reader:
        assert list(read_groups(reader, 1 << 10, version(model), device=device))
    torch.distributed.barrier()
    leave()
    found, driver = [], ctypes.CDLL("libcuda.so.1")
    for number in range(torch.cuda.device_count()):
        flags, active = ctypes.c_uint(), ctypes.c_int()
        assert driver.cuDevicePrimaryCtxGetState(number, ctypes.byref(flags), ctypes.byref(active)) == 0
        found.append(bool(active.value))
    return found


def test_no_rank_has_a_context_on_anothers_device(ranks) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    for rank, found in enumerate(ranks(2).run(contexts)):
        assert found == [number == rank for number in range(len(found))]


@on_ranks(2)
def test_weights_changed_inside_a_minibatch_are_refused(rank: int, world: int) -> None:
    device = own_device(rank)
    model = fully_shard(block(64).to(device), mesh=init_device_mesh("cuda", (world,)))
    with torch.no_grad():
        model(torch.randn(2, 64, device=device))
        model.reshard()  # a root stays unsharded after its forward
        for parameter in model.parameters():
            parameter.to_local().add_(1.0)
        with pytest.raises(StaleParametersError, match="0.weight"):
            model(torch.randn(2, 64, device=device))
        model.publish()
        model(torch.randn(2, 64, device=device))
    leave()


@on_ranks(1)
def test_weights_changed_between_two_microbatches_are_refused_at_their_end(rank: int, world: int) -> None:
    """No microbatch waits for the check; the changed one runs, and no gradient is written."""
    device = own_device(rank)
    model = fully_shard(block(64).to(device), mesh=init_device_mesh("cuda", (world,)))

    def run() -> None:
        with model.minibatch():
            for _ in range(2):
                model(torch.randn(2, 64, device=device)).sum().backward()
                with torch.no_grad():
                    model[2].weight.to_local().add_(1.0)

    with pytest.raises(StaleParametersError, match="2.weight changed inside an open minibatch"):
        run()
    assert all(parameter.grad is None for parameter in model.parameters())
    leave()


@on_ranks(2)
def test_shutdown_ends_in_good_order(rank: int, world: int) -> None:
    device = own_device(rank)
    for _ in range(2):
        model = fully_shard(block(64).to(device), mesh=init_device_mesh("cuda", (world,)))
        with model.minibatch():
            model(torch.randn(2, 64, device=device)).sum().backward()
        shutdown()


@on_ranks(2)
def test_the_default_mesh_is_on_the_device_to_which_each_unit_is_moved(rank: int, world: int) -> None:
    """As torch's: a model that fits no device is made on the CPU."""
    own_device(rank)
    model = model_of(2, WIDTH, torch.device("cpu"))
    for number, layer in enumerate(model):
        fully_shard(layer)
        on_device = [{one.device.type for one in other.parameters()} for other in model]
        assert on_device == [{"cuda"}] * (number + 1) + [{"cpu"}] * (1 - number)
    fully_shard(model)
    with torch.no_grad():
        assert model(torch.randn(8, WIDTH)).device.type == "cuda"
    leave()
