"""Vector clocks of threads and streams, which come up one after another."""

from __future__ import annotations

import numpy as np

Clock = np.ndarray  # int64 [agents that were known then]: of each how far its past is known


class Clocks:
    """By agent, a number: what is known there of all agents' pasts. Its own time begins at 1."""

    def __init__(self) -> None:
        self._rows = np.zeros((64, 64), np.int64)
        self._versions: list[int] = []  # how often others' pasts were learned
        self._met: dict[tuple[int, int], int] = {}  # (learner, teacher): the teacher's version that it knows

    def new(self) -> int:
        agent = len(self._versions)
        if agent == len(self._rows):
            grown = np.zeros((2 * agent, 2 * agent), np.int64)
            grown[:agent, :agent] = self._rows
            self._rows = grown
        self._versions.append(0)
        self._rows[agent, agent] = 1
        return agent

    def time(self, agent: int) -> int:
        return int(self._rows[agent, agent])

    def knows(self, agent: int, other: int, time: int) -> bool:
        """Whether what `other` did at its `time` happened before what `agent` does now."""
        return bool(self._rows[agent, other] >= time)

    def snapshot(self, agent: int) -> Clock:
        """What `agent` knows, for others to learn; what it does from now on is not part of it."""
        found = self._rows[agent, : len(self._versions)].copy()
        self._rows[agent, agent] += 1
        return found

    def learn(self, agent: int, clock: Clock) -> None:
        row = self._rows[agent, : len(clock)]
        if (clock > row).any():
            np.maximum(row, clock, out=row)
            self._versions[agent] += 1

    def follow(self, agent: int, leader: int) -> None:
        """`agent` learns all that `leader` knows now; what the leader does from now on is not part of it."""
        rows, version = self._rows, self._versions[leader]
        if self._met.get((agent, leader)) == version:
            rows[agent, leader] = rows[leader, leader]
        else:
            self.learn(agent, rows[leader])
            self._met[agent, leader] = version
        rows[leader, leader] += 1
