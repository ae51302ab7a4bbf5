"""Minibatches that `finalize_backward()` ends: torch 2.15's manual finalization, on every torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import own_gradients
from support.on_ranks import on_ranks
from support.programs import backward, new
from support.ranks import Pools
from torch.distributed import fsdp
from torch.distributed.fsdp import FSDPModule

import odc
from odc import OdcError, fully_shard
from odc.errors import UnfinishedMinibatchError, UnsupportedError

Gradients = dict[str, torch.Tensor | None]


def equal(left: Gradients, right: Gradients) -> None:
    assert left.keys() == right.keys()
    for name, one in left.items():
        other = right[name]
        assert one is not None and other is not None, name
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def in_a_block(rank: int, counts: tuple[int, int]) -> Gradients:
    model, _ = new(fully_shard)
    with model.minibatch():
        for microbatch in range(counts[rank]):
            backward(model, rank, 0, microbatch)
    return own_gradients(model)


@pytest.mark.parametrize("early", [True, False])
@on_ranks(2)
def test_only_finalize_ends_the_minibatch(rank: int, world: int, early: bool) -> None:
    """Any number of backwards on each rank, none of which ends the minibatch, whatever it is marked as."""
    counts = (0, 3)
    model, optimizer = new(fully_shard)
    if not early:
        with torch.no_grad():
            model(torch.zeros(1, 10, dtype=torch.int64))  # the root is built
        model.publish()
    model.set_manual_backward_finalization(True)
    for microbatch in range(counts[rank]):
        model.set_is_last_backward(True)
        backward(model, rank, 0, microbatch)
        assert all(grad is None for grad in own_gradients(model).values())
    if rank:
        with pytest.raises(UnfinishedMinibatchError):
            optimizer.step()
    assert model.finalize_backward() is None
    equal(own_gradients(model), in_a_block(rank, counts))
    optimizer.step()
    optimizer.zero_grad()
    model.set_manual_backward_finalization(False)
    backward(model, rank, 1)
    assert all(grad is not None for grad in own_gradients(model).values()), "a last backward ends it again"


@on_ranks(2)
def test_an_asynchronous_end_is_over_after_wait(rank: int, world: int) -> None:
    model, optimizer = new(fully_shard)
    model.set_manual_backward_finalization(True)
    backward(model, rank, 0)
    handle = model.finalize_backward(async_op=True)
    assert isinstance(handle, getattr(fsdp, "GradientReductionHandle", object))
    assert all(grad is None for grad in own_gradients(model).values()), "no rank has waited"
    with pytest.raises(UnfinishedMinibatchError, match=r"optimizer.step\(\) before .* wait\(\)"):
        optimizer.step()
    with pytest.raises(UnfinishedMinibatchError, match=r"finalize_backward\(\) before wait\(\)"):
        model.finalize_backward()
    with pytest.raises(UnfinishedMinibatchError, match=r"wait\(\) on the handle"):
        model(torch.zeros(1, 10, dtype=torch.int64))
    model.reshard()
    handle.wait()
    found = own_gradients(model)
    handle.wait()
    equal(found, own_gradients(model))
    equal(found, in_a_block(rank, (1, 1)))


@on_ranks(2)
def test_without_gradient_sync_the_minibatch_goes_on(rank: int, world: int) -> None:
    """As in torch, without gradient sync nothing is reduced, and the backwards that follow add to it."""
    model, _ = new(fully_shard)
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    backward(model, rank, 0, 0)
    model.finalize_backward()
    assert all(grad is None for grad in own_gradients(model).values())
    model.set_requires_gradient_sync(True)
    backward(model, rank, 0, 1)
    model.finalize_backward()
    equal(own_gradients(model), in_a_block(rank, (2, 2)))


def _refused(rank: int, world: int) -> None:
    model, _ = new(fully_shard)
    below = model.layers[0]
    with pytest.raises(OdcError, match="needs set_manual_backward_finalization"):
        model.finalize_backward()
    with pytest.raises(OdcError, match="on the root"):
        below.set_manual_backward_finalization(True)
    with pytest.raises(OdcError, match="on the root"):
        below.finalize_backward()
    model.set_manual_backward_finalization(True)
    with pytest.raises(OdcError, match=r"inside `with model.minibatch\(\)`"), model.minibatch():
        model.finalize_backward()


def _refused_in_time(rank: int, world: int) -> None:
    model, _ = new(fully_shard)
    model.set_manual_backward_finalization(True)
    backward(model, rank, 0)
    with pytest.raises(OdcError, match="after the first backward"):
        model.set_manual_backward_finalization(False)
    seen: list[str] = []

    def inside(grad: torch.Tensor) -> None:
        for refused in (model.finalize_backward, lambda: model.set_manual_backward_finalization(False)):
            with pytest.raises(OdcError, match="during a backward") as caught:
                refused()
            seen.append(str(caught.value))

    out: Any = model(torch.zeros(1, 10, dtype=torch.int64))
    out.register_hook(inside)
    out.sum().backward()
    assert len(seen) == 2
    model.finalize_backward()


def _refused_below_at_first_use(rank: int, world: int) -> None:
    model, _ = new(fully_shard)
    model.layers[0].set_manual_backward_finalization(True)
    with pytest.raises(OdcError, match="must be called on the root"):
        model(torch.zeros(1, 10, dtype=torch.int64))


@pytest.mark.parametrize("program", [_refused, _refused_in_time, _refused_below_at_first_use])
def test_a_call_at_the_wrong_place_or_time_is_refused(ranks: Pools, program: Callable[..., None]) -> None:
    ranks(2).run(program)


@on_ranks(2)
def test_kept_storage_keeps_its_place_and_no_old_weights(rank: int, world: int) -> None:
    model, optimizer = new(fully_shard)
    unit = model.layers[0]
    if not hasattr(FSDPModule, "set_keep_unsharded_storage"):
        with pytest.raises(UnsupportedError, match=f"needs torch 2.15; torch {torch.__version__.split('+')[0]}"):
            model.set_keep_unsharded_storage(True)
        return
    model.set_keep_unsharded_storage(True)
    plain, plain_optimizer = new(fully_shard)
    places = []
    for step in range(3):
        for one, its_optimizer in ((model, optimizer), (plain, plain_optimizer)):
            backward(one, rank, step)
            its_optimizer.step()
            its_optimizer.zero_grad()
        unit.unshard()
        places.append([p.data_ptr() for p in unit.parameters()])
        unit.reshard()
    assert places[0] == places[1] == places[2]
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.to_local(), other.to_local()), "kept memory never keeps old weights"


@on_ranks(2)
def test_fully_shard_gives_the_state_as_torchs_does(rank: int, world: int) -> None:
    model, _ = new(fully_shard)
    states = [fully_shard.state(module) for module in (model, *model.layers)]  # type: ignore[attr-defined]
    assert len(set(states)) == 1 + len(model.layers) and None not in states
    assert states[0] is fsdp.fully_shard.state(model)  # type: ignore[attr-defined]
    assert odc.fully_shard.state(torch.nn.Linear(1, 1)) is None  # type: ignore[attr-defined]


@on_ranks(2)
def test_what_torch_refuses_as_a_number_of_buffers_is_refused(rank: int, world: int) -> None:
    model, _ = new(fully_shard)
    for refused, error in ((0, ValueError), (-1, ValueError), (True, TypeError), (1.0, TypeError), (None, TypeError)):
        with pytest.raises(error, match="max_input_buffers must be"):
            model.set_reduce_scatter_max_input_buffers(refused)
    assert model.set_reduce_scatter_max_input_buffers(2) is None
    assert model.layers[0].set_reduce_scatter_max_input_buffers(1, recurse=False) is None
