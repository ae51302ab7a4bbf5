"""What every plan refuses, in one place, so that all ranks refuse the same input with the same words.

Chose integers only: a NaN cannot hide in one, and a plan from rounded floats may differ between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from odc.dispatch.rearrangement import Ints
from odc.errors import PlanError


def check_lengths(lengths: Sequence[ArrayLike], longest: int | None = None, *, what: str = "example") -> list[Ints]:
    """One int64 array an instance, checked.

    Args:
        lengths: [d] lists of lengths.
        longest: the most tokens of one; None for no cap.
        what: has these lengths, for messages.

    Raises PlanError, naming the instance and the example, for one that is no integer, below 1 or over the cap, and for
    no instances. Floats are taken where they are whole.
    """
    if not len(lengths):
        raise PlanError("there are no instances to balance")
    return [_check(instance, np.asarray(values), longest, what) for instance, values in enumerate(lengths)]


def _check(instance: int, values: np.ndarray, longest: int | None, what: str) -> Ints:
    if not values.size and values.ndim == 1:
        return np.empty(0, np.int64)
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        raise PlanError(f"instance {instance}: lengths must be one list of integers, got {values.dtype} {values.shape}")
    whole = np.isfinite(values) & (values == np.floor(values)) if values.dtype.kind == "f" else np.True_
    good = whole & (values >= 1) & (values <= (np.iinfo(np.int64).max if longest is None else longest))
    if not np.all(good):
        slot = int(np.flatnonzero(~good)[0])
        value = values[slot].item()
        if longest is not None and value > longest:
            raise PlanError(f"instance {instance}: {what} {slot} has length {value}, more than the cap of {longest}")
        raise PlanError(f"instance {instance}: {what} {slot} has length {value}; a length is a whole number >= 1")
    return values.astype(np.int64)
