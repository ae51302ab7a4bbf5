"""Modules of inner loops, compiled by numba where it is installed and worth the half second that loading it takes.

Such modules may call nothing but their own functions, and their functions must work on arrays and on lists.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np

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


@cache
def _numba() -> ModuleType | None:
    return importlib.import_module("numba") if importlib.util.find_spec("numba") is not None else None


@cache
def _compiled(source: ModuleType) -> ModuleType:
    """A copy whose functions are compiled when first called."""
    numba = _numba()
    spec = importlib.util.find_spec(source.__name__)
    assert numba is not None and spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if function.__module__ == module.__name__:
            try:
                setattr(module, name, numba.njit(cache=True)(function))
            except RuntimeError:  # no folder that numba could cache in
                setattr(module, name, numba.njit(function))
    return module
