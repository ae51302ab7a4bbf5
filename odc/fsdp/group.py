"""The seam into FSDP2: one parameter group, on demand (docs/architecture.md, "The seam into torch")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from odc.fsdp import _torch_compat as compat
from odc.fsdp._torch_param import params_of
from odc.fsdp.fetcher import FetchedGroup, Fetcher
from odc.fsdp.minibatch import Minibatch
from odc.protocol import Gradient, UnitSpec, flatten
from odc.trace import FETCH, recorder

LEFT = "shut down"  # in place of a root: none is built any more


class OdcParamGroup(FetchedGroup):
    """A torch parameter group whose shards are fetched and whose gradients are pushed. Made by `adopt`.

    Attributes:
        odc_node_size: ranks of a node (`RankGrid.node_size`).
        odc_trained: for each parameter whether it required a gradient when it was sharded.
        odc_needed_now: whether the caller of `unshard` waits for it at once.
        odc_find_root: builds the root, which sets the attributes below; raises an error once one has shut down.
        odc_root: keeps the root alive until it shuts down, which makes this LEFT; None before the first use.
    """

    odc_node_size: int
    odc_trained: list[bool]
    odc_needed_now: bool
    odc_find_root: Callable[[OdcParamGroup], object]
    odc_root: object | None
    odc_unit: UnitSpec
    odc_fetcher: Fetcher
    odc_minibatch: Minibatch

    @compat.outside_functorch
    def unshard(self, async_op: bool = False) -> None:
        """Get the unit under way; the first call of a minibatch opens it (publishes this rank's shards)."""
        if self.odc_fetch is not None or self.is_unsharded:
            return
        if not self.unshard_in_backward and compat.is_pre_backward(self):
            return
        self._use_root()
        self.odc_minibatch.begin()
        self.odc_fetch = fetch = self.odc_fetcher.prepare(self.odc_unit, self.odc_params, now=self.odc_needed_now)
        fetch.begin()

    @compat.outside_functorch
    def wait_for_unshard(self) -> None:
        """Return with the unsharded parameters registered; no-op without an `unshard` under way."""
        if self.odc_fetch is None:
            return
        self.odc_minibatch.refuse_capture()  # which a unit that was fetched ahead has not met yet
        begin = recorder().now()
        self.await_fetch()
        compat.to_unsharded(self)
        recorder().add(FETCH, begin, unit=self.odc_unit.name)

    def pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        """As torch; fetches here if it was not fetched ahead, then fetches ahead what comes next."""
        self.odc_needed_now = True
        try:
            result = super().pre_forward(*args, **kwargs)
        finally:
            self.odc_needed_now = False
        self._use_root()
        if not compat.is_in_backward():  # what a checkpoint computes again comes in another order, and ends no forward
            self.odc_fetcher.used(self, "forward")
        return result

    def pre_backward(self, default_prefetch: bool, *unused: Any) -> None:
        # torch's own backward prefetch would look up its forward order, which another microbatch may have replaced.
        self.odc_needed_now = True
        try:
            super().pre_backward(False, *unused)
        finally:
            self.odc_needed_now = False
        if default_prefetch:
            self._use_root()
            self.odc_fetcher.used(self, "backward")

    def post_backward(self, *unused: Any) -> None:
        """Push this backward's gradients; torch reshards. Safe to call on a group without gradients, as torch does.

        They are taken *before* torch's no-sync path, which would upcast them to the reduce dtype: the owner does it.
        That path fails on a unit that no microbatch has used yet, which has nothing to reshard either.
        """
        partial = len(self.modules) > 1 and compat.is_forward(self)  # as torch finds it out
        taken = [(i, param, param.take_gradient()) for i, param in enumerate(self.odc_params)]
        if not any(param.was_unsharded for param in self.odc_params):
            return
        self._use_root()
        wanted, self.reduce_grads = self.reduce_grads, False
        try:
            super().post_backward(*unused)
        finally:
            self.reduce_grads = wanted
        shards = self.odc_minibatch.shards
        gradients = [
            Gradient(i, flatten(grad, param.shard_dim, shards)) for i, param, grad in taken if grad is not None
        ]
        if gradients:
            self.odc_minibatch.push(self.odc_unit, gradients)
        if partial:
            self.odc_minibatch.partial_backward()

    def finalize_backward(self) -> None:
        """Called by torch for each group after a backward marked as the last; the last group ends the minibatch."""
        super().finalize_backward()
        self.drop_fetch()
        if self.odc_root is not None:
            self._use_root()
            self.odc_minibatch.finalized(self)

    def _use_root(self) -> None:
        if self.odc_root in (None, LEFT):
            self.odc_find_root(self)

    def leave_root(self) -> None:
        """Let go of a root that has shut down, whose memory would stay with the model: the next use raises an error."""
        self.odc_root, self.odc_fetch = LEFT, None
        for name in ("odc_unit", "odc_fetcher", "odc_minibatch"):
            self.__dict__.pop(name, None)

    def forget_root(self) -> None:
        """As before the first use: the next one builds a root."""
        self.leave_root()
        self.odc_root = None
        self.odc_params = []
        self.odc_needed_now = False


def adopt(group: compat.FSDPParamGroup, find_root: Callable[[OdcParamGroup], object], node_size: int) -> None:
    """Turn one of torch's groups into an on-demand one, in place; `find_root` is asked at its first use."""
    group.__class__ = OdcParamGroup
    adopted: Any = group
    adopted.odc_find_root = find_root
    adopted.odc_node_size = node_size
    adopted.odc_fills_unused = False
    adopted.odc_trained = [param.parameter.requires_grad for param in params_of(group)]
    adopted.forget_root()


def sharded_groups(model: nn.Module) -> list[OdcParamGroup]:
    """The units of a model, whose root may not be built yet."""
    states = [compat.state_of(module) for module in model.modules() if isinstance(module, compat.FSDPModule)]
    found = dict.fromkeys(group for state in states for group in compat.groups_of_state(state))
    return [group for group in found if isinstance(group, OdcParamGroup)]
