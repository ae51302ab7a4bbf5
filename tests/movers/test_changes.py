"""Changes of a shard, packed and applied: the same bits, and as few bytes as the code allows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odc.movers import changes

U16 = np.uint16


def packed(old: np.ndarray, new: np.ndarray, room: int | None = None) -> torch.Tensor | None:
    """What turns `old` into `new`, both uint16; None where it does not fit."""
    into = torch.full((3 * old.nbytes + 256 if room is None else room,), 0xAB, dtype=torch.uint8)
    size = changes.pack(as_bytes(old), as_bytes(new), into)
    return None if size == changes.TOO_LARGE else into[:size]


def as_bytes(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(words.view(np.uint8))


def reference(words: np.ndarray, found: np.ndarray) -> np.ndarray:
    """What `found` says of `words`, read as the module's docstring has it, bit by bit."""
    words, tiles = words.copy(), -(-len(words) // 4096)
    starts = found[: 4 * (tiles + 1)].view(np.uint32).tolist()
    for tile in range(tiles):
        record = found[starts[tile] : starts[tile + 1]]
        if not len(record):
            continue
        groups = np.flatnonzero(np.unpackbits(record[:64], bitorder="little"))
        masks = np.unpackbits(record[64 : 64 + len(groups)], bitorder="little").reshape(-1, 8)
        changed = [
            tile * 4096 + 8 * group + i for group, mask in zip(groups, masks, strict=True) for i in range(8) if mask[i]
        ]
        codes = np.unpackbits(record[64 + len(groups) :][: -(-len(changed) // 4)], bitorder="little").reshape(-1, 2)
        at = -(-(64 + len(groups) + -(-len(changed) // 4)) // 4) * 4
        values = iter(record[at:].view(U16))
        for place, (low, high) in zip(changed, codes, strict=False):
            code = int(low) + 2 * int(high)
            words[place] = next(values) if code == 0 else (int(words[place]) + (1 if code == 1 else -1)) % (1 << 16)
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


def test_few_bytes_for_what_an_optimizer_step_changes() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(1 << 20, generator=generator) * 0.02
    after = weights - 1e-5 * torch.randn(1 << 20, generator=generator).mul(0.4).clamp(-1, 1)
    old, new = (one.bfloat16().view(torch.int16).numpy().view(U16) for one in (weights, after))
    changed = int((old != new).sum())
    jumps = int((~np.isin(new - old, [0, 1, 0xFFFF])).sum())
    groups = int((old != new).reshape(-1, 8).any(1).sum())
    found = packed(old, new)
    assert found is not None
    least = 4 * 257 + 64 * 256 + groups + changed / 4 + 2 * jumps
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


def test_room_is_three_quarters_and_whole_lines() -> None:
    assert [changes.room_for(nbytes) for nbytes in (16, 64, 1 << 20, 1000)] == [64, 64, 786432, 768]


def test_a_shard_of_odd_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a shard of 24 bytes is not a multiple of 16"):
        changes.pack(*(torch.zeros(24, dtype=torch.uint8) for _ in range(3)))
