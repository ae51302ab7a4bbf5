"""Whether ranks find cores, by affinities and files that the test writes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import inf
from pathlib import Path
from types import MappingProxyType

import pytest

from odc.memory.cores import enough_cores


def fits(
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    affinities: dict[int, set[int]],
    each: int,
    membership: str = "",
    files: Mapping[str, str] = MappingProxyType({}),
) -> bool:
    """For process 1 among those with these affinities; `files` of control groups by their path."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: affinities[process or 1])
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(membership)
    for name, text in files.items():
        path = root / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return enough_cores(each, list(affinities), root / "proc", root / "groups")


def ranks(*cores: range) -> dict[int, set[int]]:
    """Affinities of processes 1, 2, ..."""
    return {number: set(some) for number, some in enumerate(cores, 1)}


@pytest.mark.parametrize(
    ("affinities", "enough"),
    [
        (ranks(*(range(16 * rank, 16 * rank + 16) for rank in range(8))), True),  # one task a rank, cores bound
        (ranks(*[range(16)] * 8), False),  # torchrun with 16 cores
        (ranks(*[range(24)] * 8), True),
        (ranks(*(range(rank // 4 * 64, rank // 4 * 64 + 64) for rank in range(8))), True),  # four ranks a socket
        (ranks(*(range(rank // 4 * 11, rank // 4 * 11 + 11) for rank in range(8))), False),
        (ranks(*(range(2 * rank, 2 * rank + 2) for rank in range(8))), False),  # bound, to too few
        (ranks(range(4), range(3, 8)), False),  # a core of both
    ],
)
def test_ranks_that_share_cores_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, affinities: dict[int, set[int]], enough: bool
) -> None:
    assert fits(monkeypatch, tmp_path, affinities, 3) == enough


def test_a_process_that_has_ended_shares_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Affinities(dict[int, set[int]]):
        def __missing__(self, process: int) -> set[int]:
            raise ProcessLookupError(process)

    asked = Affinities({1: set(range(4))})
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: asked[process or 1])
    assert not enough_cores(3, [1, 2], tmp_path, tmp_path)
    assert enough_cores(2, [1, 2], tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("membership", "files", "quota"),
    [
        ("", {}, inf),
        ("0::/job/rank\n", {"job/rank/cpu.max": "max 100000\n"}, inf),
        ("0::/job/rank\n", {"job/rank/cpu.max": "max 100000\n", "job/cpu.max": "250000 100000\n"}, 2.5),
        ("0::/job/rank\n", {"job/rank/cpu.max": "1600000 100000\n"}, 16.0),
        ("0::/elsewhere\n", {"cpu.max": "150000 50000\n"}, 3.0),
        ("4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "-1\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, inf),
        ("4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "50000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 0.5),
        ("4:memory:/job\n", {"cpu/job/cpu.cfs_quota_us": "50000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, inf),
    ],
)  # fmt: skip
def test_a_quota_is_one_for_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, membership: str, files: dict[str, str], quota: float
) -> None:
    """Of processes that have eight cores each, for themselves."""
    both = ranks(range(8), range(8, 16))
    for each in (1, 2, 4, 8):
        for some in ({1: both[1]}, both):
            enough = each * len(some) <= quota
            assert fits(monkeypatch, tmp_path, some, each, membership, files) == enough


def test_of_this_machine_it_is_at_least_something() -> None:
    assert not enough_cores(1 << 20, [os.getpid()])
