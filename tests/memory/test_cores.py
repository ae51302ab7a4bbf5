"""How many cores a process has, by files that the test writes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from odc.memory.cores import cores


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))


def found(root: Path, membership: str, files: dict[str, str]) -> float:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    for name, text in files.items():
        path = root / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return cores(root / "proc", root / "groups")


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("", {}, 8.0),
        ("0::/job/rank\n", {"job/rank/cpu.max": "max 100000\n"}, 8.0),
        ("0::/job/rank\n", {"job/rank/cpu.max": "max 100000\n", "job/cpu.max": "250000 100000\n"}, 2.5),
        ("0::/job/rank\n", {"job/rank/cpu.max": "1600000 100000\n"}, 8.0),
        ("0::/elsewhere\n", {"cpu.max": "150000 50000\n"}, 3.0),
        ("4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "-1\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 8.0),
        ("4:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "50000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 0.5),
        ("4:memory:/job\n", {"cpu/job/cpu.cfs_quota_us": "50000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}, 8.0),
    ],
)  # fmt: skip
def test_the_least_of_affinity_and_quotas(
    tmp_path: Path, membership: str, files: dict[str, str], expected: float
) -> None:
    assert found(tmp_path, membership, files) == expected


def test_of_this_machine_it_is_at_least_something() -> None:
    assert cores() > 0
