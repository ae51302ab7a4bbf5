"""The minibatch boundary: what is called inside, what may happen there, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import time
from typing import Any

import pytest
import torch
from support.collectives import collectives
from support.compare import assert_same, differences
from support.leaks import memfd_inodes
from support.models import Case, build, own_gradients, own_parameters, tokens, train
from support.on_ranks import on_ranks
from support.programs import PLAIN, Make, Programs, Result, backward, new
from support.ranks import Pools
from support.waiting import until
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import odc
from odc import OdcError, Settings, fully_shard
from odc.errors import StaleParametersError, UnfinishedMinibatchError, UnsupportedError
from odc.fsdp import OdcModule
from odc.fsdp._torch_compat import groups_of_state
from odc.fsdp.root import root_of
from odc.runtime import daemon

PROGRAMS = Programs()


# no collective ---------------------------------------------------------------------------------------------------


def no_collectives(rank: int, world: int, settings: Settings, hybrid: bool) -> None:
    """From before the model's first forward, so building heaps and attaching to peers counts too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")) if hybrid else init_device_mesh("cpu", (world,))
    with collectives() as called:
        model = build(fully_shard, PLAIN, mesh, settings=settings)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            with model.minibatch():
                for i in range((rank + step) % 3):
                    backward(model, rank, step, i)
            optimizer.step()
            optimizer.zero_grad()
        backward(model, rank, 4)  # an unmarked backward ends a minibatch as well
        model.zero_grad()
        model.publish()
        with torch.no_grad():
            model(tokens(rank, 5, 0))
    assert called == []


@pytest.mark.parametrize("accumulate", ["server", "direct"])
def test_no_collective_from_the_first_forward_on(ranks: Pools, accumulate: Any) -> None:
    ranks(2).run(no_collectives, Settings(accumulate=accumulate), False)


def test_no_collective_with_replicas(ranks: Pools) -> None:
    ranks(4).run(no_collectives, Settings(), True)


@on_ranks(2)
def test_the_spy_sees_fsdp2s_collectives(rank: int, world: int) -> None:
    model, _ = new(torch_fully_shard)
    with collectives() as called:
        backward(model, rank, 0)
    for name in ("all_gather", "reduce_scatter", "counter of"):  # torch's full names change by version
        assert any(one.startswith(name) for one in called), f"{name} not in {called}"


# ranks without microbatches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", ["server", pytest.param("direct", marks=pytest.mark.thorough)])
@on_ranks(2)
def test_a_rank_that_never_has_a_microbatch(rank: int, world: int, accumulate: Any) -> None:
    """In ten minibatches it runs ahead as far as the protocol lets it."""
    case = Case(counts=((2, 0),), idiom="minibatch", steps=10)
    run = train(fully_shard, case, rank, world, settings=Settings(accumulate=accumulate))
    assert_same(run, train(torch_fully_shard, case, rank, world, pad=True))


@on_ranks(2)
def test_a_minibatch_without_any_microbatch(rank: int, world: int) -> None:
    model, optimizer = new(fully_shard)
    for _ in range(3):
        with model.minibatch():
            pass
        assert all(grad is None for grad in own_gradients(model).values()), "gradients out of nothing"
        optimizer.step()
    with model.minibatch():
        backward(model, rank, 0)
    assert all(grad is not None for grad in own_gradients(model).values()), "no gradients after empty minibatches"


# unfinished ------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_step_with_gradients_still_on_their_way_is_refused(rank: int, world: int) -> None:
    model, optimizer = new(fully_shard)
    model.set_is_last_backward(False)
    backward(model, rank, 0)
    before = [p.to_local().clone() for p in model.parameters()]
    for doing, act in (
        (r"optimizer.step\(\)", optimizer.step),
        (r"publish\(\)", model.publish),
        (r"load_state_dict\(\)", lambda: model.load_state_dict(model.state_dict())),
    ):
        with pytest.raises(UnfinishedMinibatchError, match=rf"rank {rank} \(epoch 1\).*{doing}"):
            act()
    assert all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True)), "it stepped"
    model.finish_minibatch()
    model.set_is_last_backward(True)
    optimizer.step()  # finished: allowed


@on_ranks(2)
def test_a_load_with_gradients_still_on_their_way_loads_nothing(rank: int, world: int) -> None:
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
    with pytest.raises(UnfinishedMinibatchError):
        model.load_state_dict(loaded)
    assert model.scale.item() == 1.0, "a part was loaded"
    model.finish_minibatch()
    model.load_state_dict(loaded)
    assert model.scale.item() == 2.0


