"""The happens-before checker's judge, against brute force: random programs whose orders are known as a graph."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from support.ordered import Judge, Logs, report
from support.ordered.log import RECORD, Key, Kind, Mode

BASE, BYTES, FILE = 1 << 20, 48, 77  # where every process has mapped the same memory
SHARED, PRIVATE = 0, 1 << 16  # offsets from BASE of what two processes map and of what each has for itself
Row = tuple[int, int, int, int, int, int, int]  # process, kind, thread, a, b, c, d


class Given:
    """In place of the logs of a run: all of it at once, or in two parts. No process is gone."""

    def __init__(self, rows: list[Row], cut: int | None = None) -> None:
        self.ended: dict[int, int] = {}
        self._cuts = [cut, None] if cut is not None else [None]
        self._by_process: dict[int, list[tuple[Any, ...]]] = {}
        for at, (process, kind, thread, *rest) in enumerate(rows):
            self._by_process.setdefault(process, []).append((at + 1, kind, thread, *rest))
        self._left = {process: np.array(some, dtype=RECORD) for process, some in self._by_process.items()}

    def batch(self, *, all_of_it: bool = False) -> list[tuple[int, np.ndarray, int]]:
        cut = self._cuts.pop(0)
        found = []
        for process, records in self._left.items():
            count = len(records) if cut is None else int((records["time"] <= cut).sum())
            found.append((process, records, count))
            self._left[process] = records[count:]
        return found


def judged(rows: list[Row], cut: int | None = None) -> list[Any]:
    logs, judge = Given(rows, cut), Judge()
    return [conflict for _ in range(1 if cut is None else 2) for conflict in judge.judge(logs)]  # type: ignore[arg-type]


@dataclass
class Program:
    """Records of a run, and the same run as a graph: events, and which come directly before which."""

    rows: list[Row] = field(default_factory=list)
    before: list[set[int]] = field(default_factory=list)
    accesses: list[tuple[int, int, int, int, int]] = field(default_factory=list)  # event, place, bytes, mode, process
    last: dict[tuple[str, int, int], int] = field(default_factory=dict)  # of each thread and stream
    marks: list[tuple[int, int, int]] = field(default_factory=list)  # process, number, event
    stored: dict[tuple[int, int], int] = field(default_factory=dict)  # by word and value
    numbers: int = 0

    def __post_init__(self) -> None:
        for process in range(2):
            self.rows.append((process, Kind.MAP, 1, BASE + SHARED, BYTES + 64, FILE, 0))
            self.rows.append((process, Kind.MAP, 1, BASE + PRIVATE, BYTES, 0, 0))

    def event(self, *agents: tuple[str, int, int], also: set[int] = frozenset()) -> int:  # type: ignore[assignment]
        """A new event, after the last ones of these agents, of the first of which it is the last now."""
        number = len(self.before)
        self.before.append({self.last[agent] for agent in agents if agent in self.last} | also)
        self.last[agents[0]] = number
        return number

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def task(self, process: int, thread: int, stream: int, place: int, nbytes: int, mode: int) -> None:
        task = self.number()
        self.rows.append((process, Kind.TASK, thread, stream, task, 0, 0))
        self.rows.append((process, Kind.ACCESS, thread, task, BASE + place, nbytes, mode))
        asked = self.event(("thread", process, thread))
        done = self.event(("stream", process, stream), also={asked})
        self.accesses.append((done, place, nbytes, mode, process))

    def host(self, process: int, thread: int, place: int, nbytes: int, mode: int) -> None:
        self.rows.append((process, Kind.ACCESS, thread, 0, BASE + place, nbytes, mode))
        self.accesses.append((self.event(("thread", process, thread)), place, nbytes, mode, process))

    def mark(self, process: int, thread: int, stream: int) -> None:
        number = self.number()
        self.rows.append((process, Kind.MARK, thread, stream, number, 0, 0))
        asked = self.event(("thread", process, thread))
        self.marks.append((process, number, self.event(("stream", process, stream), also={asked})))

    def wait(self, which: int, stream: int) -> None:
        process, number, event = self.marks[which % len(self.marks)]
        self.rows.append((process, Kind.WAIT, 1, stream, number, 0, 0))
        self.event(("stream", process, stream), also={event})

    def join(self, which: int, thread: int) -> None:
        process, number, event = self.marks[which % len(self.marks)]
        self.rows.append((process, Kind.JOIN, thread, number, 0, 0, 0))
        self.event(("thread", process, thread), also={event})

    def store(self, process: int, thread: int, word: int, value: int) -> None:
        self.rows.append((process, Kind.RELEASE, thread, BASE + BYTES + 8 * word, value, Key.WORD, 0))
        self.stored[word, value] = self.event(("thread", process, thread))

    def load(self, process: int, thread: int, word: int, value: int) -> None:
        self.rows.append((process, Kind.ACQUIRE, thread, BASE + BYTES + 8 * word, value, Key.WORD, 0))
        seen = {self.stored[word, value]} if (word, value) in self.stored else set()
        self.event(("thread", process, thread), also=seen)

    def unordered_bytes(self) -> set[tuple[Any, int]]:
        """Every byte of every memory that is accessed twice, once to write or not both times atomically, unordered."""
        past: list[set[int]] = []
        for before in self.before:
            past.append(set().union(*(past[one] for one in before), before))
        found = set()
        for at, (one, place, nbytes, mode, process) in enumerate(self.accesses):
            for other, place2, nbytes2, mode2, process2 in self.accesses[:at]:
                if mode == mode2 != Mode.WRITE or other in past[one] or one in past[other]:
                    continue
                shared = range(max(place, place2), min(place + nbytes, place2 + nbytes2))
                if place >= PRIVATE and process != process2:
                    continue
                found |= {(process if byte >= PRIVATE else "shared", byte) for byte in shared}
        return found


def program(draw: random.Random, steps: int) -> Program:
    """Few bytes, marks and words, so that accesses meet and orders matter."""
    made = Program()
    for _ in range(steps):
        process, thread, stream = draw.random() < 0.3, draw.randrange(2), draw.randrange(2)
        place = draw.choice((SHARED, SHARED, PRIVATE)) + draw.choice((0, 0, 4)), draw.choice((4, 8)), draw.randrange(3)
        kind = draw.choices(("task", "host", "mark", "wait", "join", "store", "load"), (6, 3, 3, 3, 3, 3, 3))[0]
        if kind == "task":
            made.task(process, thread, stream, *place)
        elif kind == "host":
            made.host(process, thread, *place)
        elif kind == "mark":
            made.mark(process, thread, stream)
        elif kind == "store":
            made.store(process, thread, draw.randrange(2), draw.randrange(2))
        elif kind == "load" and made.stored:
            made.load(process, thread, *draw.choice(list(made.stored)))
        elif kind in ("wait", "join") and made.marks:
            getattr(made, kind)(-1 - draw.randrange(min(3, len(made.marks))), draw.randrange(2))
    return made


def first_unordered(made: Program) -> set[tuple[Any, int]]:
    found = set()
    for conflict in judged(made.rows):
        private = conflict.memory[0] == "private"
        first, whose = (PRIVATE, conflict.later.process) if private else (SHARED, "shared")
        found |= {(whose, first + byte) for byte in range(conflict.start, conflict.end)}
    return found


@given(st.integers(0, 1 << 32), st.integers(2, 30))
def test_exactly_the_unordered_bytes_are_found(seed: int, steps: int) -> None:
    draw = random.Random(seed)
    for _ in range(30):
        made = program(draw, steps)
        assert first_unordered(made) == made.unordered_bytes(), made.rows


@given(st.integers(0, 1 << 32), st.integers(0, 40))
def test_a_run_may_be_judged_in_parts(seed: int, cut: int) -> None:
    made = program(random.Random(seed), 40)
    assert [conflict[2:] for conflict in judged(made.rows, cut)] == [conflict[2:] for conflict in judged(made.rows)]


def test_streams_and_threads_may_be_many() -> None:
    """More than there is room for at first."""
    made = Program()
    for thread in range(150):
        made.task(0, thread, thread, SHARED, 8, Mode.READ)
    made.task(0, 0, 0, SHARED, 8, Mode.WRITE)
    assert len(judged(made.rows)) == 149


def test_a_plain_store_orders_nothing() -> None:
    for kind, count in ((Kind.RELEASE, 0), (Kind.PLAIN, 1)):
        made = Program()
        made.host(0, 0, 0, 8, Mode.WRITE)
        made.rows.append((0, kind, 0, BASE + BYTES, 5, Key.WORD, 0))
        made.rows.append((1, Kind.ACQUIRE, 0, BASE + BYTES, 5, Key.WORD, 0))
        made.host(1, 0, 0, 8, Mode.READ)
        assert len(judged(made.rows)) == count


@pytest.mark.parametrize(("second", "count"), [(Kind.ADD, 0), (Kind.PLAIN, 1)])
def test_an_addition_hands_on_what_the_one_before_knew(second: Kind, count: int) -> None:
    made, word = Program(), BASE + BYTES
    made.host(0, 0, 0, 8, Mode.WRITE)
    made.rows.append((0, Kind.ADD, 0, word, 1, 0, 0))
    made.rows.append((0, second, 1, word, 2, 1 if second is Kind.ADD else Key.WORD, 0))
    made.rows.append((1, Kind.ACQUIRE, 0, word, 2, Key.WORD, 0))
    made.host(1, 0, 0, 8, Mode.READ)
    assert len(judged(made.rows)) == count


@pytest.mark.parametrize(
    ("key", "number", "count"), [(Key.LOCK, 7, 0), (Key.LOCK, 8, 1), (Key.OBJECT, 7, 1), (Key.MESSAGE, 7, 0)]
)
def test_locks_and_messages_order_processes_and_objects_do_not(key: Key, number: int, count: int) -> None:
    """A lock lies in shared memory; an object's number means something in its process only."""
    made = Program()
    place = BASE + BYTES if key is Key.LOCK else 0
    made.host(0, 0, 0, 8, Mode.WRITE)
    made.rows.append((0, Kind.RELEASE, 0, place + 7, 0, key, 0))
    made.rows.append((1, Kind.ACQUIRE, 0, place + number, 0, key, 0))
    made.host(1, 0, 0, 8, Mode.WRITE)
    assert len(judged(made.rows)) == count


