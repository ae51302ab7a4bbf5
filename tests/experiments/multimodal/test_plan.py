"""Useful FLOPs against what torch counts in the towers themselves."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_multimodal import CONFIG
from torch.utils.flop_counter import FlopCounterMode

from odc.errors import ConfigError, OdcError
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


def test_a_config_that_lacks_a_key_is_refused_by_name_or_counted(tmp_path: Path) -> None:
    """Also one for which transformers has a default."""
    path, fields = tmp_path / "model.json", json.dumps(dict(load_config("mm-demo").fields))
    refused = dict[str, str]()
    for part in ("vision_config", "audio_config", "text_config"):
        for key in json.loads(fields)[part]:
            lacking = json.loads(fields)
            del lacking[part][key]
            path.write_text(json.dumps(lacking))
            try:
                config = load_config(str(path))
            except ConfigError as error:
                refused[key] = str(error)
            else:
                with contextlib.suppress(OdcError):
                    phase_costs(config)
    for key in ("mlp_ratio", "depth", "embed_dim", "d_model", "encoder_layers", "encoder_ffn_dim", "hidden_size"):
        assert refused.get(key) == f"model: {path} lacks '{key}'", key