@on_ranks(2)
def test_weights_of_a_part_of_a_unit_are_loaded_after_an_evaluation(rank: int, world: int) -> None:
    """As of a head that belongs to the root: its own `load_state_dict` ends the evaluation, as the model's does."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model: Any = copy.deepcopy(plain)
    fully_shard(model)
    x = torch.arange(8.0).view(2, 4)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
        model[1].load_state_dict({name: 3 * value for name, value in model[1].state_dict().items()})
        plain[1].load_state_dict({name: 3 * value for name, value in plain[1].state_dict().items()})
        assert torch.equal(model(x), plain(x))


@on_ranks(2)
def test_a_step_inside_a_minibatch_is_refused(rank: int, world: int) -> None:
    model, optimizer = new(fully_shard)
    unrelated = torch.nn.Parameter(torch.ones(1))
    unrelated.grad = torch.ones(1)
    refused = rf"rank {rank} \(epoch 1\): %s\(\) inside `with model\.minibatch\(\)`"
    with model.minibatch():
        backward(model, rank, 0)
        torch.optim.SGD([unrelated], lr=0.1).step()  # not this model's parameters
        with pytest.raises(UnfinishedMinibatchError, match=refused % "clip_grad_norm_"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(UnfinishedMinibatchError, match=refused % "optimizer.step"):
            optimizer.step()
    assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()) > 0
    optimizer.step()


@on_ranks(2)
def test_minibatch_is_for_the_root_and_not_nested(rank: int, world: int) -> None:
    model, _ = new(fully_shard)
    with model.minibatch():
        with pytest.raises(OdcError, match=r"minibatch\(\) inside minibatch\(\)"):
            model.minibatch().__enter__()
        backward(model, rank, 0)
    with pytest.raises(OdcError, match="root"):
        model.layers[0].minibatch().__enter__()
    backward(model, rank, 1)


@on_ranks(2)
def test_a_gradient_penalty_in_a_block(rank: int, world: int) -> None:
    """`autograd.grad` is a backward too, of a graph whose weights the second one needs."""
    found = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        if sharded:
            for part in (model[0], model[2], model):
                fully_shard(part)
            model.set_reshard_after_backward(False)
        with model.minibatch() if sharded else contextlib.nullcontext():
            x = torch.arange(8.0).view(2, 4).requires_grad_()  # the same on both ranks
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            slope.square().sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        found.append({name: g.full_tensor() if sharded and g is not None else g for name, g in gradients.items()})
    wrong = differences(found[1], found[0], lambda b: 1e-6 + 1e-5 * b.abs())
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("mark", ["set_is_last_backward", "set_requires_gradient_sync"])
@on_ranks(2)
def test_backwards_are_marked_on_the_root(rank: int, world: int, mark: str) -> None:
    """Before and after its first use. A loop over all sharded modules comes to the root first, and changes nothing."""
    model, _ = new(fully_shard)
    for _ in range(2):
        for last in (False, True):
            for module in [model, *model.layers]:
                getattr(module, mark)(last)
            with pytest.raises(UnsupportedError, match="must be called on the root"):
                getattr(model.layers[1], mark)(not last)
        backward(model, rank, 0)
        assert all(gradient is not None for gradient in own_gradients(model).values())
        model.zero_grad()


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


@pytest.mark.parametrize("policy", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("change", [_by_data, _in_place, _one_element])
@on_ranks(2)
def test_changed_weights_are_refused_until_published(rank: int, world: int, change: Any, policy: bool) -> None:
    """Evaluate, change, evaluate: refused on ranks whose shard changed; after publish() as under FSDP2."""
    case, x = Case(counts=((1, 1),), low_precision=policy), tokens(rank, 0, 0)
    (model, _), (reference, _) = (new(shard_with, case) for shard_with in (fully_shard, torch_fully_shard))
    outputs = []
    with torch.no_grad():
        for one in (model, reference):
            one(x)
            one.reshard()
            change(one)
        if change is not _one_element or rank == 0:
            stale = rf"rank {rank} \(epoch 1\): layers.1.out.weight .*publish\(\)"
            with pytest.raises(StaleParametersError, match=stale):
                model(x)
        model.publish()
        for one in (model, reference):
            outputs.append(one(x))
    assert torch.equal(*outputs), "after publish() the output differs from FSDP2's"
    for one in (model, reference):
        backward(one, rank, 1)
    assert not differences(own_gradients(model), own_gradients(reference), None), "gradients after publish() differ"


@PROGRAMS.add
def average_swapped_in_and_out(make: Make, rank: int, world: int) -> Result:
    model, optimizer = new(make)
    publish = model.publish if make is fully_shard else lambda: None
    seen: Result = {}
    average = {name: p.to_local().clone() for name, p in model.named_parameters()}
    for step in range(3):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen[f"live {step}"] = model(tokens(rank, step, 8))
            model.reshard()
            live = {name: p.to_local().clone() for name, p in model.named_parameters()}
            for name, p in model.named_parameters():
                p.to_local().copy_(average[name].lerp_(live[name], 0.5))
            publish()
            seen[f"averaged {step}"] = model(tokens(rank, step, 8))
            model.reshard()
            for name, p in model.named_parameters():
                p.to_local().copy_(live[name])
            publish()
    return {**seen, **own_parameters(model)}


@PROGRAMS.each()
def test_equals_torch_to_the_bit(ranks: Pools, program: Any) -> None:
    ranks(2).run(program)


@on_ranks(2)
def test_without_the_check_the_published_values_stay_in_use(rank: int, world: int) -> None:
    model, _ = new(fully_shard, settings=Settings(stale_check=False))
    x = tokens(rank, 0, 0)
    with torch.no_grad():
        before = model(x)
        model.reshard()
        _by_data(model)
        after = model(x)
        model.publish()
        published = model(x)
    assert torch.equal(before, after) and not torch.equal(before, published)


# lifetime --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_a_deleted_model_gives_its_heap_back(rank: int, world: int) -> None:
    """Models of other tests may be given back meanwhile."""
    before = memfd_inodes()
    model, _ = new(fully_shard)
    backward(model, rank, 0)
    own = memfd_inodes() - before
    assert own
    del model, _
    gc.collect()
    torch.distributed.barrier()
    deadline = time.monotonic() + 60
    while own & memfd_inodes():
        assert time.monotonic() < deadline, "the heap is still there"
        time.sleep(0.005)  # the daemon's loop gives it back


@on_ranks(2)
def test_shutdown_gives_the_heap_back_though_the_model_stays(rank: int, world: int) -> None:
    """And its peers', which pushes have mapped. Whatever is done with the model later is an error that says so."""
    before = memfd_inodes()
    model, _ = new(fully_shard)
    backward(model, rank, 0)
    x = tokens(rank, 1, 0)
    loss = model(x).square().mean()
    own = memfd_inodes() - before
    assert len(own) == world
    torch.distributed.barrier()
    odc.shutdown()
    until(lambda: not own & memfd_inodes(), lambda: "the end of the heaps")
    for use in (loss.backward, lambda: model(x), model.layers[0].unshard, lambda: root_of(model)):
        with pytest.raises(OdcError, match="this model has left the job"):
            use()


