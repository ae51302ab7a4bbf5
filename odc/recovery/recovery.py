"""A rank that is killed costs one minibatch: `Recovery` keeps the state, meets again, and goes back to what was kept.

    recovery = odc.Recovery()                        # instead of torch.distributed.init_process_group
    ...                                              # build model and optimizer, as always
    recovery.protect(model, optimizer, scheduler=scheduler)
    for step in recovery.steps(1000):
        with recovery.attempt():                     # one minibatch and its optimizer step
            train(step)

Whoever started the ranks starts a process for a rank that has ended, with the same environment; it runs the program
from its beginning and takes its place at the step where the others are. docs/recovery.md says why that is exact.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from odc.deadlines import LOSS_POLL_S, LOSS_SHOWS_S, Deadline
from odc.errors import ConfigError, OdcError, PeerLostError, UnsupportedError, WaitTimeoutError
from odc.fsdp.rejoin import aborted_by_another, enter_generation, leave_generation, refuse_groups
from odc.memory.device_links import device_uuid
from odc.ranks.worker import report_progress
from odc.recovery.buddy import Buddies
from odc.recovery.devices import forget_frames, is_of_device, refuse_devices
from odc.recovery.generations import GenerationOver, Generations
from odc.recovery.holdings import Holdings
from odc.recovery.launched import launched_place, launchers_store
from odc.recovery.members import Agreed, Held, Share
from odc.recovery.process_group import GenerationGroup, make_group
from odc.recovery.reshard import FormerLayout
from odc.recovery.shown import ShownRecovery, TracedPlace
from odc.recovery.slots import Slots
from odc.recovery.state import Stateful, TrainingState

_log = logging.getLogger(__name__)


class Recovery:
    """The rank's place in a job that survives deaths. Constructing it makes the default process group.

    On the main thread; every method but `attempt` waits for other ranks. The environment is torchrun's (RANK,
    WORLD_SIZE, MASTER_ADDR, MASTER_PORT), with a store that outlives every rank: the launcher hosts it. To train on a
    GPU, make it the current device first.

    Args:
        store: a `torch.distributed.Store` that no rank hosts; None makes a client of the launcher's.
        rejoin_s: seconds to wait for a rank to meet the others, a replacement for one that has ended among them.
        every: keep each so many steps; a death costs as many minibatches.
        keep: "host": a state is lost with the last process of its host. "buddy": it is kept on another host too, and
            sent there after each kept step; a whole host may end. The same on every rank.
        fewest: where a rank has not come for `rejoin_s`, go on without it, if so many have; it may still come later.
            None: never. Over several hosts it takes "buddy". The same on every rank.

    Raises:
        ConfigError: torchrun's variables are missing, or arguments that mean nothing.
        UnsupportedError: there is a process group already, rank 0 hosts the store, or there is no other host for a
            buddy.
        WaitTimeoutError: a rank did not come within `rejoin_s`.
        OdcError: the job is over.
    """

    def __init__(
        self,
        store: Any = None,
        *,
        rejoin_s: float = 300.0,
        every: int = 1,
        keep: Literal["host", "buddy"] = "host",
        fewest: int | None = None,
    ) -> None:
        if every < 1 or rejoin_s <= 0:
            raise ConfigError(f"every={every} must be 1 or more, rejoin_s={rejoin_s} more than 0")
        if keep not in ("host", "buddy"):
            raise ConfigError(f"keep={keep!r} must be 'host' or 'buddy'")
        if dist.is_initialized():
            raise UnsupportedError("there is a process group already; odc.Recovery() makes it, before anything else")
        place, places = launched_place()
        if fewest is not None and not 1 <= fewest <= places:
            raise ConfigError(f"fewest={fewest} must be from 1 to the {places} ranks of the job")
        self._store = store or launchers_store(rejoin_s)
        self.every = every
        # Decided once: a process that takes a place runs the same program, and finds the same.
        self._device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else None
        uuid = "" if self._device is None else device_uuid(self._device.index)
        self._generations = Generations(self._store, place, places, rejoin_s, fewest, uuid)
        self._held = Holdings(self._generations, rejoin_s)
        self._buddies = Buddies(self._generations, self._held) if keep == "buddy" else None
        self._trained: TrainingState | None = None
        self.step = self._first = 0  # steps that are done, also when the program began
        self.recoveries = 0  # that this process has lived through
        self._group = GenerationGroup(self._generations, nccl=False)
        self._shown = ShownRecovery(self.rank)
        self._agreed = self._meet()

    @property
    def rank(self) -> int:
        """This process's rank in the present generation: `torch.distributed.get_rank()`."""
        return self._generations.rank

    @property
    def world(self) -> int:
        """How many ranks the present generation has; another number after a step only where `fewest` was given."""
        return self._generations.world

    @property
    def generation(self) -> int:
        """How many sets of processes the job has had before this one."""
        return self._generations.generation

    @property
    def goes_on(self) -> bool:
        """Whether the ranks have met at a step that all have kept, which `protect` loads in a new process.

        If not, some rank has kept none, and the job is at its beginning.
        """
        return self._agreed is not None

    def protect(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        first: int = 0,
        **others: Stateful,
    ) -> None:
        """Keep these from now on; in a process that takes another's place, load what that one has kept.

        Once, after `fully_shard` and the optimizer, when model and optimizer are as they are at the job's beginning:
        loaded from the checkpoint of step `first`, for instance. `others` are what else a step changes: schedulers,
        data loaders, your own counters. The states of torch's, numpy's and Python's global generators are kept too.

        Raises ConfigError in a replacement whose model differs, UnsupportedError for another mesh than a 1-D one over
        all ranks or a model on another device than the CPU or the GPU that was current, HeapMemoryError without memory.
        """
        if self._trained is not None:
            raise ConfigError("protect() is called once")
        models = [model] if isinstance(model, nn.Module) else list(model)
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        for one in models:
            refuse_groups(one)
            refuse_devices(one, self._device, fewer=self._generations.may_shrink)
        self._trained = TrainingState(models, optimizers, {"odc.trace": TracedPlace(), **others})
        known = self._generations.first  # a replacement may find a newer checkpoint than the job began with
        self._first = self.step = first if known is None else known
        if self._agreed is None:
            self._generations.begin_at(self._first)
            self._keep()
        else:
            with self.repeatable():
                self._restore(self._agreed)

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the steps to be done, from where the job is; one comes again that was not finished.

        Ends when every rank has kept the last one.
        """
        while True:
            while self.step < total:
                yield self.step
            with self.repeatable():
                self.finish()
                return

    @contextlib.contextmanager
    def attempt(self) -> Iterator[None]:
        """One step. If its block ends, the step is counted and kept. If a rank is lost in it, all ranks go back.

        Does not raise then: returns once the ranks have met again and the last kept state is restored. Any other error
        leaves it, and ends the job unless a replacement is started for this rank.
        """
        if self._trained is None:
            raise ConfigError("protect() must be called before attempt()")
        with self.repeatable():
            yield
            self.count()

    def count(self) -> None:
        """A step is done: keep it. Inside `repeatable`, before this rank ends the next one."""
        self.step += 1
        if self.step % self.every == 0:
            self._keep()
            report_progress()
        if self._generations.may_shrink and self._generations.superseded():
            raise GenerationOver  # by a process that wants to join, of which no wait in odc would learn

    def wait_for_all(self, point: str) -> None:
        """Wait until every rank of this generation has come to a point. Inside `repeatable`: a death ends the wait."""
        self._generations.ready(point, Held([]))

    def finish(self) -> None:
        """The last step is done: wait until every rank has kept its last. Inside `repeatable`; the job is over then."""
        self._generations.finish()
        self._held.end_keeper()

    @contextlib.contextmanager
    def repeatable(self) -> Iterator[None]:
        """For loops that are not this program's: a block of many steps, each of which calls `count`, and `finish`.

        If a rank is lost in it, all go back to the last step that all have kept, `step`, from where the loop has to go
        on. Errors as of `attempt`, which is this for one step.
        """
        lost: tuple[str, int | None] | None = None
        try:
            yield
        except GenerationOver:
            lost = "a rank has ended, or joins", None
        except RuntimeError as error:
            if not self._is_loss(error):
                raise
            lost = f"{type(error).__name__}: {error}", getattr(error, "culprit", None)
            forget_frames(error)
        if lost is not None:
            reason, culprit = lost
            self._recover(reason, self.rank if culprit is None else culprit)

    def close(self) -> None:
        """Let go of all kept states. The process group stays."""
        if self._buddies is not None:
            self._buddies.close()
        self._group.close()
        self._held.close()
        self._generations.close()
        self._shown.close()

    def __enter__(self) -> Recovery:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    # keeping and restoring ---------------------------------------------------------------------------------------

    @property
    def _state(self) -> TrainingState:
        assert self._trained is not None
        return self._trained

    def _keep(self) -> None:
        if self._generations.may_shrink:
            self._state.refuse_undivided()
        tensors, text = self._state.take()
        self._group.settle(tensors)
        self._held.own.write(self.step, tensors, text)
        self._shown.kept(self.step)
        if self._buddies is not None:
            self._buddies.keep(self.step)

    def _restore(self, agreed: Agreed) -> None:
        self.step = agreed.step
        if agreed.layout != self._held.own_share.layout:
            self._divide_anew(agreed)
            return
        self._held.own.forget_after(agreed.step)
        self._state.put(*self._held.own.read(agreed.step))
        self._shown.gone_back(agreed.step)
        if self._buddies is not None:
            self._buddies.keep(agreed.step)

    def _divide_anew(self, agreed: Agreed) -> None:
        """Take this rank's part of what another number of ranks has kept, and keep it; waits until all have."""
        places = self._generations.places_of(agreed.layout)
        former = FormerLayout(
            lambda rank: self._find(Share(agreed.layout, rank), agreed.step),
            agreed.step,
            len(places),
            self.rank,
            self.world,
        )
        took_part = self._generations.place in places
        base = places.index(self._generations.place) if took_part else self.rank % len(places)
        self._state.put(*former.kept(base), former.part, random=took_part)
        if self._buddies is not None:
            self._buddies.begin(agreed)
        self._held.own.forget_after(-1)  # of a division that was given up
        self._keep()
        self._shown.gone_back(self.step)
        try:
            if self._buddies is not None:
                self._buddies.settle()
            self._generations.ready("divided", Held([]))  # from here on the former layout is not needed
        except WaitTimeoutError as error:  # a process that joins takes long to build its model, or has hung
            self._generations.leave()
            raise GenerationOver from error
        if self._buddies is not None:
            self._buddies.hide_other_layouts()
        self._held.drop_other_layouts()
        self._held.start_keeper()  # of what is held now

    def _find(self, share: Share, step: int) -> Slots:
        """The slots of a share that are whole for a step, wherever they are held."""
        try:
            found = self._held.find_here(share, step)
        except OSError as error:  # a holder has ended since it showed what it holds
            self._generations.leave()
            raise GenerationOver from error
        if found is None:
            assert self._buddies is not None, "ranks of several hosts that may become fewer have buddies"
            found = self._buddies.fetch(share, step)
        return found

    # losing a rank ---------------------------------------------------------------------------------------------

    def _is_loss(self, error: RuntimeError) -> bool:
        """Whether the end of another rank is behind an error, and not a mistake in this one."""
        if is_of_device(error):
            return False
        if isinstance(error, PeerLostError):
            return error.culprit not in (None, self.rank)
        if isinstance(error, OdcError) and not isinstance(error.__cause__, RuntimeError):  # as a failed save has
            return False
        return self._loss_shows()  # torch's collectives fail at once, before anything else shows why

    def _loss_shows(self) -> bool:
        """Whether another rank has ended this generation, waited for a while."""
        deadline = Deadline(LOSS_SHOWS_S)

        def look() -> None:  # ends a call of a store whose host may be cut off
            if deadline.passed() or aborted_by_another():
                raise GenerationOver

        while not aborted_by_another():
            with contextlib.suppress(GenerationOver):
                if (culprit := self._generations.culprit(look)) is not None:
                    return culprit != self.rank
            if deadline.passed():
                return False
            time.sleep(LOSS_POLL_S)
        return True

    def _recover(self, reason: str, culprit: int) -> None:
        """Meet again and go back to the newest step that every rank has kept."""
        self.recoveries += 1
        self._shown.lost(reason, culprit)
        _log.warning("rank %d goes back to the last kept step: %s", self.rank, reason)
        if self._buddies is not None:
            self._buddies.close()
        self._group.close()
        leave_generation(list(self._state.models), reason, culprit)
        self._generations.leave()
        self._agreed = self._meet()
        if self._device is not None:
            gc.collect()  # objects in cycles hold memory of the device, which the next heap needs
        enter_generation(list(self._state.models))
        with self.repeatable():  # it waits where the number of ranks has changed
            self._restore(self._agreed or Agreed(self._held.own_share.layout, self._first))

    def _refuse_hosts(self) -> None:
        hosts = {presence.host for presence in self._generations.presences.values()}
        if len(hosts) > 1 and self._generations.may_shrink and self._buddies is None:
            raise UnsupportedError("with fewest=..., ranks on several hosts need keep='buddy'")
        if len(hosts) == 1 and not self._generations.may_shrink and self._buddies is not None:
            raise UnsupportedError("keep='buddy' is for ranks on several hosts, and all are on this one; keep='host'")

    def _meet(self) -> Agreed | None:
        """Enter a generation, with a process group; what all go back to, None at the beginning."""
        tries = 3 if self._generations.may_shrink else 1  # with members whose end is not seen
        while True:
            entered = False
            try:
                with self._shown.answering(lambda: self.rank):
                    agreed = self._generations.enter(self._held.shown)
                entered = True
                self._refuse_hosts()
                self._held.take_own()
                self._group = make_group(self._store, self._generations, self._device)
                if self._buddies is not None:
                    self._buddies.open(agreed)
                self._held.hold_others(self._generations.ready("ready", Held(self._held.own.fds)))
                if self._buddies is not None and (agreed is None or agreed.layout == self._held.own_share.layout):
                    self._buddies.begin(agreed)
                self._held.start_keeper()
                self._shown.met(self.generation)
                return agreed
            except GenerationOver:
                pass
            except OSError:  # a holder has ended since it showed what it holds
                self._generations.leave()
            except PeerLostError:  # the same on another host
                if not self._loss_shows():
                    raise
                self._generations.leave()
            except WaitTimeoutError:
                tries -= 1
                if not entered or not tries:
                    raise
                self._generations.leave()  # who does not show in the next one is left out
            if self._buddies is not None:
                self._buddies.close()
            self._group.close()
            if dist.is_initialized():
                leave_generation([], "its ranks meet anew", self.rank)
