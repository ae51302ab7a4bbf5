"""A rank's state on another host, so that it outlives its own: each rank also keeps that of another, its **ward**.

    keep e, show it | on a thread: wait until the ward shows e; STEP = 0, read its bytes, STEP = 1 + e
                    | forward and backward of step e + 1; wait for the thread; DONE

No rank ends step `e + 1`, and so none overwrites what it kept of step `e - 1`, before all wards' states of step `e` are
whole at their buddies. So slots on other hosts keep the rule of those at home (docs/recovery.md) without a message.
"""

from __future__ import annotations

import functools
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping

from odc.deadlines import STATE_LONGEST_POLL_S, STATE_POLL_S, WORD_SLEEP_S, Backoff, Deadline
from odc.errors import PeerLostError, UnsupportedError, WaitTimeoutError
from odc.fsdp.minibatch import before_done
from odc.fsdp.rejoin import await_rank, host_network, refuse_aborted
from odc.net.engines import Engine
from odc.net.network import HostNetwork
from odc.recovery.generations import EndWatch, Generations
from odc.recovery.holdings import Holdings
from odc.recovery.members import Agreed, Held, Share
from odc.recovery.slots import Extent, Slots
from odc.settings import Settings
from odc.worker import Job, Worker

PURPOSE = "state"  # of a connection, in its handshake
_LIST = "states"  # what a rank is asked for: by name, the extents of the states that it shows


def ward_of(hosts: Mapping[int, str], rank: int) -> int | None:
    """Whose buddy `rank` is: the rank with its place on the host before its own. None where there is one host.

    `hosts` are by rank, all of them.
    """
    ranks: dict[str, list[int]] = {}
    for one in sorted(hosts):
        ranks.setdefault(hosts[one], []).append(one)
    if len(ranks) == 1:
        return None
    order = list(ranks)
    before = ranks[order[order.index(hosts[rank]) - 1]]
    return before[ranks[hosts[rank]].index(rank) % len(before)]


def refuse_hosts(generations: Generations, *, buddies: bool, first: bool) -> None:
    """UnsupportedError where the hosts of a generation need buddies and there are none.

    At the beginning (`first`) also where some rank would have no buddy: later ranks may come back where there is room.
    """
    hosts = Counter(presence.host for presence in generations.presences.values())
    if buddies and first and len({*hosts.values()}) > 1:
        counts = " and ".join(str(count) for count in hosts.values())
        raise UnsupportedError(
            f"keep='buddy' needs equally many ranks on each host, not {counts}: each keeps the state of one other"
        )
    if len(hosts) > 1 and generations.may_shrink and not buddies:
        raise UnsupportedError("with fewest=..., ranks on several hosts need keep='buddy'")
    if buddies and first and len(hosts) == 1 and not generations.may_shrink:
        raise UnsupportedError("keep='buddy' is for ranks on several hosts, and all are on this one; keep='host'")


