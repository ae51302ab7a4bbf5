"""Sums in 8 bits: what the module's docstring says, with numba and without, and nothing more than half a step lost."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odc.movers import int8


def with_and_without_numba() -> Iterator[None]:
    yield
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8, "numba", lambda: None)
        yield


def packed(values: torch.Tensor) -> torch.Tensor:
    into = torch.full((int8.room_for(values.numel()),), 0xAB, dtype=torch.uint8)
    int8.pack(values, into)
    return into


def unpacked(memory: torch.Tensor, numel: int) -> torch.Tensor:
    into = torch.full((numel,), 7.0)
    int8.add(torch.zeros(numel), memory, into)
    return into


def rest(values: torch.Tensor, memory: torch.Tensor, before: float = 0.0) -> torch.Tensor:
    into = torch.full_like(values, before)
    int8.rest(values, memory, into)
    return into


def reference(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales, float32, and codes, block by block of 128, as the module's docstring has it."""
    scales, codes = [], []
    for first in range(0, len(values), 128):
        block = values[first : first + 128]
        top = np.abs(block).max()
        scale = np.float32(top) / np.float32(127)
        if not np.isfinite(top) or scale < 2.0**-126:
            scales.append(np.float32(0.0 if np.isfinite(top) else np.nan))
            codes.append(np.zeros(len(block), np.int8))
        else:
            scales.append(scale)
            codes.append(np.rint(block * (np.float32(1) / scale)).astype(np.int8))
    return np.array(scales, np.float32), np.concatenate(codes)


@st.composite
def sums(draw: st.DrawFn) -> torch.Tensor:
    """Blocks of all magnitudes, of zeros, subnormal and with what is not finite; the last one is short."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 1200))
    powers = generator.integers(-44, 38, count // 128 + 1).repeat(128)[:count]
    values = (generator.standard_normal(count) * 10.0**powers).astype(np.float32)
    values[generator.random(count) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0.0
    for odd in draw(st.lists(st.sampled_from([np.inf, -np.inf, np.nan, 3.4028235e38, -3.4e38, 1e-45]), max_size=3)):
        values[generator.integers(count)] = odd
    return torch.from_numpy(values)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@given(sums())
def test_scales_and_codes_are_those_of_the_blocks(values: torch.Tensor) -> None:
    scales, codes = reference(values.numpy())
    back = np.repeat(scales, 128)[: len(codes)] * codes
    for _ in with_and_without_numba():
        memory = packed(values)
        found = memory.numpy()
        assert found[: scales.nbytes].view(np.float32).tobytes() == scales.tobytes()
        assert (found[scales.nbytes : scales.nbytes + len(codes)].view(np.int8) == codes).all()
        assert np.array_equal(unpacked(memory, len(codes)).numpy(), back, equal_nan=True)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@given(sums())
def test_what_is_left_and_what_has_crossed_are_the_whole(values: torch.Tensor) -> None:
    for _ in with_and_without_numba():
        memory = packed(values)
        back, left = unpacked(memory, values.numel()), rest(values, memory, before=5.0)
        finite = back.isfinite()
        assert torch.equal(left[finite], (values - back)[finite])
        assert (left[~finite] == 5.0).all(), "the residual of a block that was not finite stays"
        tops = torch.cat([block.abs().amax().expand(len(block)) for block in values.split(128)])
        # Of 127 steps each of four fp32 roundings is off by 127 / 2**24 of a step at most.
        half = tops.double() / 127 * (0.5 + 4 * 127 / 2**24) + 128 * 2.0**-126
        assert (left[finite].double().abs() <= half[finite]).all()


@pytest.mark.parametrize("odd", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_seen_and_stays_in_its_block(odd: float) -> None:
    values = torch.linspace(-1, 1, 384)
    values[200] = odd
    for _ in with_and_without_numba():
        back = unpacked(packed(values), 384)
        assert back[128:256].isnan().all()
        assert back[:128].isfinite().all() and back[256:].isfinite().all()


def test_an_element_takes_little_more_than_a_byte() -> None:
    assert int8.room_for(1 << 20) <= 1.05 * (1 << 20)
    assert int8.room_for(1) <= 16 and not int8.room_for(0)
    values = torch.empty(0)
    for _ in with_and_without_numba():
        assert not unpacked(packed(values), 0).numel()


def test_torch_takes_a_large_sum_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = packed(values)
    monkeypatch.setattr(int8, "numba", lambda: None)
    monkeypatch.setattr(int8, "_TURN", 256)
    assert torch.equal(packed(values), whole)
    assert torch.equal(unpacked(whole, 1000) + rest(values, whole), values)
