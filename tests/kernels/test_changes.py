"""pack and patch, interpreted: the bytes of the reference in plain torch, and the published bits out of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support import change_tiles
from support.kernel_heaps import same_bits
from support.on_ranks import on_interpreted_ranks

F64, F32, F16, BF16, I8 = torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8
TILE = change_tiles.TILE


class Published:
    """A unit in two buffers, as heaps lay it out; `shards` are what is published next."""

    def __init__(self, dtypes: Sequence[torch.dtype], numels: Sequence[int], seed: int, *, buffers: int) -> None:
        self.draw, self.buffers = torch.Generator().manual_seed(seed), buffers
        self.dtypes, self.numels, self.offsets, self.nbytes = dtypes, numels, list[int](), 0
        for dtype, numel in zip(dtypes, numels, strict=True):
            self.offsets.append(self.nbytes)
            self.nbytes += -(-numel * dtype.itemsize // 16) * 16
        self.memory = torch.zeros(2, self.nbytes + 16, dtype=torch.uint8)
        self.memory[:, self.nbytes :] = 0xEE  # another unit's
        self.epoch = 0

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Of every parameter in a shard."""
        return [
            memory[at : at + numel * dtype.itemsize].view(dtype)
            for at, numel, dtype in zip(self.offsets, self.numels, self.dtypes, strict=True)
        ]

    def normal(self, numel: int) -> torch.Tensor:
        return torch.randn(numel, generator=self.draw, dtype=F64) * 0.02

    @property
    def place(self) -> torch.Tensor:
        """The newest version."""
        return self.memory[self.epoch % self.buffers]

    def publish(self, shards: Sequence[torch.Tensor], into: torch.Tensor) -> int:
        """4-byte words of the records."""
        from odc.kernels import UnitChanges, pack

        found, before = torch.tensor([0, 77], dtype=torch.int32), self.views(self.place)
        self.epoch += 1
        pack([UnitChanges(self.views(self.place), before, shards, into)], found)
        assert found[1] == 77, "of no unit"
        assert (self.memory[:, self.nbytes :] == 0xEE).all(), "behind the unit"
        return int(found[0])


def moved(draw: torch.Generator, shard: torch.Tensor, to: torch.dtype, share: float, how: str) -> torch.Tensor:
    """`shard` with a share of its elements changed, so that they are other ones in dtype `to` as well."""
    which = torch.rand(len(shard), generator=draw) < share
    if how == "anything":
        fresh = torch.randint(-100, 101, (len(shard),), generator=draw)
        return torch.where(which, fresh.to(shard.dtype), shard)
    if to is I8:
        return torch.where(which, shard + (1 if how == "up" else -1), shard)
    near = shard.to(to)
    word = near.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[to.itemsize])
    word += which.to(word.dtype) * (1 if how == "up" else -1)
    return near.to(shard.dtype)


DTYPES = [(BF16, F32), (BF16, BF16), (F16, F32), (F32, F32), (F32, BF16), (F64, F64), (I8, I8)]


@st.composite
def units(draw: st.DrawFn) -> tuple[list[tuple[torch.dtype, torch.dtype]], list[int], int, int]:
    """Dtypes of each published parameter and of its shard, elements, buffers, a seed."""
    kinds = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=4))
    sizes = st.one_of(st.sampled_from([0, 1, 7, 8, 9, 255, 256, TILE - 1, TILE, TILE + 1]), st.integers(0, 5000))
    numels = [draw(sizes) for _ in kinds]
    return kinds, numels, draw(st.sampled_from([1, 2])), draw(st.integers(0, 1 << 20))


@on_interpreted_ranks(1)
def test_kernels_write_what_the_reference_writes_and_patch_to_the_published_bits(rank: int, world: int) -> None:
    from odc.kernels import PatchPlan

    seen = set[str]()

    @settings(deadline=None, max_examples=30, database=None, phases=[Phase.generate])  # in a rank, without a profile
    @given(units(), st.data())
    def check(unit: tuple[list[tuple[torch.dtype, torch.dtype]], list[int], int, int], data: st.DataObject) -> None:
        kinds, numels, buffers, seed = unit
        one = Published([to for to, _ in kinds], numels, seed, buffers=buffers)
        wide = [
            one.normal(n).to(own) if own is not I8 else torch.zeros(n, dtype=I8)
            for n, (_, own) in zip(numels, kinds, strict=True)
        ]
        shards = [w.to(to).to(own) for w, (to, own) in zip(wide, kinds, strict=True)]
        into = torch.zeros(4 * one.nbytes + 64, dtype=torch.uint8)
        one.publish(shards, into)
        cache = one.place[: one.nbytes].clone()
        plan = PatchPlan(
            [(at, n, to.itemsize) for at, n, to in zip(one.offsets, numels, one.dtypes, strict=True)], cache.device
        )
        for _ in range(2):
            how, share = (
                data.draw(st.sampled_from(["up", "down", "anything"])),
                data.draw(st.sampled_from([0, 0.02, 0.5, 1])),
            )
            shards = [moved(one.draw, shard, to, share, how) for shard, (to, _) in zip(shards, kinds, strict=True)]
            before = one.place.clone()
            into.zero_()
            found = one.publish(shards, into)
            for view, shard in zip(one.views(one.place), shards, strict=True):
                assert same_bits(view, shard.to(view.dtype))
            wanted = change_tiles.pack(list(zip(one.views(before), one.views(one.place), strict=True)))
            size = plan.directory_bytes + 4 * found if found else 0
            seen.add("nothing" if not found else how)
            assert size == len(wanted)
            if len(set(kinds)) == 1:  # a launch for each pair of dtypes; records are in the order of their programs
                assert torch.equal(into[:size], wanted)
            assert not into[size:].any(), "behind the changes"
            if found:
                plan.run(cache, into)
            assert torch.equal(cache, one.place[: one.nbytes])
            again = before[: one.nbytes].clone()
            if found:
                change_tiles.patch(one.views(again), into)
            assert torch.equal(again, one.place[: one.nbytes]), "the reference"

    check()
    assert seen == {"nothing", "up", "down", "anything"}