class StateExchange:
    """States that this rank shows to other hosts, and reads there, in one generation. Used by its main thread, but
    `connect` and `fetch` by any.

    Every wait ends with WaitTimeoutError after `timeout_s` in which the other rank has not answered, with PeerLostError
    if it has gone or left the generation, or if this exchange is closed.
    """

    def __init__(self, network: HostNetwork, timeout_s: float) -> None:
        self._network, self._closed = network, False
        self._shown: dict[str, Extent] = {}
        self._engine = Engine(
            network.rank, lambda rank, check: network.dial(rank, PURPOSE, check), timeout_s, network.lost_after_s
        )
        self._engine.answer(_LIST, lambda: json.dumps(self._shown).encode())
        network.expect(PURPOSE, self._engine.adopt)

    def show(self, share: Share, step: int, slots: Slots) -> None:
        """Let other hosts read a share of the state after `step`, which is whole in `slots`, and stays so until `hide`.

        No-op if it is shown already.
        """
        name = _name(share, step)
        if name not in self._shown:
            extent, state = slots.shown(step)
            self._engine.expose(name, state)
            self._shown = {**self._shown, name: extent}  # the engine's threads see all of it or nothing

    def hide(self, layout: int) -> None:
        """Show nothing of a layout any more. What has been asked for may still be sent."""
        hidden = [name for name in self._shown if name.startswith(f"{layout}.")]
        self._shown = {name: extent for name, extent in self._shown.items() if name not in hidden}
        for name in hidden:
            self._engine.withdraw(name)

    def connect(self, rank: int) -> None:
        """Make a connection to `rank`, which listens."""
        self._listed(rank)

    def fetch(self, holder: int, share: Share, step: int, into: Slots, found: threading.Event) -> None:
        """Keep a share of the state after `step` in `into`, once `holder` shows it; returns when it is whole there.

        Sets `found` when it is shown, and its bytes begin to come. Until then it waits for as long as `holder` answers,
        which may compute: a deadline is the caller's, who ends the wait by `close`.
        """
        backoff, name = Backoff(STATE_POLL_S, STATE_LONGEST_POLL_S), _name(share, step)
        while (extent := self._listed(holder).get(name)) is None:
            backoff.sleep()
        found.set()
        what = f"the state of rank {share.rank} after step {step}"
        check = functools.partial(self._refuse_closed, holder)
        read = functools.partial(self._engine.read, holder, name, 0, what=what, check=check)
        into.receive(step, extent, read)

    def _refuse_closed(self, holder: int, doing: str) -> None:
        if self._closed:
            text = f"rank {self._network.rank}, {doing}: this rank has left the generation"
            raise PeerLostError(text, culprit=holder)

    def _listed(self, holder: int) -> dict[str, Extent]:
        check = functools.partial(self._refuse_closed, holder)
        found = json.loads(self._engine.ask(holder, _LIST, what="which states it shows", check=check))
        return {name: Extent(*extent) for name, extent in found.items()}

    def close(self) -> None:
        """End all connections; a `fetch` that goes on raises. Idempotent."""
        self._closed = True
        self._network.expect_no_more(PURPOSE)
        self._engine.close()


