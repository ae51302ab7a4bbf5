"""Ranks that hang and ranks that cannot run: what happens is bounded, and the error names them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.recovering import Death, run

from odc.deadlines import RESTART_FIRST_PAUSE_S, RESTART_LONGEST_PAUSE_S
from odc.experiments.launch import JobFailedError, Lives


def test_a_survivor_that_hangs_is_named_by_those_that_wait_for_it(tmp_path: Path) -> None:
    deaths = [Death(1, 2, "begin", "hang"), Death(0, 2, "begin")]
    with pytest.raises(
        JobFailedError, match=r"in generation \d, waiting for ranks \[(0, )?1\] to meet the others: none"
    ):
        run(tmp_path, 3, deaths, restarts=1, rejoin_s=10.0)


def test_a_rank_that_always_dies_ends_the_job(tmp_path: Path) -> None:
    deaths = [Death(1, 2, point) for point in ("begin", "clip", "step", "finish")]
    with pytest.raises(JobFailedError, match="rank 1 failed: the process was killed by SIGKILL") as failed:
        run(tmp_path, 2, deaths, restarts=2)
    assert "it had ended twice before, without a step kept between: the process was killed by SIGKILL" in str(
        failed.value
    )


def test_a_rank_that_died_after_it_had_kept_a_step_is_not_one_that_cannot_run(tmp_path: Path) -> None:
    with pytest.raises(JobFailedError, match="rank 1 failed: the process was killed by SIGKILL") as failed:
        run(tmp_path, 2, [Death(1, 2, "begin"), Death(1, 5, "begin")], restarts=1)
    assert "had ended" not in str(failed.value)


def test_pauses_between_restarts_double_until_a_step_is_kept() -> None:
    lives = Lives(100)
    assert lives.ended(1, "first", progressed=True) == 0.0
    pauses = [lives.ended(1, "again", progressed=False) for _ in range(20)]
    assert pauses[:3] == [RESTART_FIRST_PAUSE_S, 2 * RESTART_FIRST_PAUSE_S, 4 * RESTART_FIRST_PAUSE_S]
    assert pauses[-1] == RESTART_LONGEST_PAUSE_S
    assert "21 times before, without a step kept between: first; again" in lives.before(1)
    assert lives.ended(2, "another", progressed=False) == 0.0, "each rank by itself"
    assert lives.ended(1, "later", progressed=True) == 0.0
    assert lives.ended(1, "and again", progressed=False) == RESTART_FIRST_PAUSE_S
    assert lives.left == 100 - 24
