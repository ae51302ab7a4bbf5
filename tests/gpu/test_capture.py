"""What is refused while a CUDA graph is being captured; the capture itself is pretended, as nothing emulates graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.device import own_device
from support.on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from odc import fully_shard
from odc.errors import AbandonedMinibatchError, UnsupportedError
from odc.fsdp import live_roots


@on_ranks(2)
def test_nothing_of_a_minibatch_is_captured(rank: int, world: int) -> None:
    device = own_device(rank)
    model: Any = fully_shard(nn.Linear(8, 8).to(device), mesh=init_device_mesh("cuda", (world,)))
    x = torch.ones(2, 8, device=device)
    loss: Any = None

    def backward() -> None:
        loss.backward()

    def captured(use: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(UnsupportedError, match=f"rank {rank}.*a CUDA graph is being captured"):
                use()

    captured(lambda: model(x))
    assert not live_roots(), "nothing is built for a graph either"
    for _ in range(2):  # the second time a root is there
        with model.minibatch():
            captured(lambda: model.unshard())
            captured(lambda: model(x))
            model(x).sum().backward()
        captured(model.publish)
        model.zero_grad()

    def captured_backward() -> None:
        nonlocal loss
        with model.minibatch():
            model(x).sum().backward()
            loss = model(x).sum()
            captured(backward)
            model.abandon_minibatch("its backward was captured")

    with pytest.raises(AbandonedMinibatchError, match="its backward was captured"):
        captured_backward()
    for root in live_roots():
        root.shut_down()


@on_ranks(2)
def test_a_unit_that_was_fetched_ahead_is_not_captured_either(rank: int, world: int) -> None:
    device, mesh = own_device(rank), init_device_mesh("cuda", (world,))
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(device)
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    x = torch.ones(2, 8, device=device)
    for _ in range(2):  # the first learns the order
        with model.minibatch():
            model(x).sum().backward()
        model.zero_grad()
    capturing: list[bool] = []
    first: Any = model[0]
    with model.minibatch(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
        begun = first.register_forward_hook(lambda *_: capturing.append(True))
        with pytest.raises(UnsupportedError, match=f"rank {rank}.*a CUDA graph is being captured"):
            model(x)
        begun.remove()
        capturing.clear()
        model(x).sum().backward()
    for root in live_roots():
        root.shut_down()
