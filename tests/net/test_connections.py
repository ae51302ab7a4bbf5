"""What a thread hears on a connection to another rank's engine: in few wakes, and never asleep when all has come."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import pytest

from odc.net.engines.connections import Answers, no_check
from odc.net.engines.server import LENGTH, READ, request

KIB = 1 << 10


class Sleeper:
    """A connection as a kernel has it that wakes a receiver only when as much has come as it asked to be woken by.

    It fails where the receiver would sleep although all of the answer has come. `calls` has, of each receive, the
    bytes that wake it and the bytes that it wanted; it gets `most` at a time.
    """

    def __init__(self, answer: bytes, most: int) -> None:
        self._rest, self._most, self._wake = memoryview(answer), most, 1
        self.calls: list[tuple[int, int]] = []

    def send(self, data: bytes) -> int:
        return len(data)

    def setsockopt(self, level: int, option: int, value: int) -> None:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_RCVLOWAT)
        self._wake = value

    def recvmsg_into(self, views: Sequence[memoryview], ancillary: int, flags: int) -> tuple[int, None, int, None]:
        assert flags == socket.MSG_WAITALL
        wanted = sum(len(view) for view in views)
        self.calls.append((self._wake, wanted))
        assert self._wake == 1 or len(self._rest) - wanted >= self._wake, "asleep although all has come"
        count, at = min(wanted, self._most), 0
        for view in views:
            part = self._rest[at : min(at + len(view), count)]
            view[: len(part)] = part
            at += len(part)
        self._rest = self._rest[count:]
        return count, None, 0, None


@pytest.mark.parametrize("most", [4096 * KIB, 300 * KIB + 7])
@pytest.mark.parametrize("nbytes", [0, 1, 64 * KIB, 256 * KIB + 3, 3000 * KIB])
def test_an_answer_comes_whole_and_no_receive_sleeps_on_less_than_is_left(nbytes: int, most: int) -> None:
    sent = bytes(i % 251 for i in range(nbytes))
    connection: Any = Sleeper(LENGTH.pack(nbytes) + sent, most)
    into = bytearray(nbytes)
    answers = Answers(0, 1, 60.0, "memory", no_check)
    answers.connection = connection
    assert answers.ask(request(READ, "region", 0, nbytes), memoryview(into)) == nbytes
    assert bytes(into) == sent


def test_a_large_answer_takes_few_calls_and_few_wakes() -> None:
    nbytes = 4096 * KIB
    connection: Any = Sleeper(LENGTH.pack(nbytes) + bytes(nbytes), nbytes * 2)
    answers = Answers(0, 1, 60.0, "memory", no_check)
    answers.connection = connection
    answers.ask(request(READ, "region", 0, nbytes), memoryview(bytearray(nbytes)))
    assert len(connection.calls) <= 4
    assert connection.calls[0][0] >= 256 * KIB
