"""Jobs over several hosts whose ranks die: they end with the same bits as one that nothing befell."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hosts import Hosts, need_hosts
from support.recovering import Death, unequal
from support.recovering_hosts import run_on

TWO_BY_TWO = {
    "backward": [Death(3, 2, "backward"), Death(0, 4, "backward", "segfault")],
    "finish": [Death(1, 2, "finish"), Death(2, 5, "finish", "exit")],
    "clip and step": [Death(2, 3, "clip"), Death(0, 5, "step", "raise")],
    "keep": [Death(0, 2, "keep"), Death(3, 3, "keep"), Death(2, 5, "begin")],
    "first minibatch": [Death(3, 0, "building"), Death(1, 0, "forward"), Death(2, 0, "keep")],
    "after the last": [Death(1, 7, "keep"), Death(2, 7, "ready")],
    "one of each host": [Death(0, 2, "backward"), Death(3, 2, "backward"), Death(1, 5, "begin"), Death(2, 5, "begin")],
    "another recovery": [Death(1, 1, "backward"), Death(2, 1, "restore"), Death(3, 1, "ready"), Death(0, 4, "clip")],
}
THREE_BY_ONE = {
    "minibatch": [Death(1, 1, "backward"), Death(0, 4, "finish"), Death(2, 6, "clip")],
    "another recovery": [Death(1, 1, "backward"), Death(2, 1, "ready"), Death(0, 1, "restore")],
    "first and last": [Death(1, 0, "building"), Death(2, 0, "keep"), Death(0, 7, "ready")],
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


@pytest.mark.thorough
def test_a_whole_host_that_dies_while_ranks_meet(two: Hosts, undisturbed: Any, tmp_path: Path) -> None:
    folder, deaths = tmp_path / "deaths", [Death(1, 1, "backward"), Death(2, 1, "ready"), Death(3, 1, "ready")]
    found = run_on(two, 2, folder, deaths, keeper=True)
    assert_happened(folder, deaths)
    assert not unequal(found, undisturbed)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_deaths_at_any_moment(seed: int, two: Hosts, undisturbed: Any, tmp_path: Path) -> None:
    folder = tmp_path / "deaths"
    found = run_on(two, 2, folder, restarts=60, killed=(0.8, 10, seed), keeper=True)
    assert len(list(folder.iterdir())) > 2
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
    "while ranks meet": [Death(1, 1, "backward"), Death(2, 1, "ready"), Death(3, 1, "ready")],
    "while it restores": [Death(0, 3, "finish"), Death(1, 3, "finish"), Death(0, -1, "restore")],
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
