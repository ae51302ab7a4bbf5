"""What every plan refuses, in one place, so that all ranks refuse the same input with the same words.

Chose integers only: a NaN cannot hide in one, and a plan from rounded floats may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from odc.dispatch.rearrangement import Ints
from odc.errors import PlanError


def check_lengths(
    lengths: Sequence[ArrayLike], longest: int | None = None, *, what: str = "example"
) -> tuple[Ints, Ints]:
    """Counts int64 [d] and flat lengths int64 [n] of one list an instance, checked.

    Args:
        lengths: [d] lists of lengths.
        longest: the most tokens of one; None for no cap.
        what: has these lengths, for messages.

    Raises PlanError, naming the instance and the example, for one that is no integer, below 1 or over the cap, and for
    no instances. Floats are taken where they are whole.
    """
    if not len(lengths):
        raise PlanError("there are no instances to balance")
    arrays = [np.asarray(values) for values in lengths]
    for instance, values in enumerate(arrays):
        if values.ndim != 1 or (values.dtype.kind not in "iuf" and values.size):
            raise PlanError(
                f"instance {instance}: lengths must be one list of integers, got {values.dtype} {values.shape}"
            )
    counts = np.array([len(values) for values in arrays])
    filled = [values for values in arrays if len(values)]
    flat = np.concatenate(filled) if filled else np.empty(0, np.int64)
    good = (flat >= 1) & (flat <= (np.iinfo(np.int64).max if longest is None else longest))
    if flat.dtype.kind == "f":
        good &= np.isfinite(flat) & (flat == np.floor(flat))
    if not good.all():
        place = int(np.flatnonzero(~good)[0])
        instance = int(np.searchsorted(np.cumsum(counts), place, side="right"))
        _refuse(f"instance {instance}: {what} {place - int(counts[:instance].sum())}", flat[place].item(), longest)
    return counts, flat.astype(np.int64, copy=False)


def _refuse(who: str, value: float, longest: int | None) -> None:
    if longest is not None and value > longest:
        raise PlanError(f"{who} has length {value}, more than the cap of {longest}")
    raise PlanError(f"{who} has length {value}; a length is a whole number >= 1")
