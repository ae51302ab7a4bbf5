"""Modules of inner loops, compiled by numba where it is installed and worth the half second that loading it takes.

Such modules may call nothing but their own functions, and their functions must work on arrays and on lists.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from odc.compiled import compiled as _compiled
from odc.compiled import numba as _numba

WORTH = 128  # samples from which loading numba pays in a process that has not done so


def loops_of(module: ModuleType, samples: int) -> tuple[ModuleType, bool]:
    """The copy of `module` to use for so many samples, and whether it is compiled: it takes arrays then, else lists."""
    if samples < WORTH and not _numba.cache_info().currsize:
        return module, False
    compiled = _compiled(module) if _numba() is not None else None
    return (module, False) if compiled is None else (compiled, True)


def run_loop(function: Callable[..., Any], samples: int, *given: Any) -> tuple[Any, list[Any]]:
    """A loop's result, compiled on arrays or interpreted on lists, and the arguments as it left them."""
    module, arrays = loops_of(sys.modules[function.__module__], samples)
    values = [value if arrays or not isinstance(value, np.ndarray) else value.tolist() for value in given]
    return getattr(module, function.__name__)(*values), values
