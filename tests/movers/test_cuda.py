"""How units are put together and sent in pieces, on tensors of the CPU: memmove stands for the driver."""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.deferred import move_all
from support.on_ranks import on_interpreted_ranks
from support.uninterpreted import run_uninterpreted

from odc.errors import OdcError, UnsupportedError
from odc.memory import HostLanes, driver_calls
from odc.movers import choice, driver
from odc.movers import cpu as cpu_mover
from odc.movers.choice import mover_for
from odc.movers.cuda import CudaMover
from odc.settings import Settings

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
    from odc.errors import UnsupportedError
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


def test_the_device_and_the_settings_decide_what_moves_data(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 1)
    for kernels in ("auto", "torch"):
        assert mover_for(Settings(kernels=kernels), torch.device("cpu")) is cpu_mover  # type: ignore[arg-type]
    assert type(mover_for(Settings(kernels="torch"), cuda)) is CudaMover
    monkeypatch.setattr("odc.movers.choice._kernels_run", lambda device: False)
    assert type(mover_for(Settings(), cuda)) is CudaMover, "torch moves what no kernel can"


@needs_triton
def test_kernels_are_the_default_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("odc.movers.choice._failure", lambda device: "")
    choice._kernels_run.cache_clear()
    mover = mover_for(Settings(copy_engine_bytes=77), torch.device("cuda", 0), own=3)
    assert type(mover).__name__ == "CompiledMover" and mover.atomic  # type: ignore[attr-defined]
    assert (mover._own, mover._least) == (3, 77)  # type: ignore[attr-defined]


@needs_triton
def test_kernels_that_cannot_be_built_leave_the_data_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """However many models there are, one warning; whoever asked for kernels gets an error."""
    tried: list[torch.device] = []

    def fails(device: torch.device) -> None:
        tried.append(device)
        raise RuntimeError("Failed to find C compiler.\nAnd more")

    monkeypatch.setattr("odc.movers.triton.launch_one", fails)
    choice._kernels_run.cache_clear(), choice._failure.cache_clear()
    cuda = torch.device("cuda", 0)
    try:
        for _ in range(2):
            assert type(mover_for(Settings(), cuda)) is CudaMover
        (warning,) = caplog.messages
        assert "torch's take their place: RuntimeError: Failed to find C compiler.; triton builds" in warning
        with pytest.raises(UnsupportedError, match="no kernel runs on cuda:0: RuntimeError: Failed to find C compiler"):
            mover_for(Settings(kernels="triton"), cuda)
        assert tried == [cuda], "once a process"
    finally:
        choice._kernels_run.cache_clear(), choice._failure.cache_clear()


