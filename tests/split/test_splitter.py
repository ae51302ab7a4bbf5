"""The splitter: what it refuses and on whom, random minibatches at random paces, and a rank that dies in a piece."""

from __future__ import annotations

import functools
import itertools
import random
import time
import uuid
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import examples
from support.failing import assert_all_noticed
from support.on_ranks import on_ranks
from support.rank_worker import die
from support.ranks import spawn_ranks
from support.split_jobs import LONGEST, Minibatch, add_whole, gradient_error, loss_of, model_of, step_of, tokens_of
from torch.utils.checkpoint import checkpoint

from odc.balance import Plan, SplitSample
from odc.errors import OdcError, PeerLostError, PlanError, UnsupportedError, WaitTimeoutError
from odc.split import Splitter, ranks_of_host


def splitter_of(model: Any, name: str, **more: Any) -> Splitter:
    return Splitter(model, **{"longest": LONGEST, "layers": 2, "timeout_s": 60.0, "name": name, **more})


# random minibatches -----------------------------------------------------------------------------------------------

PACES = st.sampled_from([0.0, 0.0, 0.002, 0.02])


@st.composite
def minibatches(draw: Any, world: int = 3) -> Minibatch:
    gangs = st.permutations(range(world)).flatmap(lambda order: st.integers(2, world).map(lambda n: list(order[:n])))
    cuts = st.sampled_from(["zigzag", "contiguous", "uneven"])
    splits = draw(st.lists(st.tuples(st.integers(12, 80), gangs, cuts), max_size=4))
    whole = draw(st.lists(st.tuples(st.integers(2, 40), st.integers(0, world - 1)), min_size=1, max_size=4))
    return Minibatch(splits, whole)


def at_random_paces(rank: int, world: int, name: str, job: list[tuple[Minibatch, list[float]]], keep: bool) -> None:
    model, like = model_of("own", torch.float64), model_of("own", torch.float64)
    splitter = splitter_of(model, name, keep=keep)
    random.seed(rank)
    for minibatch, paces in job:  # no rank waits for all others in between
        step_of(model, splitter, minibatch, rank, world, paces[rank])
    for minibatch, _ in job:
        add_whole(like, minibatch)
    error = gradient_error(model, like)
    assert error <= 1e-12, f"gradients of {job} are apart by {error}"
    splitter.close()


def test_random_minibatches_at_random_paces_never_hang(ranks: Any) -> None:
    pool = ranks(3)

    @given(
        st.lists(st.tuples(minibatches(), st.lists(PACES, min_size=3, max_size=3)), min_size=1, max_size=5),
        st.booleans(),
    )
    @settings(max_examples=examples(40))
    def property_(job: list[tuple[Minibatch, list[float]]], keep: bool) -> None:
        pool.run(at_random_paces, uuid.uuid4().hex, job, keep, timeout=120.0)

    property_()


def in_their_own_orders(rank: int, world: int, name: str, job: list[tuple[Minibatch, list[int]]]) -> str:
    """Each rank runs the split samples in an order of its own; returns the error that it got, or nothing."""
    model, message = model_of("own"), ""
    splitter = splitter_of(model, name)
    for minibatch, seeds in job:
        random.Random(seeds[rank]).shuffle(minibatch.splits)
        try:
            step_of(model, splitter, minibatch, rank, world, 0.002)
        except WaitTimeoutError:
            raise
        except OdcError as error:
            message = str(error)
            break
    dist.barrier()
    return message


def test_opposite_orders_are_an_error_on_every_rank_that_they_concern(ranks: Any) -> None:
    pool = ranks(3)

    @given(
        st.lists(st.tuples(minibatches(), st.lists(st.integers(0, 2), min_size=3, max_size=3)), min_size=1, max_size=2)
    )
    @settings(max_examples=examples(40))
    def property_(job: list[tuple[Minibatch, list[int]]]) -> None:
        differ = False
        for minibatch, seeds in job:
            orders = [minibatch.splits[:] for _ in seeds]
            for order, seed in zip(orders, seeds, strict=True):
                random.Random(seed).shuffle(order)
            plans = [Minibatch(order).plan(3).splits for order in orders]
            for at, splits in enumerate(zip(*plans, strict=True)):
                met = [
                    (rank, other) for rank in range(3) for other in plans[rank][at].ranks if rank in splits[rank].ranks
                ]
                differ = differ or any(splits[rank] != splits[other] for rank, other in met)
        messages = pool.run(in_their_own_orders, uuid.uuid4().hex, job, timeout=120.0)
        assert any(messages) == differ, messages

    property_()


