"""Modules of inner loops, copied and compiled by numba where it is installed and loads."""

from __future__ import annotations

import importlib.util
import inspect
import logging
from functools import cache
from types import ModuleType

_log = logging.getLogger(__name__)


@cache
def numba() -> ModuleType | None:
    """None where it is not installed, or does not load (a warning says why). Loading it takes half a second."""
    if importlib.util.find_spec("numba") is None:
        return None
    try:
        return importlib.import_module("numba")
    except (ImportError, OSError) as error:  # as for a numba that is too old for the NumPy beside it
        _log.warning("numba does not load, so loops run without it: %s", error)
        return None


@cache
def compiled(source: ModuleType) -> ModuleType:
    """A copy of `source`, which calls nothing but its own functions and numpy. They are compiled when first called, and
    run without Python's lock. numba must be installed.
    """
    found, spec = numba(), importlib.util.find_spec(source.__name__)
    assert found is not None and spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if function.__module__ == module.__name__:
            try:
                setattr(module, name, found.njit(cache=True, nogil=True)(function))
            except RuntimeError:  # no folder that numba could cache in
                setattr(module, name, found.njit(nogil=True)(function))
    return module
