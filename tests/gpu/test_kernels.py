"""The kernels, compiled, on CUDA heaps of other processes: what the interpreted tests hold, and what those cannot show.

Most functions here are those of tests/kernels, run with the device as torch's default. Added are sizes at which
vectors, many programs and 64-bit offsets matter, and launches by several threads. What one process can show on a device
is in tests/kernels/test_gpu.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.device import own_device

pytest.importorskip("triton", reason="needs triton: pip install 'odc-fsdp[kernels]'")

_KERNELS = Path(__file__).parent.parent / "kernels"
if str(_KERNELS) not in sys.path:
    sys.path.insert(0, str(_KERNELS))

import test_accumulate as accumulate_  # noqa: E402 (found by the path above)
import test_add as add_  # noqa: E402
import test_gather as gather_  # noqa: E402
import test_get as get_  # noqa: E402
import test_publish as publish_  # noqa: E402
import test_put as put_  # noqa: E402
import test_rows as rows_  # noqa: E402
from support.kernel_heaps import failures_of_threads, numbers, same_bits, shared, whole_numbers  # noqa: E402

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
GIB = 1 << 30


def on_device(rank: int, world: int, function: Callable[..., Any], *args: Any) -> Any:
    """`function`, or the body of a test that `support.on_ranks` made, with the rank's device as torch's default.

    Kernels return before they have run, and what a peer reads next must be there: barriers wait for the device first.
    """
    device, meet = own_device(rank), dist.barrier

    def barrier() -> None:
        torch.cuda.synchronize(device)
        meet()

    torch.set_default_device(device)
    dist.barrier = barrier
    try:
        return getattr(function, "on_rank", function)(rank, world, *args)
    finally:
        dist.barrier = meet
        torch.set_default_device(None)


@pytest.mark.parametrize(
    ("function", "args"),
    [
        *[(get_.test_slices_of_peers_with_conversion, (own, theirs)) for own in (F32, BF16) for theirs in (F32, BF16)],
        (gather_.test_units_of_peers, ([F32] * 6, None)),
        (gather_.test_units_of_peers, ([BF16, F32, F32, BF16, F64, BF16], None)),
        (gather_.test_units_of_peers, ([BF16] * 6, F32)),
        (gather_.test_units_of_peers, ([F32] * 6, F16)),
        (put_.test_slots_are_whole_once_their_word_says_so, ()),
        *[(add_.test_owner_adds_what_was_put, (accumulator,)) for accumulator in (F32, F64)],
        (add_.test_staged_push, ()),
        *[(accumulate_.test_no_addition_is_lost, ([F32] * 3, accumulator)) for accumulator in (F32, F64)],
        (accumulate_.test_no_addition_is_lost, ([BF16, F32, F16], F32)),
        (publish_.test_peers_read_what_was_published, ()),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
@pytest.mark.parametrize("world", [2, 3])
def test_between_ranks(ranks, world: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    ranks(world).run(on_device, function, *args, timeout=240)


@pytest.mark.parametrize(
    "function",
    [rows_.test_every_program_finds_its_row, put_.test_odd_puts],
    ids=lambda function: function.__name__,
)
def test_of_one_rank(ranks, function: Callable[..., Any]) -> None:
    ranks(1).run(on_device, function, timeout=240)


def large_and_askew(rank: int, world: int) -> None:
    """Every kernel at its own block size over millions of elements, at addresses of every alignment."""
    from odc import kernels

    numel = (1 << 20) + 3
    peer = (rank + 1) % world
    with shared("large", rank, world, 64 << 20) as heaps:
        for askew in range(4):  # elements
            part = slice(askew, askew + numel)
            mine, theirs = heaps.memory(rank, F32), heaps.memory(peer, F32)
            values, low = numbers(rank, numel, F32), numbers(rank + 9, numel, BF16)
            kernels.publish([mine[part]], [values])
            dist.barrier()
            out, half = torch.empty(numel), torch.empty(numel, dtype=BF16)
            kernels.get(out, heaps.table, peer, 4 * askew)
            kernels.get(half, heaps.table, peer, 4 * askew, dtype=F32)
            expected = numbers(peer, numel, F32)
            assert same_bits(out, expected) and same_bits(half, expected.to(BF16)), f"get, {askew} askew"
            whole = torch.empty(world * numel)
            kernels.gather([whole], [4 * askew], heaps.table, first=rank)
            assert same_bits(whole, torch.cat([numbers(r, numel, F32) for r in range(world)])), f"gather, {askew} askew"
            dist.barrier()
            kernels.put([low], heaps.table, peer, 2 * askew)
            dist.barrier()
            found = heaps.memory(rank, BF16)[part]
            assert same_bits(found, numbers((rank - 1) % world + 9, numel, BF16)), f"put, {askew} askew"
            total, again = values.clone(), values.clone()
            kernels.add([total[: numel - askew]], [low[askew:]])
            again[: numel - askew] += low[askew:].float()
            assert same_bits(total, again), f"add, {askew} askew"
            dist.barrier()
            mine.zero_()
            dist.barrier()
            gradient = whole_numbers(rank, world * numel, BF16)
            for _ in range(2):
                kernels.accumulate([gradient], [numel], [askew], heaps.table, first=rank)
            dist.barrier()
            summed = sum(2 * whole_numbers(r, world * numel, BF16).float() for r in range(world))
            assert same_bits(mine[part], summed[rank * numel : (rank + 1) * numel]), f"accumulate, {askew} askew"
            assert not mine[:askew].any() and not mine[askew + numel :].any(), "it added beside its place"
            assert not theirs.isnan().any()
            dist.barrier()


@pytest.mark.parametrize("world", [2, 3])
def test_large_and_askew(ranks, world: int) -> None:
    ranks(world).run(on_device, large_and_askew, timeout=240)


def beyond_32_bits(rank: int, world: int) -> bool:
    """Offsets and element counts that no 32-bit number holds."""
    from odc import kernels

    if torch.cuda.mem_get_info()[0] < 24 * GIB:
        return False
    nbytes = 5 * GIB
    memory, out = torch.zeros(nbytes, dtype=torch.int8), torch.zeros(nbytes, dtype=torch.int8)
    table = torch.tensor([memory.data_ptr()])
    memory[-1000:] = torch.arange(1000).to(torch.int8)
    memory[3 * GIB] = 7
    kernels.get(out[:1000], table, 0, nbytes - 1000)
    assert same_bits(out[:1000], memory[-1000:]), "get from beyond 4 GiB"
    kernels.get(out, table, 0)
    assert torch.equal(out, memory), "get of 5 GiB"
    kernels.put([memory[-1000:]], torch.tensor([out.data_ptr()]), 0, 4 * GIB + 11)
    assert same_bits(out[4 * GIB + 11 :][:1000], memory[-1000:]), "put beyond 4 GiB"
    return True


def test_beyond_32_bits(ranks) -> None:
    if not all(ranks(1).run(on_device, beyond_32_bits, timeout=240)):
        pytest.skip("needs 24 GiB of device memory free")


def launches_from_threads(rank: int, world: int) -> None:
    """Threads launch kernels at once, each in a stream of its own, first of all: no kernel is compiled twice."""
    from odc.kernels import get, publish

    device = torch.device("cuda", torch.cuda.current_device())

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for i in range(20):
                source = numbers(100 * seed + i, 100_000 + i, F32).to(device)
                out, half = torch.empty_like(source), torch.empty_like(source, dtype=BF16)
                get(out, torch.tensor([source.data_ptr()], device=device), 0)
                publish([half], [source])
                assert same_bits(out, source) and same_bits(half, source.to(BF16)), f"round {i}: wrong numbers"

    wrong = failures_of_threads(4, work, 120)
    assert not wrong, wrong


def test_threads_launch_at_once(ranks) -> None:
    ranks(1).run(on_device, launches_from_threads, timeout=240)