# refusals ---------------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_a_plan_that_does_not_fit_is_refused_before_the_first_piece(rank: int, world: int, name: str) -> None:
    """Refused on all ranks, also on one without a piece, before any of them waits."""
    splitter = splitter_of(model_of("own"), name, longest=100, piece_tokens=50)
    refused = (
        r"sample 0 has 120 tokens in pieces of up to 60, but the arenas are for 100 .* longest=120, piece_tokens=60"
    )
    with pytest.raises(PlanError, match=refused):
        next(splitter.pieces(Minibatch([(120, [0, 1], "zigzag")]).plan(world)))
    with pytest.raises(PlanError, match="the plan is for 5 ranks, the splitter for 3"):
        next(splitter.pieces(Minibatch([(60, [0, 1], "zigzag")]).plan(5)))
    hosts = splitter_of(model_of("own"), name, node=2)
    with pytest.raises(PlanError, match=r"on several hosts: ranks \[1, 2\]"):
        next(hosts.pieces(Minibatch([(60, [1, 2], "zigzag")]).plan(world)))  # rank 2 has no neighbour on its host
    # On the last host fewer ranks than `node` refuse no other plan than all others do.
    hosts._refuse(Minibatch([(60, [0, 1], "zigzag")]).plan(world))
    assert list(splitter.pieces(Minibatch([], [(5, 0)]).plan(world))) == []


@on_ranks(3)
def test_hosts_of_unequally_many_ranks_are_refused_on_all(rank: int, world: int, name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1")
        assert ranks_of_host() == 1
        patch.setenv("LOCAL_WORLD_SIZE", "2" if rank < 2 else "1")
        with pytest.raises(UnsupportedError, match=r"equally many ranks on every host; there are \[1, 2\]"):
            ranks_of_host()


@on_ranks(2)
def test_a_piece_without_backward_is_named(rank: int, world: int, name: str) -> None:
    model = model_of("own")
    pieces = splitter_of(model, name).pieces(Minibatch([(40, [0, 1], "zigzag")]).plan(world))
    with torch.no_grad():
        loss_of(model, *next(pieces).of(tokens_of(0, 40)))
    dist.barrier()  # else the rank that raises first gives the job up while the other still runs forward
    with pytest.raises(OdcError, match=r"the piece of sample 0 was not run forward and backward through all 2 layers"):
        next(pieces)


@pytest.mark.parametrize("keep", [True, False])
@on_ranks(2)
def test_a_second_forward_of_a_piece_is_refused(rank: int, world: int, name: str, keep: bool) -> None:
    """Before it changes anything: the backward of the first is still right. The deadline is hours away."""
    model: Any = model_of("llama", torch.float64)
    like: Any = model_of("llama", torch.float64)
    splitter = splitter_of(model, name, layers=None, keep=keep, timeout_s=7200.0)
    minibatch = Minibatch([(40, [0, 1], "zigzag")])
    for piece in splitter.pieces(minibatch.plan(world)):
        loss = loss_of(model, *piece.of(tokens_of(0, 40)))
        for again in (model, model.model):
            with pytest.raises(OdcError, match=r"called again with a piece of sample 0, .* a piece runs forward once"):
                again(**piece.of(tokens_of(0, 40)).inputs)
        loss.backward()
    add_whole(like, minibatch)
    assert gradient_error(model, like) <= 1e-12
    splitter.close()


@pytest.mark.parametrize("keep", [True, False])
@on_ranks(2)
def test_a_forward_that_failed_does_not_run_again(rank: int, world: int, name: str, keep: bool) -> None:
    model: Any = model_of("llama")
    splitter = splitter_of(model, name, layers=None, keep=keep, timeout_s=7200.0)
    pieces = splitter.pieces(Minibatch([(40, [0, 1], "zigzag")]).plan(world))
    inputs = next(pieces).of(tokens_of(0, 40))
    failing = model.model.layers[1].register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, *inputs)
    failing.remove()
    with pytest.raises(OdcError, match=r"LlamaForCausalLM was called again .* call model.abandon_minibatch\(reason\)"):
        loss_of(model, *inputs)
    dist.barrier()  # the generator ends the exchange for both as it is dropped


