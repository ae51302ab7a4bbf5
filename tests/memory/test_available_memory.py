from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from odc.memory import free_memory

MIB = 1 << 20


def tree(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


def proc(tmp_path: Path, cgroup: str, available_kib: int = 8 << 20) -> Path:
    meminfo = f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable:   {available_kib} kB\nBuffers: 2 kB"
    return tree(tmp_path / "proc", {"meminfo": meminfo, "self/cgroup": cgroup})


def test_this_machine() -> None:
    free = free_memory()
    assert 0 < free.nbytes < 1 << 60
    assert free.limited_by


NESTED = {
    "a/memory.max": 100 * MIB,
    "a/memory.current": 90 * MIB,
    "a/memory.stat": f"anon {80 * MIB}\ninactive_file {4 * MIB}\nfile {10 * MIB}",
    "a/b/memory.max": 60 * MIB,
    "a/b/memory.current": 10 * MIB,
    "a/b/c/memory.max": "max",
    "a/b/c/memory.current": 10 * MIB,
}
VERSION_1 = {
    "memory/job/memory.limit_in_bytes": 50 * MIB,
    "memory/job/memory.usage_in_bytes": 20 * MIB,
    "memory/job/memory.stat": f"total_inactive_file {5 * MIB}",
    "memory/memory.limit_in_bytes": 9223372036854771712,
    "memory/memory.usage_in_bytes": 20 * MIB,
}
CONTAINER = {"memory/memory.limit_in_bytes": 50 * MIB, "memory/memory.usage_in_bytes": 20 * MIB}


@pytest.mark.parametrize(
    ("files", "cgroup", "available", "nbytes", "limit"),
    [
        pytest.param({}, "0::/", 8192, 8192, "", id="the machine alone"),
        pytest.param(NESTED, "0::/a/b/c", 8192, 14, "a", id="version 2: the tightest group, without its page cache"),
        pytest.param(VERSION_1, "5:cpu,cpuacct:/x\n4:memory:/job\n0::/", 8192, 35, "memory/job", id="version 1"),
        pytest.param(CONTAINER, "4:memory:/docker/0123", 8192, 30, "memory", id="only the root is visible"),
        pytest.param({"memory.max": 50 * MIB, "memory.current": 0}, "0::/", 1, 1, "", id="the machine is tighter"),
        pytest.param({"memory.max": 5 * MIB, "memory.current": 6 * MIB}, "0::/", 8192, 0, ".", id="over its limit"),
    ],
)
def test_the_tightest_limit_counts(
    tmp_path: Path, files: dict[str, object], cgroup: str, available: int, nbytes: int, limit: str
) -> None:
    """`available`, `nbytes` in MiB; `limit` is the group that limits, or empty for the machine."""
    groups = tree(tmp_path / "cgroup", files)
    free = free_memory(proc(tmp_path, cgroup, available << 10), groups)
    assert free.nbytes == nbytes * MIB
    assert free.limited_by == (f"control group {groups / limit}" if limit else "the machine (MemAvailable)")


def test_nothing_to_read_is_no_error(tmp_path: Path) -> None:
    assert free_memory(tmp_path / "proc", tmp_path / "cgroup").limited_by == "nothing that could be read"


@example("", "²", "0")
@example("", "0", "²")
@given(st.text(max_size=60), st.text(max_size=30), st.text(max_size=30))
def test_nonsense_is_no_error(tmp_path_factory, cgroup: str, limit: str, usage: str) -> None:
    root = tmp_path_factory.mktemp("nonsense")
    groups = tree(root / "cgroup", {"memory.max": limit, "memory.current": usage})
    assert free_memory(proc(root, f"0::/{cgroup}".replace("\0", "")), groups).nbytes >= 0
