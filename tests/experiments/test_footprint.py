from __future__ import annotations

import mmap

from odc.experiments import footprint

_SIZE = 64 << 20


def test_touched_memory_is_held_and_peaks() -> None:
    footprint.trim()
    before = footprint.held_bytes()
    with mmap.mmap(-1, _SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(b"x" * _SIZE)
        held = footprint.held_bytes() - before
    after = footprint.held_bytes() - before
    assert 0.9 * _SIZE < held < 1.5 * _SIZE
    assert after < 0.2 * _SIZE
    assert footprint.peak_bytes() > before + 0.9 * _SIZE


def test_a_reset_forgets_the_peak() -> None:
    with mmap.mmap(-1, _SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(b"x" * _SIZE)
        high = footprint.peak_bytes()
    footprint.reset_peak()
    assert footprint.peak_bytes() < high - 0.5 * _SIZE
