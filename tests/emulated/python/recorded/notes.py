"""What hooks note in the record of this process: kinds of records, names, and where in odc a thread is."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

ACCESS, MAP, RELEASE, ACQUIRE, ADD, REGION = 2, 7, 8, 9, 10, 11  # kinds of records, as in record.h
THREAD, STREAM, PROCESS, PLAIN, SITE = 12, 13, 14, 15, 16
READ, WRITE, ATOMIC = 0, 1, 2
WORD, LOCK, OBJECT, MESSAGE = 0, 1, 2, 3  # kinds of keys: a word's or a lock's address; a number of this process; any's
DROPPED = 0  # in place of an object's number: the references of a job, as Key.OBJECT of tests/support/ordered says

_QUIET_FILES = ("/odc/memory/", "/odc/protocol/wait.py", "/odc/protocol/check.py", "/odc/worker.py", "/odc/trace/")
_numbers = itertools.count(1)
_cuda: Any = None


def open_record(cuda: ctypes.CDLL) -> None:
    """Before any other call here: where notes go."""
    global _cuda
    _cuda = cuda
    cuda.emulated_note.argtypes = [ctypes.c_uint, *[ctypes.c_uint64] * 4]
    cuda.emulated_name.restype = ctypes.c_uint64
    cuda.emulated_accessed.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint64]
    cuda.emulated_stream_number.argtypes = [ctypes.c_void_p, ctypes.c_int]


def library() -> Any:
    """The emulated CUDA that records; None in a process that does not."""
    return _cuda


def note(kind: int, a: int, b: int = 0, c: int = 0, d: int = 0) -> None:
    _cuda.emulated_note(kind, a, b & (1 << 64) - 1, c & (1 << 64) - 1, d)


@functools.cache
def _name(process: int, text: str) -> int:
    return int(_cuda.emulated_name(text.encode()))


def name(text: str) -> int:
    return _name(os.getpid(), text)


@functools.cache
def _is_of_odc(file: str) -> bool:
    return "/odc/" in file and not any(part in file for part in _QUIET_FILES)


def site() -> int:
    """Where in odc the calling thread is: the innermost line outside of its words, locks and waits."""
    frame: Any = sys._getframe(1)
    while frame is not None and not _is_of_odc(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return 0
    file = frame.f_code.co_filename
    return name(f"{file[file.rindex('/odc/') + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}")


def wrapped(owner: Any, method: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, method, functools.wraps(getattr(owner, method))(around(getattr(owner, method))))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    _cuda.emulated_quiet(1)
    try:
        yield
    finally:
        _cuda.emulated_quiet(-1)


def number(thing: Any, attribute: str = "recorded") -> int:
    found = vars(thing).get(attribute)
    if found is None:
        found = vars(thing)[attribute] = next(_numbers)
    return int(found)


def agreed(text: str) -> int:
    """The number of a MESSAGE that several processes know by a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big")


def touched(memory: memoryview, mode: int) -> None:
    """The calling thread reads or writes host memory now."""
    if memory.nbytes:
        note(SITE, site())
        note(ACCESS, 0, np.frombuffer(memory, np.uint8).ctypes.data, memory.nbytes, mode)