@on_ranks(2)
def test_a_whole_model_may_be_recomputed(rank: int, world: int, name: str) -> None:
    model, like = model_of("llama", torch.float64), model_of("llama", torch.float64)
    splitter = splitter_of(model, name, layers=None)
    minibatch = Minibatch([(40, [0, 1], "zigzag")])
    for piece in splitter.pieces(minibatch.plan(world)):
        given = piece.of(tokens_of(0, 40))
        loss = checkpoint(loss_of, model, *given, use_reentrant=False)
        assert loss is not None
        loss.backward()
    add_whole(like, minibatch)
    assert gradient_error(model, like) <= 1e-12
    splitter.close()


@on_ranks(2)
def test_a_piece_without_a_label(rank: int, world: int, name: str) -> None:
    """Only the first token has a label: one piece has no loss, and gives and takes gradients of 0 all the same."""
    model = model_of("own", torch.float64)
    splitter, tokens = splitter_of(model, name), tokens_of(0, 40)
    labels = torch.full_like(tokens, -100)
    labels[1] = 7
    for piece in splitter.pieces(Minibatch([(40, [0, 1], "zigzag")]).plan(world)):
        loss_of(model, *piece.of(tokens, labels)).backward()
    like: Any = model_of("own", torch.float64)
    targets = torch.cat([labels[1:], labels.new_full((1,), -100)])
    loss_of(like, {"input_ids": tokens[None], "position_ids": torch.arange(40)[None]}, targets).backward()
    assert gradient_error(model, like) <= 1e-12
    splitter.close()


@on_ranks(2)
def test_frozen_layers(rank: int, world: int, name: str) -> None:
    """Nothing below the second layer is trained: backward does not come to the first, whose keys are given back."""
    model, like = model_of("llama", torch.float64), model_of("llama", torch.float64)
    for one in (model, like):
        for parameter in [*one.model.embed_tokens.parameters(), *one.model.layers[0].parameters()]:  # type: ignore[union-attr]
            parameter.requires_grad_(False)
    splitter = splitter_of(model, name, layers=None)
    minibatch = Minibatch([(40, [0, 1], "zigzag"), (60, [1, 0], "zigzag")])
    step_of(model, splitter, minibatch, rank, world)
    add_whole(like, minibatch)
    assert gradient_error(model, like) <= 1e-12
    splitter.close()


@on_ranks(2)
def test_frozen_attention_of_a_layer_that_is_recomputed(rank: int, world: int, name: str) -> None:
    """The layer's MLP is trained, so backward recomputes its attention, and reads the peer's keys again."""
    model: Any = model_of("llama", torch.float64)
    like: Any = model_of("llama", torch.float64)
    for layer in model.model.layers:  # transformers' own checkpointing would have the embeddings require gradients
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    for one in (model, like):
        lowest = one.model.layers[0]
        for module in (one.model.embed_tokens, lowest.input_layernorm, lowest.self_attn):
            module.requires_grad_(False)
    splitter = splitter_of(model, name, layers=None)
    splitter.prepare()
    calls = itertools.count()

    def late_in_recompute(*_: Any) -> None:
        if rank == 1 and next(calls) % 2:  # the peer could come to the next sample meanwhile
            time.sleep(0.5)

    model.model.layers[0].self_attn.register_forward_pre_hook(late_in_recompute)
    minibatch = Minibatch([(40, [0, 1], "zigzag"), (60, [1, 0], "zigzag"), (50, [0, 1], "zigzag")])
    step_of(model, splitter, minibatch, rank, world)
    add_whole(like, minibatch)
    assert gradient_error(model, like) <= 1e-12
    splitter.close()


@pytest.mark.parametrize(
    "splits",
    [
        [(40, [0, 1], "zigzag"), (60, [0, 1], "zigzag")],
        # Each rank has a second piece, which no rank reads and which waits for the first one.
        [(40, [0, 1], "contiguous"), (40, [1, 0], "contiguous")],
    ],
    ids=["zigzag", "contiguous"],
)
@on_ranks(2)
def test_opposite_orders_are_named_at_once(rank: int, world: int, name: str, splits: list[Any]) -> None:
    """Their deadline is hours away: the test would run out of time if they waited for each other."""
    model = model_of("own")
    splitter = splitter_of(model, name, timeout_s=7200.0)
    with pytest.raises((PlanError, PeerLostError), match="have different plans or models for split sample"):
        step_of(model, splitter, Minibatch(splits if rank else splits[::-1]), rank, world)


