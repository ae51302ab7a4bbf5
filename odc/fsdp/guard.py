"""An optimizer step or gradient clipping in an unfinished minibatch is an error.

A step never finishes the minibatch by itself: clipping has run before it, on gradients that were not there yet, so the
step would be unclipped. Clipping inside the minibatch is refused for the same reason: it would find no gradients,
return a norm of 0 and clip nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from odc.fsdp import _torch_clip
from odc.fsdp.root import live_roots
from odc.runtime import State

_installed = False


def install() -> None:
    """Install the hooks once for the process; called by the first `fully_shard`."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        _torch_clip.install(_before_clip)
        _installed = True


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for root in live_roots():
        if not root.minibatch.may_step and stepped & root.parameter_ids():
            root.minibatch.before_step()


def _before_clip(doing: str, parameters: list[torch.Tensor]) -> None:
    unfinished = [root for root in live_roots() if root.minibatch.state is not State.CLOSED]
    clipped = {id(parameter) for parameter in parameters} if unfinished else set()
    for root in unfinished:
        if clipped & root.parameter_ids():
            root.minibatch.refuse_unfinished(doing)