class Buddies:
    """What this rank keeps of another, its ward, and what its own buddy reads here. On the rank's main thread.

    `held` are the slots that this process holds; those of the ward are added. While one host has all ranks, there is no
    ward, and nothing is done.
    """

    def __init__(self, generations: Generations, held: Holdings, settings: Settings) -> None:
        self._generations, self._held, self._settings = generations, held, settings
        self._exchange: StateExchange | None = None
        self._ward = Share(0, -1)
        self._worker, self._job = Worker("odc-buddy"), _settled()
        self._awaited = -1, "", threading.Event()  # of the job: a rank, what it has to do, and whether it has

    def open(self, agreed: Agreed | None) -> None:
        """In a generation that has been entered: show what this rank holds, and read its own share of `agreed` where
        it has none. Waits for every rank. Raises as `Generations.ready` and `settle`.
        """
        rank, shown = self._generations.rank, self._generations.presences
        ward = ward_of({one: presence.host for one, presence in shown.items()}, rank)
        if ward is None:
            return
        own = self._held.own_share
        self._ward = Share(own.layout, ward)
        self._exchange = exchange = StateExchange(host_network(self._settings), self._generations.patience_s)
        for share, slots in self._held.items():
            for step in slots.steps():
                exchange.show(share, step, slots)
        self._generations.ready("shown", Held([]))
        self._begin(ward, f"rank {ward} to answer", lambda found: exchange.connect(ward))
        self.settle()  # now: a root may have the listener move later
        if agreed is not None and agreed.layout == own.layout and agreed.step not in self._held.own.steps():
            self._fetch(own, agreed.step, self._held.own)

    def fetch(self, share: Share, step: int) -> Slots:
        """A copy of a share after `step`, which a rank of another host has shown. Waits, and raises, as `settle`."""
        return self._fetch(share, step, Slots.create(share))

    def _fetch(self, share: Share, step: int, into: Slots) -> Slots:
        shown = self._generations.presences
        holder = next(one for one in shown if share in shown[one].held and step in shown[one].held[share].steps)
        self._begin_fetch(holder, share, step, into)
        self.settle()
        return into

    def _begin_fetch(self, holder: int, share: Share, step: int, into: Slots) -> None:
        assert self._exchange is not None
        what = f"rank {holder} to show the state of rank {share.rank} after step {step}"
        self._begin(holder, what, functools.partial(self._exchange.fetch, holder, share, step, into))

    def _begin(self, holder: int, what: str, work: Callable[[threading.Event], None]) -> None:
        """On the worker, what waits for `holder` to do `what`; `work` sets the event once it has."""
        found = threading.Event()
        self._awaited, self._job = (holder, what, found), Job(functools.partial(work, found))
        self._worker.submit(self._job)

    def begin(self, agreed: Agreed | None) -> None:
        """Once every rank is ready: hold the ward's slots, with what was agreed on, and show nothing of its layout.

        Slots of a rank that has been the ward before, or was on this host, are let go of; those of other layouts stay.
        """
        if self._exchange is None:
            return
        layout = self._ward.layout
        self._exchange.hide(layout)
        mine = [one for one in self._held if one.layout == layout]
        for share in [one for one in mine if one != self._ward and not self._generations.here(one.rank)]:
            self._held.pop(share).close()
        if self._ward not in self._held:
            self._held[self._ward] = Slots.create(self._ward)
        # A ward that begins anew may have another state than it had before.
        kept = agreed is not None and agreed.layout == layout
        self._held[self._ward].forget_after(agreed.step if agreed is not None and kept else -1)
        before_done.append(self.settle)

    def keep(self, step: int) -> None:
        """Show this rank's state after `step`, which it has kept, and begin to read the ward's. Does not wait."""
        if self._exchange is None:
            return
        own, ward = self._held.own_share, self._held[self._ward]
        self._exchange.hide(own.layout)  # no rank is done with this step before the last one is whole at all buddies
        self._exchange.show(own, step, self._held.own)
        if step not in ward.steps():
            self._begin_fetch(self._ward.rank, self._ward, step, ward)

    def settle(self) -> None:
        """Wait until what was begun to be read is whole here. Raises as `StateExchange.fetch`, and as soon as this rank
        knows that the generation ends: PeerLostError, or GenerationOver where no model is in use.

        The rank that has to show it may take as long as in any wait of odc, by the `Settings` of the model; where no
        model is in use, `patience_s`. After that WaitTimeoutError.
        """
        if not self._job.over():
            self._await(*self._awaited)
        self._job.wait()

    def _await(self, holder: int, what: str, found: threading.Event) -> None:
        await_rank(lambda seconds: self._job.over(seconds) or found.is_set(), holder, what)
        one, doing = self._generations, f"waiting for {what}"
        watch, deadline = EndWatch(one), Deadline(one.patience_s)
        while not self._job.over(WORD_SLEEP_S):
            if not refuse_aborted(doing):
                watch.refuse()
            if deadline.passed() and not found.is_set():  # the reading has a deadline of its own
                raise WaitTimeoutError(f"rank {one.rank}, {doing}: it has not in {one.patience_s:g} s", culprit=holder)

    def hide_other_layouts(self) -> None:
        """Every rank has what it needs of them."""
        if self._exchange is not None:
            for layout in {share.layout for share in self._held} - {self._ward.layout}:
                self._exchange.hide(layout)

    def close(self) -> None:
        """Leave the generation: give up what is being read. Idempotent."""
        if self._exchange is None:
            return
        if self.settle in before_done:
            before_done.remove(self.settle)
        self._exchange.close()
        self._job.cancel()  # from here on no thread writes the ward's slots
        self._exchange, self._job = None, _settled()


def _settled() -> Job[None]:
    job = Job[None](lambda: None)
    job.run()
    return job


def _name(share: Share, step: int) -> str:
    return f"{share.layout}.{share.rank}/{step}"
