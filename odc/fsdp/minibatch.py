"""The minibatch protocol of one root: CLOSED -> OPEN -> CLOSED, with one meeting at the end.

Chose one meeting point a minibatch, at the very end, over a barrier a layer: a finish first does all that peers wait
for (flush, counts, DONE) and only then waits itself, so ranks may arrive with any number of microbatches, also none.
The order below is what makes the verbs sound:

    begin    wait: all DONE the previous epoch | publish, zero accumulators | PUBLISHED
    (fetch and push: each waits for the peer's PUBLISHED)
    (claim: waits until every rank has offered its microbatches)
    done     queue drained, own fetches over, sender flushed | attach to all | push counts to all | OUTCOME | DONE
    collect  wait: all DONE, own daemon has added all | (replicas complete) | scale once, write .grad

A rank may give the open minibatch up at any time (`abandon`). It still meets the others: it stores its outcome before
its DONE, so all ranks read the same outcomes and none writes a gradient. A backward that ended with an exception, which
the training loop has caught, abandons the minibatch by itself: part of its gradients is at their owners already.

No collective is called anywhere here. Everything runs on the rank's main thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from odc.errors import AbandonedMinibatchError, OdcError
from odc.fsdp import _torch_compat as compat
from odc.fsdp import refusals
from odc.fsdp.gradients import push_counts, write_gradients
from odc.fsdp.group import OdcParamGroup
from odc.fsdp.sender import Sender
from odc.runtime import Gradient, Outcome, State, UnitSpec, Verbs, Word
from odc.trace import Mark, recorder


class Minibatch:
    """State machine of one root; see the module.

    Args:
        verbs: of the root.
        sender: of the root.
        groups: every unit of the root, in the order of the heap's units.
        iteration: torch's own state of the root.
    """

    def __init__(
        self, verbs: Verbs, sender: Sender, groups: Sequence[OdcParamGroup], iteration: compat.Iteration
    ) -> None:
        self._verbs, self._sender, self._groups, self._iteration = verbs, sender, groups, iteration
        self._space, self._geometry = verbs.space, verbs.geometry
        self._rank = verbs.geometry.ranks[verbs.geometry.me]
        self.state = State.CLOSED
        self.pushed = False  # in the open epoch
        self.explicit = False  # inside `with model.minibatch()`
        self.given_up: str | None = None  # why this rank abandons the open epoch
        self.manual = False  # a minibatch ends by `finalize_backward()`, never by a backward
        self._finalized: set[int] = set()
        self._writing = False  # `collect` writes gradients and runs their hooks
        self._kept = False  # units may hold unsharded parameters although the minibatch has ended
        self._window: Mark | None = None  # of the open epoch, for those who look at the trace of their own loop
        self._seen = torch.zeros(verbs.space.param_base[-1], dtype=torch.int64)
        self._dirty = [False] * len(groups)

    @property
    def epoch(self) -> int:
        """Number of the open or last minibatch, from 1."""
        return self._verbs.epoch

    def begin(self) -> None:
        """Open the next epoch if none is open: publish own shards. Waits until nobody uses the last epoch."""
        self._verbs.touch("beginning or fetching")
        refusals.refuse_early_begin(self._who(), self.state)
        if self.state is not State.CLOSED:
            self._mark()
            return
        last = self._verbs.epoch
        if last:
            self._verbs.await_done(last)
            if len(self._geometry.column) > 1:
                others = [m for m in self._geometry.column if m != self._geometry.me]
                self._verbs.await_word(Word.READ, others, "to read the accumulators of")
        self._verbs.publish([[param.shard() for param in group.odc_params] for group in self._groups], self._dirty)
        self._dirty = [False] * len(self._groups)
        self._verbs.board.store(Word.MICROBATCH, 0)
        self._set(State.OPEN)
        self._mark()
        self.pushed = False

    def _mark(self) -> None:
        """Open the window of the open epoch in the trace, if it has none yet."""
        if self._window is None and self.state is State.OPEN:
            self._window = recorder().window(self.epoch)
            self._window.__enter__()

    def push(self, unit: UnitSpec, gradients: Sequence[Gradient]) -> None:
        """Send gradients of the open epoch.

        Raises:
            UnsupportedError: one is of a parameter that has no place in the accumulators.
        """
        refusals.refuse_unfrozen(self._who(), unit, gradients)
        self.begin()
        self.pushed = True
        self._sender.send(unit, gradients)

    def finalized(self, group: OdcParamGroup) -> None:
        """A last backward is over for `group`; the last of all groups ends the minibatch.

        Not an earlier one: torch finalizes the root's own group before later groups' left-over gradients.
        """
        if self.explicit or self.manual:
            return  # marks change nothing: the block, or `finalize_backward()`, ends the minibatch
        self._finalized.add(id(group))
        if len(self._finalized) < len(self._groups):
            return
        self.begin()
        self._close_own_part()
        # Runs after every other root of this backward is done: two roots may finish in opposite order on two ranks.
        compat.queue_after_backward(self._collect_or_raise)

    def partial_backward(self) -> None:
        """A backward through a unit of which only some modules ran; it ends the minibatch, as torch reduces there.

        torch calls no final callback after such a backward, unless other units take part in it as well.
        """
        if self.explicit or self.manual or not self._iteration.is_last_backward():
            return

        def end() -> None:
            if self.state is not State.FINISHING and not self._iteration.final_callback_queued():
                self.begin()
                self._close_own_part(partial=True)
                compat.queue_after_backward(self._collect_or_raise)

        compat.queue_after_backward(end)

    def done(self) -> None:
        """First half of finish: everything that peers wait for. Waits only for peers to come up and for credits.

        Outside of a backward.
        """
        self.begin()  # a rank without microbatches: its peers need its shards
        self.recover()
        self._close_own_part()

    def _close_own_part(self, *, partial: bool = False) -> None:
        """`partial`: a forward of other units may still wait for its backward, so they keep unsharded parameters."""
        self._finalized.clear()
        refusals.refuse_unclaimed(self._who(), self._verbs)
        for group in self._groups:
            if not partial:
                compat.torch_finalize(group)
            group.drop_fetch()
            if not partial:
                # Also where no backward resharded (no microbatch after an evaluation): clipping must see the sharded
                # parameters, and the unsharded values are of an epoch that ends.
                compat.to_sharded(group)
        self._kept = partial
        if not partial:
            self._iteration.forget_order()
        self._flush()
        self._space.attach_all()  # before DONE: a peer may end right after it has seen DONE
        outcome = Outcome.TRAINED if self.given_up is None else Outcome.ABANDONED
        self._verbs.done(outcome, self.given_up or "")
        self._set(State.FINISHING)

    def _flush(self) -> None:
        """Return when everything sent is posted. A push cut short gives the minibatch up; a lost peer raises."""
        try:
            self._sender.flush()
        except OdcError:
            raise
        except Exception as error:
            self._give_up(f"a push failed ({type(error).__name__}: {error})")
            self._flush()

    def collect(self) -> AbandonedMinibatchError | None:
        """Second half of finish, the meeting: wait for every rank and write `.grad`.

        Returns the error to be raised if a rank has given the minibatch up; then no rank writes a `.grad`. Any other
        error is raised here and ends the job on every rank: the others may have written theirs.
        """
        if self.state is not State.FINISHING:
            raise OdcError(f"rank {self._rank}: collect() without done() in epoch {self.epoch}")
        try:
            return self._meet()
        except BaseException as error:
            self._set(State.FAILED)
            self.abort(error)
            raise

    def _collect_or_raise(self) -> None:
        if (abandoned := self.collect()) is not None:
            raise abandoned

    @torch.no_grad()
    def _meet(self) -> AbandonedMinibatchError | None:
        verbs, space = self._verbs, self._space
        verbs.await_done(self.epoch)
        verbs.await_accumulated()
        counts = push_counts(space)
        used = (counts != self._seen).tolist()
        self._seen = counts
        abandoned = refusals.abandonment(self._who(), verbs)
        if abandoned is None and any(used):
            refusals.refuse_half_evaluated(verbs)
        hybrid = len(self._geometry.column) > 1
        verbs.board.store(Word.COMPLETE, self.epoch)
        if hybrid:
            verbs.await_word(Word.COMPLETE, self._geometry.column, "to complete the accumulators of")
        if abandoned is None:
            self._write_gradients(used)
        else:
            self._dirty = [True] * len(self._groups)  # a push that was cut short has added more than it has counted
        if hybrid:
            space.heap.lanes.settle()  # own reads of replicas' accumulators
        verbs.board.store(Word.READ, self.epoch)
        self._set(State.CLOSED)
        self._end_window(keep=abandoned is None)
        self.pushed, self.given_up = False, None
        return abandoned

    def _write_gradients(self, used: Sequence[bool]) -> None:
        self._writing = True
        try:
            for unit, group in zip(self._space.units, self._groups, strict=True):
                base = self._space.param_base[unit.index]
                flags = list(used[base : base + len(unit.params)])
                self._dirty[unit.index] = any(flags)
                divide = group.gradient_divide_factor or float(len(self._geometry.ranks))
                write_gradients(self._space, unit, group.odc_params, flags, divide)
        finally:
            self._writing = False

    def _end_window(self, *, keep: bool) -> None:
        if self._window is None:
            return
        if keep:
            self._window.__exit__(None, None, None)
        else:
            self._window.cancel()
        self._window = None

    # giving a minibatch up ---------------------------------------------------------------------------------------

    def abandon(self, reason: str) -> None:
        """Give the open minibatch up; no-op where none is open.

        Inside `with model.minibatch()` the block's end meets the others, in manual mode `finalize_backward()` does.
        Elsewhere this call does: it returns when all ranks have closed the minibatch, and the others get the error out
        of their backward.
        """
        if self.state is not State.OPEN:
            return
        self._iteration.reset(self._groups)
        self._give_up(reason)
        if not self.explicit and not self.manual:
            self._close_own_part()
            self.collect()

    def reset(self) -> None:
        """As `FSDPModule.reset_iter_state`: what the open minibatch holds of this rank is lost."""
        self._iteration.reset(self._groups)
        if self.pushed:
            self.abandon("reset_iter_state() was called after gradients of this minibatch had been pushed")

    def recover(self) -> None:
        """Clear what an exception that the training loop has caught left in torch's state; outside of a backward.

        An interrupted forward has pushed nothing and costs its microbatch. An interrupted backward costs the minibatch.
        """
        if self._iteration.backward_cut_short():
            self.abandon("a backward ended with an exception, which the training loop has caught")
        elif self._iteration.forward_cut_short():
            self._iteration.reset(self._groups)

    def left_unfinished(self) -> str:
        """For the peers of a rank that leaves now: what it has not told them of a failed backward, or nothing."""
        return (
            "a backward that ended with an exception, which was caught" if self._iteration.backward_cut_short() else ""
        )

    def _give_up(self, reason: str) -> None:
        if self.given_up is None:
            self.given_up = reason
        if self._verbs.queue is not None:
            self._verbs.queue.give_up()

    def close_evaluation(self, doing: str) -> None:
        """Close an epoch in which nothing was pushed, without meeting anyone; no-op when closed.

        Raises:
            UnfinishedMinibatchError: something was pushed.
        """
        if self.state is State.CLOSED:
            return
        self._refuse_pushed(doing)
        for group in self._groups:
            group.drop_fetch()
            compat.to_sharded(group)
        self._verbs.done(Outcome.EVALUATED)
        self._set(State.CLOSED)
        self._end_window(keep=False)

    def publish(self) -> None:
        """Make changed weights seen: close the epoch and open the next. Every rank calls it.

        The epoch's window in the trace begins at its first use: a rank may publish for readers outside the job and then
        wait for what they make of it.

        Raises:
            UnfinishedMinibatchError: something was pushed in this epoch.
        """
        self.close_evaluation("publish()")
        self.begin()
        self._end_window(keep=False)

    @property
    def may_step(self) -> bool:
        """Whether an optimizer may change the shards with nothing else to do: `before_step` need not be called.

        In a post-accumulate-grad hook, too: the gradient is whole, and peers read published copies of the shards.
        """
        return self._writing or (self.state is State.CLOSED and not self._kept)

    def before_step(self) -> None:
        """An optimizer is about to change the shards; an epoch of evaluation ends, units that were kept are resharded.

        Raises:
            UnfinishedMinibatchError: the minibatch is not finished, so there is nothing whole to step with.
        """
        self.refuse_unfinished("optimizer.step()")
        if self._writing:
            return
        self.close_evaluation("optimizer.step()")
        if self._kept:
            for group in self._groups:
                compat.to_sharded(group)
            self._kept = False

    def refuse_unfinished(self, doing: str) -> None:
        """Raise `UnfinishedMinibatchError` if `doing` would use gradients that are not there yet."""
        if self._writing:
            return  # a hook of a parameter whose gradient has just been written (optimizer in backward)
        if self.explicit and self.state is State.OPEN:
            refusals.refuse_inside_block(self._who(), doing)
        if self.state is not State.CLOSED:
            self._refuse_pushed(doing)

    def _refuse_pushed(self, doing: str) -> None:
        refusals.refuse_unwritten(self._who(), doing, self.state)
        pushed = self.pushed or self.given_up is not None
        cut_short = self._iteration.backward_cut_short()
        refusals.refuse_pushed(self._who(), doing, cut_short=cut_short, pushed=pushed)

    def abort(self, error: BaseException) -> None:
        """Spread ABORT with `error` as the reason; the root cannot be used any more."""
        culprit = error.culprit if isinstance(error, OdcError) else None
        reason = f"{type(error).__name__} in epoch {self.epoch}: {error}"
        self._verbs.abort(reason, self._rank if culprit is None else culprit)

    def _who(self) -> str:
        return f"rank {self._rank} (epoch {self.epoch})"

    def _set(self, state: State) -> None:
        self.state = state
        self._verbs.board.store(Word.STATE, int(state))