@pytest.mark.parametrize(("start", "nbytes", "count"), [(0, 16, 0), (0, 4, 0), (16, 4, 1)])
def test_a_block_that_is_given_back_orders_who_gets_it_next(start: int, nbytes: int, count: int) -> None:
    """But not who gets another."""
    made = Program()
    made.host(0, 0, PRIVATE, 32, Mode.WRITE)
    made.rows.append((0, Kind.BLOCK, 0, BASE + PRIVATE, 16, 0, 0))
    made.rows.append((0, Kind.BLOCK, 1, BASE + PRIVATE + start, nbytes, 1, 0))
    made.host(0, 1, PRIVATE + start, nbytes, Mode.WRITE)
    assert len(judged(made.rows)) == count


@pytest.mark.parametrize(("joined", "over", "count"), [(True, True, 0), (True, False, 1), (False, True, 1)])
def test_a_job_that_is_over_has_dropped_what_another_thread_gives_back(joined: bool, over: bool, count: int) -> None:
    """Where its thread has seen the end of what it asked a stream for. Another job's end takes nothing of that back."""
    made = Program()
    made.task(0, 1, 5, PRIVATE, 8, Mode.READ)
    made.mark(0, 1, 5)
    if joined:
        made.join(0, 1)
    for thread in (1, 2) if over else (2,):
        made.rows.append((0, Kind.RELEASE, thread, 0, 0, Key.OBJECT, 0))
    made.rows.append((0, Kind.BLOCK, 0, BASE + PRIVATE, 16, 0, 0))
    made.rows.append((0, Kind.BLOCK, 0, BASE + PRIVATE, 16, 1, 0))
    made.host(0, 0, PRIVATE, 8, Mode.WRITE)
    assert len(judged(made.rows)) == count


