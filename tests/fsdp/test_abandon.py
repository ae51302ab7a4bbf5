"""Minibatches that are given up, on real ranks: the weights are those of a run that never had them (issue 11)."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import programs
from support.extent import examples
from support.failing import end
from support.models import Case, adamw, build, own_gradients, own_parameters, tokens
from support.on_ranks import on_ranks
from support.ranks import Pools, RankPool, spawn_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method

import odc
from odc import AbandonedMinibatchError, Settings, fully_shard
from odc.errors import UnfinishedMinibatchError
from odc.fsdp import root_of

Where = Literal["forward", "backward", "asked"]

EXACT = Settings(reproducible=True)


class Boom(Exception):
    """Stands for whatever a bad sample raises."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong in one microbatch of one rank.

    Attributes:
        where: in the forward or the backward of a layer; "asked": the rank calls `abandon_minibatch`.
        layer: of the model; backward begins at the last.
    """

    where: Where
    layer: int = 1


@dataclass(frozen=True)
class Planned:
    """A minibatch: microbatches by rank, and faults by (rank, microbatch)."""

    counts: tuple[int, ...]
    faults: tuple[tuple[tuple[int, int], Fault], ...] = ()

    @property
    def lost(self) -> bool:
        """Whether any of its faults happens and costs the minibatch."""
        return any(fault.where != "forward" and m < self.counts[rank] for (rank, m), fault in self.faults)

    def fault(self, rank: int, microbatch: int) -> Fault | None:
        return dict(self.faults).get((rank, microbatch))


@contextlib.contextmanager
def broken(model: Any, fault: Fault | None) -> Iterator[None]:
    """Raise `Boom` where the fault is."""

    def boom(*unused: Any) -> None:
        raise Boom("bad sample")

    def arm(module: Any, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(boom)

    if fault is None or fault.where == "asked":
        yield
        return
    layer = model.layers[fault.layer]
    handle = layer.register_forward_pre_hook(boom) if fault.where == "forward" else layer.register_forward_hook(arm)
    try:
        yield
    finally:
        handle.remove()


def backward(model: Any, rank: int, number: int, microbatch: int, fault: Fault | None = None) -> None:
    with broken(model, fault):
        programs.backward(model, rank, number, microbatch)


def in_blocks(model: Any, rank: int, number: int, minibatch: Planned) -> bool:
    """Returns that there are gradients, or raises."""
    with model.minibatch():
        for m in range(minibatch.counts[rank]):
            fault = minibatch.fault(rank, m)
            if fault is not None and fault.where == "asked":
                model.abandon_minibatch("asked to")
                continue
            try:
                backward(model, rank, number, m, fault)
            except Boom:
                if fault is not None and fault.where == "forward":
                    backward(model, rank, number, m)  # what a forward has cost can be had again
    return True


def in_a_plain_loop(model: Any, rank: int, number: int, minibatch: Planned) -> bool:
    """One backward; a fault in it is caught and not reported. Returns whether there are gradients."""
    fault = minibatch.fault(rank, 0)
    try:
        backward(model, rank, number, 0, fault)
    except Boom:
        if fault is None or fault.where == "backward":
            return False
        backward(model, rank, number, 0)
    return True


def trained(
    rank: int,
    world: int,
    plan: list[Planned],
    plain: bool = False,
    hybrid: bool = False,
    checkpointing: Literal["", "function"] = "",
    chosen: Settings = EXACT,
) -> tuple[str, list[int]]:
    """Digest of this rank's shards after the plan, and the numbers of the minibatches that gave no gradient here."""
    mesh = (
        init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        if hybrid
        else init_device_mesh("cpu", (world,))
    )
    case = Case(counts=((1,) * world,), checkpointing=checkpointing)
    model = build(fully_shard, case, mesh, settings=chosen)
    optimizer, lost = adamw(model), list[int]()
    number = 0  # of good minibatches so far, and so of the data
    for i, minibatch in enumerate(plan):
        try:
            there = (in_a_plain_loop if plain else in_blocks)(model, rank, number, minibatch)
        except AbandonedMinibatchError:
            there = False
            assert all(gradient is None for gradient in own_gradients(model).values()), "some gradients were written"
        if there:
            optimizer.step()
            optimizer.zero_grad()
            number += 1
        else:
            lost.append(i)
    digest = hashlib.sha256()
    for values in own_parameters(model).values():
        digest.update(values.numpy().tobytes())
    return digest.hexdigest(), lost


