"""Jobs whose ranks die: they end with the same bits as one that nothing befell."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.recovering import HOW, STEPS, Death, Work, run, train, unequal

from odc.experiments.launch import JobFailedError, launch

RANKS = 3
ROUNDS = {
    "forward and backward": [Death(1, 1, "forward"), Death(0, 4, "backward"), Death(2, 6, "forward", "segfault")],
    "finish": [Death(2, 2, "finish"), Death(0, 4, "finish", "exit")],
    "clip and step": [Death(1, 2, "clip"), Death(2, 3, "step"), Death(0, 5, "step", "raise")],
    "keep": [Death(0, 2, "keep"), Death(1, 3, "keep"), Death(2, 3, "begin")],
    "first minibatch": [Death(1, 0, "building"), Death(2, 0, "forward"), Death(0, 0, "keep")],
    "after the last": [Death(1, 7, "keep"), Death(0, 7, "ready")],
    "two at once": [Death(0, 2, "backward"), Death(2, 2, "backward"), Death(2, 5, "begin"), Death(1, 5, "begin")],
    "another recovery": [
        Death(1, 1, "backward"),
        Death(0, 1, "restore"),
        Death(2, 1, "ready"),
        Death(1, 4, "clip", "raise"),
    ],
    "connecting": [Death(1, 1, "backward"), Death(0, 1, "connect"), Death(2, -1, "connect")],
    "before it connects": [Death(1, 1, "backward"), Death(0, 1, "met"), Death(2, -1, "met")],
    "all at once": [Death(rank, 4, "begin") for rank in range(RANKS)],
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("undisturbed"), RANKS)


@pytest.mark.parametrize("deaths", ROUNDS.values(), ids=ROUNDS.keys())
def test_a_job_survives_deaths(deaths: list[Death], undisturbed: Any, tmp_path: Path) -> None:
    found = run(tmp_path, RANKS, deaths)
    happened = {path.name for path in tmp_path.iterdir()}
    assert happened == {f"{death.rank}.{death.step}.{death.point}" for death in deaths}
    assert not unequal(found, undisturbed)


def train_without_a_keeper(folder: str, deaths: list[Death]) -> Any:
    """A rank that is due to end waits until all are."""

    def end() -> None:
        while len(list(Path(folder).iterdir())) < len(deaths):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    HOW["kill"] = end
    del os.environ["TORCHELASTIC_MAX_RESTARTS"]
    return train(folder, deaths, STEPS, None)


def test_a_job_whose_kept_states_are_all_gone_ends(tmp_path: Path) -> None:
    """It does not begin again: its program may find a newer checkpoint by now."""
    deaths = [Death(rank, 4, "begin") for rank in range(2)]
    with pytest.raises(JobFailedError, match="NothingKeptError: .* past its beginning"):
        launch(train_without_a_keeper, str(tmp_path), deaths, ranks=2, restarts=2)


def test_a_group_whose_connecting_was_cut_short_is_never_destroyed(undisturbed: Any, tmp_path: Path) -> None:
    """Gloo would wait for ever for some of them, whenever the last reference goes: in two of 24 jobs it did."""
    found = run(tmp_path, RANKS, [Death(1, 1, "backward"), Death(0, 1, "connect")])
    assert [one["cut short"] > 0 for one in found] == [False, True, True]
    assert not unequal(found, undisturbed)


def test_a_job_without_deaths_never_goes_back(undisturbed: Any) -> None:
    assert [one["recoveries"] for one in undisturbed] == [0] * RANKS


def test_an_error_of_its_own_ends_a_process_even_if_torch_raises_it(undisturbed: Any, tmp_path: Path) -> None:
    """Its class is that of gloo's errors, which follow the end of another rank; this one would come again for ever."""
    found = run(tmp_path, RANKS, [Death(1, 4, "forward", "raise as torch")])
    assert [one["recoveries"] for one in found] == [1, 0, 1], "a new process has the place of rank 1"
    assert not unequal(found, undisturbed)


@pytest.mark.parametrize("count", [8, pytest.param(20, marks=pytest.mark.thorough)])
def test_nothing_is_left_of_a_generation(count: int, tmp_path: Path) -> None:
    """Threads and connections end some time after their generation; one left by each would be 6 at least."""
    steps = 3 * count
    found = run(
        tmp_path, 2, [Death(1, step, "backward") for step in range(1, steps, 3)], steps=steps, work=Work(tidy=True)
    )
    survivor = found[0]
    assert survivor["recoveries"] == count
    early, late = survivor["held"][2:6], survivor["held"][-4:]
    grown = [max(one[i] for one in late) - max(one[i] for one in early) for i in range(3)]
    assert max(grown) < 4, "descriptors, threads and mappings"
