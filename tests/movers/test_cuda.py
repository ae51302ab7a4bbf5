"""How units are put together and sent in pieces, on tensors of the CPU: memmove stands for the driver."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.deferred import move_all
from support.on_ranks import on_interpreted_ranks

from odc.errors import UnsupportedError
from odc.movers import cpu as cpu_mover
from odc.movers.cuda import CudaMover

SHARDS = 3
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
pieces = st.lists(st.tuples(st.integers(0, 40), st.sampled_from([F32, BF16])), min_size=1, max_size=6)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


class Copied:
    """In place of the copy engine; keeps the sizes of what it was asked for."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.calls = 0

    def __call__(self, targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray) -> None:
        self.sizes += sizes.tolist()
        self.calls += 1
        assert targets.flags.c_contiguous and targets.dtype == sources.dtype == sizes.dtype == np.int64
        move_all(targets, sources, sizes)


def gathers(make: Callable[..., CudaMover], sizes: list[tuple[int, torch.dtype]], boundary: int) -> None:
    """Twice, to other addresses: the second time by what was kept of the first."""
    offsets, end = [], 0
    for numel, dtype in sizes:
        offsets.append(end)
        end += -(-numel * dtype.itemsize // 16) * 16
    copied = Copied()
    mover = make(1, boundary, copied)
    large = [numel * dtype.itemsize for numel, dtype in sizes if numel * dtype.itemsize >= boundary]
    for _ in range(2):
        memory = [torch.randint(0, 255, (max(end, 16),), dtype=torch.uint8) for _ in range(SHARDS)]
        found, expected = ([torch.zeros(SHARDS * numel, dtype=dtype) for numel, dtype in sizes] for _ in range(2))
        copied.sizes.clear()
        mover.gather(found, offsets, SHARDS, [(2, memory[2]), (0, memory[0]), (1, memory[1])])
        cpu_mover.gather(expected, offsets, SHARDS, list(enumerate(memory)))
        for mine, theirs in zip(found, expected, strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
        assert sorted(copied.sizes) == sorted(large * (SHARDS - 1)), "of peers, and of no small piece"


@given(pieces, st.sampled_from([1, 64, 1 << 30]))
def test_a_unit_is_the_same_whatever_copies_its_pieces(sizes: list[tuple[int, torch.dtype]], boundary: int) -> None:
    gathers(CudaMover, sizes, boundary)


def stages(make: Callable[..., CudaMover], boundary: int) -> None:
    """A unit's gradients to the slots of two of four owners and more; one is short of whole shards, one is empty."""
    shards, numels, offsets, room = 4, [40, 3, 5], [0, 40, 43], 48
    copied = Copied()
    mover = make(3, boundary, copied)
    for owners in ([0, 1, 2], [1, 2]):
        for dtype in (F32, BF16):
            values = [torch.randn(n).to(dtype) for n in (160, 11, 2)]
            slots = torch.full((shards, room * dtype.itemsize), 7, dtype=torch.uint8)
            copied.calls = 0
            mover.stage(values, numels, offsets, [(owner, slots[owner]) for owner in owners])
            for owner in range(shards):
                expected = torch.zeros(room, dtype=dtype)
                for value, numel, offset in zip(values, numels, offsets, strict=True):
                    part = value[owner * numel : (owner + 1) * numel]
                    expected[offset : offset + part.numel()] = part
                found = slots[owner].view(dtype)
                if owner in owners:
                    assert torch.equal(found, expected), f"owner {owner} of {owners}, {dtype}"
                else:
                    assert bool((slots[owner] == 7).all()), "a slot of no owner's was written"
            assert copied.calls <= 1


@pytest.mark.parametrize("boundary", [1, 64, 1 << 30])
def test_every_owner_gets_its_part_and_zeros_beyond(boundary: int) -> None:
    stages(CudaMover, boundary)


@needs_triton
@on_interpreted_ranks(1)
def test_kernels_move_the_same(rank: int, world: int) -> None:
    from odc.movers.compiled import CompiledMover

    for boundary in (1, 64, 1 << 30):
        gathers(CompiledMover, [(40, BF16), (3, F32), (0, F32), (30, F32), (1, BF16)], boundary)
        stages(CompiledMover, boundary)
    adds_parts(CompiledMover)
    mover = CompiledMover(0, 64, Copied())
    totals, expected = (torch.arange(60.0).view(3, 20) for _ in range(2))
    values = [torch.arange(30).to(BF16), torch.arange(11).to(BF16)]
    accumulators = [(shard, totals[shard]) for shard in (1, 2, 0)]
    mover.accumulate_all(values, [10, 4], [0, 12], accumulators)
    for shard in range(3):
        for value, numel, offset in zip(values, [10, 4], [0, 12], strict=True):
            part = value[shard * numel : (shard + 1) * numel]
            expected[shard, offset : offset + part.numel()] += part
    assert torch.equal(totals, expected)


@needs_triton
@on_interpreted_ranks(1)
def test_what_kernels_do_not_convert_torch_does(rank: int, world: int) -> None:
    """As a frozen shard in 8 bits that is computed in bf16; a complex number is two words."""
    from odc.movers import triton
    from odc.movers.compiled import CompiledMover

    e4m3, complex128 = torch.float8_e4m3fn, torch.complex128
    pairs = [(F32, BF16), (e4m3, BF16), (complex128, complex128), (torch.uint8, torch.uint8), (torch.bool, F32)]
    shards = [torch.arange(5).to(own) for own, _ in pairs]
    places, mover = [torch.zeros(5, dtype=to) for _, to in pairs], CompiledMover(0, 64, Copied())
    mover.publish(places, shards)
    for place, shard in zip(places, shards, strict=True):
        assert torch.equal(place.view(torch.uint8), shard.to(place.dtype).view(torch.uint8))
    for changed in range(len(pairs)):
        found = torch.zeros(len(pairs), dtype=torch.int32)
        mover.differ(places, shards, found)
        assert not found.any()
        kept, shards[changed] = shards[changed], torch.zeros_like(shards[changed])
        mover.differ(places, shards, found)
        assert found.bool().tolist() == [i == changed for i in range(len(pairs))]
        shards[changed] = kept
    memory = torch.cat([place.view(torch.uint8) for place in places[2:3]])
    out = torch.zeros(5, dtype=complex128)
    triton.gather([out], [0], 1, [(0, memory)])
    assert torch.equal(out, shards[2])
    for i, what in ((1, "float8_e4m3fn can only be copied"), (2, "8 bytes at most, not of torch.complex128")):
        unit = [places[i]], [places[i]], [shards[i]], torch.zeros(64, dtype=torch.uint8)
        with pytest.raises(UnsupportedError, match=what):
            mover.pack([unit], torch.zeros(1, dtype=torch.int32))


def adds_parts(make: Callable[..., CudaMover]) -> None:
    """One owner's part of two gradients, one of which ends in it."""
    values = [torch.arange(30).to(BF16), torch.arange(11).to(BF16)]
    for shard in range(3):
        found = torch.ones(20)
        make(0, 1).add_part(values, (10, 4), (0, 12), shard, found)
        expected = torch.ones(20)
        expected[:10] += values[0][10 * shard : 10 * shard + 10]
        part = values[1][4 * shard : 4 * shard + 4]
        expected[12 : 12 + part.numel()] += part
        assert torch.equal(found, expected)


def test_a_part_is_added_to_one_accumulator() -> None:
    adds_parts(CudaMover)


def test_all_sources_are_added_and_every_change_is_seen() -> None:
    mover = CudaMover(0, 1)
    totals = [torch.zeros(4), torch.ones(2)]
    values = [[torch.ones(4), torch.full((4,), 2, dtype=BF16), torch.ones(4)], [torch.ones(2)]]
    addition = mover.addition(totals, values)
    assert [total.tolist() for total in totals] == [[0.0] * 4, [1.0] * 2]
    addition.run()
    assert [total.tolist() for total in totals] == [[4.0] * 4, [2.0] * 2]
    values[1][0].fill_(7.0)
    addition.run()
    assert [total.tolist() for total in totals] == [[8.0] * 4, [9.0] * 2]
    places, shards = [torch.arange(5.0).to(BF16), torch.arange(3.0)], [torch.arange(5.0), torch.arange(3.0)]
    found = torch.zeros(2, dtype=torch.int32)
    mover.differ(places, shards, found)
    assert found.tolist() == [0, 0]
    shards[1][2] = -shards[1][2]
    mover.differ(places, shards, found)
    assert found.tolist() == [0, 1]


def test_a_comparison_takes_a_few_mib_however_large_the_shards_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """All casts beside each other were a quarter of the weights."""
    from odc.movers import cuda as module

    monkeypatch.setattr(module, "_COMPARED", 8)
    taken: list[int] = []

    class Watched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor) and func is not torch.ops.aten.slice.Tensor:
                taken.append(made.numel())
            return made

    found = torch.zeros(1, dtype=torch.int32)
    with Watched():
        CudaMover(0, 1).differ([torch.zeros(1000, dtype=BF16)], [torch.zeros(1000)], found)
    assert 0 < max(taken[2:]) <= 8 * 2, "bytes of eight elements at most"


def test_autograd_does_not_notice_a_parameter_filled_again() -> None:
    """FSDP frees and refills parameters that the graph has saved: a version that moved is an error in backward."""
    memory = [torch.full((4,), 2.0).view(torch.uint8) for _ in range(2)]
    storage = torch.zeros(8)
    parameter = torch.nn.Parameter(storage.view(2, 4))
    x = torch.ones(4, requires_grad=True)
    mover = CudaMover(0, 1 << 30)

    def fill() -> None:
        mover.gather([storage], [0], 2, list(enumerate(memory)))

    fill()
    loss = (parameter @ x).sum()
    storage.untyped_storage().resize_(0)
    storage.untyped_storage().resize_(32)
    fill()
    loss.backward()
    assert x.grad is not None and x.grad.tolist() == [4.0] * 4
