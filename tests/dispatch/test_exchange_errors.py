"""What an exchange refuses, on which ranks, and which rank its deadlines name."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from support.doubles import KINDS, exchange_of
from support.rank_worker import die
from support.ranks import spawn_ranks
from support.silent import SilentStore, silent_once_a_rank_is_lost
from support.toy import ENCODERS, POLICIES

from odc.dispatch import BalancePolicy, Phase, Rearrangement, Records
from odc.dispatch.exchange import BACK, CollectiveExchange, checked_group
from odc.dispatch.exchange.checked_group import CheckedGroup
from odc.dispatch.loader import PlannedLoader
from odc.dispatch.orchestrator import Orchestrator, channels
from odc.dispatch.route import Route
from odc.errors import HeapMemoryError, PeerLostError, PlanError, WaitTimeoutError
from odc.fsdp import default_store
from odc.net import JobStore


def swapped(rank: int, rows: int = 3) -> Route:
    """Two instances of one example each, which change places."""
    return Route.of(Rearrangement.to([1, 1], [1, 0]), {"rows": [rows, rows]}, rank)


def refused(rank: int, kind: str, route: Route, tensors: dict[str, torch.Tensor], message: str) -> None:
    # On demand, the rank that sees it second learns it from the other's word that the job has ended.
    expected = (PlanError, PeerLostError) if kind == "on_demand" else PlanError
    with pytest.raises(expected) as error, exchange_of(kind, rank, 2, ["data"], timeout_s=60.0) as exchange:
        exchange.move(1, "data", route, tensors)
    assert message in str(error.value), f"rank {rank} raised {error.value}"


def brings(rank: int, world: int, kind: str, of_rank_1: Any, message: str) -> None:
    tensors = {"rows": of_rank_1 if rank else torch.zeros(3, 2)}
    refused(rank, kind, swapped(rank), tensors, f"rank 1 brings {message}")


def plans_otherwise(rank: int, world: int, kind: str, of_rank_1: dict[str, Any]) -> None:
    """The permutation is the same on both ranks, and each brings what its own plan holds."""
    mine = {"rows": [3, 3], "features": 4, "dtype": torch.float32} | (of_rank_1 if rank else {})
    route = Route.of(Rearrangement.to([1, 1], [1, 0]), {"ids": [2, 2], "pixels": mine["rows"]}, rank)
    pixels = torch.zeros(mine["rows"][rank], mine["features"], dtype=mine["dtype"])
    refused(rank, kind, route, {"ids": torch.zeros(2), "pixels": pixels}, "planned another exchange than rank")


@pytest.mark.parametrize("kind", ["collective", "on_demand"])
@pytest.mark.parametrize(
    ("of_rank_1", "message"),
    [
        (torch.zeros(2, 2), "2 rows of field 'rows', but the plan has 3 there"),
        (None, "NoneType as field 'rows': pass zeros where there is no gradient"),
    ],
    ids=["too few", "no gradient"],
)
def test_a_step_is_refused_on_every_rank_with_the_culprit_named(kind: str, of_rank_1: Any, message: str) -> None:
    with spawn_ranks(2, brings, kind, of_rank_1, message) as ranks:
        outcomes = ranks.wait()
    assert [(one.exit_code, one.error) for one in outcomes] == [(0, None)] * 2, outcomes[0].describe()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of_rank_1", [{"dtype": torch.float64}, {"features": 8}, {"rows": [3, 4]}], ids=str)
def test_no_row_moves_by_plans_that_differ(kind: str, of_rank_1: dict[str, Any]) -> None:
    with spawn_ranks(2, plans_otherwise, kind, of_rank_1) as ranks:
        outcomes = ranks.wait()
    assert [(one.exit_code, one.error) for one in outcomes] == [(0, None)] * 2, outcomes[0].describe()


def stays_away(rank: int, world: int, kind: str) -> None:
    """Rank 1 stays until rank 0 has given up, so a deadline that never runs out would keep both for ever."""
    over = default_store()
    with exchange_of(kind, rank, world, ["data"], timeout_s=10.0) as exchange:
        dist.barrier()
        if rank == 1:
            over.wait(["rank 0 has given up"], timedelta(hours=1))
            return
        with pytest.raises(WaitTimeoutError, match=r"moving data of step 1|rank 1 to put data of step 1") as error:
            exchange.move(1, "data", swapped(rank), {"rows": torch.zeros(3, 2)})
        assert error.value.culprit == 1, str(error.value)
        assert "rank 1" in str(error.value), str(error.value)
        over.set("rank 0 has given up", "")


@pytest.mark.parametrize("kind", ["collective", "on_demand"])
def test_a_deadline_names_the_rank_that_did_not_come(kind: str) -> None:
    with spawn_ranks(2, stays_away, kind) as ranks:
        outcomes = ranks.wait()
    assert [(one.exit_code, one.error) for one in outcomes] == [(0, None)] * 2, outcomes[0].describe()


def overflows(rank: int, world: int) -> None:
    rows = [600, 1]
    route = Route.of(Rearrangement.to([1, 1], [1, 0]), {"rows": rows}, rank)
    error = HeapMemoryError if rank == 0 else PeerLostError  # with the same words
    with exchange_of("on_demand", rank, world, ["data"], arena_bytes=1 << 12, timeout_s=60.0) as exchange:
        with pytest.raises(error, match=r"data of step 1 needs \d+ bytes, but the arena has 4096") as it:
            exchange.move(1, "data", route, {"rows": torch.zeros(rows[rank], 2)})
        assert "declare arena_bytes=4864 or more" in str(it.value), str(it.value)


def fits(rank: int, world: int) -> None:
    with exchange_of("on_demand", rank, world, ["data"], arena_bytes=4864) as exchange:
        for step in range(1, 20):  # each waits for the one before to be read
            given = torch.full((600, 2), float(10 * step + rank))
            got = exchange.move(step, "data", swapped(rank, 600), {"rows": given})["rows"]
            assert torch.equal(got, torch.full((600, 2), float(10 * step + 1 - rank))), f"step {step}"


def test_an_overflow_names_the_size_that_would_do(ranks: Any) -> None:
    ranks(2).run(overflows)
    ranks(2).run(fits)


def runs_apart(rank: int, world: int) -> None:
    """Rank 0 sends to rank 1 only. Rank 1 comes when all others are done: if one waited for it, none would be."""
    plan = Rearrangement.to([1, 1, 1, 1], [1, 1, 2, 3])
    route = Route.of(plan, {"rows": [4] * 4}, rank)
    with exchange_of("on_demand", rank, world, ["data"]) as exchange:
        store = default_store()
        if rank == 1:
            store.wait([f"rank {other} is done" for other in (0, 2, 3)], timedelta(hours=1))
        got = exchange.move(1, "data", route, {"rows": torch.full((4, 1), float(rank))})["rows"]
        assert got[:, 0].tolist() == {0: [], 1: [0.0] * 4 + [1.0] * 4, 2: [2.0] * 4, 3: [3.0] * 4}[rank]
        assert exchange.moved["data"] == (16 if rank == 0 else 0)
        store.set(f"rank {rank} is done", "")


def test_on_demand_a_rank_waits_for_its_rows_alone(ranks: Any) -> None:
    ranks(4).run(runs_apart)


def back_and_forth(rank: int, world: int, kind: str) -> None:
    """By the inverse route gradients return to where the rows came from, also where nothing was brought."""
    plan = Rearrangement(np.array([3, 0]), np.array([1, 2]), np.array([2, 0, 1]))
    rows = {"rows": [2, 1, 3], "ids": [1, 1, 1]}
    with exchange_of(kind, rank, world, ["data", f"data{BACK}"]) as exchange:
        given = torch.arange(12.0).view(6, 2) if rank == 0 else torch.zeros(0, 2)
        ids = torch.arange(3) if rank == 0 else torch.zeros(0, dtype=torch.int64)
        route = Route.of(plan, rows, rank)
        got = exchange.move(1, "data", route, {"rows": given, "ids": ids})
        back = {"rows": 10.0 * rank + got["rows"]}
        return_route = Route.of(plan, {"rows": rows["rows"]}, rank).inverse
        gradient = exchange.move(1, f"data{BACK}", return_route, back)["rows"]
        if rank == 0:
            expected = given + torch.tensor([10.0] * 3 + [0.0] * 3)[:, None]
            assert torch.equal(gradient, expected), f"{gradient}"


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_go_back(ranks: Any, kind: str) -> None:
    ranks(2).run(back_and_forth, kind)


@pytest.fixture
def group_over_a_silent_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CheckedGroup, SilentStore]]:
    """Rank 0's part of a group of three ranks, whose store falls silent when the test asks for it."""
    for name, value in {"get_rank": 0, "get_world_size": 3, "new_group": None}.items():
        monkeypatch.setattr(dist, name, lambda *given, found=value, **options: found)
    for name in ("STORE_LEAST_S", "STORE_ENDING_S"):
        monkeypatch.setattr(checked_group, name, 3.0)
    store = SilentStore(silent=False)
    yield CheckedGroup(store, "data", "gloo", 3.0), store
    store.silent = False


