"""How the ranks of a job meet, at its start and after a death, and agree on the step that all of them have kept.

A **generation** is one set of processes, one for each rank. It is given up when one of them ends: the next one begins,
in which a new process has the place of that rank, and the others are the same as before.

Keys in the launcher's store, under `odc/recovery/`: `generation` (the newest; it only rises), `G/present/R` (what rank
R of generation G is and holds), `G/ready/R` (where its slots are then), `G/over/R` (it has kept its last step),
`over` once all have, `first`, the step that the job begins at, and `keeper/H`, the process that keeps the slots of host
H. Process group and heaps of generation G have their keys under `odc/recovery/G/`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from odc.deadlines import STORE_LEAST_S, STORE_LONGEST_POLL_S, STORE_POLL_S, Backoff, Deadline
from odc.errors import OdcError, WaitTimeoutError
from odc.fsdp._torch_groups import DEFAULT_PREFIX
from odc.memory import ProcessHandle
from odc.net import JobStore, announce_failure
from odc.net.store import attempt, failure, host_identity

PREFIX = "odc/recovery/"


class NothingKeptError(OdcError):
    """No step is kept of every rank: both copies of a rank's state are gone. Restart from the last checkpoint."""


@dataclass(frozen=True)
class Held:
    """Slots of one rank in the process that holds them: its descriptors, and the steps that are whole."""

    fds: list[int]
    steps: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Presence:
    """What a rank shows of itself in a generation. `held` are slots by rank, its own among them if it has any."""

    pid: int
    host: str
    held: dict[int, Held]

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: bytes) -> Presence:
        found = json.loads(text)
        held = {int(rank): Held(**one) for rank, one in found["held"].items()}
        return cls(found["pid"], found["host"], held)


def newest_common(presences: Iterable[Presence], world: int, first: int | None) -> int | None:
    """The newest step that is whole for every rank; None where the job begins, or goes back to its beginning.

    That is step `first`, whose state a rank has by its program alone; None before any rank has kept it.
    NothingKeptError if a rank has kept nothing, although another cannot go back to the beginning any more.
    """
    kept: dict[int, set[int]] = {rank: set() for rank in range(world)}
    for presence in presences:
        for rank, held in presence.held.items():
            kept[rank].update(held.steps)
    common = set.intersection(*kept.values())
    if common:
        return max(common)
    if all(steps <= {first} for steps in kept.values()):
        return None
    raise NothingKeptError(
        f"no step is kept of every rank: {describe(kept)}; no process lives that held the others. Restart from the "
        "last checkpoint"
    )


def describe(kept: Mapping[int, set[int]]) -> str:
    """For messages: which steps of which rank."""
    each = (f"rank {rank} {' and '.join(map(str, sorted(steps))) or 'none'}" for rank, steps in sorted(kept.items()))
    return ", ".join(each)


class GenerationOver(Exception):
    """The generation that this rank was in, or was about to enter, has been given up."""


