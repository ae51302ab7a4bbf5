"""Triton's interpreter in a process that compiles no kernel: the language is patched once, not in every launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def patch_once() -> None:
    """Have the interpreter patch triton's language once a module, for good.

    By itself it does so in every call of a function, in a quarter of its time, to leave room for compiled kernels.
    """
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set[str]()

    def patch_new(fn: Callable[..., Any]) -> Any:
        if fn.__module__ not in patched:
            patch(fn)
            patched.add(fn.__module__)
        return interpreter._LangPatchScope()  # an empty one, so that nothing is restored

    interpreter._patch_lang = patch_new
