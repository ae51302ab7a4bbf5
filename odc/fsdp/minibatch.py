"""The minibatch protocol of one root: CLOSED -> OPEN -> CLOSED, with one meeting at the end.

Chose one meeting point a minibatch, at the very end, over a barrier a layer: a finish first does all that peers wait
for (flush, counts, DONE) and only then waits itself, so ranks may arrive with any number of microbatches, also none.
The order below is what makes the verbs sound:

    begin    wait: all DONE the previous epoch | publish, zero accumulators | PUBLISHED
    (fetch and push: each waits for the peer's PUBLISHED)
    (claim: waits until every rank has offered its microbatches)
    done     queue drained, own fetches over, sender flushed | attach to all | push counts to all | DONE
    collect  wait: all DONE, own daemon has added all | (replicas complete) | scale once, write .grad

No collective is called anywhere here. Everything runs on the rank's main thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from odc.comm import Gradient, State, UnitSpec, Verbs, Word
from odc.errors import OdcError, UnfinishedMinibatchError, UnsupportedError
from odc.fsdp import _torch_compat as compat
from odc.fsdp.gradients import push_counts, write_gradients
from odc.fsdp.group import OdcParamGroup
from odc.fsdp.sender import Sender
from odc.trace import Mark, recorder


class Minibatch:
    """State machine of one root; see the module.

    Args:
        verbs: of the root.
        sender: of the root.
        groups: every unit of the root, in the order of the heap's units.
        forget_order: makes torch forget the order of forwards, once a minibatch.
    """

    def __init__(
        self, verbs: Verbs, sender: Sender, groups: Sequence[OdcParamGroup], forget_order: Callable[[], None]
    ) -> None:
        self._verbs, self._sender, self._groups, self._forget_order = verbs, sender, groups, forget_order
        self._space, self._geometry = verbs.space, verbs.geometry
        self._rank = verbs.geometry.ranks[verbs.geometry.me]
        self.state = State.CLOSED
        self.pushed = False  # in the open epoch
        self.explicit = False  # inside `with model.minibatch()`
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
        if self.state is State.FINISHING:
            raise UnfinishedMinibatchError(
                f"rank {self._rank} (epoch {self.epoch}): the next minibatch begins before the gradients of the last "
                "one are written; call wait() on the handle of finalize_backward(async_op=True) first"
            )
        self._verbs.touch("beginning or fetching")
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
        self._refuse_unfrozen(unit, gradients)
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
        self._finalized.clear()
        self.done()
        # Runs after every other root of this backward is done: two roots may finish in opposite order on two ranks.
        compat.queue_after_backward(self.collect)

    def partial_backward(self, final_callback_queued: Callable[[], bool]) -> None:
        """A backward through a unit of which only some modules ran; it ends the minibatch, as torch reduces there.

        torch calls no final callback after such a backward, unless other units take part in it as well.

        Args:
            final_callback_queued: whether torch's final callback is still to come in the running backward.
        """
        if self.explicit or self.manual:
            return

        def end() -> None:
            if self.state is not State.FINISHING and not final_callback_queued():
                self.done(partial=True)
                compat.queue_after_backward(self.collect)

        compat.queue_after_backward(end)

    def done(self, *, partial: bool = False) -> None:
        """First half of finish: everything that peers wait for. Waits only for peers to come up and for credits.

        Args:
            partial: a forward of other units may still wait for its backward: they keep their unsharded parameters.
        """
        self.begin()  # a rank without microbatches: its peers need its shards
        self._finalized.clear()
        self._refuse_unclaimed()
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
            self._forget_order()
        self._sender.flush()
        self._space.attach_all()  # before DONE: a peer may end right after it has seen DONE
        self._verbs.done(trained=True)
        self._set(State.FINISHING)

    @torch.no_grad()
    def collect(self) -> None:
        """Second half of finish, the meeting: wait for every rank and write `.grad`."""
        if self.state is not State.FINISHING:
            raise OdcError(f"rank {self._rank}: collect() without done() in epoch {self.epoch}")
        verbs, space = self._verbs, self._space
        verbs.await_done(self.epoch)
        verbs.await_accumulated()
        counts = push_counts(space)
        used = (counts != self._seen).tolist()
        self._seen = counts
        self._refuse_half_evaluated(any(used))
        hybrid = len(self._geometry.column) > 1
        verbs.board.store(Word.COMPLETE, self.epoch)
        if hybrid:
            verbs.await_word(Word.COMPLETE, self._geometry.column, "to complete the accumulators of")
        self._writing = True
        try:
            for unit, group in zip(space.units, self._groups, strict=True):
                base = space.param_base[unit.index]
                flags = used[base : base + len(unit.params)]
                self._dirty[unit.index] = any(flags)
                divide = group.gradient_divide_factor or float(len(self._geometry.ranks))
                write_gradients(space, unit, group.odc_params, flags, divide)
        finally:
            self._writing = False
        if hybrid:
            space.heap.lanes.settle()  # own reads of replicas' accumulators
        verbs.board.store(Word.READ, self.epoch)
        self._set(State.CLOSED)
        if self._window is not None:
            self._window.__exit__(None, None, None)
            self._window = None
        self.pushed = False

    def close_evaluation(self, doing: str) -> None:
        """Close an epoch in which nothing was pushed, without meeting anyone; no-op when closed.

        Raises:
            UnfinishedMinibatchError: something was pushed.
        """
        if self.state is State.CLOSED:
            return
        if self.pushed:
            raise UnfinishedMinibatchError(
                f"rank {self._rank} (epoch {self.epoch}): {doing} inside an unfinished minibatch; mark the last "
                "backward with model.set_is_last_backward(True), or use `with model.minibatch():`"
            )
        for group in self._groups:
            group.drop_fetch()
            compat.to_sharded(group)
        self._verbs.done(trained=False)
        self._set(State.CLOSED)
        if self._window is not None:
            self._window.cancel()
            self._window = None

    def publish(self) -> None:
        """Make changed weights seen: close the epoch and open the next. Every rank calls it.

        The epoch's window in the trace begins at its first use: a rank may publish for readers outside the job and then
        wait for what they make of it.

        Raises:
            UnfinishedMinibatchError: something was pushed in this epoch.
        """
        self.close_evaluation("publish()")
        self.begin()
        if self._window is not None:
            self._window.cancel()
            self._window = None

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
        if self.state is State.FINISHING:
            raise UnfinishedMinibatchError(
                f"rank {self._rank} (epoch {self.epoch}): optimizer.step() before the minibatch's gradients are "
                "written; step after the backward, or after wait() of finalize_backward(async_op=True)"
            )
        if self.explicit:
            raise UnfinishedMinibatchError(
                f"rank {self._rank} (epoch {self.epoch}): optimizer.step() inside `with model.minibatch()`; "
                "step after it"
            )
        self.close_evaluation("optimizer.step()")
        if self._kept:
            for group in self._groups:
                compat.to_sharded(group)
            self._kept = False

    def abort(self, error: BaseException) -> None:
        """Spread ABORT with `error` as the reason; the root cannot be used any more."""
        culprit = error.culprit if isinstance(error, OdcError) else None
        reason = f"{type(error).__name__} in epoch {self.epoch}: {error}"
        self._verbs.abort(reason, self._rank if culprit is None else culprit)

    def _refuse_unfrozen(self, unit: UnitSpec, gradients: Sequence[Gradient]) -> None:
        for spec in (unit.params[gradient.param] for gradient in gradients):
            if not spec.trained:
                raise UnsupportedError(
                    f"rank {self._rank} (epoch {self.epoch}): {spec.name} has a gradient, but was frozen when it was "
                    "sharded and still when the model was first used, so there is no memory to sum it in. To train a "
                    "parameter only later, leave it requires_grad=True until after fully_shard, then freeze it"
                )

    def _refuse_unclaimed(self) -> None:
        """Before DONE: no gradient is written anywhere while a microbatch may be left that nobody has computed."""
        queue = self._verbs.queue
        if queue is not None and queue.left_early:
            raise OdcError(
                f"rank {self._rank} (epoch {self.epoch}) left the queue before its end; a rank that calls "
                "model.claim() goes on until it gives no more, or microbatches would be lost"
            )

    def _refuse_half_evaluated(self, trained: bool) -> None:
        if not trained:
            return
        for member in self._geometry.members:
            if self._space.board(member).load(Word.EVAL_CLOSED) == self.epoch:
                rank = self._geometry.ranks[member]
                raise OdcError(
                    f"rank {self._rank} trained in epoch {self.epoch}, but rank {rank} closed that epoch after "
                    "evaluation only; run evaluation, loads and publish() on every rank alike"
                )

    def _set(self, state: State) -> None:
        self.state = state
        self._verbs.board.store(Word.STATE, int(state))
