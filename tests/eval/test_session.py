from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import Case, build
from support.rank_worker import die
from support.ranks import spawn_ranks
from support.silent import silent_once_a_rank_is_lost
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from odc import Settings, fully_shard
from odc.errors import OdcError, PeerLostError
from odc.eval import gather_results, run_requests, session
from odc.fsdp import root_of


def test_one_process_alone_needs_no_process_group():
    with session() as peers:
        assert (peers.rank, peers.world) == (0, 1)
        assert peers.exchange("me", "names") == ["me"]
        assert run_requests([1, 2], lambda some: [2 * one for one in some], peers, pad=True) == [2, 4]
    with pytest.raises(KeyError, match="mine"), session():
        raise KeyError("mine")
    for wrong in (0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"timeout_s must be positive seconds, .*, not {wrong}"):
            session(timeout_s=wrong).__enter__()


def _gathered(rank: int, world: int) -> Any:
    results = []
    for _ in range(3):  # sessions follow each other
        with session(timeout_s=60.0) as peers:
            mine = list(range(rank, 7, world))
            results.append(gather_results(mine, mine, peers, expected=7))
    return results


def test_over_the_jobs_own_store(ranks):
    for world in (2, 3):
        first, *others = ranks(world).run(_gathered)
        assert first == [list(range(7))] * 3
        assert others == [[None] * 3] * (world - 1)


def _wait_once_aborted(model: Any) -> None:
    with session(modules=[model], timeout_s=60.0) as peers:
        root_of(model).member.protocol.abort("rank 1 died", 1)
        peers.exchange(1, "numbers")


def _aborted(rank: int, world: int) -> None:
    case, settings = Case(counts=((1, 1),)), Settings(timeout_s=60.0)
    model: Any = build(fully_shard, case, init_device_mesh("cpu", (world,)), settings=settings)
    dist.barrier()
    if rank == 0:  # rank 1 does not take part
        expected = r"rank 0 \(epoch 1\), waiting for numbers: the job was aborted by rank 1: rank 1 died"
        with pytest.raises(PeerLostError, match=expected):
            _wait_once_aborted(model)
    dist.barrier()


def test_an_abort_of_a_model_ends_a_wait_for_another_rank():
    """As where that rank was on another host, whose processes cannot be seen from here."""
    with spawn_ranks(2, _aborted) as ranks:
        outcomes = ranks.wait()
    assert [(one.exit_code, one.error) for one in outcomes] == [(0, None)] * 2, outcomes[0].describe()


def test_a_loss_ends_the_entry_to_a_session_over_a_silent_store(monkeypatch):
    group = SimpleNamespace(get_group_store=lambda: store)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    ended = pytest.raises(PeerLostError, match="rank 0, entering an evaluation: .* by rank 1: rank 1 died")
    with silent_once_a_rank_is_lost() as store, ended, session(group, timeout_s=600.0):
        pass


def _in_a_group(rank: int, world: int) -> Any:
    group = dist.new_group([1, 2])
    if rank == 0:
        try:
            with session(group):
                return None
        except OdcError as error:
            return str(error)
    with session(group, timeout_s=60.0) as peers:
        assert peers.ranks == (1, 2), peers.ranks
        return gather_results([rank], [rank], peers)


def test_a_group_of_some_ranks(ranks):
    outside, first, other = ranks(3).run(_in_a_group)
    assert "rank 0" in outside
    assert (first, other) == ([1, 2], None)


def _in_a_wrapper(rank: int, world: int) -> float:
    """A plain module holds the sharded one; rank 1 has no request, and never runs it."""
    case, settings = Case(counts=((1, 1),)), Settings(timeout_s=60.0)
    model: Any = build(fully_shard, case, init_device_mesh("cpu", (world,)), settings=settings)
    ids, total = torch.arange(8)[None], 0.0
    with session(modules=[nn.Sequential(model)], timeout_s=60.0), torch.no_grad():
        if rank == 0:
            total = float(model(ids).sum())
    return total


def test_a_sharded_model_inside_a_module_is_served_by_a_rank_without_requests(ranks):
    first, other = ranks(2).run(_in_a_wrapper)
    assert first and not other


