"""Modules of loops, compiled by numba where it is installed and worth loading.

Chose to compile a second copy of a module on first use over decorating its functions: numba takes half a second to
load, which small plans and `import odc` should not pay, and the interpreted copy stays for tests to compare with.
Compiled code is cached beside the source (or in numba's own folder), so that only the very first call compiles. The
price is that these modules may call nothing but their own functions, and work on arrays and lists alike.
"""

from __future__ import annotations

import importlib.util
import inspect
from functools import cache
from types import ModuleType

WORTH = 128  # samples from which loading numba pays in a process that has not done so


def loops_of(module: ModuleType, samples: int) -> tuple[ModuleType, bool]:
    """The copy of `module` to handle so many samples with, and whether it is compiled (wants arrays) or not (lists)."""
    if samples < WORTH and not _numba.cache_info().currsize:
        return module, False
    compiled = _compiled(module) if _numba() is not None else None
    return (module, False) if compiled is None else (compiled, True)


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