@needs_triton
@pytest.mark.parametrize(
    "full",
    [torch.OutOfMemoryError("full"), RuntimeError("Triton Error [CUDA]: out of memory")],
    ids=["torch", "triton"],
)
def test_a_full_device_says_nothing_of_kernels(
    full: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or the rank would do without them from then on, though there is room later."""

    def fails(*_: object) -> None:
        raise full

    monkeypatch.setattr("odc.movers.triton.launch_one", fails)
    choice._kernels_run.cache_clear(), choice._failure.cache_clear()
    cuda = torch.device("cuda", 0)
    try:
        with pytest.raises(type(full)):
            mover_for(Settings(), cuda)
        monkeypatch.setattr("odc.movers.triton.launch_one", lambda device: None)
        mover = mover_for(Settings(), cuda)
        monkeypatch.setattr(type(mover), "prepare", fails)
        with pytest.raises(type(full)):
            choice.prepare_mover(mover, Settings(), cuda, 1, HostLanes(), [], True)
        assert not caplog.messages
    finally:
        choice._kernels_run.cache_clear(), choice._failure.cache_clear()


@needs_triton
@pytest.mark.parametrize("compiler", [None, "/no/such/compiler"])
def test_a_machine_without_a_compiler_is_found_by_one_launch(compiler: str | None, tmp_path: Path) -> None:
    """By triton's own driver, which it builds when the first kernel is launched."""
    (failure, kind), errors = run_uninterpreted("no_compiler.py", tmp_path, CC=compiler, PATH=str(tmp_path))
    assert ("C compiler" if compiler is None else compiler) in failure
    assert kind == "CudaMover" and "torch's take their place" in errors


class Result(IntEnum):
    """As cuda.bindings answers."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_CONTEXT = 201


class StandIn:
    """The driver's two functions and torch's stream: what was asked for, and what is answered."""

    def __init__(self, patch: pytest.MonkeyPatch, codes: list[int], stream: int = 5, batches: bool = True) -> None:
        self.copied: list[tuple[int, ...]] = []
        self.batched: list[list[tuple[int, ...]]] = []
        self.queried, self._codes = 0, codes
        patch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=stream, query=self._query))
        patch.setattr(driver_calls, "bindings", lambda: SimpleNamespace(cuMemcpyAsync=self._copy))
        patch.setattr(driver, "_batch_function", lambda: self._batch if batches else None)
        patch.setattr(driver, "_refused", [])

    def _query(self) -> None:
        self.queried += 1

    def _copy(self, *args: int) -> tuple[Result]:
        self.copied.append(args)
        return (Result(self._codes.pop(0) if self._codes else 0),)

    def _batch(self, targets: int, sources: int, sizes: int, count: int, *rest: int) -> int:
        attributes, first, kinds, failed, stream = rest
        message = ctypes.cast(attributes, ctypes.POINTER(driver._Attributes)).contents
        assert (message.order, message.flags, kinds, stream) == (1, 1, 1, 5) and failed
        assert ctypes.c_size_t.from_address(first).value == 0
        columns = [(ctypes.c_uint64 * count).from_address(each) for each in (targets, sources, sizes)]
        self.batched.append(list(zip(*columns, strict=True)))
        return self._codes.pop(0) if self._codes else 0


@pytest.mark.parametrize(("codes", "queries", "refused"), [([0], 0, ""), ([201, 0], 1, ""), ([201, 201], 1, "201")])
def test_a_thread_without_a_context_gets_one(
    codes: list[int], queries: int, refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = StandIn(monkeypatch, codes)
    with pytest.raises(OdcError, match=f"CUDA error {refused}") if refused else nullcontext():
        driver.copy(1, 2, 3)
    assert stand_in.queried == queries and not codes


@pytest.mark.parametrize("codes", [[], [201, 0, 201, 0]])
def test_memory_is_zeroed_by_the_driver(codes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it and nothing beside it, four bytes at a time; for no bytes nothing is asked."""
    stand_in, waiting = StandIn(monkeypatch, []), list(codes)

    def memset(target: int, value: int, words: int, stream: int) -> tuple[Result]:
        assert (value, stream) == (0, 5) and words > 0
        code = waiting.pop(0) if waiting else 0
        if not code:
            ctypes.memset(target, 0, 4 * words)
        return (Result(code),)

    monkeypatch.setattr(driver_calls, "bindings", lambda: SimpleNamespace(cuMemsetD32Async=memset))
    totals = [torch.ones(6), torch.ones(4, dtype=torch.float64), torch.ones(0)]
    CudaMover(0, 1).zero([totals[0][1:4], totals[1][:2], totals[2]])
    assert totals[0].tolist() == [1, 0, 0, 0, 1, 1] and totals[1].tolist() == [0, 0, 1, 1]
    assert stand_in.queried == codes.count(201)
    waiting += [201, 201]
    with pytest.raises(OdcError, match="zeroing 24 bytes on the device was refused: .* error 201"):
        CudaMover(0, 1).zero(totals)


THREE = [(10, 1, 5), (20, 2, 6), (30, 3, 7)]  # target, source, bytes


def asks_for(*copies: tuple[int, int, int]) -> None:
    driver.copy_all(*(np.array(column, dtype=np.int64) for column in zip(*copies, strict=True)))


@pytest.mark.parametrize("codes", [[], [201, 0]])
def test_many_copies_are_one_call(codes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn(monkeypatch, list(codes))
    asks_for(*THREE)
    assert stand_in.batched[-1] == THREE and len(stand_in.batched) == (len(codes) or 1) and not stand_in.copied
    asks_for(THREE[0])
    assert [copy[:3] for copy in stand_in.copied] == THREE[:1], "one copy needs no batch"


@pytest.mark.parametrize(
    "options", [{"batches": False}, {"codes": [801]}, {"stream": 0}], ids=["old driver", "refused", "default stream"]
)
def test_without_batches_copies_are_asked_for_one_by_one(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = StandIn(monkeypatch, **{"codes": [], **options})
    for _ in range(2):
        stand_in.copied.clear()
        asks_for(*THREE)
        assert [copy[:3] for copy in stand_in.copied] == THREE
    assert len(stand_in.batched) == (1 if options.get("codes") == [] or "codes" in options else 0)


def test_settings_refuse_sizes_of_nothing() -> None:
    with pytest.raises(ValueError, match="copy_engine_bytes must be"):
        Settings(copy_engine_bytes=0)