@on_interpreted_ranks(1)
def test_what_does_not_fit_is_counted_and_not_written(rank: int, world: int) -> None:
    """The directory is; what lies behind the limit is another unit's."""
    from odc.kernels import PatchPlan

    for room in (0, 64, 1000, 6000):
        one = Published([BF16], [3 * TILE - 5], 1, buffers=1)
        shard = one.normal(one.numels[0]).to(F32)
        plan = PatchPlan([(0, one.numels[0], 2)], shard.device)
        into = torch.full((12_000,), 0xCC, dtype=torch.uint8)
        one.publish([shard], into[: plan.directory_bytes + room])
        before = one.place.clone()
        found = one.publish([one.normal(one.numels[0]).to(F32)], into[: plan.directory_bytes + room])
        wanted = change_tiles.pack([(one.views(before)[0], one.views(one.place)[0])])
        assert plan.directory_bytes + 4 * found == len(wanted) > plan.directory_bytes + room
        assert (into[plan.directory_bytes + room :] == 0xCC).all()


@on_interpreted_ranks(1)
def test_one_launch_a_pair_of_dtypes_packs_all_units_and_one_patches_a_unit(rank: int, world: int) -> None:
    from odc.kernels import PatchPlan, UnitChanges, launch, pack
    from odc.kernels.launch import PreparedLaunch

    launched, real = list[str](), PreparedLaunch.__call__

    def note(self: PreparedLaunch, programs: int, *args: object, **options: object) -> None:
        launched.append(self._kernel.__name__)
        real(self, programs, *args, **options)  # type: ignore[arg-type]

    PreparedLaunch.__call__ = note  # type: ignore[method-assign]
    try:
        found = torch.zeros(3, dtype=torch.int32)
        kinds = [[(BF16, F32), (BF16, F32)], [(BF16, F32), (F32, F32)], [(I8, I8), (BF16, F32)]]
        units = []
        for unit in kinds:
            places = [torch.zeros(48, dtype=to) for to, _ in unit]
            units.append(
                UnitChanges(
                    places,
                    places,
                    [torch.ones(48, dtype=own) for _, own in unit],
                    torch.zeros(999 * 4, dtype=torch.uint8),
                )
            )
        pack(units, found)
        assert launched == ["pack_kernel"] * 3, "fp32 to bf16, fp32 as it is, int8 as it is"
        assert (found > 0).all()
        for unit, (places, *_, into), launches in zip(kinds, units, (1, 1, 2), strict=True):
            plan = PatchPlan([(192 * i, 48, to.itemsize) for i, (to, _) in enumerate(unit)], into.device)
            launched.clear()
            shard = torch.zeros(2 * 192, dtype=torch.uint8)
            plan.run(shard, into)
            assert launched == ["patch_kernel"] * launches, "one a width of words"
            for i, place in enumerate(places):
                assert torch.equal(shard[192 * i :][: place.nbytes], place.view(torch.uint8))
    finally:
        PreparedLaunch.__call__ = real  # type: ignore[method-assign]
    assert launch is not None


@on_interpreted_ranks(1)
def test_what_does_not_belong_together_is_refused(rank: int, world: int) -> None:
    from odc.kernels import UnitChanges, pack

    place, into, found = torch.zeros(4), torch.zeros(64, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    for wrong in (torch.zeros(1), torch.zeros(0, dtype=torch.int32)):
        with pytest.raises(ValueError, match="an int32 for each unit"):
            pack([UnitChanges([place], [place], [place], into)], wrong)
    with pytest.raises(ValueError, match="a shard of 5 elements does not fit a place of 4"):
        pack([UnitChanges([place], [place], [torch.zeros(5)], into)], found)
    with pytest.raises(ValueError, match="version before 0 is not contiguous"):
        pack([UnitChanges([place], [torch.zeros(8)[::2]], [place], into)], found)