def test_memory_that_is_mapped_anew_is_other_memory() -> None:
    made = Program()
    made.host(0, 0, PRIVATE, 8, Mode.WRITE)
    made.rows.append((0, Kind.MAP, 1, BASE + PRIVATE, BYTES, 0, 0))
    made.host(0, 1, PRIVATE, 8, Mode.WRITE)
    assert not judged(made.rows)


# ---- the log

SPACE = os.stat("/proc/self/ns/pid").st_ino  # of this process's number


def written(folder: Path, pid: int, records: list[tuple[int, ...]], count: int | None = None) -> None:
    head = struct.pack("6Q", len(records) if count is None else count, pid, 0, 0, 0, 0)
    (folder / f"{SPACE}.{pid}.log").write_bytes(head + np.array(records, dtype=RECORD).tobytes())


def test_a_log_is_read_on_from_where_it_ended(tmp_path: Path) -> None:
    """Up to the first record that is not whole yet."""
    one, two, three = ((at, Kind.SITE, 5, at, 0, 0, 0) for at in (1, 2, 3))
    written(tmp_path, 10, [one, (0, 0, 0, 0, 0, 0, 0), three])
    logs = Logs(tmp_path)
    ((_, records, count),) = logs.batch()
    assert records["a"].tolist() == [1]
    assert count == 1
    written(tmp_path, 10, [one, two, three])
    ((_, records, count),) = logs.batch()
    assert records["a"].tolist() == [2, 3]
    assert count == 2


