"""Batches of copies on the emulated driver: each rule of either ABI is broken once, and odc's copies keep them all."""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from odc.movers import driver

INVALID, NO_CONTEXT, NONE = 1, 201, 2**64 - 1
COUNT, ELEMENTS, NBYTES = 3, 4, 16
IN_STREAM_ORDER, DURING_THE_CALL = 1, 2
SLEEP = 3_000_000_000  # cycles: 3 s


class Batch:
    """Copies of `COUNT` small tensors, asked for by one of the two ABIs: 12 (CUDA 12.8's) or 13."""

    def __init__(self, abi: int) -> None:
        self.abi, self.stream = abi, torch.cuda.Stream()
        self.sources = [torch.full((ELEMENTS,), 1.0 + i, device="cuda") for i in range(COUNT)]
        self.whole = torch.zeros(COUNT, 2 * ELEMENTS, device="cuda")
        self.targets = list(self.whole[:, :ELEMENTS])
        self.to = [target.data_ptr() for target in self.targets]
        self.origin = [source.data_ptr() for source in self.sources]
        self.sizes = [NBYTES] * COUNT
        self.first, self.orders, self.handle = [0], [IN_STREAM_ORDER], self.stream.cuda_stream
        torch.cuda.synchronize()

    def ask(self) -> tuple[int, int]:
        """(CUDA's error, the copy that it is of: `NONE` of none, and always by the ABI of CUDA 13)."""
        function = ctypes.CDLL("libcuda.so.1")["cuMemcpyBatchAsync" if self.abi == 12 else "cuMemcpyBatchAsync_v2"]
        addresses = [_array(ctypes.c_uint64, each) for each in (self.to, self.origin)]
        sizes, first = _array(ctypes.c_size_t, self.sizes), _array(ctypes.c_size_t, self.first)
        attributes = (driver._Attributes * max(1, len(self.orders)))(
            *(driver._Attributes(order=order) for order in self.orders)
        )
        failed = ctypes.c_size_t(77)
        count = ctypes.c_size_t(len(self.to))
        args = [*addresses, sizes, count, attributes, first, ctypes.c_size_t(len(self.first))]
        where = [ctypes.byref(failed)] if self.abi == 12 else []
        code = function(*args, *where, ctypes.c_void_p(self.handle))
        return code, failed.value if where else NONE

    def copied(self) -> list[float]:
        torch.cuda.synchronize()
        return [float(target.sum()) / ELEMENTS for target in self.targets]


def _array(kind: type[ctypes.c_uint64], values: Sequence[int]) -> ctypes.Array[ctypes.c_uint64]:
    return (kind * max(1, len(values)))(*values)


def default_stream(batch: Batch) -> None:
    batch.handle = 0


def legacy_stream(batch: Batch) -> None:
    batch.handle = 1


def copy_of_nothing(batch: Batch) -> None:
    batch.sizes[1] = 0


def no_attributes(batch: Batch) -> None:
    batch.first, batch.orders = [], []


def more_attributes_than_copies(batch: Batch) -> None:
    batch.first, batch.orders = [0, 1, 2, 3], [IN_STREAM_ORDER] * 4


def first_index_is_not_0(batch: Batch) -> None:
    batch.first = [1]


def indices_do_not_increase(batch: Batch) -> None:
    batch.first, batch.orders = [0, 2, 2], [IN_STREAM_ORDER] * 3


def index_beyond_the_last_copy(batch: Batch) -> None:
    batch.first, batch.orders = [0, COUNT], [IN_STREAM_ORDER] * 2


def no_order(batch: Batch) -> None:
    batch.first, batch.orders = [0, 2], [IN_STREAM_ORDER, 0]


def targets_overlap(batch: Batch) -> None:
    batch.to[1] = batch.to[0] + NBYTES - 4


def target_is_a_source(batch: Batch) -> None:
    batch.to[0] = batch.origin[2] - 4


