"""Useful FLOPs against what torch counts in the towers themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny_multimodal import CONFIG
from torch.utils.flop_counter import FlopCounterMode

from odc.experiments.multimodal.model import build_towers, load_config
from odc.experiments.multimodal.plan import phase_costs

COSTS = phase_costs(CONFIG)


@pytest.fixture(scope="module")
def towers() -> dict[str, Any]:
    """Built when the tests run: to collect them no process has to load transformers' models."""
    built = build_towers(CONFIG, seed=0)
    for module in (module for tower in built.values() for module in tower.modules()):
        if hasattr(getattr(module, "config", None), "_attn_implementation"):
            module.config._attn_implementation = "eager"  # torch does not count its attention kernel for CPUs
    return built


def counted(run: object) -> int:
    with FlopCounterMode(display=False) as counter:
        run()  # type: ignore[operator]
    return counter.get_total_flops()


def test_encoders(towers: dict[str, Any]) -> None:
    image = counted(lambda: towers["image"](torch.randn(48, 48), torch.tensor([[6, 8]])))
    audio = counted(lambda: towers["audio"](torch.randn(1, 80, 8), [80]))
    assert COSTS["image"](48) / 3 == pytest.approx(image, rel=1e-6)
    assert COSTS["audio"](40) / 3 == pytest.approx(audio, rel=1e-6)


def test_language_model_counts_as_in_odc_balance() -> None:
    from odc.balance.cost import transformer_cost

    assert COSTS["llm"] == transformer_cost(16, 2, 24, 259, heads=2, kv_heads=1)


def test_shipped_config() -> None:
    costs = phase_costs(load_config("mm-demo"))
    assert all(cost.a > 0 and cost.b > 0 for cost in costs.values())
