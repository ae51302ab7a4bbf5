"""The records of a run: a file for each process, written by the emulated CUDA (tests/emulated/record.h) and its hooks.

All processes read one clock, a store is recorded before it is made and a load after it, so the order of times is one in
which everything may have happened.
"""

from __future__ import annotations

import os
import time
from enum import IntEnum
from pathlib import Path

import numpy as np

RECORD = np.dtype([("time", "u8"), ("kind", "u4"), ("thread", "u4"), *((name, "u8") for name in "abcd")])
_PATIENCE_NS = 50_000_000  # between a record's time and its being whole in the file


class Kind(IntEnum):
    """What a record says; record.h has the fields."""

    TASK = 1
    ACCESS = 2
    DONE = 3
    MARK = 4
    WAIT = 5
    JOIN = 6
    MAP = 7
    RELEASE = 8
    ACQUIRE = 9
    ADD = 10
    REGION = 11
    THREAD = 12
    STREAM = 13
    PROCESS = 14
    PLAIN = 15
    SITE = 16
    BLOCK = 17


class Mode(IntEnum):
    READ = 0
    WRITE = 1
    ATOMIC = 2


class Key(IntEnum):
    """What a release and an acquire agree on."""

    WORD = 0  # an address, and the value
    LOCK = 1  # an address
    OBJECT = 2  # a number of the process; 0: what its workers' jobs refer to, which each has dropped when it is over
    MESSAGE = 3  # a number that two processes have agreed on


class ProcessLog:
    """What one process has recorded, into a file that is named by its namespace of process numbers and its number."""

    def __init__(self, path: Path) -> None:
        self._space, self.pid = map(int, path.stem.split("."))
        self.path, self._taken = path, 0
        self._names: dict[int, str] = {}

    def fresh(self) -> np.ndarray:
        """RECORD [n]: the records since the last call, as far as they are whole."""
        with self.path.open("rb") as file:
            head = np.frombuffer(file.read(RECORD.itemsize), dtype="u8")
            count = int(head[0]) - self._taken if len(head) else 0
            file.seek((1 + self._taken) * RECORD.itemsize)
            found = np.frombuffer(file.read(count * RECORD.itemsize), dtype=RECORD)
        unfinished = np.flatnonzero(found["time"] == 0)
        found = found[: unfinished[0]] if len(unfinished) else found
        self._taken += len(found)
        return found

    @property
    def alive(self) -> bool:
        if self._space == os.stat("/proc/self/ns/pid").st_ino:
            return Path(f"/proc/{self.pid}").exists()
        return any(self._is(process) for process in Path("/proc").glob("[0-9]*"))

    def _is(self, process: Path) -> bool:
        """Whether a process of this namespace, or of one below it, is the one."""
        try:
            if (process / "ns/pid").stat().st_ino != self._space:
                return False
            (numbers,) = (line for line in (process / "status").read_text().splitlines() if line.startswith("NSpid:"))
        except OSError:
            return False  # it has ended
        return int(numbers.split()[-1]) == self.pid

    def name(self, number: int) -> str:
        if number not in self._names:
            lines = self.path.with_suffix(".names").read_text().splitlines()
            self._names = {int(key): text for key, _, text in (line.partition("\t") for line in lines)}
        return self._names.get(number, "")


class Logs:
    """The logs of all processes of a run, which may still be running."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.processes: list[ProcessLog] = []
        self._known: set[Path] = set()
        self._left: dict[int, np.ndarray] = {}  # by process: records that are too young
        self.ended: dict[int, int] = {}  # by process that is gone: the time of its last record

    def batch(self, *, all_of_it: bool = False) -> list[tuple[int, np.ndarray, int]]:
        """By process: (its number, its records, how many of them may be judged now); the rest come again."""
        self.processes += [ProcessLog(path) for path in sorted(self._folder.glob("*.log")) if path not in self._known]
        self._known = {log.path for log in self.processes}
        until = time.monotonic_ns() - (0 if all_of_it else _PATIENCE_NS)
        found = []
        for number, log in enumerate(self.processes):
            records = log.fresh()
            if (left := self._left.get(number)) is not None and len(left):
                records = np.concatenate([left, records])
            records = records[np.argsort(records["time"], kind="stable")]
            found.append((number, records))
            if not log.alive:  # none will come
                self.ended[number] = max(self.ended.get(number, 0), int(records["time"].max(initial=0)))
            else:
                until = min(until, _first_unfinished(records))
        batch = []
        for number, records in found:
            count = int(np.searchsorted(records["time"], until, side="left"))
            batch.append((number, records, count))
            self._left[number] = records[count:]
        return batch


def _first_unfinished(records: np.ndarray) -> int:
    """When the first kernel was launched of which accesses may still come."""
    launched = records[(records["kind"] == Kind.TASK) & (records["d"] == 1)]
    done = records["a"][records["kind"] == Kind.DONE]
    times = launched["time"][~np.isin(launched["b"], done)]
    return int(times.min()) if len(times) else (1 << 63) - 1
