"""Minibatches that end by `model.finalize_backward()` and never by a backward: torch 2.15's manual finalization.

Pipeline schedules and CUDA graphs treat the reduction of gradients as a step of its own. Under odc that step is the
meeting at the end of a minibatch. Works on every supported torch.
"""

from __future__ import annotations

from odc.errors import OdcError, UnfinishedMinibatchError
from odc.fsdp import _torch_compat as compat
from odc.fsdp.minibatch import Minibatch
from odc.fsdp.root import live_roots, root_of
from odc.runtime import State


class GradientReduction(compat.GradientReductionHandle):  # type: ignore[misc]
    """A minibatch whose gradients are sent but not yet written; torch's `GradientReductionHandle`.

    Args:
        machine: of the root; None where nothing is left to wait for.
    """

    def __init__(self, machine: Minibatch | None) -> None:
        self._machine, self._epoch = machine, machine.epoch if machine is not None else 0

    def wait(self) -> None:
        """Wait for every rank and write `.grad`. A second call does nothing.

        Raises:
            AbandonedMinibatchError: a rank has given the minibatch up.
            OdcError: the job was ended in the meantime.
        """
        machine, self._machine = self._machine, None
        if machine is None:
            return
        if machine.epoch != self._epoch or machine.state is not State.FINISHING:
            raise OdcError(f"the gradients of epoch {self._epoch} will not come: the minibatch has failed")
        if (abandoned := machine.collect()) is not None:
            raise abandoned


def set_manual(module: compat.FSDPModule, enabled: bool) -> None:
    """Say who ends minibatches: `finalize_backward()`, or a last backward. See `OdcModule`."""
    state = compat.state_of(module)
    if compat.is_root(state) is False:
        raise OdcError("set_manual_backward_finalization() must be called on the root")
    root = next((root for root in live_roots() if root.state is state), None)
    if enabled != compat.is_manual(state):
        if compat.is_in_backward():
            raise OdcError("set_manual_backward_finalization() cannot change the mode during a backward")
        if root is not None and root.minibatch.pushed:
            raise OdcError(
                f"rank {root.rank} (epoch {root.minibatch.epoch}): set_manual_backward_finalization() cannot change "
                "the mode after the first backward of a minibatch"
            )
    compat.set_manual(state, enabled)
    if root is not None:
        root.minibatch.manual = enabled


def finalize(module: compat.FSDPModule, async_op: bool) -> GradientReduction | None:
    """End the minibatch; see `OdcModule.finalize_backward`."""
    root = root_of(module)
    machine = root.minibatch
    where = f"rank {root.rank} (epoch {machine.epoch}): finalize_backward()"
    if machine.state is State.FINISHING:
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
