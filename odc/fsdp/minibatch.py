"""The state machine of one root's minibatches: CLOSED -> OPEN -> FINISHING -> CLOSED.

It is used by one thread at a time: by the rank's main thread, and in a backward on a device by autograd's, for which
the main thread waits. `odc.protocol.protocol` defines what ranks store; this module decides when (docs/protocol.md,
"States"). Several roots close all their epochs before they wait for any.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from odc.errors import AbandonedMinibatchError, OdcError, culprit_of
from odc.fsdp import _torch_compat as compat
from odc.fsdp import refusals
from odc.fsdp.collect import Collector
from odc.fsdp.fetcher import FetchedGroup
from odc.fsdp.last import LastPushes
from odc.fsdp.sender import Sender
from odc.fsdp.stale import StaleCheck
from odc.protocol import Gradient, Outcome, RootState, UnitSpec
from odc.runtime import Endpoint
from odc.trace import Mark, recorder

#: Called before this rank is done with a minibatch, on its main thread: a wait that has had the forward and backward to
#: end in. What one raises ends the job, as the loss of a peer does.
before_done: list[Callable[[], object]] = []


@dataclass
class OpenEpoch:
    """What this rank has done in the open epoch; replaced by a new one when the epoch ends."""

    pushed: bool = False
    given_up: str | None = None  # why this rank abandons it
    finalized: set[int] = field(default_factory=set)  # groups for which a last backward is over
    window: Mark | None = None  # in the trace, from the epoch's first use with gradients on


class Minibatch:
    """State machine of one root; see the module.

    `groups` are the root's units in the order of the heap's; `iteration` is what torch keeps of the root.

    Attributes:
        explicit: the minibatch is ended by the block or call around it, never by a backward.
        manual: it is ended by `finalize_backward()`, never by a backward.
        current: of the open epoch.
        stale: finds shards that were changed in it.
    """

    def __init__(
        self, member: Endpoint, sender: Sender, groups: Sequence[FetchedGroup], iteration: compat.Iteration
    ) -> None:
        self._member, self._sender, self._groups, self._iteration = member, sender, groups, iteration
        self._protocol, self._rank = member.protocol, member.grid.rank
        self._collector, self.stale = Collector(member, groups), StaleCheck(member.layout)
        self.shards, self.state = member.grid.shards, RootState.CLOSED
        self.explicit = self.manual = False
        self.current = OpenEpoch()
        self.last = LastPushes(len(groups))
        # Of a frozen model no epoch ends: it has no gradients to meet for, and a window of the trace would stay open.
        self._trains = any(spec.trained for unit in member.layout.units for spec in unit.params)
        self._kept = False  # units may hold unsharded parameters although the minibatch has ended

    @property
    def epoch(self) -> int:
        """Number of the open or last minibatch, from 1."""
        return self._protocol.epoch

    @property
    def ends_by_backward(self) -> bool:
        """Whether a backward that is marked as the last ends the minibatch; one through a frozen model never does."""
        return self._trains and not (self.explicit or self.manual)

    def refuse_capture(self) -> None:
        """UnsupportedError while a CUDA graph is being captured."""
        refusals.refuse_capture(self._who(), self._member.layout.heap.device)

    def begin(self) -> None:
        """Open the next epoch if none is open: publish this rank's shards. Waits until no rank uses the last epoch."""
        self._protocol.touch("beginning or fetching")
        self.refuse_capture()
        refusals.refuse_early_begin(self._who(), self.state)
        if self.state is RootState.CLOSED:
            self._open()
        # An evaluation is no part of a step, though it may share the epoch or have no end.
        if self.current.window is None and self._trains and (torch.is_grad_enabled() or compat.is_in_backward()):
            self.current.window = recorder().window(recorder().before + self.epoch)
            self.current.window.__enter__()

    def _open(self) -> None:
        self._protocol.await_end_of_epoch()
        self._collector.drop_abandoned()
        if (stepped := self._iteration.post_optim_event()) is not None:
            self._member.layout.heap.lanes.follow(stepped)  # an optimizer on another stream may still write the shards
        shards = [[param.shard() for param in group.odc_params] for group in self._groups]
        self._collector.release_accumulators()
        with self._failing(lambda: not self._protocol.is_done(self._member.grid.me)):
            self._member.shards.publish(shards, self._collector.dirty)
            self._collector.dirty = [False] * len(self._groups)
            self._protocol.reset_microbatches()
            self.last.begin()
            self._set(RootState.OPEN)

    def _end(self, *, keep_window: bool) -> None:
        """The open epoch has ended; an evaluation or an abandoned minibatch leaves no window in the trace."""
        self._set(RootState.CLOSED)
        window, self.current = self.current.window, OpenEpoch()
        if window is not None and keep_window:
            window.__exit__(None, None, None)
        elif window is not None:
            window.cancel()

    def push(self, unit: UnitSpec, gradients: Sequence[Gradient]) -> None:
        """Send gradients of the open epoch; UnsupportedError if one is of a frozen parameter."""
        refusals.refuse_unfrozen(self._who(), unit, gradients)
        self.begin()
        self.current.pushed = True
        # In manual mode torch's mark means nothing. Inside `minibatch()` a backward is the last if the loop marks it or
        # the queue from which its microbatch comes has no other.
        marked = not self.manual and (self._iteration.is_last_backward() or self._claimed_last())
        self._sender.send(unit, gradients, last=self.last.pushed(unit.index, marked))

    def _claimed_last(self) -> bool:
        queue = self._member.queue
        return queue is not None and self._member.layout.spans_hosts and queue.in_last()

    def finalized(self, group: FetchedGroup) -> None:
        """A last backward is over for `group`; the last of all groups ends the minibatch.

        Not an earlier one: torch finalizes the root's own group before later groups' left-over gradients.
        """
        # A unit of several modules comes once for each of them in torch before 2.12, also after the last of all groups.
        if not self.ends_by_backward or self.state is RootState.FINISHING:
            return
        self.current.finalized.add(id(group))
        if len(self.current.finalized) < len(self._groups):
            return
        self.begin()
        self._close()
        # Runs after every other root of this backward is done: two roots may finish in opposite order on two ranks.
        compat.queue_after_backward(self.collect_or_raise)

    def partial_backward(self) -> None:
        """A backward through a unit of which only some modules ran; it ends the minibatch, as torch reduces there.

        torch calls no final callback after such a backward, unless other units take part in it as well. Where it
        reduces outside of a backward (`torch.distributed.pipelining`), it always calls one.
        """
        if not (self.ends_by_backward and self._iteration.is_last_backward() and compat.is_in_backward()):
            return

        def end() -> None:
            if self.state is not RootState.FINISHING and not self._iteration.final_callback_queued():
                self.begin()
                self._close(partial=True)
                compat.queue_after_backward(self.collect_or_raise)

        compat.queue_after_backward(end)

    def flush(self) -> None:
        """Return when everything sent is posted; a failed push gives the minibatch up. Outside of a backward."""
        self.recover()
        self._flush()

    def done(self) -> None:
        """First half of finish, outside of a backward. Waits only for peers to come up and for credits."""
        self.begin()  # a rank without microbatches: its peers need its shards
        self.recover()
        self._close()

    def _close(self, *, partial: bool = False) -> None:
        """`partial`: a forward of other units may still wait for its backward, so they keep unsharded parameters."""
        refusals.refuse_unclaimed(self._who(), self._member.queue)
        for group in self._groups:
            if not partial:
                compat.torch_finalize(group)
            group.drop_fetch()
            if not partial:
                # Also where no backward resharded (no microbatch after an evaluation): clipping must see the sharded
                # parameters, and the unsharded values are of an epoch that ends.
                compat.to_sharded(group)
        self._kept = partial
        self._flush()
        self.stale.refuse(self.epoch)
        for wait in before_done:
            wait()
        self._member.protocol.attach_all()  # before DONE: a peer may end right after it has seen DONE
        given_up = self.current.given_up
        self._done(Outcome.TRAINED if given_up is None else Outcome.ABANDONED, given_up or "")

    def _done(self, outcome: Outcome, reason: str = "") -> None:
        with self._failing(lambda: self._protocol.is_done(self._member.grid.me)):
            self._member.done(outcome, reason)
            self._set(RootState.FINISHING)

    def _flush(self) -> None:
        """Return when everything sent is posted. A push cut short gives the minibatch up; a lost peer raises."""
        while True:
            try:
                return self._sender.flush()
            except OdcError:
                raise
            except Exception as error:
                self._give_up(f"a push failed ({type(error).__name__}: {error})")

    def collect(self) -> AbandonedMinibatchError | None:
        """Second half of finish: wait for every rank and write `.grad`.

        Returns the error to be raised if a rank has given the minibatch up; then no rank writes a `.grad`. Any other
        error is raised here and ends the job on every rank.
        """
        if self.state is not RootState.FINISHING:
            raise OdcError(f"rank {self._rank}: collect() without done() in epoch {self.epoch}")
        with self._failing(lambda: True):
            abandoned = self._collector.collect(self._who())
            self._end(keep_window=abandoned is None)
        return abandoned

    def collect_or_raise(self) -> None:
        """As `collect`, but raises the error that a minibatch was given up."""
        if (abandoned := self.collect()) is not None:
            raise abandoned

    # giving a minibatch up ---------------------------------------------------------------------------------------

    def abandon(self, reason: str) -> None:
        """Give the open minibatch up; no-op where none is open.

        Inside `with model.minibatch()` the end of the block ends it, in manual mode `finalize_backward()` does.
        Elsewhere this call does: it waits for the other ranks, whose last backward raises the error. It raises it, too,
        where the loop has marked that another backward of this minibatch comes: that one would be of the next.
        """
        failed_before_last = self._iteration.backward_cut_short() and not self._iteration.cut_short_last()
        # A context of `no_sync` that the error left has marked the next backward as the last again.
        marked = self._iteration.is_last_backward() and not failed_before_last
        lost = self._abandon(reason, ends=self.ends_by_backward)
        if lost is not None and not marked:
            raise lost

    def _abandon(self, reason: str, *, ends: bool) -> AbandonedMinibatchError | None:
        if self.state is not RootState.OPEN:
            return None
        loses = self._trains or self.explicit or self.manual  # nothing of a frozen model is lost
        if loses:
            self._give_up(reason)
        self._iteration.reset(self._groups)  # only now: it forgets that a backward was cut short
        if not (loses and ends):
            return None
        self._close()
        return self.collect()

    def reset(self) -> None:
        """As `FSDPModule.reset_iter_state`: what the open minibatch holds of this rank is lost."""
        if self.current.pushed:
            self.abandon("reset_iter_state() was called after gradients of this minibatch had been pushed")
        self._iteration.reset(self._groups)

    def recover(self) -> None:
        """Clear torch's state after an exception that the training loop has caught; outside of a backward.

        An interrupted forward has pushed nothing and costs its microbatch. An interrupted backward costs the minibatch,
        as some gradients are at their owners; one that has not reached the model leaves no trace. In a plain loop the
        minibatch ends here if that backward was marked as the last; else the marked one ends it, and raises here too.
        """
        if self._iteration.backward_cut_short():
            reason = "a backward ended with an exception, which the training loop has caught"
            self._abandon(reason, ends=self.ends_by_backward and self._iteration.cut_short_last())
        elif self._iteration.forward_cut_short():
            self._iteration.reset(self._groups)

    def leave(self) -> None:
        """This rank leaves the job, and its modules stay: what the open minibatch holds of it is given up.

        Outside of a backward, once the job is aborted, so that no fetch or push still waits for a peer.
        """
        self._iteration.reset(self._groups)
        self._set(RootState.FAILED)
        if self.current.window is not None:
            self.current.window.__exit__(None, None, None)  # `Recorder.go_back` marks it as given up

    def left_unfinished(self) -> str:
        """For the peers of a rank that shuts down now: the failed backward that it has not reported, or nothing."""
        cut_short = self._iteration.backward_cut_short()
        return "a backward that ended with an exception, which was caught" if cut_short else ""

    def _give_up(self, reason: str) -> None:
        if self.current.given_up is None:
            self.current.given_up = reason
        self._protocol.give_up()
        if self._member.queue is not None:
            self._member.queue.give_up()

    @property
    def lost(self) -> bool:
        """Whether this rank knows that the open minibatch will be abandoned."""
        return self._protocol.gives_up(self._member.grid.me)

    def absent(self, member: int | None, doing: str) -> bool:
        """Whether a member, whose board is mapped, has ended its part of this minibatch or gives it up. PeerLostError
        if the job was aborted; `doing` is for its message.
        """
        self._protocol.waiter.check(doing)
        return member is not None and (self._protocol.gives_up(member) or self._protocol.is_done(member))

    def lose_with(self, member: int) -> bool:
        """Give this minibatch up as `member` does; returns False if that member does not."""
        if not self._protocol.gives_up(member):
            return False
        self._protocol.give_up()
        return True

    def close_evaluation(self, doing: str) -> None:
        """Close an epoch in which nothing was pushed; no-op when closed.

        Waits for no rank on one host, and over hosts until this rank has a connection to every other host.
        Raises UnfinishedMinibatchError if something was pushed.
        """
        if self.state is RootState.CLOSED:
            return
        self._refuse_pushed(doing)
        for group in self._groups:
            group.drop_fetch()
            compat.to_sharded(group)
        self.stale.refuse(self.epoch)
        self._done(Outcome.EVALUATED)
        self._end(keep_window=False)

    def publish(self) -> None:
        """Show changed weights to the peers: close the epoch and open the next. UnfinishedMinibatchError after a push.

        The epoch's window in the trace begins at its first use with gradients: a rank may publish for readers outside
        the job and wait.
        """
        self.refuse_capture()
        self.close_evaluation("publish()")
        self._protocol.touch("beginning or fetching")
        self._open()

    @property
    def may_step(self) -> bool:
        """Whether an optimizer may change the shards with nothing else to do: `before_step` need not be called.

        In a post-accumulate-grad hook, too: the gradient is whole, and peers read published copies of the shards.
        """
        return self._collector.writing or (self.state is RootState.CLOSED and not self._kept)

    def before_step(self) -> None:
        """An optimizer is about to change the shards: an epoch of evaluation ends, units that were kept are resharded.

        Raises UnfinishedMinibatchError in an unfinished minibatch.
        """
        self.refuse_unfinished("optimizer.step()")
        self.close_evaluation("optimizer.step()")
        if self._kept:
            for group in self._groups:
                compat.to_sharded(group)
            self._kept = False

    def refuse_unfinished(self, doing: str) -> None:
        """Raise `UnfinishedMinibatchError` if `doing` would use gradients that are not there yet."""
        if self._collector.writing:
            return  # a hook of a parameter whose gradient has just been written (optimizer in backward)
        if self.explicit and self.state is RootState.OPEN:
            refusals.refuse_inside_block(self._who(), doing)
        if self.state is not RootState.CLOSED:
            self._refuse_pushed(doing)

    def _refuse_pushed(self, doing: str) -> None:
        refusals.refuse_unwritten(self._who(), doing, self.state)
        pushed = self.current.pushed or self.current.given_up is not None
        cut_short = self._iteration.backward_cut_short()
        refusals.refuse_pushed(self._who(), doing, cut_short=cut_short, pushed=pushed, explicit=self.explicit)

    @contextlib.contextmanager
    def _failing(self, shown: Callable[[], bool]) -> Iterator[None]:
        """An error inside, be it a signal handler's, ends the job once peers were `shown` what cannot be taken back."""
        try:
            yield
        except BaseException as error:
            if shown():
                self._set(RootState.FAILED)
                self.abort(error)
            raise

    def abort(self, error: BaseException) -> None:
        """Spread ABORT with `error` as the reason; the root cannot be used any more."""
        reason = f"{type(error).__name__} in epoch {self.epoch}: {error}"
        self._protocol.abort(reason, culprit_of(error, self._rank))

    def _who(self) -> str:
        return f"rank {self._rank} (epoch {self.epoch})"

    def _set(self, state: RootState) -> None:
        self.state = state
        self._protocol.set_state(state)
