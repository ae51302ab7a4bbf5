"""A gradient scaler of torch's amid an iteration that is given up: the private torch name that takes."""

from __future__ import annotations

import inspect
from typing import Any

from torch.amp import GradScaler

from odc.fsdp._torch_compat import lacking

if "_per_optimizer_states" not in inspect.getsource(GradScaler.update):
    raise lacking("GradScaler._per_optimizer_states")


def begin_iteration(scaler: Any) -> None:
    """Let every optimizer be unscaled and stepped again: `load_state_dict` leaves those at the stage they are in."""
    scaler._per_optimizer_states.clear()
