"""Units in a region that is computed again in backward: what is fetched, and what stays (odc/fsdp/group.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from odc import fully_shard
from odc.fsdp import live_roots
from odc.fsdp._torch_compat import groups_of_state, state_of
from odc.fsdp.fetcher import Fetcher

LAYERS, WIDTH = 5, 16


class Layer(nn.Module):
    """Two units: the layer, and experts in it whose output the layer needs again for its own gradients."""

    def __init__(self, recomputed: bool) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.recomputed = recomputed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.gated, x, use_reentrant=False) if self.recomputed else self.gated(x)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + torch.sigmoid(self.gate(x)) * self.experts(x)
        return found


def steps(recomputed: bool, world: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Of each step: units that are held at the end of forward beside the root's, and fetches until then and in all."""
    begun: list[str] = []

    def prepare(self: Fetcher, unit: Any, *args: Any, **options: Any) -> Any:
        begun.append(unit.name)
        return real(self, unit, *args, **options)

    real = Fetcher.prepare
    monkeypatch.setattr(Fetcher, "prepare", prepare)
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(Layer(recomputed) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer.experts, mesh=init_device_mesh("cpu", (world,)))
        fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    units = [module for layer in model for module in (layer, layer.experts)]
    found = []
    for _ in range(3):
        begun.clear()
        output = model(torch.randn(3, WIDTH))
        groups = [group for module in units for group in groups_of_state(state_of(module))]
        held = sum(group.is_unsharded or group.odc_fetch is not None for group in groups)
        forward = len(begun)
        output.square().mean().backward()
        found.append((held, forward, len(begun)))
        model.zero_grad()
    for root in live_roots():
        root.shut_down()
    monkeypatch.undo()
    return found


@on_ranks(2)
def test_no_unit_is_fetched_in_vain(rank: int, world: int) -> None:
    monkeypatch = pytest.MonkeyPatch()
    expected = steps(False, world, monkeypatch)
    assert expected[1][0] <= 1, "what comes last may still be held"
    assert steps(True, world, monkeypatch) == expected
