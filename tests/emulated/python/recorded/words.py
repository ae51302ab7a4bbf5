"""Words, locks and mappings of shared memory. What `Settings(check_protocol=True)` loads to check orders nothing."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from recorded.notes import ACQUIRE, ADD, LOCK, MAP, PLAIN, RELEASE, WORD, note, quiet, site, wrapped

_ACQUIRES, _RELEASES = {2, 4, 5}, {3, 4, 5}  # of __ATOMIC_*


class _Atomic:
    """A function of libatomic that notes each call: loads after they are done, stores before."""

    def __init__(self, function: Any, kind: str) -> None:
        vars(self).update(_function=function, _kind=kind)

    def __setattr__(self, key: str, value: object) -> None:
        setattr(self._function, key, value)

    def __call__(self, where: int, *rest: int) -> Any:
        order = rest[-1]
        if self._kind == "store":
            note(RELEASE if order in _RELEASES else PLAIN, where, rest[0], WORD, site())
            return self._function(where, *rest)
        value = self._function(where, *rest)
        if self._kind == "load" and order in _ACQUIRES:
            note(ACQUIRE, where, value, WORD, site())
        if self._kind == "add" and order in _ACQUIRES & _RELEASES:
            note(ADD, where, value + rest[0], value, site())
        return value


class _Library:
    def __init__(self, library: Any) -> None:
        self._library = library

    def __getitem__(self, item: str) -> Any:
        kind = {"__atomic_load_8": "load", "__atomic_store_8": "store", "__atomic_fetch_add_8": "add"}.get(item)
        return self._library[item] if kind is None else _Atomic(self._library[item], kind)


class _Ctypes:
    """`ctypes` as `odc.memory.atomics` sees it."""

    def __getattr__(self, item: str) -> Any:
        return getattr(ctypes, item)

    def PyDLL(self, library: str) -> Any:
        return _Library(ctypes.PyDLL(library))


def atomics(module: ModuleType) -> None:
    """What `Words` load, store and add; by the orders that they ask for."""
    vars(module)["ctypes"] = _Ctypes()
    module.default_atomics.cache_clear()


def mutex(module: ModuleType) -> None:
    """Robust mutexes."""

    def acquire(real: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any, *given: Any) -> None:
            real(self, *given)
            note(ACQUIRE, self._address, 0, LOCK, site())

        return run

    def release(real: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any) -> None:
            note(RELEASE, self._address, 0, LOCK, site())
            real(self)

        return run

    wrapped(module.RobustMutex, "acquire", acquire)
    wrapped(module.RobustMutex, "release", release)


def mapping(module: ModuleType) -> None:
    """Which file lies at which addresses."""

    def init(real: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any, fd: int, nbytes: int, **rest: Any) -> None:
            real(self, fd, nbytes, **rest)
            note(MAP, self.address, nbytes, os.fstat(fd).st_ino, 0)

        return run

    wrapped(module.Mapping, "__init__", init)


def check(module: ModuleType) -> None:
    """Nothing that the checks of the protocol load is noted."""

    def unseen(real: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            with quiet():
                return real(*args, **named)

        return run

    for method in ("awaited", "stored"):
        wrapped(module.ProtocolChecks, method, unseen)

    def init(real: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any, inner: Any, check: Callable[[int, int, int], None]) -> None:
            real(self, inner, unseen(check))

        return run

    wrapped(module.CheckedWords, "__init__", init)
