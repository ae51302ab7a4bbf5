"""Jobs over several hosts whose ranks die: they end with the same bits as one that nothing befell."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hosts import Hosts, need_hosts
from support.ranks import RanksFailed
from support.recovering import Death, Work, model_of, unequal
from support.recovering_hosts import Launch, kill_ranks, run_on

TWO_BY_TWO = {
    "backward": [Death(3, 2, "backward"), Death(0, 4, "backward", "segfault")],
    "finish": [Death(1, 2, "finish"), Death(2, 5, "finish", "exit")],
    "clip and step": [Death(2, 3, "clip"), Death(0, 5, "step", "raise")],
    "keep": [Death(0, 2, "keep"), Death(3, 3, "keep"), Death(2, 5, "begin")],
    "first minibatch": [Death(3, 0, "building"), Death(1, 0, "forward"), Death(2, 0, "keep")],
    "after the last": [Death(1, 7, "keep"), Death(2, 7, "ready")],
    "one of each host": [Death(0, 2, "backward"), Death(3, 2, "backward"), Death(1, 5, "begin"), Death(2, 5, "begin")],
    "another recovery": [Death(1, 1, "backward"), Death(2, 1, "restore"), Death(3, 1, "ready"), Death(0, 4, "clip")],
    "slots held late": [Death(1, 1, "backward"), Death(1, -1, "returned", "late"), Death(0, 1, "restore")],
}
THREE_BY_ONE = {
    "minibatch": [Death(1, 1, "backward"), Death(0, 4, "finish"), Death(2, 6, "clip")],
    "another recovery": [Death(1, 1, "backward"), Death(2, 1, "ready"), Death(0, 1, "restore")],
    "first and last": [Death(1, 0, "building"), Death(2, 0, "keep"), Death(0, 7, "ready")],
}
ALONE = {
    "one after the other": [Death(1, 2, "begin"), Death(0, 4, "finish"), Death(2, 6, "clip")],
    "keep": [Death(0, 2, "keep"), Death(2, 4, "keep"), Death(1, 5, "step")],
    "while ranks meet": [Death(1, 1, "backward"), Death(1, -1, "ready"), Death(2, 4, "begin"), Death(2, 0, "restore")],
}
QUICK = {"clip and step", "another recovery", "one after the other"}


@pytest.fixture(scope="module")
def two() -> Iterator[Hosts]:
    need_hosts()
    with Hosts(2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def three() -> Iterator[Hosts]:
    need_hosts()
    with Hosts(3) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def undisturbed(two: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_on(two, 2, tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def three_undisturbed(three: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_on(three, 1, tmp_path_factory.mktemp("undisturbed"))


def cases(rounds: dict[str, list[Death]]) -> Any:
    """All rounds, those that are not quick marked thorough."""
    return [
        pytest.param(deaths, id=name, marks=[] if name in QUICK else [pytest.mark.thorough])
        for name, deaths in rounds.items()
    ]


def assert_happened(folder: Path, deaths: list[Death]) -> None:
    happened = {path.name for path in folder.iterdir()}
    assert happened == {f"{death.rank}.{death.step}.{death.point}" for death in deaths}


@pytest.mark.parametrize("deaths", cases(TWO_BY_TWO))
def test_a_rank_whose_host_lives_is_replaced_there(
    deaths: list[Death], two: Hosts, undisturbed: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "deaths"
    found = run_on(two, 2, folder, deaths)
    assert_happened(folder, deaths)
    assert not unequal(found, undisturbed)


def test_a_death_while_the_others_are_in_a_collective_of_torch(two: Hosts, tmp_path: Path) -> None:
    deaths = [Death(2, 3, "clip"), Death(1, 5, "clip")]  # each some steps after gloo has connected
    found = run_on(two, 2, tmp_path / "deaths", deaths)
    assert_happened(tmp_path / "deaths", deaths)
    assert not unequal(found, run_on(two, 2, tmp_path / "undisturbed"))


@pytest.mark.thorough
def test_a_whole_host_that_dies_while_ranks_meet(two: Hosts, undisturbed: Any, tmp_path: Path) -> None:
    folder, deaths = tmp_path / "deaths", [Death(1, 1, "backward"), Death(2, 1, "ready"), Death(3, 1, "ready")]
    found = run_on(two, 2, folder, deaths, keeper=True)
    assert_happened(folder, deaths)
    assert not unequal(found, undisturbed)


@pytest.mark.parametrize("deaths", cases(THREE_BY_ONE))
def test_a_rank_alone_on_its_host_has_its_state_from_the_keeper(
    deaths: list[Death], three: Hosts, three_undisturbed: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "deaths"
    found = run_on(three, 1, folder, deaths, keeper=True)
    assert_happened(folder, deaths)
    assert not unequal(found, three_undisturbed)


WHOLE_HOSTS = {
    "backward": [Death(2, 2, "backward"), Death(3, 2, "backward")],
    "one after the other": [Death(rank, step, "begin") for rank, step in ((0, 2), (1, 2), (2, 5), (3, 5))],
    "keep": [Death(2, 2, "keep"), Death(3, 2, "keep"), Death(0, 4, "keep"), Death(1, 4, "step")],
    "while ranks meet": [Death(2, 2, "backward"), Death(3, 2, "ready")],
    "while it restores": [Death(0, 3, "finish"), Death(1, 3, "finish"), Death(0, 0, "restore")],
    "first and last": [Death(0, 0, "finish"), Death(1, 0, "finish"), Death(2, 7, "keep"), Death(3, 7, "keep")],
}


@pytest.mark.parametrize("deaths", cases(WHOLE_HOSTS))
def test_a_whole_host_comes_back_from_its_buddies(
    deaths: list[Death], two: Hosts, undisturbed: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "deaths"
    found = run_on(two, 2, folder, deaths, keep="buddy")
    assert_happened(folder, deaths)
    assert not unequal(found, undisturbed)


@pytest.mark.parametrize("deaths", cases(ALONE))
def test_a_rank_alone_on_its_host_comes_back_from_its_buddy(
    deaths: list[Death], three: Hosts, three_undisturbed: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "deaths"
    found = run_on(three, 1, folder, deaths, keep="buddy")
    assert_happened(folder, deaths)
    assert not unequal(found, three_undisturbed)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(2))
def test_a_host_that_ends_at_any_moment(seed: int, two: Hosts, undisturbed: Any, tmp_path: Path) -> None:
    draw, killed = random.Random(seed), list[int]()
    host = two[draw.randrange(2)]

    def kill(over: threading.Event) -> None:
        over.wait(draw.uniform(0.2, 1.5))
        while not over.is_set() and not (count := kill_ranks(host)):
            over.wait(0.05)
        killed.append(0 if over.is_set() else count)

    while not any(killed):  # a job may end before it has been killed
        assert len(killed) < 5, "no rank was there to kill"
        over = threading.Event()
        killing = threading.Thread(target=kill, args=(over,))
        killing.start()
        try:
            found = run_on(two, 2, tmp_path / f"deaths {len(killed)}", restarts=2, keep="buddy")
        finally:
            over.set()
            killing.join()
        assert not unequal(found, undisturbed)


@pytest.mark.thorough
@pytest.mark.parametrize("host", [2, 0], ids=["a new one", "the one that is left"])
def test_ranks_of_a_lost_host_come_back_on_another(host: int, three: Hosts, undisturbed: Any, tmp_path: Path) -> None:
    folder, deaths = tmp_path / "deaths", [Death(2, 3, "begin"), Death(3, 3, "begin")]
    names = [f"{death.rank}.3.begin" for death in deaths]
    deaths.append(Death(3, 5, "clip"))
    launches = [Launch([0, 1], 0), Launch([2, 3], 0), Launch([2, 3], 1, names, host)]
    found = run_on(three, 2, folder, deaths, launches=launches, keep="buddy")
    assert_happened(folder, deaths)
    assert not unequal(found, undisturbed)


@pytest.mark.thorough
def test_a_rank_that_comes_back_on_another_host_learns_where_its_state_is(three: Hosts, tmp_path: Path) -> None:
    launches = [Launch([0, 1], 0), Launch([2, 3], 0), Launch([2], 0, ["2.3.begin"])]
    with pytest.raises(RanksFailed, match="rank 2 begins on a host where no process holds what it has kept"):
        run_on(three, 2, tmp_path / "deaths", [Death(2, 3, "begin")], launches=launches)


@pytest.mark.thorough
def test_a_job_ends_by_name_where_both_copies_of_a_state_are_gone(three: Hosts, tmp_path: Path) -> None:
    deaths = [Death(rank, 3, "begin") for rank in (0, 1)]  # rank 1 is the buddy of rank 0
    launches = [Launch([0], 1), Launch([1], 1), Launch([2], 0)]
    with pytest.raises(RanksFailed, match="NothingKeptError: no step is kept of every rank: rank 0 none"):
        run_on(three, 1, tmp_path / "deaths", deaths, launches=launches, keep="buddy")


def test_hosts_with_unequally_many_ranks_cannot_be_buddies(two: Hosts, tmp_path: Path) -> None:
    launches = [Launch([0, 1, 2], 0), Launch([3], 0)]
    with pytest.raises(RanksFailed, match="keep='buddy' needs equally many ranks on each host, not 3 and 1"):
        run_on(two, 2, tmp_path / "job", launches=launches, keep="buddy")


@pytest.mark.thorough
def test_nothing_is_left_of_a_generation_over_hosts(two: Hosts, tmp_path: Path) -> None:
    """Some connections and threads come when they are first needed; one that each generation left would be 8."""
    steps = 24
    deaths = [Death(rank, step, "begin") for step in range(1, steps, 3) for rank in (2, 3)]
    work = Work(clip=False, tidy=True)
    found = run_on(two, 2, tmp_path / "deaths", deaths, steps=steps, work=work, keep="buddy")
    for survivor in found[:2]:
        assert survivor["recoveries"] == 8
        early, late = survivor["held"][3:6], survivor["held"][-3:]
        grown = [max(one[i] for one in late) - max(one[i] for one in early) for i in range(3)]
        assert max(grown) < 4, "descriptors, threads and mappings"


# bytes ---------------------------------------------------------------------------------------------------------------

WIDE = 1024


@pytest.mark.parametrize("shape", [(2, 2), pytest.param((3, 1), marks=pytest.mark.thorough)])
def test_bytes_that_a_buddy_costs_are_as_documented(shape: tuple[int, int], request: Any, tmp_path: Path) -> None:
    """docs/recovery.md: 12 bytes a parameter of a host's shards under AdamW, after each step, out of each host.

    The job computes nothing: what crosses for its training depends on when ranks read.
    """
    count, per_host = shape
    hosts: Hosts = request.getfixturevalue("two" if count == 2 else "three")
    few, many = (_sent(hosts, per_host, tmp_path, steps) for steps in (2, 6))
    parameters = sum(parameter.numel() for parameter in model_of(WIDE).parameters())
    documented = 12 * parameters / count
    assert [(more - less) / 4 for less, more in zip(few, many, strict=True)] == pytest.approx(
        [documented] * count, 0.02
    )


def _sent(hosts: Hosts, per_host: int, folder: Path, steps: int) -> list[int]:
    """Bytes that the device of each host has sent in a job, as it counts them."""
    before = [host.counted()[0] for host in hosts]
    run_on(
        hosts, per_host, folder / str(steps), steps=steps, work=Work(clip=False, width=WIDE, idle=True), keep="buddy"
    )
    return [host.counted()[0] - then for host, then in zip(hosts, before, strict=True)]
