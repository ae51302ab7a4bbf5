"""The policies by name, as the command line and saved runs spell them."""

from __future__ import annotations

from collections.abc import Callable

from odc.balance.lb_split import lb_split
from odc.balance.plan import Plan
from odc.balance.planners import lb_micro, lb_mini, local_sort
from odc.errors import PlanError

Policy = Callable[..., Plan]

POLICIES: dict[str, Policy] = {"local_sort": local_sort, "lb_micro": lb_micro, "lb_mini": lb_mini, "lb_split": lb_split}


def policy_named(name: str) -> Policy:
    """The policy called `name`; PlanError listing the known names otherwise."""
    try:
        return POLICIES[name]
    except KeyError:
        raise PlanError(f"there is no policy {name!r}; known: {', '.join(POLICIES)}") from None
