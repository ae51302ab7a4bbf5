"""Where a forward of a sharded module begins: registered forward methods too, and a forward inside another one.

The private torch names that takes are checked at import.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from odc.fsdp._torch_compat import FSDPModule, FSDPState, TrainingState, lacking, note_mark, state_of

# What a method is replaced by when it is registered as a forward method.
_METHODS = [
    code
    for code in register_fsdp_forward_method.__code__.co_consts
    if isinstance(code, CodeType) and code.co_name == "wrapped_method"
]

if "_pre_forward" not in {name for code in _METHODS for name in code.co_names}:
    raise lacking("register_fsdp_forward_method.wrapped_method")
for _owner, _name in (
    (nn.Module, "_call_impl"),
    (FSDPState, "_pre_forward"),
    (FSDPState, "_register_root_post_backward_final_callback"),
):
    if not hasattr(_owner, _name):
        raise lacking(f"{_owner.__name__}.{_name}")

_ENTRIES = {nn.Module._call_impl.__code__, *_METHODS}


class OdcState(FSDPState):
    """What torch keeps of a module that odc has sharded. Never constructed: a state's class is set.

    Attributes:
        odc_before: called with the module and its arguments before a registered forward method of it.
    """

    odc_before: Callable[[nn.Module, Any], None]

    def _pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        # Only registered methods look this up here: torch's hook of the module was bound before the class was set.
        self.odc_before(module, args)
        return super()._pre_forward(module, args, kwargs)

    def _register_root_post_backward_final_callback(self) -> None:
        note_mark(self)
        super()._register_root_post_backward_final_callback()


def hook_methods(module: FSDPModule, before: Callable[[nn.Module, Any], None]) -> None:
    """Call `before(module, args)` before each method that `register_fsdp_forward_method` makes a forward method."""
    state: Any = state_of(module)
    state.__class__, state.odc_before = OdcState, before


def is_nested(module: FSDPModule) -> bool:
    """Whether the forward of `module` that begins now lies inside another one of it, which still runs.

    An interrupted forward leaves the same training state, but its frame calls nothing any more.
    """
    if state_of(module)._training_state != TrainingState.FORWARD:
        return False
    frame, found = inspect.currentframe(), 0
    while frame is not None and found < 2:
        found += frame.f_code in _ENTRIES and frame.f_locals.get("self") is module
        frame = frame.f_back
    return found == 2
