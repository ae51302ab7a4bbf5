from __future__ import annotations

import ctypes
import gc
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.atomics import WORD, backends

from odc.memory import Atomics, Words


class Memory(ctypes.Array):
    """Eight words that can be weakly referenced."""

    _type_ = ctypes.c_int64
    _length_ = 8


def words_of(memory: Memory, count: int = 8, atomics: Atomics | None = None) -> Words:
    return Words(ctypes.addressof(memory), count, memory, atomics)


@pytest.mark.parametrize("atomics", [None, *backends()], ids=lambda atomics: getattr(atomics, "name", "default"))
@given(values=st.lists(WORD, min_size=8, max_size=8))
def test_words_are_apart(atomics: Atomics | None, values: list[int]) -> None:
    words = words_of(Memory(), atomics=atomics)
    for i, value in enumerate(values):
        words.store(i, value)
    assert [words.load(i) for i in range(len(words))] == values == words.as_tensor().tolist()


def test_an_index_out_of_bounds_touches_nothing() -> None:
    memory = Memory()
    words = words_of(memory, count=4)
    for i in (-1, 4, 1 << 40):
        for use in (
            lambda i=i: words.load(i),
            lambda i=i: words.store(i, 1),
            lambda i=i: words.add(i, 1),
            lambda i=i: words.loading(i),
            lambda i=i: words.storing(i),
        ):
            with pytest.raises(IndexError, match=f"word {i} of 4"):
                use()
    assert list(memory) == [0] * 8


@pytest.mark.parametrize("value", [1 << 63, -(1 << 63) - 1])
def test_a_value_that_does_not_fit_is_refused(value: int) -> None:
    words = words_of(Memory())
    for use in (lambda: words.store(0, value), lambda: words.add(0, value)):
        with pytest.raises(OverflowError, match="signed 64-bit"):
            use()
    assert words.load(0) == 0


def test_addresses_and_counts_are_checked() -> None:
    memory = Memory()
    for address, count in ((ctypes.addressof(memory) + 4, 1), (0, 1), (ctypes.addressof(memory), -1)):
        with pytest.raises(ValueError, match="words"):
            Words(address, count, memory)


def test_a_tensor_is_the_same_memory_and_keeps_it() -> None:
    memory = Memory()
    gone = weakref.ref(memory)
    words = words_of(memory)
    tensor = words.as_tensor()
    tensor[2] = 7
    assert words.load(2) == 7
    words.store(1, -1)
    assert tensor.tolist() == [0, -1, 7, 0, 0, 0, 0, 0]
    assert tensor.dtype == torch.int64
    del memory, words
    gc.collect()
    assert gone() is not None
    del tensor
    gc.collect()
    assert gone() is None


def test_what_loads_and_stores_one_word_keeps_its_memory() -> None:
    memory = Memory()
    gone = weakref.ref(memory)
    words = words_of(memory)
    load, store = words.loading(2), words.storing(2)
    store(-7)
    assert load() == words.load(2) == -7
    assert sum(memory) == -7, "no other word was touched"
    del memory, words, store
    gc.collect()
    assert gone() is not None and load() == -7
    del load
    gc.collect()
    assert gone() is None


def test_a_subclass_sees_every_store() -> None:
    class Watched(Words):
        __slots__ = ("seen",)

        def store(self, i: int, value: int) -> None:
            self.seen.append((i, value))
            super().store(i, value)

    memory = Memory()
    words = Watched(ctypes.addressof(memory), 8, memory)
    words.seen = []
    words.storing(3)(5)
    assert words.seen == [(3, 5)] and memory[3] == 5


def test_no_words() -> None:
    words = words_of(Memory(), count=0)
    assert len(words) == 0
    assert words.as_tensor().shape == (0,)


@pytest.mark.parametrize("machine", ["this", "one without futexes"])
def test_a_sleeper_is_woken_by_the_store_that_it_waits_for(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if machine != "this":
        monkeypatch.setattr("odc.memory.words._futex", lambda: None)
    words = words_of(Memory())
    asleep, woken = threading.Event(), threading.Event()

    def sleep() -> None:
        while words.load(2) < 5:
            asleep.set()
            words.wait_at_least(2, 5, 3600.0)
        woken.set()

    sleeper = threading.Thread(target=sleep, daemon=True)
    sleeper.start()
    asleep.wait(60.0)
    for value in (4, 5):
        words.store(2, value)
        words.wake(2)
    assert woken.wait(60.0)  # before the sleep ends by itself
    sleeper.join()


def test_a_sleep_ends_by_itself_and_none_begins_where_the_word_is_there() -> None:
    words = words_of(Memory())
    words.wait_at_least(0, 1, 0.01)
    words.store(0, 7)
    words.wait_at_least(0, 7, 3600.0)
