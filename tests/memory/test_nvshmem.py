"""What can be tried of NVSHMEM's start without a GPU: sizes, the id's way through the store, kernels to initialise.

The fakes stand for NVSHMEM and triton's compiler; what is tested is what we do with them.
"""

from __future__ import annotations

import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from odc.errors import HeapMemoryError, UnsupportedError, WaitTimeoutError
from odc.memory import Attachment, HostLanes, ShmHeap, nvshmem
from odc.net import JobStore


def library() -> Any:
    """nvshmem4py's unique ids: a record of a version and 124 bytes."""
    layout = np.dtype([("version", "<i4"), ("internal", "i1", (124,))])

    def get_unique_id(empty: bool = False) -> Any:
        data = np.zeros(1, layout)
        if not empty:
            data["version"], data["internal"] = 7, np.arange(124) - 60
        return SimpleNamespace(_data=data)

    return SimpleNamespace(get_unique_id=get_unique_id)


@given(st.lists(st.integers(1, 1 << 36), max_size=5))
def test_every_heap_fits_into_what_is_reserved(heaps: list[int]) -> None:
    needed = nvshmem.needed_bytes(heaps)
    at = 0
    for nbytes in heaps:  # one after the other, each on a large page
        at = -(-at // (2 << 20)) * (2 << 20) + nbytes
    assert at + (64 << 20) <= needed <= sum(heaps) + len(heaps) * (2 << 20) + (64 << 20)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1073741824", 1 << 30),
        ("1G", 1 << 30),
        ("1.5g", 3 << 29),
        ("512MB", 512 << 20),
        ("2GiB", 2 << 30),
        ("64K", 65536),
    ],
)
def test_sizes_of_the_environment(text: str, size: int) -> None:
    assert nvshmem.bytes_of(text) == size


def test_what_is_needed_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVSHMEM_SYMMETRIC_SIZE", raising=False)
    nvshmem.reserve(12345, 0)
    assert os.environ["NVSHMEM_SYMMETRIC_SIZE"] == "12345"
    monkeypatch.setenv("NVSHMEM_SYMMETRIC_SIZE", "1G")
    nvshmem.reserve(1 << 30, 0)
    assert os.environ["NVSHMEM_SYMMETRIC_SIZE"] == "1G", "more than is needed stays"
    with pytest.raises(HeapMemoryError, match=r"rank 3: .*NVSHMEM_SYMMETRIC_SIZE=1G.* need 1073741825 bytes; unset it"):
        nvshmem.reserve((1 << 30) + 1, 3)


def test_the_id_reaches_every_rank() -> None:
    store, found = dist.HashStore(), {}

    def take(rank: int) -> None:
        found[rank] = nvshmem.exchange_id(library(), JobStore(store, 60.0), rank)._data.tobytes()

    threads = [threading.Thread(target=take, args=(rank,)) for rank in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert found.keys() == {0, 1, 2}
    assert set(found.values()) == {library().get_unique_id()._data.tobytes()}


def test_a_rank_0_that_never_comes_is_named() -> None:
    with pytest.raises(WaitTimeoutError, match=r"rank 1, waiting for rank 0 to start NVSHMEM.*0\.05 s") as failure:
        nvshmem.exchange_id(library(), JobStore(dist.HashStore(), 0.05), 1)
    assert failure.value.culprit == 0


def test_without_it_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvshmem", None)
    with pytest.raises(UnsupportedError, match=r"odc-fsdp\[nvshmem\]"):
        nvshmem.start(JobStore(dist.HashStore(), 1.0), 0, 1, torch.device("cpu"), 1)


class Kernel:
    """A compiled kernel, which is loaded when `run` is asked for."""

    def __init__(self) -> None:
        self.module: int | None = None

    @property
    def run(self) -> None:
        self.module = 0xC0DE


def test_kernels_that_link_nvshmem_are_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    initialised, asked_before = [], []
    bindings = SimpleNamespace(cumodule_init=initialised.append)
    monkeypatch.setitem(sys.modules, "nvshmem", SimpleNamespace(bindings=bindings))
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **message: asked_before.append(message["key"])
    )
    nvshmem.initialize_kernels()
    nvshmem.initialize_kernels()
    hook = triton.knobs.runtime.jit_post_compile_hook

    def compiled(key: str, libraries: Any, warmup: bool = False) -> None:
        function = SimpleNamespace(device_caches={0: ({key: Kernel()},)})
        fn = SimpleNamespace(jit_function=function)
        hook(key=key, fn=fn, compile={"device": 0, "extern_libs": libraries}, is_manual_warmup=warmup)

    compiled("plain", {})
    compiled("libdevice", (("libdevice", "/x/libdevice.10.bc"),))
    compiled("warm", {"libnvshmem_device": "/x"}, warmup=True)
    assert initialised == []
    compiled("linked", (("libnvshmem_device", "/x/libnvshmem_device.bc"),))
    assert initialised == [0xC0DE], "once, although it was asked for twice"
    assert asked_before == ["plain", "libdevice", "warm", "linked"], "who was there first is still asked"


def no_peer(member: int) -> Attachment:
    raise AssertionError("no peer is asked for anything")


def test_a_heap_of_other_ranks_than_nvshmems_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def heap() -> nvshmem.NvshmemHeap:
        host = ShmHeap("h", (0, 2), 0, no_peer, 1.0)
        return nvshmem.NvshmemHeap(host, torch.device("cpu"), HostLanes(), None, lambda: None)  # type: ignore[arg-type]

    with pytest.raises(UnsupportedError, match="not started"):
        heap().seal()
    monkeypatch.setattr(nvshmem, "_started", (0, 3))
    with pytest.raises(
        UnsupportedError, match=r"all 3 ranks of the job, in their order, but this heap belongs to ranks \(0, 2\)"
    ):
        heap().seal()