def over_the_end(batch: Batch) -> None:
    batch.sizes[2] = 1 << 40


def no_copies(batch: Batch) -> None:
    batch.to, batch.origin, batch.sizes = [], [], []


BROKEN = {
    default_stream: NONE, legacy_stream: NONE, no_copies: NONE, no_attributes: NONE, more_attributes_than_copies: NONE,
    first_index_is_not_0: NONE, indices_do_not_increase: NONE, index_beyond_the_last_copy: NONE, no_order: 2,
    copy_of_nothing: 1, targets_overlap: 0, target_is_a_source: 0, over_the_end: 2,
}  # fmt: skip


@pytest.mark.parametrize("abi", [12, 13])
@pytest.mark.parametrize("rule", BROKEN, ids=lambda rule: rule.__name__)
def test_a_batch_that_breaks_a_rule_is_refused_whole(abi: int, rule) -> None:
    batch = Batch(abi)
    rule(batch)
    assert batch.ask() == (INVALID, BROKEN[rule] if abi == 12 else NONE)
    assert batch.copied() == [0.0] * COUNT


@pytest.mark.parametrize("abi", [12, 13])
def test_a_batch_that_keeps_them_is_copied_in_its_streams_turn(abi: int) -> None:
    batch = Batch(abi)
    with torch.cuda.stream(batch.stream):
        torch.cuda._sleep(SLEEP)
        for source in batch.sources:
            source.add_(10.0)
    assert batch.ask() == (0, NONE) and not batch.stream.query()
    assert batch.copied() == [11.0, 12.0, 13.0] and float(batch.whole[:, ELEMENTS:].sum()) == 0


def test_each_copy_has_the_attributes_from_the_index_before_it() -> None:
    """Two sources may be read during the call, so before what is queued; the third one not."""
    batch = Batch(13)
    batch.first, batch.orders = [0, 2], [DURING_THE_CALL, IN_STREAM_ORDER]
    with torch.cuda.stream(batch.stream):
        torch.cuda._sleep(SLEEP)
        for source in batch.sources:
            source.add_(10.0)
    assert batch.ask() == (0, NONE) and batch.copied() == [1.0, 2.0, 13.0]


def test_copies_of_a_batch_come_in_any_order() -> None:
    """Seen from the host, which polls pinned memory: the first or the last copy is there before the other."""
    numbers = torch.arange(2, dtype=torch.float32, device="cuda") + 1
    seen = torch.zeros(2, pin_memory=True)
    batch, came_first, deadline = Batch(13), set[int](), time.monotonic() + 100
    batch.sizes = [4, 4]
    batch.origin, batch.to = ([each.data_ptr(), each.data_ptr() + 4] for each in (numbers, seen))
    torch.cuda.synchronize()
    while came_first != {0, 1}:
        assert time.monotonic() < deadline, f"only copy {came_first} ever came first"
        seen.zero_()
        assert batch.ask() == (0, NONE)
        while not batch.stream.query():
            came_first |= {one for one in (0, 1) if bool(seen[one]) and not bool(seen[1 - one])}  # in this order


def test_odc_copies_in_batches_by_all_rules() -> None:
    """The driver refuses none, so none of the copies went alone."""
    sizes = [1, 3, 1000]
    sources = [torch.full((size,), float(size), device="cuda") for size in sizes]
    targets = [torch.zeros_like(source) for source in sources]
    columns = [[each.data_ptr() for each in targets], [each.data_ptr() for each in sources], [4 * n for n in sizes]]
    torch.cuda.synchronize()
    alone = itertools.count()
    with pytest.MonkeyPatch.context() as patch, torch.cuda.stream(torch.cuda.Stream()):
        patch.setattr(driver, "copy", lambda *_: next(alone))
        driver.copy_all(*(np.array(column, dtype=np.int64) for column in columns))
    torch.cuda.synchronize()
    assert all(torch.equal(*pair) for pair in zip(sources, targets, strict=True))
    assert not driver._refused and next(alone) == 0
