"""A rank that is killed costs one minibatch: `Recovery` keeps the state, meets again, and goes back to what was kept.

    recovery = odc.Recovery()                        # instead of torch.distributed.init_process_group
    ...                                              # build model and optimizer, as always
    batches = odc.StatefulBatches(loader)
    recovery.protect(model, optimizer, scheduler=scheduler, batches=batches)
    for step in recovery.steps(1000):
        with recovery.attempt():                     # one minibatch and its optimizer step
            train(next(batches))

Whoever started the ranks starts a process for a rank that has ended, with the same environment; it runs the program
from its beginning and takes its place at the step where the others are. docs/recovery.md says why that is exact.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from odc.errors import ConfigError, PeerLostError, UnsupportedError, WaitTimeoutError, culprit_of
from odc.fsdp.rejoin import enter_generation, leave_generation, refuse_groups
from odc.memory.device_links import device_uuid
from odc.ranks.worker import report_progress
from odc.recovery.batches import refuse_loaders
from odc.recovery.buddy import Buddies, refuse_hosts
from odc.recovery.devices import forget_frames, refuse_devices
from odc.recovery.generations import GenerationOver, Generations
from odc.recovery.holdings import Holdings
from odc.recovery.launched import launched_place, launchers_store
from odc.recovery.losses import is_loss, loss_shows
from odc.recovery.members import Agreed, Held, Share
from odc.recovery.met import MinibatchMet
from odc.recovery.process_group import GenerationGroup, make_group
from odc.recovery.reshard import FormerLayout
from odc.recovery.shown import ShownRecovery, TracedPlace
from odc.recovery.slots import HolderEndedError, Slots
from odc.recovery.state import Stateful, TrainingState
from odc.settings import Settings

_log = logging.getLogger(__name__)
_ALONE = (
    "rank %d begins in generation %d with the weights that its program has built. If a broadcast before protect() "
    "has to bring them, begin the job anew, and broadcast in the first attempt (docs/recovery.md)"
)


class Recovery:
    """The rank's place in a job that survives deaths. Constructing it makes the default process group.

    On the main thread. Constructing it, `finish` and `wait_for_all` wait for all ranks, and so does the end of a block
    of `attempt` or `repeatable` in which a rank was lost. The environment is torchrun's (RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT), with a store that outlives every rank: the launcher hosts it. To train on a GPU, make it the current
    device first.

    Args:
        store: a `torch.distributed.Store` that no rank hosts; None makes a client of the launcher's.
        rejoin_s: seconds to wait for a rank to meet the others, a replacement for one that has ended among them.
        every: keep each so many steps; a death costs as many minibatches.
        keep: "host": a state is lost with the last process of its host. "buddy": it is kept on another host too, and
            sent there after each kept step; a whole host may end. The same on every rank.
        fewest: where a rank has not come for `rejoin_s`, go on without it, if so many have; it may still come later.
            None: never. Over several hosts it takes "buddy". The same on every rank.
        settings: those that `fully_shard` is given, if any: the network is opened here, by their `lost_after_s`,
            `address`, `ports` and `secret_file`.

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
        settings: Settings | None = None,
    ) -> None:
        if every < 1 or not 0 < rejoin_s < float("inf"):
            raise ConfigError(f"every={every} must be 1 or more, rejoin_s={rejoin_s} more than 0, and finite")
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
        self._settings = settings
        self._buddies = Buddies(self._generations, self._held, settings or Settings()) if keep == "buddy" else None
        self._trained: TrainingState | None = None
        self.step = self._first = 0  # steps that are done, also when the program began
        self.recoveries = 0  # that this process has lived through
        self._group = GenerationGroup(self._generations, nccl=False)
        self._shown = ShownRecovery(self.rank)
        self._agreed = self._meet()
        self._met = MinibatchMet()

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
        loaded by this process alone, from the checkpoint of step `first`, for instance. `others` are what else a step
        changes: schedulers, `StatefulBatches`, your own counters. Modes of modules, `requires_grad`, and the states of
        torch's, numpy's and Python's global generators are kept, too. Warns where an earlier generation kept none.

        Raises ConfigError in a replacement whose model differs, for another `first` than the job's where no step is
        kept, an optimizer that holds another, or others that cannot be put back, UnsupportedError for another mesh than
        a 1-D one over all ranks or another device than the CPU or the current GPU, HeapMemoryError without memory.
        """
        if self._trained is not None:
            raise ConfigError("protect() is called once")
        models = [model] if isinstance(model, nn.Module) else list(model)
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        for one in models:
            refuse_groups(one)
            refuse_devices(one, self._device, fewer=self._generations.may_shrink)
        refuse_loaders(others)
        self._trained = TrainingState(models, optimizers, {"odc.trace": TracedPlace(), **others})
        self._met.watch(models, buddies=self._buddies is not None)
        self._first = self.step = self._generations.begin_at(first)
        if self._agreed is None:
            if first != self._first:
                raise ConfigError(
                    f"the job began at step {self._first} and has kept none since, but this process gives "
                    f"first={first}: begin it anew from that checkpoint, with a new store"
                )
            if self.generation:
                _log.warning(_ALONE, self.rank, self.generation)
            try:
                self._keep()
            except GenerationOver as error:
                raise PeerLostError(f"rank {self.rank}: a rank has ended before all had kept a first state") from error
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
        self._state.begin()
        with self.repeatable():
            yield
            self.count()

    def count(self) -> None:
        """A step is done: keep it. Inside `repeatable`, before this rank ends the next one.

        Where no minibatch has been run since a state was kept, that one stays: all can go back to it.
        """
        self.step += 1
        if self.step % self.every == 0 and self._met.since_kept:
            if max(self._held.own.steps()) <= self._first:
                self._generations.pass_first()
            self._keep()
            report_progress()
            if self._generations.may_shrink and self._generations.superseded():
                raise GenerationOver  # by a process that wants to join, of which no wait in odc would learn

    def wait_for_all(self, point: str) -> None:
        """Wait until every rank is at `point`; a name works once a generation. In `repeatable` a death ends it."""
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
        lost: tuple[str, int] | None = None
        try:
            yield
        except GenerationOver:
            lost = "a rank has ended, or joins", self.rank
        except Exception as error:
            if not is_loss(error, self._generations, self._group):
                raise
            lost = f"{type(error).__name__}: {error}", culprit_of(error, self.rank)
            forget_frames(error)
        if lost is not None:
            self._recover(*lost)

    def close(self) -> None:
        """Let go of all kept states. The process group stays."""
        self._met.close()
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
        self._met.kept()
        self._shown.kept(self.step)
        if self._buddies is not None:
            self._buddies.keep(self.step)

    def _restore(self, agreed: Agreed) -> None:
        self.step = agreed.step
        self._met.kept()
        if agreed.layout != self._held.own_share.layout:
            self._divide_anew(agreed)
            return
        self._held.own.forget_after(agreed.step)
        self._state.put(*self._held.own.read(agreed.step), first=agreed.step == self._first)
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
        self._state.put(*former.kept(base), former.part, random=took_part, first=agreed.step == self._first)
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
        except HolderEndedError as error:  # since it showed what it holds
            self._generations.leave()
            raise GenerationOver from error
        if found is None:
            assert self._buddies is not None, "ranks of several hosts that may become fewer have buddies"
            found = self._buddies.fetch(share, step)
        return found

    # losing a rank ---------------------------------------------------------------------------------------------

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

    def _meet(self) -> Agreed | None:
        """Enter a generation, with a process group; what all go back to, None at the beginning."""
        tries = 3 if self._generations.may_shrink else 1  # with members whose end is not seen
        while True:
            entered = False
            try:
                with self._shown.answering(lambda: self.rank):
                    agreed = self._generations.enter(self._held.shown)
                entered = True
                refuse_hosts(self._generations, buddies=self._buddies is not None, first=agreed is None)
                self._held.take_own(agreed if self._buddies is None else None)
                self._group = make_group(self._store, self._generations, self._device, self._settings)
                if self._buddies is not None:
                    self._buddies.open(agreed)
                self._held.hold_others(self._generations.ready("ready", Held(self._held.own.fds)))
                self.wait_for_all("held")  # only then may a rank go on, and end: all of its host have its slots
                if self._buddies is not None and (agreed is None or agreed.layout == self._held.own_share.layout):
                    self._buddies.begin(agreed)
                self._held.start_keeper()
                self._shown.met(self.generation)
                return agreed
            except GenerationOver:
                pass
            except HolderEndedError:  # since it showed what it holds
                self._generations.leave()
            except PeerLostError:  # the same on another host
                if not loss_shows(self._generations):
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