@on_ranks(2)
def test_a_model_cannot_run_after_shutdown_and_another_can(rank: int, world: int) -> None:
    model, _ = new(fully_shard)
    bare: Any = torch.nn.Sequential(torch.nn.Linear(4, 4))  # whose root has no parameters of its own
    for part in (bare[0], bare):
        fully_shard(part, mesh=init_device_mesh("cpu", (world,)))
    backward(model, rank, 0)
    bare(torch.ones(2, 4)).sum().backward()
    torch.distributed.barrier()
    odc.shutdown()
    odc.shutdown()  # twice is once
    with pytest.raises(OdcError, match="shutdown"):
        backward(model, rank, 1)
    with pytest.raises(OdcError, match="shutdown"):
        bare(torch.ones(2, 4))
    again, _ = new(fully_shard)
    backward(again, rank, 0)
    until(lambda: "collectives" in daemon(rank).liveness._followers)


@on_ranks(2)
def test_evaluation_keeps_nothing_of_its_forwards(rank: int, world: int) -> None:
    """FSDP2 forgets their order only at the end of a last backward, which an evaluation has not."""
    model, _ = new(fully_shard)
    with torch.no_grad():
        for number in range(2):
            model(tokens(rank, number, 0))
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    assert not states[0]._comm_ctx.post_forward_order
    assert not any(group._post_forward_indices for state in states for group in groups_of_state(state))


# the surface -----------------------------------------------------------------------------------------------------

KEPT = {  # torch's own, which mean under odc what they mean there
    "reshard", "set_gradient_divide_factor", "set_modules_to_backward_prefetch",
    "set_modules_to_forward_prefetch", "set_post_optim_event", "set_reduce_scatter_divide_factor",
    "set_reshard_after_backward", "set_reshard_after_forward", "set_unshard_in_backward",
}  # fmt: skip


def test_every_method_of_fsdp2_is_kept_redefined_or_refused_on_purpose() -> None:
    public = {name for name in vars(FSDPModule) if not name.startswith("_")}
    redefined = {name for name in vars(OdcModule) if not name.startswith("_")}
    assert public - redefined == KEPT & public
