"""Lazy microbatches: what is prepared when, what is held, and how errors travel."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import up_to

from odc.errors import WaitTimeoutError
from odc.microbatch import LazyMicrobatches, input_figures
from odc.trace import recorder
from odc.worker import Job


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    recorder().clear()
    yield
    recorder().clear()


class Watched:
    """A source and its `prepare`, which count."""

    def __init__(self, count: int) -> None:
        self.count, self.pulled, self.prepared = count, 0, 0
        self.threads: set[int] = set()

    def __iter__(self) -> Iterator[int]:
        for i in range(self.count):
            self.pulled += 1
            yield i

    def prepare(self, i: int) -> dict[str, torch.Tensor]:
        self.threads.add(threading.get_ident())
        self.prepared += 1
        return {"x": torch.full((i + 1,), float(i))}


def await_rest(lazy: LazyMicrobatches[Any]) -> None:
    """Return when the thread has nothing more to do."""
    assert lazy._worker is not None
    lazy._worker.submit(last := Job(lambda: None))
    assert last.over(60.0)


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("prefetch", [0, 1, 3, None])
def test_all_come_in_order(prefetch: int | None, background: bool) -> None:
    watched = Watched(7)
    lazy = LazyMicrobatches(watched, watched.prepare, prefetch=prefetch, background=background)
    assert [int(item["x"][0]) for item in lazy] == list(range(7))
    assert list(lazy) == []
    elsewhere = watched.threads - {threading.get_ident()}
    assert bool(elsewhere) == (background and bool(prefetch))


@pytest.mark.parametrize("prefetch", [1, 3])
def test_the_thread_prepares_so_many_ahead_and_no_more(prefetch: int) -> None:
    watched = Watched(20)
    with LazyMicrobatches(watched, watched.prepare, prefetch=prefetch) as lazy:
        for used in range(4):
            await_rest(lazy)
            assert watched.prepared == watched.pulled == prefetch + used
            next(lazy)
        await_rest(lazy)
    assert watched.pulled == prefetch + 4, "close pulls no more"


def test_close_lets_go_of_what_was_prepared() -> None:
    class Item:
        pass

    prepared: list[weakref.ref[Item]] = []

    def prepare(_: int) -> Item:
        item = Item()
        prepared.append(weakref.ref(item))
        return item

    lazy = LazyMicrobatches(range(9), prepare, prefetch=3)
    await_rest(lazy)
    assert len(prepared) == 3 and all(item() for item in prepared)
    lazy.close()
    assert [item() for item in prepared] == [None] * 3


def test_on_the_callers_thread_the_next_is_ready_too() -> None:
    watched = Watched(5)
    lazy = LazyMicrobatches(watched, watched.prepare, prefetch=2, background=False)
    assert watched.prepared == 0
    next(lazy)
    assert watched.prepared == 3
    lazy.close()
    assert list(lazy) == []
    assert watched.prepared == 3


@pytest.mark.parametrize("prefetch", [0, 1, None])
@pytest.mark.parametrize("where", ["source", "prepare"])
def test_an_error_comes_where_its_microbatch_would_have(where: str, prefetch: int | None) -> None:
    def source() -> Iterator[int]:
        for i in range(5):
            if where == "source" and i == 2:
                raise KeyError("no third one")
            yield i

    def prepare(i: int) -> int:
        if where == "prepare" and i == 2:
            raise KeyError("no third one")
        return i

    lazy = LazyMicrobatches(source(), prepare, prefetch=prefetch)
    assert [next(lazy), next(lazy)] == [0, 1]
    with pytest.raises(KeyError, match="no third one"):
        next(lazy)
    assert list(lazy) == []


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_preparation_that_runs_out_of_something_is_not_the_end(prefetch: int) -> None:
    """As of `next(more)` in it: the loop would end without an error, and the rank would train on less."""
    more = iter([10])
    lazy = LazyMicrobatches(range(3), lambda i: i + next(more), prefetch=prefetch)
    assert next(lazy) == 10
    with pytest.raises(RuntimeError, match="microbatch 1: `prepare` or `born` raised StopIteration"):
        next(lazy)


def test_the_thread_prepares_on_the_device_of_the_one_that_made_it(monkeypatch: pytest.MonkeyPatch) -> None:
    current = threading.local()  # CUDA's current device is a thread's own, and 0 at first
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "device", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "device", device))
    torch.cuda.set_device(3)
    lazy = LazyMicrobatches(range(2), lambda i: (torch.cuda.current_device(), threading.get_ident()))
    assert all(device == 3 and thread != threading.get_ident() for device, thread in lazy)


def test_a_source_that_gives_nothing_is_named_at_the_deadline() -> None:
    stuck = threading.Event()

    def source() -> Iterator[int]:
        stuck.wait(60.0)
        yield 0

    lazy = LazyMicrobatches(source(), lambda i: i, timeout_s=0.05)
    with pytest.raises(WaitTimeoutError, match=r"waited 0.05 s for its own input thread to prepare microbatch 0"):
        next(lazy)
    stuck.set()
    lazy.close()


@pytest.mark.parametrize("wrong", [-1, 1.5, True])
def test_a_prefetch_that_cannot_be(wrong: object) -> None:
    with pytest.raises(ValueError, match="prefetch"):
        LazyMicrobatches([], lambda i: i, prefetch=wrong)  # type: ignore[arg-type]


@settings(max_examples=up_to(30))
@given(st.lists(st.integers(0, 50), max_size=12), st.sampled_from([0, 1, 2, None]), st.booleans())
def test_memory_is_what_was_held_at_once(sizes: list[int], prefetch: int | None, background: bool) -> None:
    recorder().clear()

    def prepare(size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        return torch.zeros(size, dtype=torch.uint8), [torch.zeros(1, dtype=torch.uint8)]

    lazy = LazyMicrobatches(sizes, prepare, prefetch=prefetch, background=background)
    for _ in lazy:
        pass
    figures = input_figures(recorder().spans())
    bytes_of = [size + 1 for size in sizes]
    assert figures.microbatches == len(sizes)
    held = len(sizes) if prefetch is None else min(len(sizes), prefetch + 1)
    assert figures.most_held <= held
    most = max((sum(bytes_of[i : i + held]) for i in range(len(sizes))), default=0)
    assert max(bytes_of, default=0) <= figures.peak_bytes <= most
    if prefetch is None or not background:
        assert (figures.most_held, figures.peak_bytes) == (held, most)


def test_ages_count_from_when_a_sample_was_made() -> None:
    made = time.monotonic() - 100.0
    lazy = LazyMicrobatches([0, 1], lambda i: i, prefetch=1, born=lambda i: made - 10.0 * i)
    assert list(lazy) == [0, 1]
    figures = input_figures(recorder().spans())
    assert 100 <= figures.mean_age_s - 5 <= 160
    assert 110 <= figures.max_age_s <= 170


def test_eager_inputs_are_older_and_take_more_memory_than_lazy_ones() -> None:
    def run(prefetch: int | None) -> tuple[int, float]:
        recorder().clear()
        for _ in LazyMicrobatches(range(8), lambda i: torch.zeros(1000), prefetch=prefetch, background=False):
            time.sleep(0.005)
        figures = input_figures(recorder().spans())
        return figures.peak_bytes, figures.max_age_s

    eager_bytes, eager_age = run(None)
    lazy_bytes, lazy_age = run(1)
    assert eager_bytes == 8 * 4000 and lazy_bytes == 2 * 4000
    assert eager_age > 7 * 0.005
    for _ in range(100):  # a busy machine may hold up some of them
        if lazy_age < eager_age:
            return
        lazy_age = run(1)[1]
    pytest.fail(f"lazy inputs are {lazy_age} s old, eager ones {eager_age} s")


def test_waiting_and_preparing_are_in_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Semaphore(0)

    class Watched(Job[Any]):
        def over(self, within_s: float = 0.0) -> bool:
            asked.release()
            return super().over(within_s)

    def slow(i: int) -> int:
        asked.acquire()  # so that all of the preparation is waited for, however late this thread asks
        time.sleep(0.02)
        return i

    monkeypatch.setattr("odc.microbatch.lazy.Job", Watched)
    assert list(LazyMicrobatches([1, 2], slow, prefetch=1)) == [1, 2]
    figures = input_figures(recorder().spans())
    assert figures.prepare_s >= 0.04
    assert figures.waited_s >= 0.04
    assert input_figures([]).microbatches == 0


@pytest.mark.parametrize(("prefetch", "background"), [(1, True), (3, True), (1, False), (None, False), (None, True)])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_the_last_one_is_known_to_be_the_last(prefetch: int | None, background: bool, count: int) -> None:
    watched = Watched(count)

    def ends_late() -> Iterator[int]:
        yield from watched
        time.sleep(0.05)

    with LazyMicrobatches(ends_late(), watched.prepare, prefetch=prefetch, background=background) as microbatches:
        i = -1
        for i, _ in enumerate(microbatches):
            assert microbatches.last == (i == count - 1)
        assert i == count - 1


def test_whether_one_is_the_last_is_known_before_the_next_is_prepared() -> None:
    known, prepared = threading.Event(), []

    def prepare(i: int) -> int:
        prepared.append(i == 0 or known.wait(60.0))
        return i

    with LazyMicrobatches(range(2), prepare, timeout_s=120.0) as lazy:
        next(lazy)
        assert not lazy.last
        known.set()
        assert list(lazy) == [1] and prepared == [True, True]


def test_a_pull_that_does_not_end_is_named() -> None:
    goes_on = threading.Event()

    def stalls() -> Iterator[int]:
        yield 0
        goes_on.wait(60.0)

    with LazyMicrobatches(stalls(), lambda i: i, timeout_s=0.3) as lazy:
        next(lazy)
        try:
            with pytest.raises(WaitTimeoutError, match=r"waited 0.3 s for its own input thread to pull microbatch 1"):
                _ = lazy.last
        finally:
            goes_on.set()


def test_what_may_be_followed_by_another_is_not_the_last() -> None:
    watched = Watched(2)
    lazy = LazyMicrobatches(watched, watched.prepare, prefetch=0)
    assert [lazy.last for _ in lazy] == [False, False], "nothing is pulled before it is asked for"

    def breaks() -> Iterator[int]:
        yield 0
        raise OSError("no more data")

    broken = LazyMicrobatches(breaks(), watched.prepare, background=False)
    next(broken)
    assert not broken.last
    with pytest.raises(OSError, match="no more data"):
        next(broken)


@pytest.mark.parametrize("prefetch", [1, None])
@pytest.mark.parametrize("background", [True, False])
def test_prepare_has_the_modes_of_the_thread_that_made_it(prefetch: int | None, background: bool) -> None:
    linear, options = torch.nn.Linear(2, 2), {"prefetch": prefetch, "background": background}
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        lazy = LazyMicrobatches(range(2), lambda _: (linear(torch.ones(1, 2, device="cpu")), torch.ones(1)), **options)
        for computed, made in lazy:
            assert computed.dtype == torch.bfloat16 and not computed.requires_grad and made.is_meta
    for computed, made in LazyMicrobatches(range(2), lambda _: (linear(torch.ones(1, 2)), torch.ones(1))):
        assert computed.dtype == torch.float32 and computed.requires_grad and not made.is_meta


def test_the_thread_casts_the_weights_of_the_moment() -> None:
    """Autocast's cache would keep those of the first microbatch."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        lazy = LazyMicrobatches([torch.ones(1, 1)] * 2, model)
    await_rest(lazy)
    torch.nn.init.constant_(model.weight, 2.0)
    assert [float(out.detach()) for out in lazy] == [1.0, 2.0]
