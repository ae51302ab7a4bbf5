"""Compiled kernels on a CUDA device against plain torch there: bits, races between programs, sizes, hidden waits.

One process and one device are enough: addresses of the own memory stand for peers'. The bodies take a device, so that
those without streams run in the interpreter as well, with fewer sizes: a test that is wrong itself is found without a
GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from support.device import device_work, no_waits
from support.kernel_heaps import numbers, same_bits, whole_numbers
from support.kernel_references import (
    accumulate_reference,
    add_reference,
    gather_reference,
    params_of,
    publish_reference,
)
from support.on_ranks import on_interpreted_ranks

from odc.protocol.rounding import RoundedUnit

pytest.importorskip("triton", reason="needs triton: pip install 'odc-fsdp[kernels]'")

F64, F32, F16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
CPU = torch.device("cpu")
GIB = 1 << 30


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here (`odc doctor` says what is missing)")
    return torch.device("cuda", torch.cuda.current_device())


def on(device: torch.device, seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return numbers(seed, numel, dtype).to(device)


def table_of(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.tensor([one.data_ptr() for one in tensors]).to(tensors[0].device)


def moves_any_share(device: torch.device, sizes: list[int], *shifts: tuple[int, int]) -> None:
    """publish, add, accumulate and get between all types, at aligned and unaligned addresses."""
    from odc import kernels

    for n in sizes:
        for target in (F64, F32, F16, BF16):
            for here, there in shifts:
                for source in (F64, F32, F16, BF16):
                    what = f"{n} of {source} to {target}, from {here} to {there}"
                    values = on(device, n, n + 8, source)[here : here + n]
                    found, expected = on(device, 1, n + 9, target), on(device, 1, n + 9, target)
                    kernels.publish([found[there : there + n]], [values])
                    publish_reference([expected[there : there + n]], [values])
                    assert same_bits(found, expected), f"publish: {what}"
                    kernels.get(found[: n // 2], table_of(values), 0, dtype=source)
                    expected[: n // 2] = values[: n // 2].to(target)
                    assert same_bits(found, expected), f"get: {what}"
                    if target in (F16, BF16):
                        continue
                    kernels.add([found[there : there + n]], [values])
                    add_reference([expected[there : there + n]], [values])
                    assert same_bits(found, expected), f"add: {what}"
                    kernels.accumulate([values], [n], [there], table_of(found), dtype=target)
                    accumulate_reference([values], [n], [there], [expected])
                    assert same_bits(found, expected), f"accumulate: {what}"


def converts_every_number(device: torch.device, drawn: int) -> None:
    from odc import kernels

    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).to(device)
    singles = torch.randint(-(1 << 31), 1 << 31, (drawn,), generator=torch.Generator().manual_seed(0))
    singles = singles.to(torch.int32).to(device).view(F32)
    for values, to in ((every.view(BF16), F32), (every.view(F16), F32), (singles, BF16), (singles, F16)):
        found, expected = torch.empty_like(values, dtype=to), values.to(to)
        kernels.publish([found], [values])
        nan = expected.isnan()
        assert torch.equal(found.isnan(), nan), f"{values.dtype} to {to}: not the same numbers are NaN"
        assert same_bits(found[~nan], expected[~nan]), f"{values.dtype} to {to}"


def gathers_units(device: torch.device, width: int) -> None:
    from odc import kernels

    shapes = [((3, width), 0), ((width, 5), 1), ((2, width, 7), 1), ((width,), 0), ((1,), 0)]
    for dtype, published in ((BF16, None), (F32, BF16), (BF16, F32)):
        theirs = published or dtype
        offsets, end = [], 0
        for shape, _ in shapes:
            offsets.append(end)
            end += -(-torch.Size(shape).numel() * theirs.itemsize // 16) * 16
        owners = [on(device, shard, end // theirs.itemsize, theirs).view(torch.uint8) for shard in range(3)]
        found, expected = (
            [
                torch.zeros([size * (3 if i == dim else 1) for i, size in enumerate(shape)], dtype=dtype, device=device)
                for shape, dim in shapes
            ]
            for _ in range(2)
        )
        dims = [dim for _, dim in shapes]
        kernels.gather(found, offsets, table_of(*owners), dims=dims, dtype=published, first=1)
        gather_reference(expected, offsets, owners, dims=dims, dtype=published)
        assert all(map(same_bits, found, expected)), f"{theirs} to {dtype}"


def puts_and_signals(device: torch.device, numel: int) -> None:
    from odc import kernels

    slot = torch.zeros(4 * numel + 64, dtype=torch.uint8, device=device)
    word = slot[-64:].view(torch.int64)
    arrived, table = torch.zeros(1, dtype=torch.int32, device=device), table_of(slot)
    at = slot.numel() - 64
    for i in range(1, 4):
        values = [on(device, i, numel, F32)[1:], on(device, -i, 1, F32)]
        kernels.put(values, table, 0, signal=kernels.Signal(at, i, arrived))
        assert same_bits(slot[:-64].view(F32), torch.cat(values)), f"round {i}"
        assert int(word[0]) == i and int(arrived) == 0


def rounds_sums(device: torch.device, numel: int) -> None:
    """To the bytes of the CPU's loops, with infinities, and what is subnormal beside it and as it is rounded."""
    from odc.kernels import RoundingPlan

    one = RoundedUnit([(numel, True), (1001, False), (300, True), (0, True), (77, False)])
    plan = RoundingPlan(params_of(one), device)
    for shift, power in ((0, 0), (1, -38), (2, 30)):
        total = numbers(numel, one.numel + shift, F32)[shift:] * 10.0**power
        total[[5, 400]] = torch.tensor([torch.inf, 1e-41])
        memory, expected = (torch.zeros(one.nbytes, dtype=torch.uint8) for _ in range(2))
        left, kept = (numbers(7, one.numel, F32) for _ in range(2))
        there, rounded, residual = torch.zeros(shift + one.numel, device=device), memory.to(device), kept.to(device)
        there[shift:] = total.to(device)
        plan.write(there[shift:], rounded)
        plan.keep(there[shift:], rounded, residual, [True, True, False, True, True])
        one.write(total, expected)
        one.keep(total, expected, left, [True, True, False, True, True])
        what = f"from element {shift}, times 10^{power}"
        assert torch.equal(rounded.cpu(), expected), what
        plan.add(there[shift:], rounded, there[shift:])
        one.add(total, expected, total)
        assert torch.equal(there[shift:].cpu().nan_to_num(7.0), total.nan_to_num(7.0)), what
        assert same_bits(residual.cpu(), left), what


