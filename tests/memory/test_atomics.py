from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from support.atomics import WORD, backends

from odc.errors import UnsupportedError
from odc.memory import Atomics, choose, default_atomics, libatomic


@pytest.mark.parametrize("atomics", backends(), ids=lambda atomics: atomics.name)
@given(value=WORD)
def test_what_is_stored_is_loaded(atomics: Atomics, value: int) -> None:
    cell = (ctypes.c_int64 * 3)(11, 12, 13)
    middle = ctypes.addressof(cell) + 8
    atomics.store(middle, value)
    assert atomics.load(middle) == value
    assert list(cell) == [11, value, 13]


@given(start=WORD, delta=WORD)
def test_add_returns_the_old_value_and_wraps_around(start: int, delta: int) -> None:
    cell = ctypes.c_int64(start)
    assert libatomic().add(ctypes.addressof(cell), delta) == start
    assert (cell.value - start - delta) % (1 << 64) == 0


def test_libatomic_is_taken_where_it_loads() -> None:
    assert choose().name == "libatomic"
    assert default_atomics() is default_atomics()


def test_x86_64_does_without_libatomic_but_not_for_addition() -> None:
    atomics, cell = choose("libatomic-that-is-not-there.so", "x86_64"), ctypes.c_int64(4)
    assert atomics.name == "plain x86-64"
    with pytest.raises(UnsupportedError, match="apt-get install libatomic1"):
        atomics.add(ctypes.addressof(cell), 1)
    assert cell.value == 4


@pytest.mark.parametrize("machine", ["aarch64", "ppc64le", "i686"])
def test_other_machines_need_libatomic(machine: str) -> None:
    with pytest.raises(UnsupportedError, match=f"no atomic operations on {machine}.*apt-get install libatomic1"):
        choose("libatomic-that-is-not-there.so", machine)


def test_a_library_without_the_symbols_does_not_count() -> None:
    """libc.so.6 loads, and lacks them."""
    assert choose("libc.so.6", "x86_64").name == "plain x86-64"
