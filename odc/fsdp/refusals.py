"""What a minibatch refuses, with which error. Pure checks: nothing is changed and no rank is waited for.

`who` names the global rank and its epoch and begins every message.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from odc.errors import AbandonedMinibatchError, OdcError, UnfinishedMinibatchError, UnsupportedError
from odc.fsdp._torch_param import ShardedParam
from odc.protocol import Gradient, MemberProtocol, Outcome, RankGrid, RootState, UnitSpec
from odc.protocol.queue import Queue

NOT_SHARDED = "is not sharded by odc: call odc.fully_shard on it too, last, after its layers"


def refuse_early_begin(who: str, state: RootState) -> None:
    """Before an epoch is opened or used: the last one must have written its gradients."""
    if state in (RootState.FINISHING, RootState.FAILED):
        raise UnfinishedMinibatchError(
            f"{who}: the next minibatch begins before the gradients of the last one are written. Call wait() on the "
            "handle of finalize_backward(async_op=True) first; models that share a backward end together inside "
            "`with odc.minibatch(a, b):`; after an error at the end of a minibatch restart the job"
        )


def refuse_gradient_views(who: str, grid: RankGrid, units: Sequence[tuple[UnitSpec, Sequence[ShardedParam]]]) -> None:
    """`Settings(gradient_views=True)`, where the accumulator cannot be the gradient."""
    if len(grid.replica_group) > 1:
        raise UnsupportedError(
            f"{who}: Settings(gradient_views=True) does not go with {len(grid.replica_group)} replicas, which read "
            "each other's accumulators; shard over all ranks"
        )
    for unit, params in units:
        for spec, param in zip(unit.params, params, strict=True):
            if spec.trained and param.gradient_dtype != unit.accumulator_dtype:
                raise UnsupportedError(
                    f"{who}: Settings(gradient_views=True) needs gradients in the dtype of the accumulators: that of "
                    f"{spec.name!r} is {param.gradient_dtype}, unit {unit.name!r} sums in {unit.accumulator_dtype}"
                )


def refuse_capture(who: str, device: torch.device) -> None:
    """Before an epoch is opened or used: ranks wait for each other there, and a graph would replay none of that."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"{who}: a CUDA graph is being captured on the current stream, and odc's fetches and pushes cannot be "
            "part of one: a replay would neither wait for peers nor announce anything. Capture parts of the model with "
            "parameters that are not sharded (ignored_params) or keep their places (set_keep_unsharded_storage(True), "
            "from torch 2.15 on): others' memory is freed at the end of a minibatch, if not before. Capture them with "
            "capture_error_mode='thread_local' (docs/gpu.md)"
        )


def refuse_unwritten(who: str, doing: str, state: RootState) -> None:
    """`doing` would change or use what the end of the minibatch has yet to write."""
    if state in (RootState.FINISHING, RootState.FAILED):
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


def refuse_pushed(who: str, doing: str, *, cut_short: bool, pushed: bool, explicit: bool) -> None:
    """`doing` would lose gradients that were pushed, or take a part of them for the whole.

    `explicit`: inside `with model.minibatch()`.
    """
    if cut_short:
        raise UnfinishedMinibatchError(
            f"{who}: {doing} after a backward that ended with an exception, so that the minibatch's gradients are not "
            "whole; call model.abandon_minibatch(reason), which every rank learns at its end"
        )
    if pushed and explicit:
        refuse_inside_block(who, doing)
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


def refuse_unclaimed(who: str, queue: Queue | None) -> None:
    """Before DONE: no gradient is written anywhere while a microbatch may be left that no rank has computed."""
    if queue is not None and queue.left_early:
        raise OdcError(
            f"{who} left the queue before its end; a rank that calls model.claim() goes on until it gives no more, or "
            "microbatches would be lost"
        )


def refuse_half_evaluated(protocol: MemberProtocol) -> None:
    """After DONE of every rank, where some rank has trained: no rank may have closed the epoch as an evaluation."""
    ranks = protocol.grid.ranks
    for member in protocol.closed_as(Outcome.EVALUATED):
        raise OdcError(
            f"rank {protocol.grid.rank} trained in epoch {protocol.epoch}, but rank {ranks[member]} closed that epoch "
            "after evaluation only; run evaluation, loads and publish() on every rank alike",
            culprit=ranks[member],
        )


def refuse_uneven_steps(protocol: MemberProtocol) -> None:
    """After DONE of every rank, where some rank has trained: the shards must be of one optimizer step."""
    stepped, ranks = protocol.stepped(), protocol.grid.ranks
    if all(stepped) or not any(stepped):
        return
    did, did_not = ranks[stepped.index(True)], ranks[stepped.index(False)]
    raise OdcError(
        f"rank {protocol.grid.rank} (epoch {protocol.epoch}): rank {did} has called optimizer.step() since the last "
        f"minibatch, and rank {did_not} has not, so the weights would fall apart. Put all backwards of one step into "
        "`with model.minibatch():`, outside of which each is a minibatch; skip a step on every rank or on none",
        culprit=did_not,
    )


def abandonment(who: str, protocol: MemberProtocol) -> AbandonedMinibatchError | None:
    """The error for every rank if any has given the current epoch up. After DONE of every rank."""
    members = protocol.closed_as(Outcome.ABANDONED)
    if not members:
        return None
    culprit, reason = protocol.grid.ranks[members[0]], protocol.abandonment(members[0])
    too = f", and by {len(members) - 1} more" if len(members) > 1 else ""
    return AbandonedMinibatchError(
        f"{who}: the minibatch was abandoned by rank {culprit}{too}: {reason}. No rank has a gradient of it and the "
        "weights are as they were: run it again, or go on with the next one",
        reason=reason,
        culprit=culprit,
    )