@pytest.mark.parametrize("alive", [True, False])
def test_what_follows_a_kernel_waits_for_its_accesses(tmp_path: Path, alive: bool) -> None:
    """As long as its process lives."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    pid = os.getpid() if alive else ended.pid
    launch, later = (1, Kind.TASK, 5, 0, 9, 0, 1), (2, Kind.SITE, 5, 0, 0, 0, 0)
    access, done = (3, Kind.ACCESS, 6, 9, 100, 8, 1), (4, Kind.DONE, 6, 9, 0, 0, 0)
    written(tmp_path, pid, [launch, later])
    logs = Logs(tmp_path)
    assert logs.batch()[0][2] == (0 if alive else 2)
    written(tmp_path, pid, [launch, later, access, done])
    assert logs.batch()[0][2] == (4 if alive else 2)


def test_the_youngest_records_wait_for_those_of_other_processes(tmp_path: Path) -> None:
    written(tmp_path, 10, [(time.monotonic_ns() + 10**9, Kind.SITE, 5, 0, 0, 0, 0)])
    assert Logs(tmp_path).batch()[0][2] == 0


@pytest.mark.parametrize(("begins", "gone", "found"), [(9, True, 0), (9, False, 1), (4, True, 1)])
def test_who_begins_after_the_end_of_another_process_follows_it(
    begins: int, gone: bool, found: int, tmp_path: Path
) -> None:
    """As a process does that takes the place of one that was killed. One that lives, or ends later, orders nothing."""
    writes = [(kind, 1, *rest) for kind, *rest in ((Kind.MAP, BASE, BYTES, FILE, 0), (Kind.TASK, 4, 9, 4, 0))]
    accesses = (Kind.ACCESS, 1, 9, BASE, 16, Mode.WRITE)
    pid = 1 << 22 if gone else os.getpid()  # beyond all that there are
    written(tmp_path, pid, [(1, *writes[0]), (2, *writes[1]), (5, *accesses)])
    written(tmp_path, (1 << 22) + 1, [(begins, *writes[0]), (begins + 1, *writes[1]), (begins + 5, *accesses)])
    assert len(Judge().judge(Logs(tmp_path))) == found


def test_a_report_names_both_accesses_and_the_memory(tmp_path: Path) -> None:
    names = [
        "rank 0",
        "rank 1",
        "lane push",
        "a copy",
        "odc-send",
        "odc/protocol/device.py:71 push",
        "staging/1 of rank 0",
    ]
    ranks = []
    for process in range(2):
        ranks.append(
            [
                (1, Kind.MAP, 1, BASE, BYTES, FILE, 0),
                (2, Kind.PROCESS, 1, 1 + process, 0, 0, 0),
                (3, Kind.STREAM, 1, 4, 3, 0, 0),
                (4, Kind.THREAD, 8, 5, 0, 0, 0),
                (5, Kind.SITE, 8, 6, 0, 0, 0),
                (6, Kind.REGION, 1, BASE, BYTES, 7, 0),
                (7, Kind.TASK, 8, 4, 9, 4, 0),
                (8, Kind.ACCESS, 8, 9, BASE + 8, 16, process),
            ]
        )
        written(tmp_path, 10 + process, ranks[-1])
        (tmp_path / f"{SPACE}.{10 + process}.names").write_text(
            "".join(f"{i}\t{name}\n" for i, name in enumerate(names, 1))
        )
    logs, judge = Logs(tmp_path), Judge()
    (text,) = report(judge, logs, judge.judge(logs))
    assert text == (
        "nothing orders two accesses to staging/1 of rank 0, bytes 8 to 24:\n"
        "    rank 0, lane push: a copy reads it, asked for by odc-send at or after odc/protocol/device.py:71 push\n"
        "    rank 1, lane push: a copy writes it, asked for by odc-send at or after odc/protocol/device.py:71 push"
    )
