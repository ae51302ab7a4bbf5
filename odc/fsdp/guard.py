"""An optimizer step in an unfinished minibatch is an error.

A hook before every optimizer's step raises. Finishing the minibatch there instead would be too late: gradient clipping
has run before the step, on gradients that were not there yet.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from odc.fsdp.root import live_roots

_installed = False


def install() -> None:
    """Install the hook once for the process; called by the first `fully_shard`."""
    global _installed
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        _installed = True


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for root in live_roots():
        if not root.minibatch.may_step and stepped & root.parameter_ids():
            root.minibatch.before_step()
