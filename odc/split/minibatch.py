"""The open minibatch of a sharded model: how a rank gives it up because of a piece, and learns that others did.

docs/protocol.md, "Pieces of split samples", explains why no rank hangs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from odc.errors import OdcError
from odc.fsdp import OdcModule, Root, root_of, sharded_tops
from odc.fsdp.boundaries import ended_by_caller
from odc.protocol import RootState


class PieceMinibatch:
    """One open minibatch of a root, which ends by `with model.minibatch()` or by `finalize_backward()`."""

    def __init__(self, root: Root) -> None:
        self._machine, self._rank = root.minibatch, root.rank
        self.epoch = root.minibatch.epoch
        self._members = {rank: member for member, rank in enumerate(root.grid.ranks)}
        root.member.protocol.attach_all()  # every rank comes to this minibatch; afterwards reading a board never waits

    @property
    def open(self) -> bool:
        return self._machine.epoch == self.epoch and self._machine.state is RootState.OPEN

    @property
    def lost(self) -> bool:
        """Whether this rank knows that the minibatch will be abandoned."""
        return self._machine.lost

    def absent(self, rank: int) -> bool:
        """Whether a global rank takes no further part in pieces of this minibatch; PeerLostError if it was aborted."""
        return self._machine.absent(self._members.get(rank), "waiting for a piece of a split sample")

    def lose(self, rank: int, what: str) -> None:
        """This rank waits in vain for another one, which is absent: give the minibatch up as that rank does.

        Raises OdcError, naming the rank, if it abandons nothing.
        """
        if not self._machine.lose_with(self._members[rank]):
            raise OdcError(
                f"rank {self._rank} (epoch {self.epoch}): rank {rank} ended the minibatch without {what}; every rank "
                "must take all its pieces of a plan, or call model.abandon_minibatch(reason)",
                culprit=rank,
            )

    def abandon(self, reason: str) -> None:
        """Give the minibatch up, on all ranks; nothing where it has ended already. Outside of a backward."""
        if self.open:
            self._machine.recover()  # a backward that was cut short has a reason of its own
            self._machine.abandon(reason)


def open_minibatch(model: nn.Module) -> PieceMinibatch | None:
    """That of the sharded model `model`, or of the first sharded one in it; None where none is open in a block.

    Opens the next one where `finalize_backward()` ends them. A minibatch that a marked backward ends cannot be given
    up for the loop, which would have to know.
    """
    top = next((module for module in model.modules() if isinstance(module, OdcModule)), None)
    if top is None:
        return None
    root = root_of(top)
    if not (root.minibatch.explicit or root.minibatch.manual):
        return None
    root.minibatch.begin()
    return PieceMinibatch(root)


@contextlib.contextmanager
def ending_no_minibatch(model: nn.Module) -> Iterator[None]:
    """Inside, a backward through the model ends no minibatch, whatever its mark. It must produce no gradients."""
    with contextlib.ExitStack() as roots:
        for top in sharded_tops(model):
            roots.enter_context(ended_by_caller(root_of(top).minibatch))
        yield
