"""What the pushes beside a busy peer are held against, on one device and on several; no device is needed."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import gpu_decoupled
from bench.gpu_decoupled import COMPUTES, IDLE, SHARED

SECONDS = {IDLE: 1.0, SHARED: 2.0, COMPUTES: 2.0}


@pytest.mark.parametrize(
    ("devices", "times"),
    [(1, {IDLE: 0.5, SHARED: 1.0, COMPUTES: 1.0}), (8, {IDLE: 1.0, COMPUTES: 2.0})],
    ids=["shared", "a device each"],
)
def test_a_wait_for_a_peer_on_another_device_is_not_hidden_by_turns_on_one(
    monkeypatch: pytest.MonkeyPatch, devices: int, times: dict[str, float]
) -> None:
    stored: list[dict[str, Any]] = []
    given = SimpleNamespace(rounds=3, fast_ms=10, owner_ms=120)
    script = SimpleNamespace(given=given, store=lambda name, title, rows, **more: stored.extend(rows))
    pool = SimpleNamespace(each=lambda function: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(gpu_decoupled, "Script", lambda *_, **__: script)
    monkeypatch.setattr(gpu_decoupled, "RankPool", lambda *_: nullcontext(pool))
    monkeypatch.setattr(gpu_decoupled, "Occupant", lambda unit_s: nullcontext())
    monkeypatch.setattr(gpu_decoupled, "pushed", lambda pool, other, way, *_: SECONDS[way])
    monkeypatch.setattr(gpu_decoupled, "answers", lambda *_: [0.01])
    gpu_decoupled.main()
    assert {row["its peer"]: row["times_baseline"] for row in stored if "times_baseline" in row} == times
