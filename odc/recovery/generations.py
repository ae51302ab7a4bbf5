"""How the ranks of a job meet, at its start and after a death, and agree on who takes part.

A **generation** is one set of processes. It is given up when one of them ends: the next one begins, in which a new
process has the place of that one, or the others go on without it, and they are the same as before.

Keys in the launcher's store, under `odc/recovery/`: `generation` (the newest; it only rises, and says "over" once all
have kept the last step in it), `G/present/P` (what the process with place P shows in generation G), `G/ready/R` (where
the slots of rank R are then), `G/over/R` (it has kept its last step), `first`, the step that the job begins at, `past`,
once a rank keeps a later one, and `keeper/H`, the process that keeps the slots of host H. Where ranks may become fewer
also `G/members`, who takes part in G; `members`, who did last; `waiting/P`, a process that waits for others of its
host. Process group and heaps of generation G have their keys under `odc/recovery/G/`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from odc.deadlines import (
    ENDED_LONGEST_POLL_S,
    MEMBERS_LEAST_S,
    STORE_LEAST_S,
    STORE_LONGEST_POLL_S,
    STORE_POLL_S,
    Backoff,
    Deadline,
)
from odc.errors import OdcError, WaitTimeoutError
from odc.fsdp._torch_groups import DEFAULT_PREFIX
from odc.memory import ProcessHandle
from odc.net import JobStore, announce_failure
from odc.net.announced import failure, host_identity
from odc.net.store import attempt
from odc.recovery.arrivals import Arrivals
from odc.recovery.members import (
    Agreed,
    Held,
    MemberList,
    NothingKeptError,
    Presence,
    Share,
    newest_common,
    on_whole_hosts,
)

PREFIX = "odc/recovery/"
_OVER = " over"


class GenerationOver(Exception):
    """The generation that this process was in, or was about to enter, has been given up."""


class Generations:
    """The generations as one process sees them; on its main thread.

    Args:
        place: this process's, as the launcher counts, of `places`.
        timeout_s: how long it waits for each other, a replacement among them; longer, once it is there.
        fewest: go on without those that have not come then, if so many have; None: never. At the job's start all are
            waited for as long as for those that are there.
        device: the UUID of the CUDA device on which this process trains, if it does.
    """

    def __init__(
        self, store: Any, place: int, places: int, timeout_s: float, fewest: int | None = None, device: str = ""
    ) -> None:
        self.place, self._places, self._timeout_s, self._device = place, places, timeout_s, device
        self._fewest = places if fewest is None else fewest
        self._store = JobStore(store, max(timeout_s, STORE_LEAST_S), place, PREFIX, lasts=True)
        self.generation, self._came = 0, False
        self.members = MemberList(0, tuple(range(places)))
        self.presences: dict[int, Presence] = {}  # by rank
        self._processes: dict[int, ProcessHandle] = {}  # by place

    @property
    def patience_s(self) -> float:
        """How long to wait for those that are there; their end is seen."""
        return max(self._timeout_s, MEMBERS_LEAST_S)

    @property
    def may_shrink(self) -> bool:
        """Whether ranks may become fewer than the places, and more again."""
        return self._fewest < self._places

    @property
    def rank(self) -> int:
        """This process's, in its generation."""
        return self.members.places.index(self.place)

    @property
    def world(self) -> int:
        """How many ranks the generation has."""
        return len(self.members.places)

    def enter(self, held: Callable[[], dict[Share, Held]]) -> Agreed | None:
        """Enter the newest generation and wait until all are in it; sets `generation`, `members` and `presences`.

        Returns what `newest_common` finds. `held` is asked for each try. Raises GenerationOver if that generation is
        given up meanwhile, WaitTimeoutError, with those that are missing, when no other has come for `timeout_s`,
        NothingKeptError, also where nothing is held past the beginning, OdcError if the job is over or the place taken.
        """
        self._refuse_over()
        self.generation = self._newest()
        self._refuse_taken()
        self.close()
        self._store.set(f"{self.generation}/present/{self.place}", self._shown(held()).encode())
        self._came = True
        shown = self._gather()
        self.presences = {rank: shown[place] for rank, place in enumerate(self.members.places)}
        agreed = self._common({place: shown[place] for place in self.members.places})
        if agreed is None and self._store.check(["past"]):
            raise NothingKeptError(
                "no process lives that held what ranks have kept, and the job is past its beginning. Restart it from "
                "the last checkpoint, with a new store"
            )
        return agreed

    def ready(self, point: str, own: Held) -> dict[int, Held]:
        """Wait until every rank has come to a point; returns what each has shown there. Raises as `enter` does."""
        prefix, ranks, watch = f"{self.generation}/{point}/", range(self.world), EndWatch(self)
        self._store.set(f"{prefix}{self.rank}", json.dumps(asdict(own)))
        arrivals = Arrivals(self._store, prefix, lambda rank, text: Held(**json.loads(text)), self.patience_s)
        found = arrivals.found
        while True:
            arrivals.look(ranks)
            if len(found) == self.world:
                return found  # whoever has ended since: after the last point of a job processes do
            watch.refuse()
            if arrivals.late(ranks):
                missing = [place for rank, place in enumerate(self.members.places) if rank not in found]
                raise self._late(missing, self.patience_s)

    def begin_at(self, step: int) -> int:
        """The step that the job begins at: this one, unless a rank has noted another."""
        return int(self._store.compare_set("first", "", str(step)))

    def pass_first(self) -> None:
        """From now on the job cannot begin again. Before any rank keeps a later step than the first."""
        self._store.set("past", "")

    @property
    def keeper(self) -> Presence | None:
        """The keeper of this host, if one was started; it may have ended."""
        found = self._store.find(self._keeper_key())
        return None if found is None else Presence.decode(found)

    def show_keeper(self, pid: int, held: dict[Share, Held]) -> None:
        """Show the ranks of this host its new keeper."""
        self._store.set(self._keeper_key(), Presence(pid, host_identity(), held).encode())

    def _keeper_key(self) -> str:
        return f"keeper/{host_identity()}"

    def finish(self) -> None:
        """Wait until every rank has kept its last step; then the job is over, and no process can enter it any more.

        Either that holds or a next generation begins, on every rank alike.
        """
        over = f"{self.generation}{_OVER}"
        try:
            self.ready("over", Held([]))
        except GenerationOver:
            if self._found() != over:
                raise
        if self._follow_by(over) != over:
            raise GenerationOver  # a rank that had come to its end was lost while another had not

    def leave(self) -> None:
        """Give this process's generation up: the next one begins, if it has not yet and the job is not over."""
        self._follow_by(str(self.generation + 1))

    def _follow_by(self, value: str) -> str:
        """Change `generation`, if it is this process's still; returns what it is then."""
        return self._store.compare_set("generation", str(self.generation or ""), value).decode()

    def _found(self, store: JobStore | None = None) -> str:
        return ((store or self._store).find("generation") or b"0").decode()

    def superseded(self) -> bool:
        """Whether a newer generation has begun."""
        return self._newest() > self.generation

    def lost_here(self) -> int | None:
        """As `culprit`, as far as processes of this host show it. Asks no store."""
        dead = [place for place, process in self._processes.items() if not process.alive()]
        if not dead:
            return None
        return self.members.places.index(dead[0]) if dead[0] in self.members.places else -1

    def culprit(self, watch: Callable[[], object] = lambda: None) -> int | None:
        """The rank that has ended this generation, -1 where that is not known; None while it goes on.

        `watch` is called while the store does not answer, and may raise to end that wait.
        """
        if (lost := self.lost_here()) is not None:
            return lost
        if (found := failure(self._of_group(watch))) is not None:  # also of a rank on another host
            return found[0]
        watched = JobStore(self._store, self._store.timeout_s, self.place, watch=watch)
        return -1 if self._newest(watched) > self.generation else None

    @property
    def share_devices(self) -> bool:
        """Whether two ranks of this generation train on one device."""
        return len({presence.device for presence in self.presences.values()}) < len(self.presences)

    def here(self, rank: int) -> bool:
        """Whether a rank of this generation is on this host."""
        return self.presences[rank].host == self.presences[self.rank].host

    def places_of(self, layout: int) -> tuple[int, ...]:
        """The places of a layout's ranks."""
        found = self._decided(layout) if self.may_shrink else None
        return tuple(range(self._places)) if found is None else found.places

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
        self._processes = {}

    # entering -----------------------------------------------------------------------------------------------------

    def _refuse_over(self) -> None:
        if self._found().endswith(_OVER):
            raise OdcError(f"rank {self.place} has nothing to go on with: the job has kept its last step, and is over")

    def _refuse_taken(self) -> None:
        """GenerationOver where the newest generation is not this process's to enter; it begins the next one then."""
        # This process itself, before a death, or the one whose place it takes.
        taken = self._store.find(f"{self.generation}/present/{self.place}")
        if taken and self._came:
            Presence.decode(taken).refuse_second(self._shown({}), self.place)
        members = self._decided(self.generation)
        if not taken and members is None:
            return
        places = (members or self.members).places
        if taken and self.place in places:
            # Ranks of other hosts may wait for that one's heap, and have no other way to learn of its end.
            rank = places.index(self.place)
            announce_failure(self._of_group(), f"another process has the place of rank {rank}", rank)
        elif members is not None:
            self._await_host(members)
        self.leave()
        raise GenerationOver

    def _gather(self) -> dict[int, Presence]:
        """What all that have come show, by place, once it is decided who takes part: sets `members`."""
        expected, places = self._expected(), range(self._places)
        # Processes start and import at their own pace: only who has taken part is missed after `timeout_s`.
        timeout_s = self.patience_s if self.may_shrink and not self._store.check(["members"]) else self._timeout_s
        arrivals = Arrivals(self._store, f"{self.generation}/present/", self._see, timeout_s)
        shown, watch = arrivals.found, EndWatch(self)
        while True:
            members = self._decided(self.generation)
            arrivals.look(dict.fromkeys((*expected, *places)) if members is None else members.places)
            if not self.may_shrink and len(shown) == self._places:
                return shown
            if members is not None:
                if self.place in members.places:
                    self.members = members
                    self._store.set("members", members.encode())
                    self._store.set(f"waiting/{self.place}", "")
                    if shown.keys() >= {*members.places}:
                        return shown
                else:
                    self._await_host(members)
                    self.leave()
                    raise GenerationOver
            elif self.may_shrink and shown.keys() >= {*expected}:
                arrivals.look(places, each=True)  # any process that joins, too
                self._decide(shown)
            watch.refuse()
            if arrivals.late(places):
                if not self._can_do_with(shown):
                    raise self._late([place for place in expected if place not in shown], timeout_s)
                self._decide(shown)

    def _expected(self) -> tuple[int, ...]:
        """The places that are waited for: those that took part last."""
        found = self._store.find("members") if self.may_shrink else None
        return tuple(range(self._places)) if found is None else MemberList.decode(found).places

    def _can_do_with(self, shown: dict[int, Presence]) -> bool:
        """Whether those that have come may go on alone. Their models are divided anew, from what is kept."""
        able = self._able(shown)
        return len(able) >= self._fewest and (not self.generation or self._common(able) is not None)

    def _able(self, shown: dict[int, Presence]) -> dict[int, Presence]:
        """Those that can train together; what others hold does not count, since no member could read it."""
        return {place: shown[place] for place in on_whole_hosts({place: one.host for place, one in shown.items()})}

    def _decide(self, shown: dict[int, Presence]) -> None:
        """Propose those that have come; the first proposal of a generation holds."""
        able = self._able(shown)
        places = tuple(able)
        found = self._store.find("members")
        before = MemberList(0, tuple(range(self._places))) if found is None else MemberList.decode(found)
        if places != before.places and self.generation and self._common(able) is None:
            places = before.places  # nothing is kept that could be divided anew
        layout = before.layout if places == before.places and found is not None else self.generation
        self._store.compare_set(f"{self.generation}/members", "", MemberList(layout, places).encode())

    def _decided(self, generation: int) -> MemberList | None:
        found = self._store.find(f"{generation}/members") if self.may_shrink else None
        return None if found is None else MemberList.decode(found)

    def _await_host(self, members: MemberList) -> None:
        """Before a process joins: wait until the members are ready, or they would never come to keep a state.

        And where its host is another, until as many of it want to join as the members' hosts have; WaitTimeoutError.
        """
        self._await_ready(len(members.places))
        here, hosts = host_identity(), []
        for place in members.places:
            if (text := self._store.find(f"{self.generation}/present/{place}")) is not None:
                hosts.append(Presence.decode(text).host)
        if here in hosts or not hosts:
            return
        self._store.set(f"waiting/{self.place}", self._shown({}).encode())
        deadline, backoff = Deadline(self.patience_s), Backoff(STORE_POLL_S, STORE_LONGEST_POLL_S, growth=1.2)
        while self._waiting_here() < hosts.count(hosts[0]):
            self._refuse_over()
            if deadline.passed():
                raise WaitTimeoutError(
                    f"rank {self.place}, waiting for {hosts.count(hosts[0])} processes of this host to join the others "
                    f"with: they have not come for {self.patience_s:g} s",
                )
            backoff.sleep()

    def _await_ready(self, world: int) -> None:
        deadline, backoff = Deadline(self.patience_s), Backoff(STORE_POLL_S, STORE_LONGEST_POLL_S, growth=1.2)
        keys = [f"{self.generation}/ready/{rank}" for rank in range(world)]
        while not self._store.check(keys) and not self.superseded() and not deadline.passed():
            self._refuse_over()
            backoff.sleep()

    def _waiting_here(self) -> int:
        """How many processes of this host wait to join."""
        found = [self._store.find(f"waiting/{place}") for place in range(self._places)]
        here = [one.pid for one in map(Presence.decode, filter(None, found)) if one.host == host_identity()]
        processes = [ProcessHandle(pid) for pid in here]
        alive = sum(process.alive() for process in processes)
        for process in processes:
            process.close()
        return alive

    def _common(self, shown: dict[int, Presence]) -> Agreed | None:
        layouts = {share.layout for one in shown.values() for share in one.held}
        worlds = {layout: len(self.places_of(layout)) for layout in layouts or {self.members.layout}}
        first = self._store.find("first")
        return newest_common(shown.values(), worlds, None if first is None else int(first))

    def _shown(self, held: dict[Share, Held]) -> Presence:
        return Presence(os.getpid(), host_identity(), held, self._device)

    def _newest(self, store: JobStore | None = None) -> int:
        return int(self._found(store).removesuffix(_OVER))

    def _of_group(self, watch: Callable[[], object] = lambda: None) -> JobStore:
        """What ranks store of this generation beside what this module does, in the store of their process group."""
        prefix = f"{self.generation}/{DEFAULT_PREFIX}{attempt()}"
        return JobStore(self._store, self._store.timeout_s, self.place, prefix, watch)

    def _late(self, missing: list[int], timeout_s: float) -> WaitTimeoutError:
        return WaitTimeoutError(
            f"rank {self.place}, in generation {self.generation}, waiting for ranks {missing} to meet the others: none "
            f"has come for {timeout_s:g} s",
            culprit=missing[0],
        )

    def _see(self, place: int, text: bytes) -> Presence:
        """What the process with a place shows; from now on its end is seen, if it is of this host."""
        presence = Presence.decode(text)
        if place != self.place and presence.host == host_identity():
            self._processes[place] = ProcessHandle(presence.pid)
        return presence


class EndWatch:
    """Checks again and again whether a generation has ended: the processes of this host each time, the store, which
    serves all ranks of the job, at pauses that grow. On the main thread.
    """

    def __init__(self, generations: Generations) -> None:
        self._generations = generations
        self._pauses, self._pause = Backoff(STORE_POLL_S, ENDED_LONGEST_POLL_S), Deadline(0.0)

    def refuse(self) -> None:
        """Raise GenerationOver if it has; then the next one begins."""
        lost = self._generations.lost_here()
        if lost is None and self._pause.passed():
            lost = self._generations.culprit()
            self._pause = Deadline(self._pauses.advance())
        if lost is not None:
            self._generations.leave()
            raise GenerationOver