def assert_as_if_never(pool: RankPool, plan: list[Planned], **how: Any) -> None:
    names = ("plain", "hybrid", "checkpointing", "chosen")
    args = [how.get(name, default) for name, default in zip(names, (False, False, "", EXACT), strict=True)]
    found = pool.run(trained, plan, *args)
    clean = pool.run(trained, [Planned(minibatch.counts) for minibatch in plan if not minibatch.lost], *args)
    expected = [i for i, minibatch in enumerate(plan) if minibatch.lost]
    assert [lost for _, lost in found] == [expected] * pool.world
    assert [digest for digest, _ in found] == [digest for digest, _ in clean]


FAULTS = st.builds(Fault, st.sampled_from(["forward", "backward", "asked"]), st.integers(0, 2))


@st.composite
def plans(draw: st.DrawFn, world: int) -> list[Planned]:
    minibatches = []
    for _ in range(draw(st.integers(1, 4))):
        counts = tuple(draw(st.lists(st.integers(0, 3), min_size=world, max_size=world)))
        places = st.tuples(st.integers(0, world - 1), st.integers(0, 2))
        faults = draw(st.dictionaries(places, FAULTS, max_size=2))
        minibatches.append(Planned(counts, tuple(faults.items())))
    return [*minibatches, Planned((2,) * world)]


@settings(max_examples=examples(40))
@given(plan=plans(2))
def test_random_failures_leave_the_weights_of_a_run_without_them(ranks: Pools, plan: list[Planned]) -> None:
    assert_as_if_never(ranks(2), plan)


BAD = Planned((2, 1, 0, 3), (((3, 1), Fault("backward", 0)), ((0, 1), Fault("asked"))))
GOOD = Planned((1, 2, 3, 1))


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"hybrid": True, "chosen": Settings(reproducible=True, accumulate="direct")}, id="hybrid direct"),
        pytest.param({"checkpointing": "function"}, id="checkpointing", marks=pytest.mark.thorough),
    ],
)
def test_the_same_with_replicas_direct_adds_and_recomputation(ranks: Pools, how: dict[str, Any]) -> None:
    assert_as_if_never(ranks(4), [GOOD, BAD, BAD, GOOD, BAD, GOOD], **how)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_plain_loop_goes_on_after_a_failed_backward(ranks: Pools, layer: int) -> None:
    bad = Planned((1, 1), (((1, 0), Fault("backward", layer)),))
    retried = Planned((1, 1), (((0, 0), Fault("forward", layer)),))
    assert_as_if_never(ranks(2), [Planned((1, 1)), bad, retried, bad, bad, Planned((1, 1))], plain=True)


def accumulated(model: Any, rank: int, number: int, mark: str, fault: Fault | None, says: str) -> bool:
    """A minibatch of four marked backwards, of which `fault` is in the second, caught. Returns whether it is given up.

    torch marks the next backward before the forward, so that is done before anything can see to the exception. With
    `says` the failed rank gives the minibatch up itself, and goes no further in it.
    """
    for m in range(4):
        getattr(model, mark)(m == 3)
        try:
            try:
                backward(model, rank, number, m, fault if m == 1 else None)
            except Boom:
                if says == "after no_sync":  # as its context leaves it
                    model.set_is_last_backward(True)
                if says:
                    model.abandon_minibatch("boom")
        except AbandonedMinibatchError as lost:
            return (m, lost.culprit) == (1 if says and rank else 3, 1)
    return False


