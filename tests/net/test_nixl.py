"""What a read by NIXL does at its end, with a stand-in for NIXL."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from odc.errors import UnsupportedError
from odc.memory import device_links
from odc.net.engines import nixl
from odc.net.engines.connections import Answers, Check, no_check
from odc.net.engines.nixl import NixlEngine
from odc.net.engines.pace import Pace


def no_dial(rank: int, check: Check) -> socket.socket:
    raise AssertionError("nothing is read")


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Devices whose memory was flushed, in the midst of what NIXL answered; device 0 needs it, device 1 does not."""
    found: list[object] = []
    monkeypatch.setattr(device_links, "flushes_writes", lambda device: device.index == 0)
    monkeypatch.setattr(device_links, "flush_writes", found.append)
    return found


def read(into: Any, found: list[object], *states: str) -> None:
    engine: Any = NixlEngine.__new__(NixlEngine)
    left = list(states)

    def state(handle: object) -> str:
        found.append(left[0])
        return left.pop(0)

    engine._agent, engine._pace = SimpleNamespace(check_xfer_state=state), Pace()
    answers: Any = Answers(0, 1, 60.0, "memory", no_check)
    answers.lost = lambda why: ValueError(why)
    assert engine._await(answers, object(), into, 0.0)


def test_what_came_to_a_device_is_flushed_once_it_is_there(flushed: list[object]) -> None:
    device = torch.device("cuda", 0)
    read(SimpleNamespace(device=device, numel=lambda: 10), flushed, "PROC", "PROC", "DONE")
    assert flushed == ["PROC", "PROC", "DONE", device]


def test_nothing_else_is_flushed(flushed: list[object]) -> None:
    read(SimpleNamespace(device=torch.device("cuda", 1), numel=lambda: 10), flushed, "DONE")
    read(torch.empty(10, dtype=torch.uint8), flushed, "DONE")
    with pytest.raises(ValueError, match="ERR"):
        read(SimpleNamespace(device=torch.device("cuda", 0), numel=lambda: 10), flushed, "ERR")
    assert flushed == ["DONE", "DONE", "ERR"]


def test_memory_that_nixl_does_not_register_is_named_by_rank_and_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at a limit of locked memory: what is exposed, and what a read goes into."""

    def register(*unused: object) -> None:
        raise RuntimeError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(nixl, "_load", lambda address: None)
    monkeypatch.setattr(nixl, "_agent", lambda api, name: SimpleNamespace(register_memory=register))
    engine = NixlEngine(3, no_dial, 60.0, "127.0.0.1")
    memory = torch.empty(10, dtype=torch.uint8)
    message = r"rank 3: NIXL cannot register 10 bytes of cpu for 'heap' \(NIXL_ERR_BACKEND\); .*engine='sockets'"
    with pytest.raises(UnsupportedError, match=message):
        engine.expose("heap", memory)
    with pytest.raises(UnsupportedError, match=message), engine._registration_of("heap", memory):
        pass
    engine.close()
