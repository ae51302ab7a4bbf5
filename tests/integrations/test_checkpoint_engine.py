"""What the sender to checkpoint-engine's receivers refuses before it begins; tests/gpu has the receivers."""

from __future__ import annotations

import sys

import pytest
import torch

from odc.errors import UnsupportedError
from odc.integrations.checkpoint_engine import _Receiver, send_weights


def test_tensors_of_the_cpu_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="map memory of GPUs only, and these tensors are on cpu"):
        send_weights([{"weight": torch.ones(3)}], "ipc://@odc-test")


@pytest.mark.parametrize("groups", [[], [{}]])
def test_there_must_be_weights(groups: list[dict[str, torch.Tensor]]) -> None:
    with pytest.raises(ValueError, match="no weights to send"):
        send_weights(groups, "ipc://@odc-test")


def test_the_extra_is_named_where_pyzmq_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(UnsupportedError, match=r"speak ZeroMQ: pip install -e '.\[checkpoint-engine\]'"):
        _Receiver("ipc://@odc-test", 1.0)