#: What a device gets, and what the interpreter.
BODIES: dict[str, tuple[Callable[..., None], tuple[object, ...], tuple[object, ...]]] = {
    "shares": (moves_any_share, ([1, 15, 16, 4096, 8191, 50_001], (0, 0), (1, 0), (0, 3), (8, 8)), ([17], (1, 3))),
    "conversions": (converts_every_number, (1 << 24,), (1 << 10,)),
    "units": (gathers_units, (1001,), (9,)),
    "words": (puts_and_signals, (1_000_000,), (50,)),
    "rounded sums": (rounds_sums, (1_000_003,), (1000,)),
}


@pytest.mark.parametrize("name", BODIES)
@on_interpreted_ranks(1)
def test_these_tests_in_the_interpreter(rank: int, world: int, name: str) -> None:
    body, _, small = BODIES[name]
    body(CPU, *small)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BODIES)
def test_on_a_device(cuda: torch.device, name: str) -> None:
    body, large, _ = BODIES[name]
    body(cuda, *large)


@pytest.mark.gpu
def test_what_was_put_is_there_for_whoever_sees_the_word(cuda: torch.device) -> None:
    """One stream puts, another looks at the word at the same time and reads: the stores of all programs came first."""
    from support.look_kernel import look

    from odc import kernels

    numel = 8 << 20
    slot, out = (torch.zeros(numel, dtype=torch.int32, device=cuda) for _ in range(2))
    word, seen = (torch.zeros(1, dtype=torch.int64, device=cuda) for _ in range(2))
    arrived = torch.zeros(1, dtype=torch.int32, device=cuda)
    table = table_of(slot)
    at = word.data_ptr() - slot.data_ptr()
    putting, looking = torch.cuda.Stream(cuda), torch.cuda.Stream(cuda)
    with torch.cuda.stream(putting):  # compiled and loaded before a look that lasts a second
        kernels.put([slot.clone()], table, 0, signal=kernels.Signal(at, 0, arrived))
    for i in range(1, 21):
        values = torch.full_like(slot, i)
        torch.cuda.synchronize(cuda)
        with torch.cuda.stream(looking):
            look(word, i, seen, looks=1_000_000)
            kernels.get(out, table, 0)
        with torch.cuda.stream(putting):
            kernels.put([values], table, 0, signal=kernels.Signal(at, i, arrived))
        torch.cuda.synchronize(cuda)
        assert int(seen) == i, "the look gave up: put and look did not run at the same time"
        assert bool((out == i).all()), f"round {i}: {int((out != i).sum())} elements came after the word"