def _held_forwards(rank: int, world: int) -> int:
    model: Any = build(fully_shard, Case(counts=((1, 1),)), init_device_mesh("cpu", (world,)))
    ticks: list[int] = []
    with session(modules=[nn.Sequential(model)], timeout_s=60.0) as peers, torch.no_grad():
        peers.tick = lambda: ticks.append(1)  # type: ignore[method-assign]
        model(torch.arange(8)[None])
        del peers.tick
    return len(ticks)


def test_a_forward_of_a_held_model_is_progress(ranks):
    assert ranks(2).run(_held_forwards) == [1, 1]


def _in_opposite_orders(rank: int, world: int) -> float:
    """Both models have been evaluated, so each rank has yet to end the evaluation of the other's first."""
    mesh, settings = init_device_mesh("cpu", (world,)), Settings(timeout_s=60.0)
    models: list[Any] = [build(fully_shard, Case(counts=((1, 1),)), mesh, settings=settings) for _ in range(2)]
    ids = torch.arange(8)[None]
    with torch.no_grad():
        for model in models:
            model(ids)
        with session(modules=models[:: 1 - 2 * rank], timeout_s=60.0):
            return float(models[rank](ids).sum())


def test_ranks_may_give_several_models_in_another_order(ranks):
    assert all(ranks(2).run(_in_opposite_orders))


def _one_fails(rank: int, world: int) -> Any:
    """Rank 1 raises; rank 0 waits for all at the end, rank 2 computes and never waits."""
    layer = nn.Linear(1, 1)
    try:
        with session(modules=[layer], timeout_s=1000.0):
            if rank == 1:
                time.sleep(0.3)
                raise KeyError("no such document")
            while rank == 2:
                layer(torch.zeros(1, 1))
    except (KeyError, PeerLostError) as error:
        left = list(layer._forward_pre_hooks)
        return type(error).__name__, getattr(error, "culprit", None), str(error), left
    return None


def test_one_ranks_exception_reaches_all(ranks):
    waiting, failing, computing = ranks(3).run(_one_fails)
    assert failing == ("KeyError", None, "'no such document'", [])
    reason = "rank 1 failed in the evaluation: KeyError: 'no such document'"
    assert waiting == ("PeerLostError", 1, f"rank 0, waiting for the end of the evaluation: {reason}", [])
    assert computing == ("PeerLostError", 1, f"rank 2, computing: {reason}", [])


def _fails_beside_a_collective(rank: int, world: int) -> None:
    with session(timeout_s=1000.0):
        if rank == 1:
            raise KeyError("no such document")
        dist.all_reduce(torch.zeros(1))


def test_a_collective_broken_off_is_blamed_on_the_rank_that_failed_first():
    with spawn_ranks(2, _fails_beside_a_collective) as ranks:
        first, second = ranks.wait()
    assert second.error == "KeyError"
    assert first.error == "PeerLostError"
    assert "rank 1 failed in the evaluation: KeyError: 'no such document'" in first.message


def _one_dies(rank: int, world: int, finished: bool) -> None:
    dist.all_reduce(torch.ones(1))  # by then no rank is on its way into the group any more
    with session(timeout_s=1000.0) as peers:
        if finished:
            peers.exchange(rank, "ranks")
        if rank == 1:
            die()


@pytest.mark.parametrize("finished", [False, True])
def test_a_rank_that_is_killed_is_named_long_before_the_deadline(finished: bool) -> None:
    """Without a launcher that would end the others: the first member sees it end, and the third hears of it."""
    with spawn_ranks(3, _one_dies, finished) as ranks:
        first, second, third = ranks.wait()
    assert second.exit_code == -9
    ended = "rank 0, waiting for the end of the evaluation: the process of rank 1 has ended"
    assert (first.error, first.message) == ("PeerLostError", ended)
    assert (third.error, "rank 1 failed in the evaluation" in third.message) == ("PeerLostError", True)


def _failed_before(rank: int, world: int) -> Any:
    """As torchrun starts the ranks of one host again: the store, which stays, has what a session left as it failed."""
    store: Any = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    store.set("odc.eval/1/failed", '[1, "KeyError: before"]')
    os.environ.update(TORCHELASTIC_RESTART_COUNT="2", GROUP_WORLD_SIZE="1")
    with session(timeout_s=60.0) as peers:
        return peers.exchange(rank, "ranks")


def test_a_session_does_not_find_what_failed_before_torchrun_started_again() -> None:
    with spawn_ranks(2, _failed_before) as ranks:
        assert [outcome.value for outcome in ranks.wait()] == [[0, 1], [0, 1]]
