"""The minibatch boundary: what is called inside, what may happen there, and what is refused."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.collectives import collectives
from support.compare import assert_same, differences
from support.leaks import memfd_inodes
from support.models import (
    Case,
    adamw,
    build,
    next_token_loss,
    own_gradients,
    own_parameters,
    tokens,
    train,
)
from support.ranks import RankPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import odc
from odc import OdcError, Settings, fully_shard
from odc.errors import StaleParametersError, UnfinishedMinibatchError, UnsupportedError

Pools = Callable[[int], RankPool]

PLAIN = Case(counts=((1, 1),))


def new(world: int, shard_with: Callable[..., Any] = fully_shard, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = build(shard_with, PLAIN, init_device_mesh("cpu", (world,)), **options)
    return model, adamw(model)


def backward(model: Any, rank: int, step: int, microbatch: int = 0) -> None:
    x = tokens(rank, step, microbatch)
    (next_token_loss(model(x), x) / 18).backward()


def raised(kind: type[Exception], call: Callable[[], object]) -> str:
    """The message of the error that `call` raises."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


# no collective ---------------------------------------------------------------------------------------------------


def no_collectives(rank: int, world: int, settings: Settings, hybrid: bool) -> list[list[str]]:
    """From before the model's first forward: building heaps and attaching to peers is looked at too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")) if hybrid else init_device_mesh("cpu", (world,))
    found = []
    with collectives() as called:
        model = build(fully_shard, PLAIN, mesh, settings=settings)
    found.append(called)
    optimizer = adamw(model)
    for step in range(3):
        with collectives() as called:
            with model.minibatch():
                for i in range((rank + step) % 3):
                    backward(model, rank, step, i)
            optimizer.step()
            optimizer.zero_grad()
        found.append(called)
    with collectives() as called:
        backward(model, rank, 4)  # an unmarked backward ends a minibatch as well
        model.zero_grad()
        model.publish()
        with torch.no_grad():
            model(tokens(rank, 5, 0))
    found.append(called)
    return found


def fsdp2_collectives(rank: int, world: int) -> list[str]:
    model, _ = new(world, torch_fully_shard)
    with collectives() as called:
        backward(model, rank, 0)
    return called


@pytest.mark.parametrize("accumulate", ["server", "direct"])
def test_no_collective_from_the_first_forward_on(ranks: Pools, accumulate: str) -> None:
    settings = Settings(accumulate=accumulate)  # type: ignore[arg-type]
    assert ranks(2).run(no_collectives, settings, False) == [[[]] * 5] * 2


def test_no_collective_with_replicas(ranks: Pools) -> None:
    assert ranks(4).run(no_collectives, Settings(), True) == [[[]] * 5] * 4


def test_the_spy_sees_fsdp2s_collectives(ranks: Pools) -> None:
    for called in ranks(2).run(fsdp2_collectives):
        assert any(name.startswith("all_gather") for name in called)  # torch's name for it changes by version
        assert any(name.startswith("reduce_scatter") for name in called)
        assert any(name.startswith("counter of") for name in called)


# ranks without microbatches --------------------------------------------------------------------------------------


def never_any(rank: int, world: int, settings: Settings) -> None:
    """Rank 1 has no microbatch in any of ten minibatches, and runs ahead as far as the protocol lets it."""
    case = Case(counts=((2, 0),), idiom="minibatch", steps=10)
    run = train(fully_shard, case, rank, world, settings=settings)
    assert_same(run, train(torch_fully_shard, case, rank, world, pad=True))


def nobody_any(rank: int, world: int) -> None:
    model, optimizer = new(world)
    for _ in range(3):
        with model.minibatch():
            pass
        assert all(grad is None for grad in own_gradients(model).values()), "gradients out of nothing"
        optimizer.step()
    with model.minibatch():
        backward(model, rank, 0)
    assert all(grad is not None for grad in own_gradients(model).values()), "no gradients after empty minibatches"


@pytest.mark.parametrize("accumulate", ["server", pytest.param("direct", marks=pytest.mark.thorough)])
def test_a_rank_that_never_has_a_microbatch(ranks: Pools, accumulate: str) -> None:
    ranks(2).run(never_any, Settings(accumulate=accumulate))  # type: ignore[arg-type]


def test_a_minibatch_without_any_microbatch(ranks: Pools) -> None:
    ranks(2).run(nobody_any)


# unfinished ------------------------------------------------------------------------------------------------------


def step_too_early(rank: int, world: int) -> list[str]:
    model, optimizer = new(world)
    messages = []
    model.set_is_last_backward(False)
    backward(model, rank, 0)
    before = [p.to_local().clone() for p in model.parameters()]
    messages.append(raised(UnfinishedMinibatchError, optimizer.step))
    messages.append(raised(UnfinishedMinibatchError, model.publish))
    messages.append(raised(UnfinishedMinibatchError, lambda: model.load_state_dict(model.state_dict())))
    assert all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True)), "it stepped"
    model.finish_minibatch()
    model.set_is_last_backward(True)
    optimizer.step()  # finished: allowed
    optimizer.zero_grad()
    return messages


def load_too_early(rank: int, world: int) -> None:
    """The root has no parameter of its own, and its buffer would be loaded before those of the layers are refused."""
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model.register_buffer("scale", torch.ones(1))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.set_is_last_backward(False)
    model(torch.ones(2, 4)).sum().backward()
    loaded = {**model.state_dict(), "scale": torch.full((1,), 2.0)}
    raised(UnfinishedMinibatchError, lambda: model.load_state_dict(loaded))
    assert model.scale.item() == 1.0, "a part was loaded"
    model.finish_minibatch()
    model.load_state_dict(loaded)
    assert model.scale.item() == 2.0


def step_inside(rank: int, world: int) -> str:
    model, optimizer = new(world)
    unrelated = torch.nn.Parameter(torch.ones(1))
    unrelated.grad = torch.ones(1)
    with model.minibatch():
        backward(model, rank, 0)
        torch.optim.SGD([unrelated], lr=0.1).step()  # not this model's parameters: none of its business
        message = raised(UnfinishedMinibatchError, optimizer.step)
    optimizer.step()
    return message


def test_a_step_with_gradients_still_on_their_way_is_refused(ranks: Pools) -> None:
    for rank, messages in enumerate(ranks(2).run(step_too_early)):
        for message, what in zip(messages, ["optimizer.step()", "publish()", "load_state_dict()"], strict=True):
            assert f"rank {rank} (epoch 1)" in message
            assert what in message


def test_a_load_with_gradients_still_on_their_way_loads_nothing(ranks: Pools) -> None:
    ranks(2).run(load_too_early)


def test_a_step_inside_a_minibatch_is_refused(ranks: Pools) -> None:
    for rank, message in enumerate(ranks(2).run(step_inside)):
        assert f"rank {rank} (epoch 1)" in message
        assert "minibatch()" in message


def wrong_order(rank: int, world: int) -> list[str]:
    model, _ = new(world)
    with model.minibatch():
        messages = [raised(OdcError, lambda: model.minibatch().__enter__())]
        backward(model, rank, 0)
    messages.append(raised(OdcError, lambda: model.layers[0].minibatch().__enter__()))
    backward(model, rank, 1)
    return messages


def test_minibatch_is_for_the_root_and_not_nested(ranks: Pools) -> None:
    for nested, below in ranks(2).run(wrong_order):
        assert "minibatch() inside minibatch()" in nested
        assert "root" in below


# weights changed inside ------------------------------------------------------------------------------------------


def _by_data(model: Any) -> None:
    model.layers[1].out.weight.data.mul_(0.5)


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.layers[1].out.weight.mul_(0.5)


def _one_element(model: Any) -> None:
    """On rank 0 only: its shard alone changed."""
    if torch.distributed.get_rank() == 0:
        model.layers[1].out.weight.to_local()[0, 0] += 1.0


CHANGES = {"data": _by_data, "in_place": _in_place, "one_element": _one_element}


def changed_inside(rank: int, world: int, how: str, policy: bool) -> str:
    """Evaluate, change, evaluate: refused on ranks whose shard changed; after publish() as under FSDP2."""
    case = Case(counts=((1, 1),), low_precision=policy)
    x, mesh = tokens(rank, 0, 0), init_device_mesh("cpu", (world,))
    model, reference = (build(shard_with, case, mesh) for shard_with in (fully_shard, torch_fully_shard))
    outputs = []
    with torch.no_grad():
        for one in (model, reference):
            one(x)
            one.reshard()
            CHANGES[how](one)
        message = ""
        if how != "one_element" or rank == 0:
            message = raised(StaleParametersError, lambda: model(x))
        model.publish()
        for one in (model, reference):
            outputs.append(one(x))
    assert torch.equal(*outputs), "after publish() the output differs from FSDP2's"
    for one in (model, reference):
        backward(one, rank, 1)
    assert not differences(own_gradients(model), own_gradients(reference), None), "gradients after publish() differ"
    return message


@pytest.mark.parametrize("policy", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("how", CHANGES)
def test_changed_weights_are_refused_until_published(ranks: Pools, how: str, policy: bool) -> None:
    first, second = ranks(2).run(changed_inside, how, policy)
    for rank, message in enumerate([first, second] if how != "one_element" else [first]):
        assert f"rank {rank} (epoch 1)" in message
        assert "layers.1.out.weight" in message
        assert "publish()" in message


def average_swapped_in_and_out(rank: int, world: int) -> None:
    results = []
    for shard_with in (fully_shard, torch_fully_shard):
        model, optimizer = new(world, shard_with)
        outputs: dict[str, torch.Tensor | None] = {}
        average = {name: p.to_local().clone() for name, p in model.named_parameters()}
        for step in range(3):
            backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                outputs[f"live {step}"] = model(tokens(rank, step, 8))
                model.reshard()
                live = {name: p.to_local().clone() for name, p in model.named_parameters()}
                for name, p in model.named_parameters():
                    p.to_local().copy_(average[name].lerp_(live[name], 0.5))
                _publish(model)
                outputs[f"averaged {step}"] = model(tokens(rank, step, 8))
                model.reshard()
                for name, p in model.named_parameters():
                    p.to_local().copy_(live[name])
                _publish(model)
        results.append({**outputs, **own_parameters(model)})
    wrong = differences(results[0], results[1], None)
    assert not wrong, "\n".join(wrong)


def _publish(model: FSDPModule) -> None:
    if hasattr(model, "publish"):
        model.publish()


def test_an_average_swapped_in_and_out(ranks: Pools) -> None:
    ranks(2).run(average_swapped_in_and_out)


def check_turned_off(rank: int, world: int) -> bool:
    model, _ = new(world, settings=Settings(stale_check=False))
    x = tokens(rank, 0, 0)
    with torch.no_grad():
        before = model(x)
        model.reshard()
        _by_data(model)
        after = model(x)
        model.publish()
        published = model(x)
    return torch.equal(before, after) and not torch.equal(before, published)


def test_without_the_check_the_published_values_stay_in_use(ranks: Pools) -> None:
    assert ranks(2).run(check_turned_off) == [True, True]


# lifetime --------------------------------------------------------------------------------------------------------


def heaps_held(rank: int, world: int) -> tuple[set[str], set[str]]:
    """Heaps of a model, and those of them that stay when it is gone; models of other tests may go meanwhile."""
    before = memfd_inodes()
    model, _ = new(world)
    backward(model, rank, 0)
    own = memfd_inodes() - before
    del model
    gc.collect()
    torch.distributed.barrier()
    deadline = time.monotonic() + 60
    while own & memfd_inodes() and time.monotonic() < deadline:
        time.sleep(0.005)  # the daemon's loop gives it back
    return own, own & memfd_inodes()


def test_a_deleted_model_gives_its_heap_back(ranks: Pools) -> None:
    for own, kept in ranks(2).run(heaps_held):
        assert own
        assert not kept


def after_shutdown(rank: int, world: int) -> str:
    model, _ = new(world)
    backward(model, rank, 0)
    torch.distributed.barrier()
    odc.shutdown()
    odc.shutdown()  # twice is once
    message = raised(OdcError, lambda: backward(model, rank, 1))
    again, _ = new(world)  # another model may follow
    backward(again, rank, 0)
    return message


def test_a_model_cannot_run_after_shutdown_and_another_can(ranks: Pools) -> None:
    for message in ranks(2).run(after_shutdown):
        assert "shutdown" in message


# the surface -----------------------------------------------------------------------------------------------------

KEPT = {  # torch's own, which mean under odc what they mean there
    "reshard", "set_gradient_divide_factor", "set_is_last_backward", "set_modules_to_backward_prefetch",
    "set_modules_to_forward_prefetch", "set_post_optim_event", "set_reduce_scatter_divide_factor",
    "set_reshard_after_backward", "set_unshard_in_backward",
}  # fmt: skip


def test_every_method_of_fsdp2_is_kept_redefined_or_refused_on_purpose() -> None:
    from odc.fsdp import OdcModule

    public = {name for name in vars(FSDPModule) if not name.startswith("_")}
    redefined = {name for name in vars(OdcModule) if not name.startswith("_")}
    assert public - redefined == KEPT & public


def refused_methods(rank: int, world: int) -> list[str]:
    model, _ = new(world)
    calls: list[Callable[[], object]] = [
        lambda: model.set_requires_gradient_sync(False, recurse=False),
        lambda: model.set_custom_all_gather(None),
        lambda: model.set_custom_reduce_scatter(None),
        lambda: model.set_all_reduce_hook(lambda grad: None),
        lambda: model.set_allocate_memory_from_process_group_for_comm(True),
    ]
    return [raised(UnsupportedError, call) for call in calls]


def test_what_has_no_meaning_is_refused_by_name(ranks: Pools) -> None:
    names = ["set_requires_gradient_sync", "set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"]
    for messages in ranks(2).run(refused_methods):
        for name, message in zip([*names, "set_allocate_memory"], messages, strict=True):
            assert name in message