@pytest.mark.gpu
def test_no_addition_of_two_streams_is_lost(cuda: torch.device) -> None:
    from odc import kernels

    numel, times = 1_000_003, 20
    total = torch.zeros(numel, device=cuda)
    table = table_of(total)
    values = [whole_numbers(seed, numel, BF16).to(cuda) for seed in range(2)]
    torch.cuda.synchronize(cuda)
    for stream, value in zip([torch.cuda.Stream(cuda) for _ in values], values, strict=True):
        with torch.cuda.stream(stream):
            for _ in range(times):
                kernels.accumulate([value], [numel], [0], table)
    torch.cuda.synchronize(cuda)
    assert torch.equal(total, times * (values[0].float() + values[1].float()))


@pytest.mark.gpu
def test_more_than_2_to_the_31_elements(cuda: torch.device) -> None:
    from odc import kernels

    numel = (1 << 31) + 77
    if torch.cuda.mem_get_info(cuda)[0] < 16 * GIB:
        pytest.skip("needs 16 GiB of the device")
    source = torch.arange(1 << 16, device=cuda).to(torch.int16).repeat(numel // (1 << 16) + 1)[:numel]
    out = torch.zeros_like(source)
    kernels.get(out, table_of(source), 0)
    assert torch.equal(out, source)
    out.zero_()
    kernels.publish([out], [source])
    assert torch.equal(out, source)
    out.zero_()
    kernels.gather([out], [0], table_of(source))
    assert torch.equal(out, source)


@pytest.mark.gpu
@pytest.mark.parametrize("mib", [1, 400])
def test_moves_never_wait_for_the_device_and_take_few_launches(cuda: torch.device, mib: int) -> None:
    """A unit of two matrices and a vector to and from two owners, of which this rank is the first."""
    from odc.movers.compiled import CompiledMover

    mover, shards = CompiledMover(0, 1 << 20), 2
    numels = [mib << 17, 1000, mib << 17]  # of a shard
    offsets = [0, 4 * numels[0], 4 * (numels[0] + numels[1])]
    firsts = [offset // 4 for offset in offsets]
    parts = [on(cuda, n, n, F32) for n in numels]
    places = [torch.zeros(n, dtype=BF16, device=cuda) for n in numels]
    sums = [torch.zeros(sum(numels), device=cuda) for _ in range(shards)]
    here = [sums[0][first : first + n] for first, n in zip(firsts, numels, strict=True)]
    memory = [torch.ones(4 * sum(numels), dtype=torch.uint8, device=cuda) for _ in range(shards)]
    outs = [torch.zeros(shards * n, device=cuda) for n in numels]
    found = torch.zeros(len(places), dtype=torch.int32, device=cuda)
    large = 2 if 4 * numels[0] >= 1 << 20 else 0
    unit = RoundedUnit([(numels[0], True), (numels[1], False), (numels[2], True)])
    rounding, crossing = mover.rounding(params_of(unit), cuda), torch.zeros(unit.nbytes, dtype=torch.uint8, device=cuda)
    calls = {
        "round": (lambda: rounding.write(sums[0], crossing), 1, 0),
        "add rounded": (lambda: rounding.add(sums[0], crossing, sums[1]), 1, 0),
        "keep": (lambda: rounding.keep(sums[0], crossing, sums[1], [True, False, True]), 1, 0),
        "publish": (lambda: mover.publish(places, parts), 1, 0),
        "gather": (
            lambda: mover.gather(outs, offsets, shards, [(1, memory[1]), (0, memory[0])]),
            2 if large else 1,
            large,
        ),
        "stage": (lambda: mover.stage(outs, numels, firsts, [(1, memory[1])]), 1, large),
        "add": (lambda: mover.add(here, places), 1, 0),
        "addition": (lambda: mover.addition([here[0]], [[parts[0], outs[0][: numels[0]], parts[0]]]).run(), 1, 0),
        "accumulate_all": (lambda: mover.accumulate_all(outs, numels, firsts, list(enumerate(sums))), 1, 0),
        "differ": (lambda: mover.differ(places, parts, found), 1, 0),
    }
    for name, (call, kernels, copies) in calls.items():
        call()  # compiles, which may wait
        torch.cuda.synchronize(cuda)

        def unwatched(call: Callable[[], None] = call) -> None:
            with no_waits():
                call()

        with torch.cuda.stream(torch.cuda.Stream(cuda)):  # tables of its own are copied there first
            call()
            launched, moved = device_work(unwatched)
        assert len(launched) <= kernels and len(moved) <= copies, f"{name}: {launched} and {moved}"


def test_a_mode_that_warns_is_no_error_in_these_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's mode warns that it is a prototype, once, and warnings are errors here."""
    modes: list[str] = []

    def mode(name: str) -> None:
        modes.append(name)
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=2)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode)
    with pytest.raises(ZeroDivisionError), no_waits():
        raise ZeroDivisionError
    assert modes == ["error", "default"]