def test_a_store_that_does_not_answer_ends_a_collective(
    group_over_a_silent_store: tuple[CheckedGroup, SilentStore],
) -> None:
    group, store = group_over_a_silent_store
    store.silent = True
    with pytest.raises(WaitTimeoutError, match=r"rank 0: the job's key-value store has not answered for 3 s"):
        group.run("moving data", lambda: pytest.fail("every rank is counted first"))
    assert store.asked.is_set()


def test_a_collective_that_fails_asks_a_silent_store_once(
    group_over_a_silent_store: tuple[CheckedGroup, SilentStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not for each rank of a thousand."""
    group, store = group_over_a_silent_store
    asked, find = list[str](), JobStore.find
    monkeypatch.setattr(JobStore, "find", lambda self, key: asked.append(key) or find(self, key))

    def break_off() -> None:
        store.silent = silent
        raise RuntimeError("connection reset")

    silent = False
    with pytest.raises(WaitTimeoutError, match=r"rank 0, moving data: rank 1, 2 did not come within") as late:
        group.run("moving data", break_off)
    assert (late.value.culprit, len(asked)) == (1, 3)
    silent = True
    with pytest.raises(WaitTimeoutError, match=r"moving data: some rank, .* did not come within .*\(connection reset"):
        group.run("moving data", break_off)
    assert len(asked) == 4


@pytest.mark.parametrize("waits", ["a collective", "per_host"])
def test_a_loss_ends_the_wait_of_an_exchange_for_a_silent_store(monkeypatch: pytest.MonkeyPatch, waits: str) -> None:
    """As where the host of the store is cut off: this rank knows that before any call of the store ends."""
    values = {"get_rank": 0, "get_world_size": 2, "new_group": None, "get_backend": "gloo"}
    for name, value in values.items():
        monkeypatch.setattr(dist, name, lambda *given, found=value, **options: found)
    ended = pytest.raises(PeerLostError, match="rank 0, .*: the job was aborted by rank 1: rank 1 died")
    with silent_once_a_rank_is_lost() as store, ended:
        exchange = CollectiveExchange(store, timeout_s=600.0)
        if waits == "per_host":
            assert not exchange.per_host
        exchange.gather(1, "lengths", np.array([1]))


# plans ------------------------------------------------------------------------------------------------------------


def of(parts: list[list[tuple[Any, ...]]]) -> Records:
    return Records.of(parts, ENCODERS)


def bad_plan(rank: int, world: int, kind: str, fault: str) -> None:
    good = of([[("text", 3), ("vision", 8, 4)]])
    llm_policy = BalancePolicy(beta=1.0) if fault == "policy" and rank == 1 else BalancePolicy()
    phases = [Phase("vision", BalancePolicy(), longest=100), Phase("audio", BalancePolicy("full", longest=200))]
    bad = {
        "nan": of([[("text", 3), ("vision", float("nan"), 4)]]),
        "negative": of([[("text", 3)], [("vision", -8, 4), ("text", 1)]]),
        "cap": of([[("vision", 101, 4), ("text", 1)]]),
        "policy's cap": of([[("audio", 201, 4), ("text", 1)]]),
        "whole": of([[("text", 501)]]),
        "nothing": Records(1, *np.zeros((4, 0), np.int64)),
    }
    message = {
        "nan": "rank 1 brings bad records: instance 1: part 1, of example 0, has nan as its length",
        "negative": "rank 1 brings bad records: instance 1: part 1, of example 1, has -8",
        "cap": "more than the cap of 100",
        "policy's cap": "more than the cap of 200",
        "whole": "instance 1: example 0 has 501 tokens; more than the cap of 500",
        "nothing": "instance 1: example 0 has no tokens at all",
        "policy": "rank 1 made another plan",
    }
    lots = of([[("text", 100)], [("text", 50), ("vision", 90, 45)], [("text", 7)], [("text", 60)], [("text", 40)]])
    mine = bad[fault] if fault in bad and rank == 1 else lots if fault == "policy" else good
    with exchange_of(kind, rank, world, channels(ENCODERS), timeout_s=60.0) as exchange:
        orchestrator = Orchestrator(phases, Phase("llm", llm_policy, longest=500), exchange)
        with pytest.raises(PlanError) as error:
            orchestrator.plan(mine)
        assert message[fault] in str(error.value), f"rank {rank} raised {error.value}"
        assert error.value.culprit == 1
        orchestrator = None  # the exchange itself still works
        assert [values.tolist() for values in exchange.gather(9, "plan", np.array([rank]))] == [[0], [1]]


@pytest.mark.parametrize("kind", ["collective", "on_demand"])
def test_bad_records_are_refused_on_every_rank_and_by_name(ranks: Any, kind: str) -> None:
    for fault in ("nan", "negative", "cap", "policy's cap", "whole", "nothing", "policy"):
        ranks(2).run(bad_plan, kind, fault)


def loads(rank: int, world: int, kind: str) -> None:
    def batches() -> Any:
        for step in range(6):
            yield [[("text", 5 + step + rank), ("vision", 10 + step, 5)]] * (step % 3)

    def records_of(batch: Any) -> Records:
        if rank == 1 and len(batch) == 2 and batch[0][0][1] == 11:  # the last
            raise ValueError("an image cannot be read: \udcff.png")  # a file's name that is not UTF-8
        return of(batch)

    phases = [Phase(name, policy) for name, policy in zip(ENCODERS, POLICIES["full"], strict=False)]
    with exchange_of(kind, rank, world, channels(ENCODERS), timeout_s=60.0) as exchange:
        loader = PlannedLoader(batches(), records_of, Orchestrator(phases, Phase("llm", BalancePolicy()), exchange))
        planned, seen = iter(loader), 0

        def see_one() -> None:
            batch, plan = next(planned)
            assert plan.step == seen + 1
            assert plan.whole.llm.counts.tolist() == [len(batch)] * world

        while seen < 5:
            see_one()
            seen += 1
        with pytest.raises((PlanError, ValueError), match="an image cannot be read|rank 1 brings bad records: .*image"):
            see_one()
        assert loader.overlap.steps == seen and loader.overlap.planning_s > 0


@pytest.mark.parametrize("kind", ["collective", "on_demand"])
def test_a_loader_plans_ahead_and_refuses_bad_data_on_all_ranks(ranks: Any, kind: str) -> None:
    ranks(2).run(loads, kind)


def dies(rank: int, world: int) -> None:
    with exchange_of("on_demand", rank, world, ["data"], timeout_s=3600.0) as exchange:
        exchange.move(1, "data", swapped(rank), {"rows": torch.zeros(3, 2)})
        if rank == 1:
            die()
        with pytest.raises(PeerLostError, match="rank 1 died") as error:
            exchange.move(2, "data", swapped(rank), {"rows": torch.zeros(3, 2)})
        assert error.value.culprit == 1
        raise error.value


def test_a_death_is_known_long_before_the_deadline_and_named() -> None:
    """The deadline is an hour away; the test would run out of time before it."""
    with spawn_ranks(2, dies) as ranks:
        outcomes = ranks.wait()
    assert outcomes[0].error == "PeerLostError", outcomes[0].describe()
