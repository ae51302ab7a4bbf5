"""How a minibatch begins and ends for its user: the block, `finish_minibatch`, manual mode; and `claim` inside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from odc.errors import AbandonedMinibatchError, OdcError, UnfinishedMinibatchError, UnsupportedError
from odc.fsdp import _torch_compat as compat
from odc.fsdp.minibatch import Minibatch
from odc.fsdp.refusals import NOT_SHARDED
from odc.fsdp.root import Root, live_roots, root_of
from odc.protocol import RootState
from odc.trace import FETCH, recorder


@contextlib.contextmanager
def minibatch(*roots: compat.FSDPModule) -> Iterator[None]:
    """One minibatch over several roots, on every rank: `with odc.minibatch(actor, critic): ...`.

    Opens all at once (so a rank without microbatches delays no other); at exit flushes all before it waits for any. A
    rank that gives one of them up gives up all, and AbandonedMinibatchError is raised. OdcError inside a minibatch of
    one of the roots, or where one is given twice. Calls no collective.
    """
    for module in roots:
        if isinstance(module, nn.Module) and not isinstance(module, compat.FSDPModule):
            raise UnsupportedError(f"minibatch(): this {type(module).__name__} {NOT_SHARDED}")
    opened = [root_of(root) for root in roots]
    for number, root in enumerate(opened):
        if root.minibatch.explicit:
            raise OdcError(f"rank {root.rank}: minibatch() inside minibatch() of the same root")
        if root in opened[:number]:
            raise OdcError(f"rank {root.rank}: minibatch() was given the same root twice")
    for module in roots:
        module.set_is_last_backward(False)
    abandoned: AbandonedMinibatchError | None = None
    try:
        for root in opened:
            root.minibatch.begin()
            root.minibatch.explicit = True
            root.map_peers()
        yield
        abandoned = _end_together([root.minibatch for root in opened])
    except BaseException as error:
        for root in opened:
            root.minibatch.abort(error)
        raise
    finally:
        for module, root in zip(roots, opened, strict=True):
            root.minibatch.explicit = False
            module.set_is_last_backward(True)
    if abandoned is not None:
        raise abandoned


def _end_together(machines: list[Minibatch]) -> AbandonedMinibatchError | None:
    """End minibatches that belong together: flush all before waiting for any, and give up all if one is given up."""
    for machine in machines:  # before any is done: a push that fails here gives all of them up
        machine.flush()
    reasons = [machine.current.given_up for machine in machines if machine.current.given_up is not None]
    for machine in machines:
        if reasons:
            machine.abandon(reasons[0])
        machine.done()
    errors = [machine.collect() for machine in machines]
    return next((error for error in errors if error is not None), None)


@contextlib.contextmanager
def ended_by_caller(machine: Minibatch) -> Iterator[None]:
    """Inside, no backward ends a minibatch, whatever it is marked as."""
    before, machine.explicit = machine.explicit, True
    try:
        yield
    finally:
        machine.explicit = before


def finish(module: compat.FSDPModule) -> None:
    """See `OdcModule.finish_minibatch`."""
    root = root_of(module)
    machine = root.minibatch
    if machine.explicit:
        raise OdcError(f"rank {root.rank}: finish_minibatch() inside `with model.minibatch()`, which ends it by itself")
    with ended_by_caller(machine):  # which gives up a backward that was cut short here, not before
        abandoned = _end_together([machine])
    if abandoned is not None:
        raise abandoned


class GradientReduction(compat.GradientReductionHandle):  # type: ignore[misc]
    """A minibatch whose gradients are sent but not yet written; torch's `GradientReductionHandle`.

    `machine` is None where nothing is left to wait for.
    """

    def __init__(self, machine: Minibatch | None) -> None:
        self._machine, self._epoch = machine, machine.epoch if machine is not None else 0

    def wait(self) -> None:
        """Wait for every rank and write `.grad`. A second call does nothing.

        Raises AbandonedMinibatchError if a rank has given the minibatch up, OdcError if the job was ended in the
        meantime.
        """
        machine, self._machine = self._machine, None
        if machine is None:
            return
        if machine.epoch != self._epoch or machine.state is not RootState.FINISHING:
            raise OdcError(f"the gradients of epoch {self._epoch} will not come: the minibatch has failed")
        machine.collect_or_raise()


def set_manual(module: compat.FSDPModule, enabled: bool) -> None:
    """See `OdcModule.set_manual_backward_finalization`."""
    state = compat.state_of(module)
    if compat.is_root(state) is False:
        raise OdcError("set_manual_backward_finalization() must be called on the root")
    root = next((root for root in live_roots() if root.state is state), None)
    if enabled != compat.is_manual(state):
        if compat.is_in_backward():
            raise OdcError("set_manual_backward_finalization() cannot change the mode during a backward")
        if root is not None and root.minibatch.current.pushed:
            raise OdcError(
                f"rank {root.rank} (epoch {root.minibatch.epoch}): set_manual_backward_finalization() cannot change "
                "the mode after the first backward of a minibatch"
            )
    compat.set_manual(state, enabled)
    if root is not None:
        root.minibatch.manual = enabled


def finalize(module: compat.FSDPModule, async_op: bool) -> GradientReduction | None:
    """See `OdcModule.finalize_backward`."""
    root = root_of(module)
    machine = root.minibatch
    where = f"rank {root.rank} (epoch {machine.epoch}): finalize_backward()"
    if machine.state is RootState.FINISHING:
        raise UnfinishedMinibatchError(f"{where} before wait() was called on the handle of the last one")
    if machine.explicit:
        raise OdcError(f"{where} inside `with model.minibatch()`, which ends the minibatch by itself")
    if not machine.manual:
        raise OdcError(f"{where} needs set_manual_backward_finalization(True), called before the first backward")
    if compat.is_in_backward():
        raise OdcError(f"{where} during a backward: call it when every backward of the minibatch is over")
    if not compat.is_synced(root.state):
        return GradientReduction(None) if async_op else None
    machine.done()
    reduction = GradientReduction(machine)
    if async_op:
        return reduction
    reduction.wait()
    return None


class Claims(Iterator[dict[str, torch.Tensor]]):
    """What `OdcModule.claim` returns; UnsupportedError if the root has no queue.

    Each item is a microbatch: its tensors by name, copied for this rank. `number` is its position in the queue (0: the
    costliest; the same on every rank, so it may seed dropout) and `rank` the global rank that offered it; both
    are -1 before the first.
    """

    def __init__(self, root: Root, mine: Sequence[Mapping[str, torch.Tensor]], costs: Sequence[float] | None) -> None:
        if not root.minibatch.explicit:
            raise OdcError(
                f"rank {root.rank}: claim() outside of `with model.minibatch():`, which ends when all ranks have"
            )
        if root.member.queue is None:
            raise UnsupportedError(
                "this model has no queue: give the root's fully_shard settings=Settings(queue_bytes=...), room for the "
                "microbatches that one rank offers in one minibatch"
            )
        self._queue, self._ranks, self._machine = root.member.queue, root.grid.ranks, root.minibatch
        self.number = self.rank = -1
        self._queue.offer(mine, costs)

    def __next__(self) -> dict[str, torch.Tensor]:
        begin = recorder().now()
        try:
            found = self._queue.claim()
        except BaseException as error:  # the microbatch that it has claimed, if it has, no rank will compute
            self._machine.abandon(f"a claim of a microbatch ended with {type(error).__name__}")
            raise
        if found is None:
            raise StopIteration
        self.number, self.rank = found.number, self._ranks[found.member]
        recorder().add(FETCH, begin, unit="microbatch", peer=self.rank, nbytes=found.nbytes)
        return found.tensors
