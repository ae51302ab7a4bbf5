"""What a minibatch refuses, and what each error says. Pure checks: nothing is changed and nobody is waited for.

`who` names the global rank and its epoch and begins every message.
"""

from __future__ import annotations

from collections.abc import Sequence

from odc.errors import AbandonedMinibatchError, OdcError, UnfinishedMinibatchError, UnsupportedError
from odc.runtime import Gradient, Outcome, State, UnitSpec, Verbs


def refuse_early_begin(who: str, state: State) -> None:
    """Before an epoch is opened or used: the last one must have written its gradients."""
    if state in (State.FINISHING, State.FAILED):
        raise UnfinishedMinibatchError(
            f"{who}: the next minibatch begins before the gradients of the last one are written. Call wait() on the "
            "handle of finalize_backward(async_op=True) first; models that share a backward end together inside "
            "`with odc.minibatch(a, b):`; after an error at the end of a minibatch restart the job"
        )


def refuse_unwritten(who: str, doing: str, state: State) -> None:
    """`doing` would change or use what the end of the minibatch has yet to write."""
    if state in (State.FINISHING, State.FAILED):
        raise UnfinishedMinibatchError(
            f"{who}: {doing} before the minibatch's gradients are written; step after the backward, or after wait() of "
            "finalize_backward(async_op=True). After an error at the end of a minibatch there are none: restart from "
            "the last checkpoint"
        )


def refuse_inside_block(who: str, doing: str) -> None:
    """`doing` belongs after the block, where gradients are."""
    raise UnfinishedMinibatchError(
        f"{who}: {doing} inside `with model.minibatch()`; gradients are there when the block ends, so do it after the "
        "block"
    )


def refuse_pushed(who: str, doing: str, *, cut_short: bool, pushed: bool) -> None:
    """`doing` would lose gradients that were pushed, or take a part of them for the whole."""
    if cut_short:
        raise UnfinishedMinibatchError(
            f"{who}: {doing} after a backward that ended with an exception, so that the minibatch's gradients are not "
            "whole; call model.abandon_minibatch(reason), which every rank learns at its end"
        )
    if pushed:
        raise UnfinishedMinibatchError(
            f"{who}: {doing} inside an unfinished minibatch; mark the last backward with "
            "model.set_is_last_backward(True), or use `with model.minibatch():`"
        )


def refuse_unfrozen(who: str, unit: UnitSpec, gradients: Sequence[Gradient]) -> None:
    """Before a push: each gradient must have a place in the accumulators."""
    for spec in (unit.params[gradient.param] for gradient in gradients):
        if not spec.trained:
            raise UnsupportedError(
                f"{who}: {spec.name} has a gradient, but was frozen when it was sharded and still when the model was "
                "first used, so there is no memory to sum it in. To train a parameter only later, leave it "
                "requires_grad=True until after fully_shard, then freeze it"
            )


def refuse_unclaimed(who: str, verbs: Verbs) -> None:
    """Before DONE: no gradient is written anywhere while a microbatch may be left that nobody has computed."""
    if verbs.queue is not None and verbs.queue.left_early:
        raise OdcError(
            f"{who} left the queue before its end; a rank that calls model.claim() goes on until it gives no more, or "
            "microbatches would be lost"
        )


def refuse_half_evaluated(verbs: Verbs) -> None:
    """After everybody's DONE, where somebody has trained: nobody may have closed the epoch as an evaluation."""
    ranks, me = verbs.geometry.ranks, verbs.geometry.me
    for member in verbs.closed_as(Outcome.EVALUATED):
        raise OdcError(
            f"rank {ranks[me]} trained in epoch {verbs.epoch}, but rank {ranks[member]} closed that epoch after "
            "evaluation only; run evaluation, loads and publish() on every rank alike",
            culprit=ranks[member],
        )


def abandonment(who: str, verbs: Verbs) -> AbandonedMinibatchError | None:
    """The error for every rank if any has given the current epoch up. After everybody's DONE."""
    members = verbs.closed_as(Outcome.ABANDONED)
    if not members:
        return None
    culprit, reason = verbs.geometry.ranks[members[0]], verbs.abandonment(members[0])
    too = f", and by {len(members) - 1} more" if len(members) > 1 else ""
    return AbandonedMinibatchError(
        f"{who}: the minibatch was abandoned by rank {culprit}{too}: {reason}. No rank has a gradient of it and the "
        "weights are as they were: run it again, or go on with the next one",
        reason=reason,
        culprit=culprit,
    )
