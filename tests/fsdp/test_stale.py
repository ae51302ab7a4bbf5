"""Shards against the bytes that were published of them (`odc.fsdp.stale`): at once on the CPU, later on a device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.deferred import late, late_heaps
from support.members import BF16, F16, F32, F64, HeapGroup
from support.on_ranks import on_ranks
from torch import nn

from odc import fully_shard
from odc.errors import StaleParametersError
from odc.fsdp import root_of
from odc.fsdp.stale import StaleCheck

LAYOUT = [[("first.weight", 4, F32), ("first.bias", 2, BF16)], [("second.weight", 3, F32)]]


def shards() -> list[list[torch.Tensor]]:
    return [[torch.arange(4.0), torch.tensor([1 / 3, 2 / 3])], [torch.tensor([7.0, 8.0, 9.0])]]


def test_a_single_changed_element_is_found_and_named() -> None:
    with HeapGroup(LAYOUT, 2) as group:
        group.members[1].shards.publish(shards(), [False, False])
        check = StaleCheck(group.layouts[1])
        check.compare(1, shards(), now=False)
        assert not group.layouts[1].heap.attached(0), "only this rank's shards are compared"
        for unit, param, at in ((0, 0, 0), (0, 0, 3), (0, 1, 1), (1, 0, 2)):
            now = shards()
            now[unit][param][at] += 0.5
            changed = rf"rank 13 \(epoch 6\): {LAYOUT[unit][param][0]} changed inside an open minibatch .*publish\(\)"
            with pytest.raises(StaleParametersError, match=changed):
                check.compare(6, now, now=False)
            check.refuse(6)  # nothing is left to raise
        rounds_alike = shards()
        rounds_alike[0][1] += 1e-5  # peers see bf16: what rounds to the same is what was published
        check.compare(1, rounds_alike, now=False)


@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64])
def test_a_nan_is_equal_to_itself_and_the_zeros_are_not(dtype: torch.dtype) -> None:
    with HeapGroup([[("w", 2, dtype)]], 1) as group:
        values = torch.tensor([math.nan, 0.0], dtype=dtype)
        group.members[0].shards.publish([[values]], [False])
        check = StaleCheck(group.layouts[0])
        check.compare(1, [[values.clone()]], now=True)
        with pytest.raises(StaleParametersError):
            check.compare(1, [[torch.tensor([math.nan, -0.0], dtype=dtype)]], now=True)


def test_a_device_is_asked_once_a_microbatch_and_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change is raised once, by the parameter's name, although a later comparison found none."""
    lanes = late_heaps(monkeypatch)
    with HeapGroup(LAYOUT, 1) as group:
        group.members[0].shards.publish(shards(), [False, False])
        (device,), mover, asked = lanes, group.layouts[0].mover, list[int]()
        differ = mover.differ  # type: ignore[attr-defined]
        monkeypatch.setattr(mover, "differ", lambda *args: (asked.append(1), differ(*args)), raising=False)
        check, changed = StaleCheck(group.layouts[0]), shards()
        changed[1][0][1] = 0.0
        settled = device.settled
        for now in (shards(), changed, shards()):
            check.compare(1, now, now=False)
        assert len(asked) == 3 and device.settled == settled, "one call each, and no wait"
        with pytest.raises(StaleParametersError, match=r"rank 10 \(epoch 1\): second.weight changed"):
            check.refuse(1)
        assert device.settled == settled + 1
        check.refuse(1)
        check.compare(1, shards(), now=False)
        check.refuse(1)
        with pytest.raises(StaleParametersError, match="second.weight"):
            check.compare(1, changed, now=True)


def _model() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model), torch.optim.SGD(model.parameters(), lr=0.1)


def _backward(model: Any) -> None:
    model(torch.ones(2, 8)).sum().backward()


def _change(model: Any) -> None:
    model[1].weight.to_local().data.mul_(2.0)


@pytest.mark.parametrize("way", ["block", "finish", "step"])
@on_ranks(1)
def test_on_a_device_the_end_of_the_minibatch_refuses(rank: int, world: int, way: str) -> None:
    """The changed microbatch runs; there is no gradient of it, and no optimizer steps."""
    with late():
        model, optimizer = _model()
        refused = pytest.raises(StaleParametersError, match="1.weight changed")
        if way == "block":
            with refused, model.minibatch():
                _backward(model)
                _change(model)
                _backward(model)
        elif way == "finish":
            model.set_is_last_backward(False)
            _backward(model)
            _change(model)
            _backward(model)
            with refused:
                model.finish_minibatch()
        else:  # gradients are recorded, but there is no backward
            model(torch.ones(2, 8))
            model.reshard()
            _change(model)
            model(torch.ones(2, 8))
            with refused:
                optimizer.step()
        assert all(parameter.grad is None for parameter in model.parameters())
        root_of(model).shut_down()


@on_ranks(1)
def test_on_a_device_an_evaluation_is_refused_at_once(rank: int, world: int) -> None:
    with late(), torch.no_grad():
        model, _ = _model()
        model(torch.ones(2, 8))
        model.reshard()
        _change(model)
        with pytest.raises(StaleParametersError, match="1.weight changed"):
            model(torch.ones(2, 8))
        model.publish()
        model(torch.ones(2, 8))
        root_of(model).shut_down()


@on_ranks(1)
def test_on_a_device_a_frozen_model_is_refused_at_once(rank: int, world: int) -> None:
    """A teacher that runs with gradients recorded, as nothing in it requires any, has no end either."""
    with late():
        model, _ = _model()
        model.requires_grad_(False)
        model(torch.ones(2, 8))
        model.reshard()
        _change(model)
        with pytest.raises(StaleParametersError, match="1.weight changed"):
            model(torch.ones(2, 8))
        root_of(model).shut_down()
