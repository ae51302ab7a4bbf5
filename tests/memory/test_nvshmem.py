"""NVSHMEM without a device: what its environment is given, its host calls, the places in its slab, its kernels.

The fakes stand for NVSHMEM's Python package and triton's compiler. The real package runs in tests/gpu/test_nvshmem.py.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odc.errors import HeapMemoryError, UnsupportedError
from odc.memory import nvshmem

MIB, GIB = 1 << 20, 1 << 30
GRANULARITY, MOST = "NVSHMEM_CUMEM_GRANULARITY", "NVSHMEM_MAX_MEMORY_PER_GPU"
STATIC, STATIC_BYTES = "NVSHMEM_DISABLE_CUDA_VMM", "NVSHMEM_SYMMETRIC_SIZE"
INTERFACE = "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"


# the environment -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [("1073741824", GIB), ("1G", GIB), ("1.5g", 3 << 29), ("512MB", 512 * MIB), ("2GiB", 2 * GIB), ("64K", 65536)],
)
def test_sizes_of_the_environment(text: str, size: int) -> None:
    assert nvshmem.bytes_of(text) == size


@given(st.integers(1, 1 << 38))
def test_little_memory_is_lost_to_the_step_of_the_heap(nbytes: int) -> None:
    environment: dict[str, str] = {}
    nvshmem.set_environment(nbytes, None, 0, environment)
    step = int(environment[GRANULARITY])
    assert step & (step - 1) == 0 and 2 * MIB <= step <= 512 * MIB, "a power of two, whole large pages"
    assert step <= max(2 * MIB, nbytes / 32), "of a heap's last step almost all may be lost"
    assert STATIC_BYTES not in environment, "it counts without CUDA's virtual memory alone"
    assert (MOST in environment) == (nbytes + 64 * MIB + step > 124 * GIB), "beyond what NVSHMEM has addresses for"
    assert int(environment.get(MOST, 124 * GIB)) >= nbytes + step


def test_what_the_environment_sets_stays() -> None:
    environment = {GRANULARITY: "512M", INTERFACE: "ib0"}
    nvshmem.set_environment(100 * MIB, "eth0", 0, environment)
    assert environment == {GRANULARITY: "512M", INTERFACE: "ib0"}
    del environment[INTERFACE]
    nvshmem.set_environment(100 * MIB, "eth0", 0, environment)
    assert environment[INTERFACE] == "eth0"


def test_a_symmetric_size_counts_without_virtual_memory_only() -> None:
    environment = {STATIC_BYTES: "1M"}
    nvshmem.set_environment(GIB, None, 0, environment)
    assert environment[STATIC_BYTES] == "1M", "correct, as it is not read"
    environment[STATIC] = "1"
    with pytest.raises(HeapMemoryError, match=r"rank 3: the environment sets NVSHMEM_SYMMETRIC_SIZE=1M.*; unset it"):
        nvshmem.set_environment(GIB, None, 3, environment)
    del environment[STATIC_BYTES]
    nvshmem.set_environment(GIB, None, 0, environment)
    assert int(environment[STATIC_BYTES]) == GIB + 64 * MIB


def test_too_few_addresses_are_refused() -> None:
    with pytest.raises(HeapMemoryError, match=r"rank 1: the environment sets NVSHMEM_MAX_MEMORY_PER_GPU=1G"):
        nvshmem.set_environment(GIB, None, 1, {MOST: "1G"})


def test_without_it_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvshmem", None)
    with pytest.raises(UnsupportedError, match=r"odc-fsdp\[nvshmem\]"):
        nvshmem.make_id()


# the library ---------------------------------------------------------------------------------------------------------


class FakePackage:
    """nvshmem4py as far as it is called: notes the calls, and whether two were in progress at a time."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.overlapped, self._inside = False, 0
        self.fails = False
        self._ids: list[Any] = []

    def _call(self, *call: Any) -> None:
        self.overlapped |= self._inside > 0
        self._inside += 1
        time.sleep(0.002)  # gives Python's lock back
        self.calls.append(call)
        self._inside -= 1

    def get_unique_id(self, empty: bool = False) -> Any:
        memory = (ctypes.c_char * 128)(*([] if empty else [b"u"] * 128))
        self._ids.append(memory)
        return SimpleNamespace(ptr=ctypes.addressof(memory))

    def init(self, device: Any, uid: Any, rank: int, nranks: int, initializer_method: str) -> None:
        self._call("init", ctypes.string_at(uid.ptr, 128), rank, nranks, initializer_method)

    def finalize(self) -> None:
        self._call("finalize")

    def malloc(self, nbytes: int) -> int:
        self._call("malloc", nbytes)
        return 0 if self.fails else 1 << 40

    def ptr(self, address: int, rank: int) -> int:
        self._call("ptr", address, rank)
        return address + (rank << 30)

    def getmem_nbi_on_stream(self, *arguments: int) -> None:
        self._call("get", *arguments)

    def quiet_on_stream(self, stream: int) -> None:
        self._call("quiet", stream)

    def cumodule_init(self, module: int) -> None:
        self._call("cumodule_init", module)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> FakePackage:
    fake = FakePackage()
    cuda = ModuleType("cuda")
    core = SimpleNamespace(Device=lambda index: SimpleNamespace(set_current=lambda: None))
    for name, module in {
        "nvshmem": SimpleNamespace(core=fake, bindings=fake),
        "nvshmem.core": fake,
        "nvshmem.bindings": fake,
        "cuda": cuda,
        "cuda.core": core,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(nvshmem, "_started", None)
    return fake


def started(nbytes: int = 4096) -> nvshmem.Library:
    return nvshmem.Library(nvshmem.make_id(), 1, 3, torch.device("cuda", 0), nbytes)


def test_it_starts_with_the_id_of_another_rank_and_allocates_once(package: FakePackage) -> None:
    library = started()
    assert package.calls == [("init", b"u" * 128, 1, 3, "uid"), ("malloc", 4096)]
    assert (library.base, nvshmem.started()) == (1 << 40, library)
    library.finalize()
    assert package.calls[-1] == ("finalize",) and nvshmem.started() is None


def test_an_allocation_that_fails_is_an_error(package: FakePackage) -> None:
    package.fails = True
    with pytest.raises(HeapMemoryError, match="rank 1: .* has not allocated 4096 bytes"):
        started()
    assert nvshmem.started() is None


def test_a_read_is_a_get_and_a_quiet_on_the_same_stream(package: FakePackage) -> None:
    library = started()
    into: Any = SimpleNamespace(data_ptr=lambda: (1 << 40) + 512, numel=lambda: 100)
    library.get(into, 1024, 2)
    assert package.calls[-2:] == [("get", (1 << 40) + 512, (1 << 40) + 1024, 100, 2, 77), ("quiet", 77)]


@pytest.mark.parametrize(
    ("start", "nbytes", "inside"), [(0, 4096, True), (4096, 0, True), (1, 4096, False), (-1, 1, False)]
)
def test_what_lies_in_the_slab(package: FakePackage, start: int, nbytes: int, inside: bool) -> None:
    memory: Any = SimpleNamespace(data_ptr=lambda: (1 << 40) + start, numel=lambda: nbytes)
    assert started().holds(memory) is inside


def test_host_calls_go_one_at_a_time(package: FakePackage) -> None:
    """Whatever the threads: the library allows no more."""
    library = started()
    into: Any = SimpleNamespace(data_ptr=lambda: 1 << 40, numel=lambda: 1)

    def calls(number: int) -> None:
        for _ in range(5):
            library.get(into, 0, 2)
            library.pointer(1 << 40, number)

    threads = [threading.Thread(target=calls, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not package.overlapped
    library.finalize()


# places in the slab --------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 9 * MIB), st.sets(st.integers(0, 5), min_size=1, max_size=4)), max_size=12),
    st.integers(2, 40).map(lambda pages: pages * 2 * MIB),
)
def test_heaps_of_a_rank_never_overlap_and_are_refused_only_without_room(
    asked: list[tuple[int, set[int]]], room: int
) -> None:
    placed: list[nvshmem.SlabPiece] = []
    for nbytes, ranks in asked:
        piece = nvshmem.place_piece(placed, nbytes, tuple(sorted(ranks)), room)
        near = [one for one in placed if not ranks.isdisjoint(one.ranks)]
        size = -(-nbytes // (2 * MIB)) * 2 * MIB
        free = [
            at
            for at in range(0, room - size + 1, 2 * MIB)
            if all(at + size <= one.offset or one.offset + one.nbytes <= at for one in near)
        ]
        assert (piece.offset if piece else None) == (free[0] if free else None)
        placed += [piece] if piece else []


# kernels -------------------------------------------------------------------------------------------------------------


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
