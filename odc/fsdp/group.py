"""The seam into FSDP2: one parameter group, on demand.

Chose to re-class each `FSDPParamGroup` *instance* and override what communicates (unshard, wait_for_unshard,
post_backward, finalize_backward; pre_forward and pre_backward only to know what is needed now) over patching torch's
module globals: other FSDP2 models in the process are untouched, and everything that does not communicate stays
torch's. The price is the private names in `_torch_compat`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from odc.fsdp import _torch_compat as compat
from odc.fsdp._torch_param import ShardedParam, params_of
from odc.fsdp.fetcher import Fetch
from odc.runtime import Gradient, UnitSpec, flatten
from odc.trace import FETCH, recorder


class Engine(Protocol):
    """What a group needs of its root."""

    shards: int

    def begin(self) -> None:
        """Open a minibatch if none is open."""

    def start_fetch(self, unit: UnitSpec, params: list[ShardedParam], *, now: bool) -> Fetch:
        """Get a unit under way; `now`: the caller waits for it at once."""
        ...

    def used(self, group: OdcParamGroup, phase: str) -> None:
        """The group is in use in `phase`: "forward" or "backward"."""

    def push(self, unit: UnitSpec, gradients: list[Gradient]) -> None:
        """Send a unit's gradients to their owners."""

    def finalized(self, group: OdcParamGroup) -> None:
        """A last backward is over for the group."""

    def partial_backward(self) -> None:
        """A backward has gone through a group of which only some modules ran."""


class OdcParamGroup(compat.FSDPParamGroup):
    """A torch parameter group whose shards are fetched and whose gradients are pushed.

    Instances are made by `adopt`, never constructed. `odc_root` is set when the root is initialised.
    """

    odc_root: Engine | None
    odc_find_root: Callable[[OdcParamGroup], Engine]
    odc_unit: UnitSpec
    odc_params: list[ShardedParam]
    odc_trained: list[bool]  # for each of them whether it required a gradient when it was sharded
    odc_fetch: Fetch | None
    odc_needed_now: bool

    def unshard(self, async_op: bool = False) -> None:
        """Get the unit under way; the first call of a minibatch opens it (publishes own shards)."""
        if self.odc_fetch is not None or self.is_unsharded:
            return
        if not self.unshard_in_backward and compat.is_pre_backward(self):
            return
        root = self._root()
        root.begin()
        self.odc_fetch = root.start_fetch(self.odc_unit, self.odc_params, now=self.odc_needed_now)

    def wait_for_unshard(self) -> None:
        """Return with the unsharded parameters registered; no-op without an `unshard` under way."""
        fetch, self.odc_fetch = self.odc_fetch, None
        if fetch is None:
            return
        begin = recorder().now()
        fetch.wait()
        compat.to_unsharded(self)
        recorder().add(FETCH, begin, unit=self.odc_unit.name)

    def pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        """As torch; fetches here if it was not fetched ahead, then fetches ahead what comes next."""
        self.odc_needed_now = True
        try:
            result = super().pre_forward(*args, **kwargs)
        finally:
            self.odc_needed_now = False
        self._root().used(self, "forward")
        return result

    def pre_backward(self, default_prefetch: bool, *unused: Any) -> None:
        """As `pre_forward`, for backward."""
        # torch's own backward prefetch would look up its forward order, which another microbatch may have replaced.
        self.odc_needed_now = True
        try:
            super().pre_backward(False, *unused)
        finally:
            self.odc_needed_now = False
        if default_prefetch:
            self._root().used(self, "backward")

    def post_backward(self, *unused: Any) -> None:
        """Push this backward's gradients; torch reshards. Safe to call on a group without gradients, as torch does.

        The gradients are taken *before* torch's no-sync path, which would upcast them to the reduce dtype: they travel
        in their own dtype and are upcast by the owner, which is exact.
        """
        partial = len(self.modules) > 1 and compat.is_forward(self)  # as torch finds it out
        taken = [(i, param, param.take_gradient()) for i, param in enumerate(self.odc_params)]
        wanted, self.reduce_grads = self.reduce_grads, False
        try:
            super().post_backward(*unused)
        finally:
            self.reduce_grads = wanted
        if self.odc_root is None:
            return
        shards = self.odc_root.shards
        gradients = [
            Gradient(i, flatten(grad, param.shard_dim, shards)) for i, param, grad in taken if grad is not None
        ]
        if gradients:
            self.odc_root.push(self.odc_unit, gradients)
        if partial:
            self.odc_root.partial_backward()

    def finalize_backward(self) -> None:
        """Called by torch for each group after a backward marked as the last; the last group ends the minibatch."""
        super().finalize_backward()
        self.drop_fetch()
        if self.odc_root is not None:
            self.odc_root.finalized(self)

    def drop_fetch(self) -> None:
        """Give up a fetch that nobody waited for: its values are of an epoch that ends."""
        fetch, self.odc_fetch = self.odc_fetch, None
        if fetch is not None:
            fetch.drop()

    def give_up(self) -> None:
        """After an interrupted forward or backward: drop its fetch and its gradients, free the unsharded parameters."""
        self.drop_fetch()
        for param in self.odc_params:
            param.take_gradient()
        compat.make_idle(self)
        compat.to_sharded(self)
        for param in self.odc_params:
            param.free()  # also what was allocated for a fetch that never began

    def _root(self) -> Engine:
        if self.odc_root is None:
            self.odc_root = self.odc_find_root(self)
        return self.odc_root


def adopt(group: compat.FSDPParamGroup, find_root: Callable[[OdcParamGroup], Engine]) -> OdcParamGroup:
    """Turn one of torch's groups into an on-demand one, in place; `find_root` is asked at its first use."""
    group.__class__ = OdcParamGroup
    adopted: Any = group
    adopted.odc_root = None
    adopted.odc_find_root = find_root
    adopted.odc_params = []
    adopted.odc_trained = [param.parameter.requires_grad for param in params_of(group)]
    adopted.odc_fetch = None
    adopted.odc_needed_now = False
    return adopted  # type: ignore[no-any-return]
