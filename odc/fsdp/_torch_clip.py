"""A hook before torch's functions that clip gradients.

torch has none, and a loop imports `clip_grad_norm_` by name long before it shards a model. Both functions are wrappers
made with `_no_grad`, which call what their closure holds: `install` puts the hook there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import CellType
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

_CLIPPING: tuple[Callable[..., Any], ...] = (clip_grad_norm_, clip_grad_value_)


def _cell(function: Callable[..., Any]) -> CellType:
    names: tuple[str, ...] = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if names != ("func",):
        raise ImportError(
            f"torch {torch.__version__}: {function.__name__} is no longer a wrapper around `func`, which odc relies on "
            "to refuse clipping inside an open minibatch. Install a supported torch or a newer odc."
        )
    closure: tuple[CellType, ...] = function.__closure__ or ()
    return closure[0]


_CELLS = [_cell(function) for function in _CLIPPING]


def install(before: Callable[[str, list[torch.Tensor]], None]) -> None:
    """Call `before(name of the function, parameters)` before gradients are clipped anywhere; once a process. It may
    raise.
    """
    for cell in _CELLS:
        cell.cell_contents = _hooked(cell.cell_contents, before)


def _hooked(clip: Callable[..., Any], before: Callable[[str, list[torch.Tensor]], None]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def hooked(parameters: torch.Tensor | Iterable[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        before(f"{clip.__name__}()", listed)
        return clip(listed or parameters, *args, **kwargs)  # torch warns of a generator that is empty

    return hooked
