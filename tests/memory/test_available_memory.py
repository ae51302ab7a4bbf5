from __future__ import annotations

from pathlib import Path

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


def test_the_machine_alone(tmp_path: Path) -> None:
    free = free_memory(proc(tmp_path, "0::/"), tmp_path / "none")
    assert free.nbytes == 8 << 30
    assert free.limited_by == "the machine (MemAvailable)"


def test_the_tightest_group_of_version_2_counts(tmp_path: Path) -> None:
    groups = tree(
        tmp_path / "cgroup",
        {
            "a/memory.max": 100 * MIB,
            "a/memory.current": 90 * MIB,
            "a/memory.stat": f"anon {80 * MIB}\ninactive_file {4 * MIB}\nfile {10 * MIB}",
            "a/b/memory.max": 60 * MIB,
            "a/b/memory.current": 10 * MIB,
            "a/b/c/memory.max": "max",
            "a/b/c/memory.current": 10 * MIB,
        },
    )
    free = free_memory(proc(tmp_path, "0::/a/b/c"), groups)
    assert free.nbytes == 14 * MIB, "page cache that can be dropped counts as free"
    assert free.limited_by == f"control group {groups / 'a'}"


def test_version_1(tmp_path: Path) -> None:
    groups = tree(
        tmp_path / "cgroup",
        {
            "memory/job/memory.limit_in_bytes": 50 * MIB,
            "memory/job/memory.usage_in_bytes": 20 * MIB,
            "memory/job/memory.stat": f"total_inactive_file {5 * MIB}",
            "memory/memory.limit_in_bytes": 9223372036854771712,
            "memory/memory.usage_in_bytes": 20 * MIB,
        },
    )
    free = free_memory(proc(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/job\n0::/"), groups)
    assert free.nbytes == 35 * MIB
    assert free.limited_by == f"control group {groups / 'memory/job'}"


def test_inside_a_container_only_the_root_is_visible(tmp_path: Path) -> None:
    groups = tree(
        tmp_path / "cgroup",
        {"memory/memory.limit_in_bytes": 50 * MIB, "memory/memory.usage_in_bytes": 20 * MIB},
    )
    assert free_memory(proc(tmp_path, "4:memory:/docker/0123"), groups).nbytes == 30 * MIB


def test_the_machine_may_be_tighter_than_the_group(tmp_path: Path) -> None:
    groups = tree(tmp_path / "cgroup", {"memory.max": 50 * MIB, "memory.current": 0})
    free = free_memory(proc(tmp_path, "0::/", available_kib=1024), groups)
    assert free.nbytes == MIB


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    groups = tree(tmp_path / "cgroup", {"memory.max": 5 * MIB, "memory.current": 6 * MIB})
    assert free_memory(proc(tmp_path, "0::/"), groups).nbytes == 0


def test_nothing_to_read_is_no_error(tmp_path: Path) -> None:
    assert free_memory(tmp_path / "proc", tmp_path / "cgroup").limited_by == "nothing that could be read"


@example("", "²", "0")
@example("", "0", "²")
@given(st.text(max_size=60), st.text(max_size=30), st.text(max_size=30))
def test_nonsense_is_no_error(tmp_path_factory, cgroup: str, limit: str, usage: str) -> None:
    root = tmp_path_factory.mktemp("nonsense")
    groups = tree(root / "cgroup", {"memory.max": limit, "memory.current": usage})
    assert free_memory(proc(root, f"0::/{cgroup}".replace("\0", "")), groups).nbytes >= 0
