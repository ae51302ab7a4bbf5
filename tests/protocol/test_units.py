from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.members import BF16, F16, F32, F64

from odc.protocol import UnitSpec

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


def test_the_fingerprint_tells_everything_apart_that_ranks_must_agree_on() -> None:
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
