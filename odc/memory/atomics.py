"""Atomic 64-bit operations on plain addresses: where they come from on this machine.

They are gcc's libatomic, called through `ctypes.PyDLL`: the GIL stays held, because handing it over would cost more
than the operation. Slim images may lack `libatomic.so.1`; x86-64 does without as long as no atomic add is needed.
"""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from odc.errors import UnsupportedError

_ACQUIRE, _RELEASE, _ACQ_REL, _SEQ_CST = 2, 3, 4, 5  # __ATOMIC_* of gcc and clang, part of libatomic's ABI
_INSTALL = "install libatomic: `apt-get install libatomic1`, `dnf install libatomic` or `apk add libatomic`"


@dataclass(frozen=True)
class Atomics:
    """Operations on an 8-byte aligned address that holds a signed 64-bit word.

    `load` acquires, `store` releases, `add` (which returns the previous value) does both. `fence` orders all accesses
    before it, of any kind or size, before all accesses after it.
    """

    name: str
    load: Callable[[int], int]
    store: Callable[[int, int], None]
    add: Callable[[int, int], int]
    fence: Callable[[], None]


def libatomic(library: str = "libatomic.so.1") -> Atomics:
    """The atomics of gcc's runtime. Raises OSError or AttributeError where they cannot be loaded."""
    loaded = ctypes.PyDLL(library)
    word, address, order = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
    raw_load = loaded["__atomic_load_8"]
    raw_load.argtypes, raw_load.restype = [address, order], word
    raw_store = loaded["__atomic_store_8"]
    raw_store.argtypes, raw_store.restype = [address, word, order], None
    raw_add = loaded["__atomic_fetch_add_8"]
    raw_add.argtypes, raw_add.restype = [address, word, order], word
    raw_fence = loaded["atomic_thread_fence"]
    raw_fence.argtypes, raw_fence.restype = [order], None
    return Atomics(
        "libatomic",
        lambda where: raw_load(where, _ACQUIRE),
        lambda where, value: raw_store(where, value, _RELEASE),
        lambda where, delta: raw_add(where, delta, _ACQ_REL),
        lambda: raw_fence(_SEQ_CST),
    )


def plain_x86_64() -> Atomics:
    """Plain accesses, which suffice on x86-64 for load and store; `add` is refused.

    x86-64 orders memory as TSO: an aligned 8-byte access is one indivisible move, and each load acquires and each store
    releases without a fence. The compiler cannot reorder either: each access is a call of its own through ctypes. The
    fence takes a lock: its atomic exchange is a full barrier on x86-64, also for the streaming stores of a large copy.
    """
    word = ctypes.c_int64

    def store(where: int, value: int) -> None:
        word.from_address(where).value = value

    def refuse(where: int, delta: int) -> int:
        raise UnsupportedError(f"atomic addition needs libatomic.so.1 on this machine; {_INSTALL}")

    lock = threading.Lock()

    def fence() -> None:
        with lock:
            pass

    return Atomics("plain x86-64", lambda where: word.from_address(where).value, store, refuse, fence)


def choose(library: str = "libatomic.so.1", machine: str | None = None) -> Atomics:
    """Atomics of libatomic, else plain accesses on x86-64. Raises UnsupportedError naming the package to install."""
    machine = machine or platform.machine()
    try:
        return libatomic(library)
    except (OSError, AttributeError) as error:
        if machine.lower() in ("x86_64", "amd64") and ctypes.sizeof(ctypes.c_void_p) == 8:
            return plain_x86_64()
        raise UnsupportedError(f"no atomic operations on {machine}: {error}; {_INSTALL}") from error


def require_add(atomics: Atomics | None = None) -> None:
    """Raise `UnsupportedError`, naming the package to install, where this machine cannot add atomically."""
    word = ctypes.c_int64(0)
    (atomics or default_atomics()).add(ctypes.addressof(word), 1)


default_atomics = cache(choose)  # once for the process, on first use
