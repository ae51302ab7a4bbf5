"""Changes of a shard, packed and applied: the same bits, and as few bytes as the code allows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odc.movers import change_loops, changes

U16 = np.uint16


def packed(old: np.ndarray, new: np.ndarray, room: int | None = None) -> torch.Tensor | None:
    """What turns `old` into `new`, both uint16; None where it does not fit."""
    into = torch.full((3 * old.nbytes + 256 if room is None else room,), 0xAB, dtype=torch.uint8)
    size = changes.pack(as_bytes(old), as_bytes(new), into)
    return None if size == changes.TOO_LARGE else into[:size]


def as_bytes(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(words.view(np.uint8))


def item(byte: int, bit: int) -> int:
    """What a bit of a map stands for."""
    return byte // 64 * 512 + 64 * bit + byte % 64


def reference(words: np.ndarray, found: np.ndarray) -> np.ndarray:
    """What `found` says of `words`, read as the module's docstring has it, bit by bit."""
    words, tiles = words.copy(), -(-len(words) // 4096)
    starts = found[: 4 * (tiles + 1)].view(np.uint32).tolist()
    for tile in range(tiles):
        record = found[starts[tile] : starts[tile + 1]].tolist()
        if not record:
            continue
        groups = sorted(item(i, bit) for i in range(64) for bit in range(8) if record[i] >> bit & 1)
        masks = zip(groups, record[64:], strict=False)
        changed = [4096 * tile + item(group, bit) for group, mask in masks for bit in range(8) if mask >> bit & 1]
        at = 64 + len(groups)
        bits = [byte >> bit & 1 for byte in record[at:] for bit in range(8)]
        near, ups = bits[: len(changed)], iter(bits[len(changed) :])
        at = -(-(at + -(-(len(changed) + sum(near)) // 8)) // 4) * 4
        values = iter(np.array(record[at:], np.uint8).view(U16))
        for place, moved in zip(changed, near, strict=True):
            words[place] = (int(words[place]) + (1 if next(ups) else -1)) % (1 << 16) if moved else next(values)
        assert len(list(values)) <= 1, "more values than the words that need one, and two bytes to end on four"
    return words


def with_and_without_numba() -> Iterator[bool]:
    yield True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(changes, "numba", lambda: None)
        yield False


@st.composite
def versions(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Two versions of a shard: words that stay, move by one, over the ends of their range too, or become anything."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = 8 * draw(st.integers(1, 1200))
    old = generator.integers(0, 1 << 16, count).astype(U16)
    old[generator.random(count) < 0.1] = draw(st.sampled_from([0, 0xFFFF, 0x8000, 0x7F80]))
    stay, near = draw(st.floats(0, 1)), draw(st.floats(0, 1))
    kind = generator.random(count)
    steps = generator.choice(np.array([1, 0xFFFF], U16), count)
    other = np.where(generator.random(count) < near, old + steps, generator.integers(0, 1 << 16, count).astype(U16))
    return old, np.where(kind < stay, old, other).astype(U16)


@given(versions())
def test_a_patched_shard_is_the_new_one_bit_for_bit(pair: tuple[np.ndarray, np.ndarray]) -> None:
    old, new = pair
    found = packed(old, new)
    assert found is not None
    if (old == new).all():
        assert not found.numel()
        return
    assert (reference(old, found.numpy()) == new).all()
    for _ in with_and_without_numba():
        patched = old.copy()
        changes.patch(as_bytes(patched), found.clone())
        assert (patched == new).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("rate", [0.0, 1e-6, 1e-4, 1e-1])
def test_every_compute_dtype_is_patched_bit_for_bit(dtype: torch.dtype, rate: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(10_000, generator=generator) * 0.02
    weights[:100:7], weights[1:100:7], weights[2:100:7] = torch.nan, torch.inf, -0.0
    after = weights - rate * torch.randn(10_000, generator=generator)
    old, new = (one.to(dtype).view(torch.uint8).numpy().view(U16) for one in (weights, after))
    found = packed(old, new)
    assert found is not None and bool(found.numel()) == bool((old != new).any())
    for _ in with_and_without_numba():
        patched = old.copy()
        if found.numel():
            changes.patch(as_bytes(patched), found.clone())
        assert (patched == new).all()


def test_few_bytes_for_what_an_optimizer_step_changes() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(1 << 20, generator=generator) * 0.02
    after = weights - 1e-5 * torch.randn(1 << 20, generator=generator).mul(0.4).clamp(-1, 1)
    old, new = (one.bfloat16().view(torch.int16).numpy().view(U16) for one in (weights, after))
    changed = int((old != new).sum())
    jumps = int((~np.isin(new - old, [0, 1, 0xFFFF])).sum())
    groups = int((old != new).reshape(-1, 8, 64).any(1).sum())
    found = packed(old, new)
    assert found is not None
    least = 4 * 257 + 64 * 256 + groups + (2 * changed - jumps) / 8 + 2 * jumps
    assert least <= found.numel() <= least + 256 * 8


def test_nothing_for_what_has_not_changed() -> None:
    words = np.arange(8192, dtype=U16)
    found = packed(words, words.copy())
    assert found is not None and found.numel() == 0


@pytest.mark.parametrize("room", [8, 100, 8000])
def test_what_does_not_fit_is_not_packed(room: int) -> None:
    generator = np.random.default_rng(1)
    old, new = (generator.integers(0, 1 << 16, 8192).astype(U16) for _ in range(2))
    into = torch.full((room + 64,), 0xAB, dtype=torch.uint8)
    assert changes.pack(as_bytes(old), as_bytes(new), into[:room]) == changes.TOO_LARGE
    assert (into[room:] == 0xAB).all(), "written over the end"


@np.errstate(over="ignore")
def test_more_than_32_bits_can_address_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops as they are written: numba takes constants for good."""
    old, new, into = np.zeros(64, np.uint16), np.full(64, 7, np.uint16), np.zeros(4096, np.uint8)
    packed = change_loops.pack(old, new, into)
    for largest, expected in ((packed, packed), (packed - 1, changes.TOO_LARGE)):
        monkeypatch.setattr(change_loops, "_LARGEST", largest)
        assert change_loops.pack(old, new, into) == expected


def test_room_is_three_quarters_and_whole_lines() -> None:
    assert [changes.room_for(nbytes) for nbytes in (16, 64, 1 << 20, 1000)] == [64, 64, 786432, 768]


def test_a_shard_of_odd_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a shard of 24 bytes is not a multiple of 16"):
        changes.pack(*(torch.zeros(24, dtype=torch.uint8) for _ in range(3)))
