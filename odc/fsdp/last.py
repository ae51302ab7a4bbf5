"""Which push of a unit is this rank's last in a minibatch, as far as the loop marks its last backward."""

from __future__ import annotations


class LastPushes:
    """Of one root with `units` units; on the rank's main thread, but for `pushed`, which a backward on a device calls
    on autograd's thread while the main thread waits for it.

    A unit that is called twice pushes twice in one backward: as many pushes are expected as the last time. Once a loop
    has run another backward after a marked one, its marks are ignored.
    """

    def __init__(self, units: int) -> None:
        self._usual = [1] * units  # pushes of a backward
        self._pushed = [0] * units  # since a minibatch, or a forward of the root, began
        self._ended: list[int | None] = [None] * units  # the pass in which the unit had its last push
        self._pass = 0
        self._trusted = True

    def begin(self) -> None:
        """A minibatch begins, of which the root may run no forward."""
        self._ended = [None] * len(self._ended)
        self._count_anew()

    def forward(self) -> None:
        """A forward of the root begins."""
        self._count_anew()
        self._pass += 1

    def _count_anew(self) -> None:
        for unit, count in enumerate(self._pushed):
            if count:
                self._usual[unit], self._pushed[unit] = count, 0

    def pushed(self, unit: int, marked: bool) -> bool:
        """Whether this push of `unit` is its last in the minibatch. `marked`: in a backward marked as the last."""
        self._pushed[unit] += 1
        ended = self._ended[unit]
        if ended is not None:
            self._trusted = self._trusted and ended == self._pass
            return False
        if not (marked and self._trusted and self._pushed[unit] == self._usual[unit]):
            return False
        self._ended[unit] = self._pass
        return True