class Generations:
    """The generations as one rank sees them; on its main thread.

    `timeout_s` is how long it waits for each rank, a replacement among them.
    """

    def __init__(self, store: Any, rank: int, world: int, timeout_s: float) -> None:
        self.rank, self.world, self._timeout_s = rank, world, timeout_s
        self._store = JobStore(store, max(timeout_s, STORE_LEAST_S), rank, PREFIX, lasts=True)
        self.generation = 0
        self.presences: dict[int, Presence] = {}
        self._processes: dict[int, ProcessHandle] = {}

    def enter(self, held: Callable[[], dict[int, Held]]) -> None:
        """Enter the newest generation and wait until all ranks are in it; sets `generation` and `presences`.

        `held` is asked for each try. Raises GenerationOver if that generation is given up meanwhile, WaitTimeoutError,
        with the ranks that are missing, when no other has come for `timeout_s`, OdcError if the job is over.
        """
        if self._store.check(["over"]):
            raise OdcError(f"rank {self.rank} has nothing to go on with: the job has kept its last step, and is over")
        self.generation = self._newest()
        own = f"{self.generation}/present/{self.rank}"
        if self._store.check([own]):  # this process itself, before a death, or the one whose place it takes
            # Ranks of other hosts may wait for that one's heap, and have no other way to learn of its end.
            announce_failure(self._of_group(), f"rank {self.rank} has ended, and its place is taken", self.rank)
            self.leave()
            raise GenerationOver
        for process in self._processes.values():
            process.close()
        self._processes = {}
        presence = Presence(os.getpid(), host_identity(), held())
        self._store.set(own, presence.encode())
        self.presences = {rank: Presence.decode(text) for rank, text in self._await("present").items()}

    def ready(self, point: str, own: Held) -> dict[int, Held]:
        """Wait until every rank has come to a point; returns what each has shown there. Raises as `enter` does."""
        self._store.set(f"{self.generation}/{point}/{self.rank}", json.dumps(asdict(own)))
        return {rank: Held(**json.loads(text)) for rank, text in self._await(point).items()}

    def begin_at(self, step: int) -> None:
        """Note the step that the job begins at, the same on every rank."""
        self._store.set("first", str(step))

    @property
    def first(self) -> int | None:
        """The step that the job begins at, once a rank has noted it."""
        found = self._store.find("first")
        return None if found is None else int(found)

    @property
    def keeper(self) -> Presence | None:
        """The keeper of this host, if one was started; it may have ended."""
        found = self._store.find(self._keeper_key())
        return None if found is None else Presence.decode(found)

    def show_keeper(self, pid: int, held: dict[int, Held]) -> None:
        """Show the ranks of this host its new keeper."""
        self._store.set(self._keeper_key(), Presence(pid, host_identity(), held).encode())

    def _keeper_key(self) -> str:
        return f"keeper/{host_identity()}"

    def finish(self) -> None:
        """Wait until every rank has kept its last step; then the job is over, and no process can enter it any more."""
        self.ready("over", Held([]))
        self._store.set("over", "")

    def leave(self) -> None:
        """Give this rank's generation up: the next one begins, if it has not yet."""
        old = str(self.generation)
        self._store.compare_set("generation", "" if not self.generation else old, str(self.generation + 1))

    def culprit(self) -> int | None:
        """The rank that has ended this generation, -1 where that is not known; None while it goes on."""
        if dead := [rank for rank, process in self._processes.items() if not process.alive()]:
            return dead[0]
        if (found := failure(self._of_group())) is not None:  # also of a rank on another host
            return found[0]
        return -1 if self._newest() > self.generation else None

    def here(self, rank: int) -> bool:
        """Whether a rank of this generation is on this host."""
        return self.presences[rank].host == self.presences[self.rank].host

    def close(self) -> None:
        for process in self._processes.values():
            process.close()

    def _newest(self) -> int:
        return int(self._store.find("generation") or 0)

    def _of_group(self) -> JobStore:
        """What ranks store of this generation beside what this module does, in the store of their process group."""
        prefix = f"{PREFIX}{self.generation}/{DEFAULT_PREFIX}{attempt()}"
        return JobStore(self._store, self._store.timeout_s, self.rank, prefix)

    def _await(self, what: str) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        deadline, backoff = Deadline(self._timeout_s, 0), Backoff(STORE_POLL_S, STORE_LONGEST_POLL_S, growth=1.2)
        while len(found) < self.world:
            for rank in [rank for rank in range(self.world) if rank not in found]:
                text = self._store.find(f"{self.generation}/{what}/{rank}")
                if text is not None:
                    found[rank] = text
                    self._watch(rank, text, what)
            if self.culprit() is not None:
                self.leave()
                raise GenerationOver
            if deadline.passed(len(found)):
                missing = [rank for rank in range(self.world) if rank not in found]
                raise WaitTimeoutError(
                    f"rank {self.rank}, in generation {self.generation}, waiting for ranks {missing} to meet the "
                    f"others: none has come for {self._timeout_s:g} s",
                    culprit=missing[0],
                )
            backoff.sleep()
        return found

    def _watch(self, rank: int, text: bytes, what: str) -> None:
        if what == "present" and rank != self.rank:
            presence = Presence.decode(text)
            if presence.host == host_identity():
                self._processes[rank] = ProcessHandle(presence.pid)
