"""How a rank ends: a clean end waits for slow peers, an error waits for no rank and reaches the peers as the reason."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.failing import backward, job
from support.models import tokens
from support.rank_worker import die, report
from support.ranks import RankOutcome
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import odc
from odc import Settings, fully_shard
from odc.errors import PeerLostError
from odc.fsdp import default_store, hooks, root_of
from odc.net.liveness import Loss
from odc.runtime import Rendezvous

Ended = Callable[..., list[RankOutcome]]
HOURS = Settings(timeout_s=7200.0)  # a wait that should not be would last


def evaluate(model: Any, rank: int) -> None:
    with torch.no_grad():
        model(tokens(rank, 0, 0))


def attach_only_after(condition: Callable[[], object]) -> None:
    """This rank announces its heap as ever, and attaches to its peers after `condition()` has returned."""
    connect = Rendezvous.connect

    def late(self: Rendezvous, member: int) -> Any:
        condition()
        return connect(self, member)

    Rendezvous.connect = late  # type: ignore[method-assign]


def set_key(key: str) -> None:
    dist.group.WORLD.get_group_store().set(key, "1")


def await_key(key: str) -> None:
    dist.group.WORLD.get_group_store().wait([key], timedelta(seconds=100))


def assert_ended_well(outcomes: list[RankOutcome]) -> None:
    assert [one.exit_code for one in outcomes] == [0] * len(outcomes), [one.describe() for one in outcomes]


# clean ends ----------------------------------------------------------------------------------------------------------


def evaluate_fast_and_slow(rank: int, world: int, how: str) -> None:
    def fast_shuts_down() -> None:
        await_key("shutting down")
        time.sleep(1.0)  # makes a fast rank that does not wait be gone for certain

    if rank == 1:
        attach_only_after(fast_shuts_down)
    model, _ = job(rank, world, settings=HOURS)
    evaluate(model, rank)
    if rank == 0:
        if how == "deletes":
            del model, _
            gc.collect()
        if how == "shuts_down":
            threading.Timer(0.1, set_key, ["shutting down"]).start()
            odc.shutdown()
        else:
            set_key("shutting down")


@pytest.mark.parametrize("how", ["ends", "deletes", "shuts_down"])
def test_a_fast_rank_stays_until_a_slow_one_has_attached(how: str, ended: Ended) -> None:
    assert_ended_well(ended(evaluate_fast_and_slow, how))


def evaluate_beside_a_dying_rank(rank: int, world: int) -> None:
    """The slow rank dies before it has attached, when the fast one shuts down already."""
    if rank == 1:
        attach_only_after(lambda: (await_key("shutting down"), die()))
    model, _ = job(rank, world, settings=HOURS)
    evaluate(model, rank)
    set_key("shutting down")


def test_a_clean_end_does_not_wait_for_a_rank_that_died(ended: Ended) -> None:
    outcomes = ended(evaluate_beside_a_dying_rank)
    assert [one.exit_code for one in outcomes] == [0, -9], outcomes[0].describe()


def leave_a_stuck_rank(rank: int, world: int) -> None:
    if rank == 1:
        attach_only_after(lambda: await_key("given up"))
    model, _ = job(rank, world, settings=Settings(timeout_s=60.0))
    try:
        evaluate(model, rank)
    except odc.OdcError:
        if rank == 0:
            raise
    if rank == 0:
        root_of(model).member.rendezvous.timeout_s = 1.0  # of the release alone
        try:
            odc.shutdown()
        except odc.OdcError as error:
            report((type(error).__name__, str(error)))
        set_key("given up")


def test_a_peer_that_never_attaches_is_given_up_and_named(ended: Ended) -> None:
    outcomes = ended(leave_a_stuck_rank)
    ((error, message),) = outcomes[0].reports
    assert error == "WaitTimeoutError"
    assert message.startswith("rank 0, leaving heap") and "rank 1 has neither attached" in message


def all_keys() -> set[str]:
    store = default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return set(store.list_keys())


def leave_nothing_in_the_store(rank: int, world: int) -> None:
    before = all_keys()
    for _ in range(2):
        model, optimizer = job(rank, world)
        evaluate(model, rank)
        del model, optimizer
        gc.collect()
    odc.shutdown()
    dist.barrier()
    if rank == 0:
        report([key for key in all_keys() - before if "/odc/" in key])
    dist.barrier()


def test_models_that_were_dropped_keep_no_keys(ended: Ended) -> None:
    outcomes = ended(leave_nothing_in_the_store)
    assert_ended_well(outcomes)
    (kept,) = outcomes[0].reports
    assert {key.partition("/odc/")[2].split("/")[0] for key in kept} <= {"process", "roots"}, kept
    assert len(kept) == 4, f"one of each kind and rank, however many models there were: {kept}"


# errors --------------------------------------------------------------------------------------------------------------


def raise_it() -> None:
    raise ValueError("no such tokenizer")


def fail_in_a_thread(rank: int, world: int) -> None:
    def train() -> None:
        model, _ = job(rank, world, settings=HOURS)
        for step in range(2):
            backward(model, rank, step)
            if rank == 1:
                raise_it()

    if rank != 1:
        return train()
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    await_key("noticed")  # the process itself goes on
    return None


def test_an_error_that_ends_the_training_thread_reaches_every_rank(ended: Ended) -> None:
    outcomes = ended(notice_a_failed_thread)
    assert "aborted by rank 1: ValueError: no such tokenizer" in outcomes[0].reports[0], outcomes[0].describe()


def notice_a_failed_thread(rank: int, world: int) -> None:
    try:
        fail_in_a_thread(rank, world)
    except odc.OdcError as error:
        report(str(error))
        set_key("noticed")


def sys_exit_that_is_caught(rank: int, world: int) -> None:
    model, _ = job(rank, world, settings=HOURS)
    backward(model, rank, 0)
    if rank == 1:
        try:
            sys.exit(2)
        except SystemExit:
            report("caught")
    backward(model, rank, 1)


def test_a_sys_exit_that_is_caught_ends_nothing(ended: Ended) -> None:
    outcomes = ended(sys_exit_that_is_caught)
    assert_ended_well(outcomes)
    assert outcomes[1].reports == ["caught"]


def fail_after_an_evaluation(rank: int, world: int) -> None:
    """Its peer has not attached yet; a clean end would wait for it."""
    if rank == 0:
        attach_only_after(lambda: await_key("failing"))
    model, _ = job(rank, world, settings=HOURS)
    evaluate(model, rank)
    if rank == 1:
        threading.Timer(2.0, set_key, ["failing"]).start()
        raise_it()
    backward(model, rank, 0)


def test_an_error_after_an_evaluation_reaches_a_peer_that_has_not_attached(ended: Ended) -> None:
    outcomes = ended(fail_after_an_evaluation)
    assert outcomes[1].error == "ValueError"
    assert outcomes[0].error == "PeerLostError", outcomes[0].describe()
    assert "was aborted by rank 1: ValueError: no such tokenizer" in outcomes[0].message


# the store's host ----------------------------------------------------------------------------------------------------


def lose_the_store(rank: int, world: int, how: str) -> None:
    """Rank 0 hosts the store, as without a launcher, and ends before any rank has attached to it."""
    shared = dist.group.WORLD.get_group_store()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(shared.get("port")), is_master=False)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model, _ = job(rank, world, settings=HOURS)
    dist.barrier()  # each has announced its process
    if rank == 0:
        time.sleep(0.5)  # the others wait for its heap by now, most likely; they must learn of it in any case
        report(time.monotonic())
        if how == "dies":
            die()
        raise_it()
    evaluate(model, rank)


@pytest.mark.parametrize("how", ["dies", "raises"])
def test_the_host_of_the_store_ends_before_its_peers_have_attached(how: str, ended: Ended) -> None:
    outcomes = ended(lose_the_store, how, world=3)
    for outcome in outcomes[1:]:
        assert outcome.error == "PeerLostError", outcome.describe()
        assert "rank 0" in outcome.message and "DistNetworkError" not in outcome.message, outcome.message


# units ---------------------------------------------------------------------------------------------------------------


def shard_unlike_units(rank: int, world: int) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    mesh = init_device_mesh("cpu", (world,))
    for layer in list(model)[: 2 + rank]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, settings=HOURS)
    model(torch.ones(2, 4))


def test_ranks_with_unlike_numbers_of_units_fail_at_once(ended: Ended) -> None:
    outcomes = ended(shard_unlike_units)
    for outcome, mine, theirs in ((outcomes[0], 3, 4), (outcomes[1], 4, 3)):
        assert outcome.error == "LayoutMismatchError", outcome.describe()
        assert f"rank {outcome.rank} has {mine} units, rank {1 - outcome.rank} has {theirs}" in outcome.message


def test_torchs_collectives_end_for_a_lost_rank_whom_their_errors_name(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, ended, later = list[object](), threading.Event(), list[Callable[[], None]]()
    liveness: Any = SimpleNamespace(rank=0, later=lambda task, after_s: later.append(task))

    def close(group: object) -> None:
        closed.append(group)
        ended.set()

    monkeypatch.setattr(hooks, "_lost", None)
    monkeypatch.setattr(hooks._torch_groups, "gloo_groups", lambda rank: [f"group with {rank}"])
    monkeypatch.setattr(hooks._torch_groups, "close_connections", close)
    text = "Application timeout caused pair closure"  # gloo's
    error, own, unlike = RuntimeError(text), torch.OutOfMemoryError("Tried"), PeerLostError("rank 1 died", culprit=1)
    hooks._end_collectives(liveness, Loss(0, 0, "an error of this rank itself"))
    hooks._end_collectives(liveness, Loss(3, 3, "a link ended", certain=False))
    later.pop()()  # no root has ended for it
    assert hooks._described(error) == (f"RuntimeError: {text}", hooks._rank) and not closed
    hooks._end_collectives(liveness, Loss(3, 2, "rank 2 died"))
    later.pop()()
    assert ended.wait(60.0)
    assert closed == ["group with 3"]
    assert hooks._described(error) == (f"RuntimeError: {text} (rank 3 was lost before: rank 2 died)", 2)
    assert hooks._described(own) == ("OutOfMemoryError: Tried", hooks._rank)
    assert hooks._described(unlike) == ("PeerLostError: rank 1 died", 1)
    for one in (error, unlike):
        hooks.advise(one)
    assert error.__notes__ == ["Rank 3 was lost before: rank 2 died"] and not hasattr(unlike, "__notes__")
