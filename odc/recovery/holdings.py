"""The slots that a process holds: its own, those of the ranks of its host, and a keeper of them where one is needed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess

from odc.errors import UnsupportedError
from odc.recovery import keeper
from odc.recovery.generations import Generations
from odc.recovery.members import Agreed, Held, NothingKeptError, Presence, Share
from odc.recovery.slots import HolderEndedError, Slots


class Holdings(dict[Share, Slots]):
    """By share. On the main thread of a process of `generations`; what is closed or dropped is let go of."""

    def __init__(self, generations: Generations, keeper_s: float) -> None:
        self._generations, self._keeper_s = generations, keeper_s
        self._keeper: subprocess.Popen[bytes] | None = None

    @property
    def own_share(self) -> Share:
        """What this process trains in its generation."""
        return Share(self._generations.members.layout, self._generations.rank)

    @property
    def own(self) -> Slots:
        return self[self.own_share]

    def shown(self) -> dict[Share, Held]:
        """For the others; also what a keeper holds, in a process that holds nothing yet."""
        kept = self._generations.keeper if not self else None
        if kept is not None:
            with contextlib.suppress(HolderEndedError):
                for share, held in kept.held.items():
                    self[share] = Slots.held_by(kept.pid, held.fds, share)
        return {share: Held(slots.fds, slots.steps()) for share, slots in self.items()}

    def take_own(self, needed: Agreed | None) -> None:
        """Those that a rank of this host holds of the process whose place this one takes; else new ones.

        HolderEndedError if that rank has ended since it showed them. NothingKeptError if they do not hold the step that
        is `needed` of them: the process has begun on another host.
        """
        share = self.own_share
        if share in self:
            return
        for presence in self._here():
            if share in presence.held:
                self[share] = Slots.held_by(presence.pid, presence.held[share].fds, share)
                return
        if needed is not None and needed.layout == share.layout:
            raise NothingKeptError(
                f"rank {share.rank} begins on a host where no process holds what it has kept: start it on the host "
                "where it was, or use keep='buddy'"
            )
        self[share] = Slots.create(share)

    def hold_others(self, owners: dict[int, Held]) -> None:
        """Hold the slots of all ranks of this host, by way of their owners. It is the same memory as before, if any."""
        for rank, held in owners.items():
            share = Share(self.own_share.layout, rank)
            if share != self.own_share and self._generations.here(rank):
                before = self.get(share)
                self[share] = Slots.held_by(self._generations.presences[rank].pid, held.fds, share)
                if before is not None:
                    before.close()

    def find_here(self, share: Share, step: int) -> Slots | None:
        """Slots that have `step` whole: held by this process, or by another of this host, then to be closed."""
        if share in self and step in self[share].steps():
            return self[share]
        for presence in self._here():
            if share in presence.held and step in presence.held[share].steps:
                return Slots.held_by(presence.pid, presence.held[share].fds, share)
        return None

    def drop_other_layouts(self) -> None:
        """Let go of what was kept in other layouts than the generation's."""
        for share in [share for share in self if share.layout != self.own_share.layout]:
            self.pop(share).close()

    def close(self) -> None:
        for slots in self.values():
            slots.close()
        self.clear()

    def _here(self) -> list[Presence]:
        return [one for rank, one in self._generations.presences.items() if self._generations.here(rank)]

    # the keeper --------------------------------------------------------------------------------------------------

    def start_keeper(self) -> None:
        """On the first rank of a host, where the launcher restarts all ranks: the keeper of this generation."""
        one = self._generations
        here = [rank for rank in range(one.world) if one.here(rank)]
        if one.rank != here[0] or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0:
            return
        before, held = one.keeper, {share: Held(slots.fds) for share, slots in self.items()}
        pids = [one.presences[rank].pid for rank in here]
        self._keeper = keeper.start([fd for each in held.values() for fd in each.fds], pids, self._keeper_s)
        one.show_keeper(self._keeper.pid, held)
        if before is not None:
            # It has ended, and its number may be another's, of another user even.
            with contextlib.suppress(OSError, IndexError, UnsupportedError):
                share, was = next(iter(before.held.items()))
                Slots.held_by(before.pid, was.fds, share).close()
                os.kill(before.pid, signal.SIGKILL)

    def end_keeper(self) -> None:
        """The job is over."""
        if self._keeper is not None:
            self._keeper.kill()
            self._keeper.wait()
