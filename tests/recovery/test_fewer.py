"""Jobs that go on with fewer ranks, and with more again: as jobs of so many ranks would, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.leaving import Leave, Phase, in_phases, phases_of, run

STEPS = 8
CASES: dict[str, tuple[int, list[Leave], list[Phase]]] = {
    "one leaves and comes back": (
        3,
        [Leave(1, 2, "forward", back=5)],
        [Phase(3, 0, 2), Phase(2, 2, 5), Phase(3, 5, 8)],
    ),
    "rank 0 leaves in its optimizer's step": (3, [Leave(0, 3, "clip")], [Phase(3, 0, 3), Phase(2, 3, 8)]),
    "all but one": (
        3,
        [Leave(0, 1, "keep"), Leave(2, 4, "forward")],
        [Phase(3, 0, 1), Phase(2, 1, 4), Phase(1, 4, 8)],
    ),
    "another while the state is divided": (
        4,
        [Leave(3, 2, "forward"), Leave(0, 2, "divide")],
        [Phase(4, 0, 2), Phase(2, 2, 8)],
    ),
    "one that has come back leaves": (
        3,
        [Leave(2, 1, "forward", back=3), Leave(0, 4, "forward")],
        [Phase(3, 0, 1), Phase(2, 1, 3), Phase(3, 3, 4), Phase(2, 4, 8)],
    ),
}


@pytest.mark.parametrize("ranks, leaves, phases", CASES.values(), ids=CASES.keys())
def test_training_goes_on_as_a_job_of_so_many_ranks(
    ranks: int, leaves: list[Leave], phases: list[Phase], tmp_path: Path
) -> None:
    found = [one for one in run(tmp_path, ranks, STEPS, leaves, fewest=1) if one is not None]
    assert len(found) == phases[-1].world
    worlds, state = max(found, key=lambda one: len(one[0]))[:2]
    assert phases_of(worlds) == phases
    reference = in_phases(phases)
    for _, mine, _ in found:
        for name in ("weights", "moments"):
            assert [torch.equal(a, b) for a, b in zip(mine[name], reference[name], strict=True)] == [True] * len(
                reference[name]
            )


def test_a_replacement_that_comes_in_time_changes_nothing(tmp_path: Path) -> None:
    leaves: Any = [Leave(1, 2, "forward", back=0)]
    (tmp_path / "back.1").touch()
    found = run(tmp_path, 3, STEPS, leaves, fewest=1, rejoin_s=60.0)
    assert {world for worlds, _, _ in found for world in worlds.values()} == {3}