@on_ranks(2)
def test_slices_that_differ_are_named_where_the_peers_keys_lie_there_already(rank: int, world: int, name: str) -> None:
    """Rank 0 waits for no rank in forward: all that rank 1 asks for lies there when it comes."""
    model = model_of("own")
    splitter = splitter_of(model, name, timeout_s=7200.0)
    border = 16 if rank else 20
    splits = [SplitSample(0, [0, 1], [[(0, border)], [(border, 40)]], [1.0, 1.0])]
    pieces = splitter.pieces(Plan.of([[], []], [40], splits=splits))
    if rank == 0:
        loss = loss_of(model, *next(pieces).of(tokens_of(0, 40)))
        dist.barrier()
        with pytest.raises((PlanError, PeerLostError), match="have different plans or models for split sample"):
            loss.backward()
    else:
        piece = next(pieces)
        dist.barrier()
        with pytest.raises(PlanError, match="rank 1 and rank 0 have different plans or models for split sample kv0"):
            loss_of(model, *piece.of(tokens_of(0, 40)))
    dist.barrier()


@on_ranks(2)
def test_a_deadline_names_the_rank_that_did_not_come(rank: int, world: int, name: str) -> None:
    """Rank 1 does not come to the only split sample, but has made its splitter."""
    model = model_of("own")
    splitter = splitter_of(model, name, timeout_s=15.0)
    splitter.prepare()
    splits = [(40, [0, 1], "zigzag")]
    dist.barrier()
    if rank == 0:
        with pytest.raises(WaitTimeoutError, match=r"rank 1 to put kv0 of step 1") as error:
            step_of(model, splitter, Minibatch(splits), rank, world)
        assert error.value.culprit == 1
    dist.barrier()


def dies_in_a_piece(rank: int, world: int, name: str, where: str) -> None:
    """Rank 1 dies between two layers of a piece of all three ranks."""
    model = model_of("llama")
    splitter = splitter_of(model, name, layers=None, timeout_s=600.0)
    minibatch = Minibatch([(60, [0, 1, 2], "zigzag")])
    step_of(model, splitter, minibatch, rank, world)
    dist.barrier()
    layer: Any = model.model.layers[1]  # type: ignore[union-attr, index]
    if rank == 1 and where == "forward":
        layer.register_forward_pre_hook(lambda *_: die())
    if rank == 1 and where == "backward":
        layer.register_full_backward_pre_hook(lambda *_: die())
    step_of(model, splitter, minibatch, rank, world)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_dies_in_a_piece_is_named_by_all(where: str) -> None:
    with spawn_ranks(3, dies_in_a_piece, uuid.uuid4().hex, where) as ranks:
        outcomes = ranks.wait()
    ((died, _),) = outcomes[1].reports
    assert_all_noticed(outcomes, 1, died)


def fails_in_a_piece(model: Any, splitter: Splitter, world: int) -> None:
    for piece in splitter.pieces(Minibatch([(40, [0, 1], "zigzag")]).plan(world)):
        loss_of(model, *piece.of(tokens_of(0, 40)))
        raise ZeroDivisionError


@on_ranks(2)
def test_a_loop_that_fails_in_a_piece_is_named(rank: int, world: int, name: str) -> None:
    """Rank 1's loop fails between forward and backward; rank 0 would wait for its gradients for hours."""
    model = model_of("own")
    splitter = splitter_of(model, name, timeout_s=7200.0)
    if rank == 1:
        with pytest.raises(ZeroDivisionError):
            fails_in_a_piece(model, splitter, world)
    else:
        with pytest.raises(PeerLostError, match="rank 1 left its piece of sample 0 unfinished"):
            step_of(model, splitter, Minibatch([(40, [0, 1], "zigzag")]), rank, world)
    dist.barrier()


def test_a_model_of_ones_own_needs_its_number_of_layers() -> None:
    with pytest.raises(UnsupportedError, match="needs `layers`"):
        Splitter(model_of("own"), LONGEST, ranks=[0, 1], rank=0)
