"""Jobs over several hosts that go on without one of them, from what its buddies have kept, and with it again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from recovery.test_fewer import STEPS, assert_equals_its_phases
from support.hosts import Hosts, need_hosts
from support.leaving import Leave, train
from support.ranks import RanksFailed
from support.recovering_hosts import Launch, run_program_on

BUDDY = {"fewest": 1, "keep": "buddy", "rejoin_s": 20.0}
#: Hosts, ranks of each, and who leaves.
CASES: dict[str, tuple[int, int, list[Leave], list[int]]] = {
    "all hosts but one": (3, 1, [Leave(0, 2, "clip"), Leave(2, 4, "forward")], [3, 2, 1]),
    "a rank of 2x2, and its host with it": (2, 2, [Leave(3, 2, "forward")], [4, 2]),
    "a host of 2x2 comes back": (
        2,
        2,
        [Leave(2, 2, "forward", back=5), Leave(3, 2, "forward", back=5)],
        [4, 2, 4],
    ),
}


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[int, Hosts]]:
    need_hosts()
    with Hosts(2) as two, Hosts(3) as three:
        yield {2: two, 3: three}


@pytest.mark.parametrize(
    ("count", "per_host", "leaves", "worlds"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.thorough] * (name != "a host of 2x2 comes back"))
        for name, case in CASES.items()
    ],
)
def test_training_goes_on_without_a_host(
    count: int, per_host: int, leaves: list[Leave], worlds: list[int], hosts: dict[int, Hosts], tmp_path: Path
) -> None:
    launches = [Launch(range(i * per_host, (i + 1) * per_host), 4) for i in range(count)]
    program = STEPS, tuple(leaves), BUDDY
    found = run_program_on(hosts[count], per_host, launches, False, train, tmp_path / "job", *program)
    assert_equals_its_phases(found, worlds)


def test_without_buddies_it_is_refused(hosts: dict[int, Hosts], tmp_path: Path) -> None:
    launches = [Launch([i], 0) for i in range(3)]
    program = STEPS, (), {"fewest": 1}
    with pytest.raises(RanksFailed, match=r"with fewest=\.\.\., ranks on several hosts need keep='buddy'"):
        run_program_on(hosts[3], 1, launches, False, train, tmp_path / "job", *program)