@pytest.mark.parametrize(
    ("mark", "fault", "says"),
    [
        ("set_is_last_backward", Fault("backward", 0), ""),
        ("set_requires_gradient_sync", Fault("backward", 2), ""),
        ("set_is_last_backward", Fault("backward", 2), "after no_sync"),
        ("set_is_last_backward", Fault("forward", 2), "under its mark"),
    ],
)
@on_ranks(2)
def test_a_loop_with_marks_keeps_step_after_a_failed_backward_that_was_not_the_last(
    rank: int, world: int, mark: str, fault: Fault, says: str
) -> None:
    """The error leaves every rank's loop in the same minibatch, so that later ones are whole."""
    mine = fault if rank == 1 else None
    found = []
    for bad in ([False, True, True, False], [False, False]):
        model, optimizer = programs.new(fully_shard, settings=EXACT)
        given_up = list[bool]()
        for step in bad:
            number = len(given_up) - sum(given_up)
            given_up.append(accumulated(model, rank, number, mark, mine if step else None, says))
            if not given_up[-1]:
                optimizer.step()
            optimizer.zero_grad()
        assert given_up == bad
        assert root_of(model).minibatch.epoch == len(bad)
        found.append(own_parameters(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


# one fault at a time -------------------------------------------------------------------------------------------------


def has_gradients(model: Any) -> bool:
    found = any(gradient is not None for gradient in own_gradients(model).values())
    model.zero_grad()
    return found


def leave_after_a_caught_error(rank: int, world: int) -> None:
    model, _ = programs.new(fully_shard)
    with contextlib.suppress(Boom):
        backward(model, rank, 0, 0, Fault("backward", 0) if rank == 1 else None)


def test_a_rank_that_exits_after_an_error_that_it_has_caught_reports_it() -> None:
    with spawn_ranks(2, leave_after_a_caught_error, whole_end=True) as job:
        outcomes = end(job, [])
    assert outcomes[0].error == "PeerLostError", outcomes[0].describe()
    assert "rank 1 has left" in outcomes[0].message and "a backward that ended with an exc" in outcomes[0].message


@on_ranks(2)
def test_reset_iter_state_costs_the_minibatch_only_if_gradients_were_pushed(rank: int, world: int) -> None:
    """The head is in the root, whose gradients are pushed last: a fault in the last layer comes before any push."""
    model, optimizer = programs.new(fully_shard, settings=EXACT)
    there = []
    for layer in (2, 0):
        try:
            backward(model, rank, 0, 0, Fault("backward", layer) if rank == 1 else None)
        except Boom:
            with pytest.raises(UnfinishedMinibatchError, match="after a backward that ended with an exception"):
                optimizer.step()
            model.reset_iter_state()
            if layer == 2:
                backward(model, rank, 0, 0)
        except AbandonedMinibatchError:
            assert rank == 0 and layer == 0
        there.append(has_gradients(model))
    assert there == [True, False]


@on_ranks(2)
def test_a_forward_method_gives_up_the_minibatch_of_a_failed_backward(rank: int, world: int) -> None:
    """As the root's own forward does."""
    model, _ = programs.new(fully_shard, settings=EXACT)
    model.predicted = model.forward
    register_fsdp_forward_method(model, "predicted")

    def gradients() -> dict[str, Any]:
        model.zero_grad()
        model.predicted(tokens(rank, 0, 0)).square().mean().backward()
        return own_gradients(model)

    first = gradients()
    fails = pytest.raises(Boom if rank == 1 else AbandonedMinibatchError)
    with broken(model, Fault("backward", 0) if rank == 1 else None), fails:
        gradients()
    last = gradients()
    assert all(torch.equal(first[name], last[name]) for name in first)


@on_ranks(2)
def test_a_minibatch_that_is_finalized_by_hand_can_be_given_up(rank: int, world: int) -> None:
    model, _ = programs.new(fully_shard, settings=EXACT)
    model.set_manual_backward_finalization(True)
    for step in range(3):
        with contextlib.suppress(Boom):
            backward(model, rank, 0, 0, Fault("backward", 0) if rank == 1 and step == 0 else None)
        if rank == 0 and step == 1:
            model.abandon_minibatch("by hand")
        handle = model.finalize_backward(async_op=True)
        with pytest.raises(AbandonedMinibatchError) if step < 2 else contextlib.nullcontext():
            handle.wait()
        assert has_gradients(model) == (step == 2)


@on_ranks(2)
def test_roots_that_share_a_minibatch_are_given_up_together(rank: int, world: int) -> None:
    roots = [programs.new(fully_shard, settings=EXACT)[0] for _ in range(2)]
    for bad in (True, False):
        with contextlib.suppress(AbandonedMinibatchError), odc.minibatch(*roots):
            for root in roots:
                backward(root, rank, 0, 0)
            if bad and rank == 0:
                roots[1].abandon_minibatch("one of two")
        assert [has_gradients(root) for root in roots] == [not bad] * 2


@on_ranks(2)
def test_a_push_that_fails_only_at_the_end_gives_up_the_other_roots_too(rank: int, world: int) -> None:
    """Else the roots before it would be trained, and running the minibatch again would train them twice."""
    roots = [programs.new(fully_shard, settings=EXACT)[0] for _ in range(2)]

    def minibatch() -> None:
        with odc.minibatch(*roots):
            for root in roots:
                backward(root, rank, 0, 0)
            if rank == 0:
                fail_once(root_of(roots[1]).sender)

    with pytest.raises(AbandonedMinibatchError, match="no room"):
        minibatch()
    assert [has_gradients(root) for root in roots] == [False] * 2


def fail_once(sender: Any) -> None:
    """The next flush of `sender` raises."""
    flush = sender.flush

    def fail() -> None:
        sender.flush = flush
        raise MemoryError("no room")

    sender.flush = fail
