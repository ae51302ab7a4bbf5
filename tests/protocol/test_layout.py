from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.linked import HOSTS
from support.members import BF16, F16, F32, F64, HeapGroup, Layout

from odc.memory import MUTEX_BYTES
from odc.protocol import UnitSpec, regions
from odc.protocol.regions import Ring
from odc.protocol.words import BOARD_WORDS
from odc.settings import ACCUMULATE_MODES, Accumulate, Settings

WHOLE = (  # elements of each whole parameter, by unit; none divides evenly by every number of shards
    (97 * 40, 40),
    *[(40 * 120, 120, 40 * 43, 43)] * 3,
    (40 * 97,),
)


def sharded(shards: int, dtype: torch.dtype) -> Layout:
    """What `fully_shard` gives every rank of the model above: shards of equal, padded size."""
    return [[(f"p{i}", -(-numel // shards), dtype) for i, numel in enumerate(unit)] for unit in WHOLE]


@pytest.mark.parametrize("shards", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("accumulate", ACCUMULATE_MODES)
def test_the_memory_bound(accumulate: Accumulate, reproducible: bool, dtype: torch.dtype, shards: int) -> None:
    layout = sharded(shards, dtype)
    numel = sum(n for unit in layout for _, n, _ in unit)
    count = sum(len(unit) for unit in layout)
    align = 16 * count  # at most one lost alignment a parameter
    chunk = max(sum(n * dtype.itemsize for _, n, _ in unit) + 16 * len(unit) for unit in layout) + 64
    with HeapGroup(layout, shards, settings=Settings(accumulate=accumulate, reproducible=reproducible)) as group:
        ledger, heap = group.layouts[0].ledger(), group.layouts[0].heap
        assert numel * dtype.itemsize <= ledger["published"] <= numel * dtype.itemsize + align
        assert ledger["accumulator"] == numel * (8 if reproducible else 4)
        if accumulate == "server":
            assert ledger["staging"] <= 2 * chunk * (shards - 1)
        else:
            assert ledger["staging"] == 0
        slots = group.layouts[0].ring.slots if accumulate == "server" else 0
        words = 8 * (BOARD_WORDS + 2 * shards + shards * count + 5 * slots * (shards - 1))
        assert ledger["words"] == words + 3 * 1024 + MUTEX_BYTES * len(layout)

        regions = heap.bytes_by_name()
        text = regions.pop("heap/layout")
        assert sum(regions.values()) == sum(ledger.values())
        padding = (len(regions) + 2) * mmap.PAGESIZE  # a region starts on a line, a large one on a page
        assert sum(ledger.values()) <= heap.nbytes <= sum(ledger.values()) + text + padding


@pytest.mark.parametrize("accumulate", ACCUMULATE_MODES)
def test_what_is_frozen_takes_neither_accumulator_nor_staging(accumulate: Accumulate) -> None:
    layout = [[("base", 40_000, BF16), ("adapter", 512, BF16)], [("base", 90_000, BF16)], [("head", 600, F32)]]
    settings = Settings(accumulate=accumulate)
    with (
        HeapGroup(layout, 3, settings=settings) as all_trained,
        HeapGroup(layout, 3, settings=settings, frozen={"base"}) as group,
    ):
        before, ledger = (each.layouts[0].ledger() for each in (all_trained, group))
        assert ledger["published"] == before["published"] == 2 * 130_512 + 4 * 600
        assert before["accumulator"] == 4 * 131_112
        assert ledger["accumulator"] == 4 * 1112 + 64, "no region is empty"
        if accumulate == "server":  # two slots of the largest unit's chunk for each of two peers, in whole lines
            assert before["staging"] == 2 * 2 * -(-2 * 90_000 // 64) * 64
            assert ledger["staging"] == 2 * 2 * -(-4 * 600 // 64) * 64


def test_a_model_without_trained_parameters_can_be_laid_out() -> None:
    with HeapGroup(LAYOUT, 2, frozen={name for unit in LAYOUT for name, _, _ in unit}) as group:
        group.publish_all(3.0)
        ledger = group.layouts[0].ledger()
        assert ledger["accumulator"] == 64 * len(LAYOUT) and ledger["staging"] == 2 * 64
        out = [torch.zeros(2 * numel, dtype=dtype) for _, numel, dtype in LAYOUT[0]]
        group.members[0].shards.fetch(group.units[0], out)
        assert all(bool((tensor == 3.0).all()) for tensor in out)


@given(
    st.lists(st.integers(0, 300_000), max_size=4),
    st.one_of(st.none(), st.integers(64, 16_384).map(lambda n: n * 64)),
    st.integers(0, 64),
    st.integers(1 << 14, 1 << 24),
)
def test_a_ring_has_two_slots_at_least_and_no_more_bytes_than_it_may_take(
    sizes: list[int], block: int | None, rings: int, most: int
) -> None:
    units = [UnitSpec.build(i, "u", [("p", numel, F32)], F32) for i, numel in enumerate(sizes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regions, "STAGING_BYTES", most)
        ring = Ring.fit(units, rings, block)
    chunk = max([64, *(-(-unit.published_bytes // 64) * 64 for unit in units)])
    most = min(2 * chunk, most // max(1, rings))
    assert ring.slots >= 2
    assert ring.slot_bytes % 64 == 0
    assert 64 <= ring.slot_bytes <= min(block or chunk, chunk)
    assert ring.slots * ring.slot_bytes <= most
    assert (ring.slots + 1) * ring.slot_bytes > most - 2 * 64, "the bound is used, not only kept"
    assert ring.slots == 2 or block, "no more slots than two where nothing bounds one"


LAYOUT: Layout = [[("a", 5, F32), ("b", 3, BF16)], [("c", 7, BF16)], [("empty", 0, F32)]]


def test_counts_of_pushes_are_of_the_members_of_a_host() -> None:
    """A row for every rank of a large job would be some 100 MB of each heap, where experts are parameters."""
    with HeapGroup(LAYOUT, 4, hosts=HOSTS) as group:
        layout, parameters = group.layouts[1], 4
        assert layout.heap.bytes_by_name()["pushes"] == 8 * len(layout.grid.local) * parameters
        for number, source in enumerate(layout.grid.local):
            layout.mine.pushes(source).fill_(number + 1)
        assert layout.mine.all_pushes().tolist() == [[1] * parameters, [2] * parameters]


@pytest.mark.parametrize("accumulate", ACCUMULATE_MODES)
@pytest.mark.parametrize("reproducible", [False, True])
def test_no_two_views_overlap(accumulate: Accumulate, reproducible: bool) -> None:
    settings = Settings(accumulate=accumulate, reproducible=reproducible)
    with HeapGroup(LAYOUT, 3, settings=settings) as group:
        layout, views = group.layouts[1], list[torch.Tensor]()
        for unit in layout.units:
            views += [layout.peer(1).published(unit, i) for i in range(len(unit.params))]
            views.append(layout.peer(1).accumulator(unit))
            assert views[-1].dtype == (F64 if reproducible else F32)
        views += [layout.peer(1).pushes(source) for source in range(3)]
        views += [
            layout.heap.tensor(1, "reason", torch.uint8),
            layout.peer(1).sent.as_tensor(),
            layout.peer(1).accumulated.as_tensor(),
        ]
        for mark, view in enumerate(views):
            view.fill_(mark + 1)
        for mark, view in enumerate(views):
            assert torch.equal(view, torch.full_like(view, mark + 1)), f"view {mark} was overwritten"
        assert all(layout.peer(1).board.load(word) == 0 for word in range(BOARD_WORDS))


def test_settings_that_may_differ_between_ranks_do_not_keep_them_apart() -> None:
    with (
        HeapGroup(LAYOUT, 2) as group,
        HeapGroup(LAYOUT, 2, settings=Settings(timeout_s=9.0, prefetch=3, trace=False)) as others,
    ):
        group.layouts[1], others.layouts[1] = others.layouts[1], group.layouts[1]
        assert group.layouts[0].peer(1).board.load(0) == 0


def test_a_second_buffer_is_counted_and_kept_apart() -> None:
    with HeapGroup(LAYOUT, 2) as one, HeapGroup(LAYOUT, 2, settings=Settings(second_buffer=True)) as two:
        ledgers = [group.layouts[0].ledger() for group in (one, two)]
        sizes = [sum(max(64, buffers * unit.published_bytes) for unit in one.units) for buffers in (1, 2)]
        assert [ledger.pop("published") for ledger in ledgers] == sizes
        assert ledgers[0] == ledgers[1]
        layout = two.layouts[0]
        for epoch in (3, 4):
            for unit in layout.units:
                for i in range(len(unit.params)):
                    layout.peer(0).published(unit, i, epoch).fill_(epoch)
        for unit in layout.units:
            for i, spec in enumerate(unit.params):
                assert [layout.peer(0).published(unit, i, epoch).tolist() for epoch in (3, 4)] == [
                    [3.0] * spec.numel,
                    [4.0] * spec.numel,
                ]
                raw = layout.peer(0).published_bytes(unit, 3)[spec.published_offset :][: spec.nbytes]
                assert torch.equal(raw, layout.peer(0).published(unit, i, 3).view(torch.uint8))


# units ---------------------------------------------------------------------------------------------------------------

DTYPES = st.sampled_from([F32, BF16, F16, F64])
PARAMS = st.lists(st.tuples(st.text("abc.", min_size=1, max_size=4), st.integers(0, 99), DTYPES), max_size=6)


@given(PARAMS)
def test_published_shards_lie_aligned_and_apart(params: list[tuple[str, int, torch.dtype]]) -> None:
    unit = UnitSpec.build(0, "u", params, F32)
    end = 0
    for spec, (name, numel, dtype) in zip(unit.params, params, strict=True):
        assert (spec.name, spec.numel, spec.dtype) == (name, numel, dtype)
        assert spec.nbytes == numel * torch.empty(0, dtype=dtype).element_size()
        assert spec.published_offset % 16 == 0
        assert end <= spec.published_offset < end + 16
        end = spec.published_offset + spec.nbytes
    assert end <= unit.published_bytes < end + 16


@given(PARAMS, st.sampled_from([F32, F64]), st.sets(st.text("abc.", min_size=1, max_size=2)))
def test_the_accumulator_has_no_gaps(
    params: list[tuple[str, int, torch.dtype]], dtype: torch.dtype, frozen: set[str]
) -> None:
    unit = UnitSpec.build(0, "u", params, dtype, frozen)
    expected = 0
    for spec in unit.params:
        assert spec.trained == (spec.name not in frozen)
        if spec.trained:
            assert spec.accumulator_offset == expected
            expected += spec.numel
    assert unit.numel == expected
    assert unit.accumulator_bytes == expected * dtype.itemsize


@given(PARAMS, st.sets(st.text("abc.", min_size=1, max_size=2)))
def test_what_is_frozen_changes_nothing_that_is_published(
    params: list[tuple[str, int, torch.dtype]], frozen: set[str]
) -> None:
    unit, plain = UnitSpec.build(0, "u", params, F32, frozen), UnitSpec.build(0, "u", params, F32)
    assert [s.published_offset for s in unit.params] == [s.published_offset for s in plain.params]
    assert unit.published_bytes == plain.published_bytes == plain.pushed_bytes
    trained = sum(spec.nbytes for spec in unit.params if spec.trained)
    assert trained <= unit.pushed_bytes <= trained + 16 * len(params)


def test_fingerprints_differ_in_everything_that_ranks_must_agree_on() -> None:
    base = [("w", 8, F32), ("b", 2, F32)]
    variants = [
        UnitSpec.build(0, "u", base, F32),
        UnitSpec.build(0, "v", base, F32),
        UnitSpec.build(0, "u", [("x", 8, F32), ("b", 2, F32)], F32),
        UnitSpec.build(0, "u", [("w", 9, F32), ("b", 2, F32)], F32),
        UnitSpec.build(0, "u", [("w", 8, BF16), ("b", 2, F32)], F32),
        UnitSpec.build(0, "u", [("b", 2, F32), ("w", 8, F32)], F32),
        UnitSpec.build(0, "u", base[:1], F32),
        UnitSpec.build(0, "u", base, F64),
        UnitSpec.build(0, "u", base, F32, {"b"}),
        UnitSpec.build(0, "u", base, F32, {"w"}),
    ]
    assert len({unit.fingerprint() for unit in variants}) == len(variants)
    assert UnitSpec.build(0, "u", list(base), F32).fingerprint() == variants[0].fingerprint()
