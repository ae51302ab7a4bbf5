from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.members import BF16, F16, F32, F64, HeapGroup

from odc.errors import UnsupportedError
from odc.protocol import Gradient, HostRoute, MemberProtocol, flatten, ring
from odc.protocol.push import Pusher
from odc.protocol.regions import Ring
from odc.settings import ACCUMULATE_MODES, Settings


@contextmanager
def small_slots(slots: int, nbytes: int) -> Iterator[None]:
    """Rings so small that a push of a few elements takes many blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ring, "fit", lambda *_: Ring(slots, nbytes))
        yield


@dataclass(frozen=True)
class Param:
    """A whole parameter: its shape, along which dimension it is sharded, and the dtype of its gradient."""

    shape: tuple[int, ...]
    dim: int
    dtype: torch.dtype

    def padded(self, shards: int) -> int:
        """Elements of each rank's padded shard, as FSDP2 pads."""
        rest = torch.Size(self.shape).numel() // self.shape[self.dim] if self.shape[self.dim] else 0
        return -(-self.shape[self.dim] // shards) * rest


@st.composite
def params(draw: st.DrawFn, shards: int) -> Param:
    dtype = draw(st.sampled_from([F32, BF16, F16, F64]))
    if draw(st.booleans()):
        return Param((draw(st.integers(1, 9)), draw(st.integers(1, 9))), 0, dtype)  # chunks of unequal size, or none
    return Param((draw(st.integers(1, 4)), shards * draw(st.integers(1, 4))), 1, dtype)  # Shard(1) must divide evenly


def gradient_of(param: Param, seed: int) -> torch.Tensor:
    """Small whole numbers: every sum of them is exact in every dtype and order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, param.shape, generator=generator).to(param.dtype)


def chunk_of(param: Param, whole: torch.Tensor, shards: int, shard: int) -> torch.Tensor:
    """What FSDP2's reduce-scatter leaves at `shard`: its chunk, 1-D, padded with zeros."""
    out = torch.zeros(param.padded(shards), dtype=F64)
    chunks = torch.chunk(whole, shards, dim=param.dim)
    if shard < len(chunks):
        flat = chunks[shard].reshape(-1).to(F64)
        out[: flat.numel()] = flat
    return out


def group_for(units: list[list[Param]], shards: int, **options: object) -> HeapGroup:
    layout = [[(f"p{i}", p.padded(shards), p.dtype) for i, p in enumerate(unit)] for unit in units]
    return HeapGroup(layout, shards, **options)  # type: ignore[arg-type]


class Patient(MemberProtocol):
    """Waits for no rank to begin an epoch; waits for credit by adding the owner's blocks at once."""

    def __init__(self, group: HeapGroup, member: int, *, drains: bool = True) -> None:
        super().__init__(group.layouts[member])
        self.group, self.drains = group, drains
        self.asked, self.credits = list[int](), list[int]()
        self.closed = False

    def await_published(self, members: Sequence[int], lane: str = "main") -> None:
        self.asked += members
        if self.closed:
            raise TimeoutError(members)

    def await_credit(self, owner: int, credit: Callable[[], int]) -> None:
        self.credits.append(credit())
        while credit() <= 0:
            assert self.drains, "a block is put without credit"
            assert self.group.services[owner].drain(), "no credit, and nothing to take"


def pusher_of(group: HeapGroup, member: int) -> Pusher:
    return Pusher(Patient(group, member), group.notify)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[int, list[list[Param]], list[tuple[int, int, list[int]]], str, bool]:
    """(shards, units, pushes as (member, unit, used parameters), accumulate, drained by hand)."""
    shards = draw(st.integers(1, 4))
    units = draw(st.lists(st.lists(params(shards), min_size=1, max_size=4), min_size=1, max_size=2))
    pushes = []
    for _ in range(draw(st.integers(1, 5))):
        unit = draw(st.integers(0, len(units) - 1))
        used = [i for i in range(len(units[unit])) if draw(st.integers(0, 3))]
        pushes.append((draw(st.integers(0, shards - 1)), unit, used))
    return shards, units, pushes, draw(st.sampled_from(ACCUMULATE_MODES)), draw(st.booleans())


@given(jobs())
def test_owners_hold_what_a_reduce_scatter_would_leave(
    job: tuple[int, list[list[Param]], list[tuple[int, int, list[int]]], str, bool],
) -> None:
    shards, units, pushes, accumulate, by_hand = job
    settings = Settings(accumulate=accumulate)  # type: ignore[arg-type]
    with small_slots(2, 64), group_for(units, shards, settings=settings, by_hand=by_hand) as group:
        pushers = [pusher_of(group, member) for member in range(shards)]
        expected = [[[torch.zeros(p.padded(shards), dtype=F64) for p in unit] for unit in units] for _ in range(shards)]
        for number, (member, at, used) in enumerate(pushes):
            grads = {i: gradient_of(units[at][i], 10 * number + i) for i in used}
            sent = pushers[member].push(
                group.units[at], [Gradient(i, flatten(g, units[at][i].dim, shards)) for i, g in grads.items()]
            )
            away = 0
            for owner in range(shards):
                for i, grad in grads.items():
                    expected[owner][at][i] += chunk_of(units[at][i], grad, shards, owner)
                    chunks = torch.chunk(grad, shards, dim=units[at][i].dim)
                    away += chunks[owner].nbytes if owner != member and owner < len(chunks) else 0
            assert sent == away, "bytes that left the rank"
        for owner in range(shards):
            group.drain(owner)
            for unit, sums in zip(group.units, expected[owner], strict=True):
                layout = group.layouts[owner]
                found = layout.peer(owner).accumulator(unit).to(F64)
                assert torch.equal(found, torch.cat(sums)), f"owner {owner}, unit {unit.name}"


def test_with_hybrid_sharding_pushes_stay_in_the_own_replica() -> None:
    with group_for([[Param((4, 2), 0, F32)]], 2, replicas=2) as group:
        pusher_of(group, 3).push(group.units[0], [Gradient(0, torch.arange(1.0, 9.0))])
        group.drain(2)
        found = [group.layouts[member].peer(member).accumulator(group.units[0]).tolist() for member in range(4)]
        assert found == [[0.0] * 4, [0.0] * 4, [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]]


def test_owners_are_served_from_the_next_shard_on_and_only_when_ready() -> None:
    with group_for([[Param((3, 1), 0, F32)]], 3) as group:
        protocol = Patient(group, 1, drains=False)
        pusher = Pusher(protocol, group.notify)
        pusher.push(group.units[0], [Gradient(0, torch.ones(3))])
        assert protocol.asked == [2, 0, 1]
        assert group.notified == [2, 0], "its own chunk needs no doorbell"

        protocol.closed = True
        before = [group.layouts[m].peer(m).accumulator(group.units[0]).tolist() for m in range(3)]
        with pytest.raises(TimeoutError):
            pusher.push(group.units[0], [Gradient(0, torch.ones(3))])
        assert [group.layouts[m].peer(m).accumulator(group.units[0]).tolist() for m in range(3)] == before


def blocks(group: HeapGroup, owner: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Takes what is posted to `owner` by the member before it: (first element, values)."""
    from odc.protocol import Inbox

    inbox = Inbox(group.layouts[owner], (owner - 1) % len(group.ranks))
    while (block := inbox.peek()) is not None:
        yield block[1][0].first, block[1][0].values.clone()
        inbox.take()


ROWS = Param((2, 2), 0, F32)
SIDE_BY_SIDE = [Param((2, 3), 0, F32), Param((2, 1), 0, F32), ROWS]
MIXED = [ROWS, Param((2, 1), 0, F32), Param((2, 1), 0, F32), Param((2, 1), 0, BF16)]


@pytest.mark.parametrize(
    ("unit", "used", "expected"),
    [
        pytest.param(SIDE_BY_SIDE, (0, 1, 2), [(0, [3.0, 4.0, 5.0, 1.0, 2.0, 3.0], F32)], id="share a block"),
        pytest.param(MIXED, (0, 2, 3), [(0, [2.0, 3.0], F32), (3, [1.0], F32), (4, [1.0], BF16)], id="unused, dtype"),
        # Three rows over two shards: the second owns one row and one row of padding, which is not sent.
        pytest.param([Param((3, 2), 0, F32), ROWS], (0, 1), [(0, [4.0, 5.0], F32), (4, [2.0, 3.0], F32)], id="padding"),
        pytest.param(
            [Param((2, 100), 0, BF16)],
            (0,),
            [(at, list(range(100 + at, min(132 + at, 200))), BF16) for at in (0, 32, 64, 96)],
            id="whole slots",
        ),
    ],
)
def test_what_one_push_posts_to_the_other_owner(
    unit: list[Param], used: tuple[int, ...], expected: list[tuple[int, list[float], torch.dtype]]
) -> None:
    with small_slots(16, 64), group_for([unit], 2, by_hand=True) as group:
        grads = [torch.arange(float(torch.Size(param.shape).numel())).to(param.dtype) for param in unit]
        sent = pusher_of(group, 0).push(group.units[0], [Gradient(i, grads[i]) for i in used])
        found = [(first, values.tolist(), values.dtype) for first, values in blocks(group, 1)]
        assert found == expected
        assert sent == sum(len(values) * dtype.itemsize for _, values, dtype in expected)


def test_a_push_waits_for_credit_before_each_block_and_never_without_need() -> None:
    unit = [Param((2, 100), 0, F32)]
    with small_slots(2, 64), group_for([unit], 2, by_hand=True) as group:
        protocol = Patient(group, 0)
        Pusher(protocol, group.notify).push(group.units[0], [Gradient(0, torch.ones(200))])
        assert protocol.credits == [2, 1, 0, 0, 0, 0, 0], "seven blocks through two slots"


def test_a_push_that_a_signal_ends_costs_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the main thread, without overlap: what its handler raises may come between any two steps of a post."""

    class Interrupting:
        size = ring._HEADER.size

        @staticmethod
        def pack_into(*_: object) -> None:
            raise KeyboardInterrupt

    unit = [Param((2, 100), 0, F32)]
    with small_slots(2, 64), group_for([unit], 2, by_hand=True) as group:
        pusher, gradients = Pusher(Patient(group, 0), group.notify), [Gradient(0, torch.ones(200))]
        for _ in range(2):
            with monkeypatch.context() as signalled:
                signalled.setattr(ring, "_HEADER", Interrupting)
                with pytest.raises(KeyboardInterrupt):
                    pusher.push(group.units[0], gradients)
            pusher.route.post_all()
        assert isinstance(pusher.route, HostRoute)
        assert pusher.route.box(1).credit() == 2
        pusher.push(group.units[0], gradients)


def test_flatten_lays_chunks_side_by_side() -> None:
    grad = torch.arange(24.0).view(2, 3, 4)
    assert flatten(grad, 0, 2).tolist() == list(range(24))
    for dim in (1, 2):
        shards = grad.shape[dim]
        expected = torch.cat([chunk.reshape(-1) for chunk in torch.chunk(grad, shards, dim=dim)])
        assert torch.equal(flatten(grad, dim, shards), expected)


@pytest.mark.parametrize("dim", [0, 1])
def test_flatten_leaves_the_graph_of_a_gradient_behind(dim: int) -> None:
    """As after `backward(create_graph=True)`; a sum of such gradients would keep the graphs of all steps."""
    grad = torch.ones(4, 6, requires_grad=True) * 2
    assert not flatten(grad, dim, 2).requires_grad


def test_flatten_copies_only_what_does_not_lie_so_already() -> None:
    grad = torch.arange(6.0).view(2, 3)
    assert flatten(grad, 0, 2).data_ptr() == grad.data_ptr()
    turned = grad.t()
    flat = flatten(turned, 0, 3)
    assert flat.is_contiguous() and flat.tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.float8_e4m3fn])
def test_refuses_dtypes_that_cannot_travel(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match=str(dtype)):
        flatten(torch.zeros(4).to(dtype), 0, 2)
