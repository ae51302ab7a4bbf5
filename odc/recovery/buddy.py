"""A rank's state on another host, so that it outlives its own: each rank also keeps that of another, its **ward**.

    keep e, show it | on a thread: wait until the ward shows e; STEP = 0, read its bytes, STEP = 1 + e
                    | forward and backward of step e + 1; wait for the thread; DONE

No rank ends step `e + 1`, and so none overwrites what it kept of step `e - 1`, before all wards' states of step `e` are
whole at their buddies. So slots on other hosts keep the rule of those at home (docs/recovery.md) without a message.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping

from odc.deadlines import STATE_LONGEST_POLL_S, STATE_POLL_S, Backoff, Deadline
from odc.errors import PeerLostError, WaitTimeoutError
from odc.fsdp.minibatch import before_done
from odc.fsdp.rejoin import host_network
from odc.net.engines import Engine
from odc.net.network import HostNetwork
from odc.recovery.generations import Generations
from odc.recovery.holdings import Holdings
from odc.recovery.members import Agreed, Held, Share
from odc.recovery.slots import Extent, Slots
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


class StateExchange:
    """States that this rank shows to other hosts, and reads there, in one generation. Used by its main thread, but
    `fetch` by any.

    Every wait ends with WaitTimeoutError after `timeout_s` in which nothing has come, with PeerLostError if the other
    rank has gone or left the generation.
    """

    def __init__(self, network: HostNetwork, timeout_s: float) -> None:
        self._network, self._timeout_s, self._closed = network, timeout_s, False
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

    def fetch(self, holder: int, share: Share, step: int, into: Slots) -> None:
        """Keep a share of the state after `step` in `into`, once `holder` shows it; returns when it is whole there."""
        deadline, backoff = Deadline(self._timeout_s), Backoff(STATE_POLL_S, STATE_LONGEST_POLL_S)
        name = _name(share, step)
        while (extent := self._listed(holder).get(name)) is None:
            if self._closed:
                raise PeerLostError(f"rank {self._network.rank} has left the generation", culprit=holder)
            if deadline.passed():
                raise WaitTimeoutError(
                    f"rank {self._network.rank}, waiting for rank {holder} to show the state of rank {share.rank} "
                    f"after step {step}: it has not in {self._timeout_s:g} s",
                    culprit=holder,
                )
            backoff.sleep()
        what = f"the state of rank {share.rank} after step {step}"
        into.receive(step, extent, lambda memory: self._engine.read(holder, name, 0, memory, what=what))

    def _listed(self, holder: int) -> dict[str, Extent]:
        found = json.loads(self._engine.ask(holder, _LIST, what="which states it shows"))
        return {name: Extent(*extent) for name, extent in found.items()}

    def close(self) -> None:
        """End all connections; a `fetch` that goes on raises. Idempotent."""
        self._closed = True
        self._network.expect_no_more(PURPOSE)
        self._engine.close()


class Buddies:
    """What this rank keeps of another, its ward, and what its own buddy reads here. On the rank's main thread.

    `held` are the slots that this process holds; those of the ward are added. Where the ranks have become so few that
    one host has all of them, there is no ward, and nothing is done.
    """

    def __init__(self, generations: Generations, held: Holdings) -> None:
        self._generations, self._held = generations, held
        self._exchange: StateExchange | None = None
        self._ward = Share(0, -1)
        self._worker, self._job = Worker("odc-buddy"), _settled()

    def open(self, agreed: Agreed | None) -> None:
        """In a generation that has been entered: show what this rank holds, and read its own share of `agreed` where
        it has none. Waits for every rank. Raises as `Generations.ready` and `StateExchange.fetch`.
        """
        rank, shown = self._generations.rank, self._generations.presences
        ward = ward_of({one: presence.host for one, presence in shown.items()}, rank)
        if ward is None:
            return
        own = self._held.own_share
        self._ward = Share(own.layout, ward)
        self._exchange = exchange = StateExchange(host_network(), self._generations.patience_s)
        for share, slots in self._held.items():
            for step in slots.steps():
                exchange.show(share, step, slots)
        self._generations.ready("shown", Held([]))
        exchange.connect(ward)  # now: a root may have the listener move later
        if agreed is not None and agreed.layout == own.layout and agreed.step not in self._held.own.steps():
            self._fetch(own, agreed.step, self._held.own)

    def fetch(self, share: Share, step: int) -> Slots:
        """A copy of a share after `step`, which a rank of another host has shown. Waits, as `StateExchange.fetch`."""
        return self._fetch(share, step, Slots.create(share))

    def _fetch(self, share: Share, step: int, into: Slots) -> Slots:
        assert self._exchange is not None
        shown = self._generations.presences
        holder = next(one for one in shown if share in shown[one].held and step in shown[one].held[share].steps)
        self._exchange.fetch(holder, share, step, into)
        return into

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
            self._job = Job(functools.partial(self._exchange.fetch, self._ward.rank, self._ward, step, ward))
            self._worker.submit(self._job)

    def settle(self) -> None:
        """Wait until the ward's state is whole here that was begun. Raises as `StateExchange.fetch`."""
        self._job.wait()

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
