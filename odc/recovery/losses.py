"""Whether an error of this rank is the consequence of another rank's end, which may show a moment later."""

from __future__ import annotations

import contextlib
import time

from odc.deadlines import LOSS_POLL_S, LOSS_SHOWS_S, Deadline
from odc.errors import OdcError, PeerLostError
from odc.fsdp.rejoin import aborted_by_another
from odc.recovery.devices import is_of_device
from odc.recovery.generations import GenerationOver, Generations
from odc.recovery.process_group import GenerationGroup


def is_loss(error: Exception, generations: Generations, group: GenerationGroup) -> bool:
    """Whether the end of another rank is behind an error, and not a mistake in this one. Waits for it to show."""
    if is_of_device(error):
        return False
    if isinstance(error, PeerLostError):
        return error.culprit not in (None, generations.rank)
    if group.cut_short:  # what a collective has brought was anything, and led to any error
        return True
    if not isinstance(error, RuntimeError):
        return False
    if isinstance(error, OdcError) and not isinstance(error.__cause__, RuntimeError):  # as a failed save has
        return False
    return loss_shows(generations)  # torch's collectives fail at once, before anything else shows why


def loss_shows(generations: Generations) -> bool:
    """Whether another rank has ended this generation, waited for a while."""
    deadline = Deadline(LOSS_SHOWS_S)

    def look() -> None:  # ends a call of a store whose host may be cut off
        if deadline.passed() or aborted_by_another():
            raise GenerationOver

    while not aborted_by_another():
        with contextlib.suppress(GenerationOver):
            if (culprit := generations.culprit(look)) is not None:
                return culprit != generations.rank
        if deadline.passed():
            return False
        time.sleep(LOSS_POLL_S)
    return True
