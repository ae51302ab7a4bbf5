"""Jobs that go on with fewer ranks, and with more again: as jobs of so many ranks would, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.leaving import Leave, in_phases, phases_of, run

STEPS = 8
QUICK = {"one leaves and comes back", "another while the state is divided"}
CASES: dict[str, tuple[int, list[Leave], list[int]]] = {
    "one leaves and comes back": (3, [Leave(1, 2, "forward", back=5)], [3, 2, 3]),
    "all but one, rank 0 first": (3, [Leave(0, 1, "keep"), Leave(2, 4, "clip")], [3, 2, 1]),
    "another while the state is divided": (4, [Leave(3, 2, "forward"), Leave(0, 2, "divide")], [4, 2]),
    "one that has come back leaves": (3, [Leave(2, 1, "forward", back=3), Leave(0, 4, "forward")], [3, 2, 3, 2]),
}


def assert_equals_its_phases(found: list[Any], worlds: list[int]) -> None:
    """All that took part in the end have what jobs of these numbers of ranks have, one after the other."""
    ended = [one for one in found if one is not None]
    phases = phases_of(ended[0].worlds)
    assert [phase.world for phase in phases] == worlds
    assert len(ended) == worlds[-1]
    assert phases[-1].last == STEPS
    reference = in_phases(phases)
    for one in ended:
        assert one.worlds == ended[0].worlds
        assert one.layouts == 1, "what was kept in former layouts is let go of"
        for name, tensors in reference.items():
            pairs = zip(one.state[name], tensors, strict=True)
            assert not [i for i, (mine, theirs) in enumerate(pairs) if not torch.equal(mine, theirs)], name


def random_after(place: int, steps: int) -> torch.Tensor:
    torch.manual_seed(place)
    torch.rand(steps)
    return torch.get_rng_state()


@pytest.mark.parametrize(
    ("ranks", "leaves", "worlds"),
    [pytest.param(*case, id=name, marks=[pytest.mark.thorough] * (name not in QUICK)) for name, case in CASES.items()],
)
def test_training_goes_on_as_a_job_of_so_many_ranks(
    ranks: int, leaves: list[Leave], worlds: list[int], tmp_path: Path
) -> None:
    found = run(tmp_path, ranks, STEPS, leaves, fewest=1)
    assert_equals_its_phases(found, worlds)
    left = {leave.place for leave in leaves}
    for place, one in enumerate(found):
        if one is not None:  # random numbers are those of the process itself
            came = next(i for i in range(1, STEPS) if one.worlds[i] > one.worlds[i - 1]) if place in left else 0
            assert torch.equal(one.random, random_after(place, STEPS - came))


def test_a_replacement_that_comes_in_time_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "back.1").touch()
    found = run(tmp_path, 3, STEPS, [Leave(1, 2, "forward", back=0)], fewest=1, rejoin_s=60.0)
    assert_equals_its_phases(found, [3])


def test_a_process_joins_at_a_step_that_is_kept(tmp_path: Path) -> None:
    found = run(tmp_path, 3, STEPS, [Leave(1, 2, "forward", back=5)], fewest=1, every=3)
    assert_equals_its_phases(found, [2, 3])
    for place in (0, 2):
        assert [step for step in found[place].done if step > 2] == [3, 4, 5, 6, 7], "none is done twice"
