"""Where a job computes: what is refused before ranks start, and which arms a comparison on CUDA may have."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch
from support.tiny_job import tiny_job

from odc.errors import ConfigError, UnsupportedError
from odc.experiments import device
from odc.experiments.compare import CompareConfig, run_arms
from odc.experiments.config import JobConfig
from odc.experiments.device import backend, settle, take_device
from odc.experiments.preflight import preflight
from odc.experiments.text.step import TextWorkload


def devices(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """As if this machine had `count` CUDA devices."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def job(tmp_path: Path, **changes: object) -> JobConfig:
    return tiny_job(tmp_path, device="cuda", **changes)


def test_without_a_device_the_job_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, 0)
    with pytest.raises(UnsupportedError, match=r"no CUDA device here \(`odc doctor --need cuda`"):
        preflight(job(tmp_path))


def test_collectives_need_a_device_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, 2)
    preflight(job(tmp_path, arm="fsdp2"))
    for arm in ("odc", "odc-equal"):
        preflight(job(tmp_path, arm=arm, ranks=4))
    with pytest.raises(ConfigError, match="arm fsdp2 uses NCCL.*4 ranks share 2 here. Take --ranks 2, or only arms"):
        preflight(job(tmp_path, arm="fsdp2", ranks=4))
    preflight(job(tmp_path, export=str(tmp_path / "whole")))
    with pytest.raises(ConfigError, match="export: a whole model is gathered by NCCL.*4 ranks share 2 here"):
        preflight(job(tmp_path, ranks=4, export=str(tmp_path / "whole")))
    devices(monkeypatch, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match="4 ranks share 1 here .*CUDA_VISIBLE_DEVICES, must show it all"):
        preflight(job(tmp_path, arm="fsdp2", ranks=4))
    compared = CompareConfig(TextWorkload(job(tmp_path, ranks=4, output=str(tmp_path / "out"))))
    with pytest.raises(ConfigError, match="arm fsdp2 uses NCCL"):
        run_arms(compared, print)


def test_a_process_group_for_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, 2)
    assert backend("cuda", 2) == "cpu:gloo,cuda:nccl"
    assert backend("cuda", 3) == "gloo", "NCCL refuses ranks that share a device"
    assert backend("cpu", 2) == "gloo"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert backend("cuda", 4) == "cpu:gloo,cuda:nccl", "the others are on another host"


def test_ranks_take_devices_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, 2)
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for rank in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert take_device("cuda") == torch.device("cuda", rank)
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert take_device("cuda") == torch.device("cuda", 0)
    assert taken == [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cuda", 0)]
    assert take_device("cpu") == torch.device("cpu") and len(taken) == 3
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: f"GPU {number}")
    assert device.device_names() == ["GPU 0", "GPU 1"], "as a comparison's figures name them"
    settle(torch.device("cpu"))


_SIZE = 64 << 20


def held_and_after() -> tuple[int, int]:
    """Bytes more than before, while touched memory is there and once it is gone."""
    device.trim()
    before = device.held_bytes()
    with mmap.mmap(-1, _SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(b"x" * _SIZE)
        held = device.held_bytes() - before
    assert device.peak_bytes() > before + 0.9 * _SIZE
    return held, device.held_bytes() - before


def test_touched_memory_is_held_and_peaks() -> None:
    """A page that processes share counts by their number, which others change: some measurement is undisturbed."""
    found = [held_and_after()]
    while not (0.9 * _SIZE < found[-1][0] < 1.5 * _SIZE and found[-1][1] < 0.2 * _SIZE):
        assert len(found) < 5, found
        found.append(held_and_after())


def peak_of_a_child() -> int:
    """Bytes by which a child's peak is above what it holds, while it holds `_SIZE` in common with this process."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            device.reset_peak()
            held = device.held_bytes()
            os.write(writes, str(device.peak_bytes() - held).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as answer:
        found = int(answer.read())
    os.waitpid(child, 0)
    return found


def test_the_peak_divides_what_processes_share() -> None:
    with mmap.mmap(-1, _SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(b"x" * _SIZE)
        found = [peak_of_a_child()]
        while not abs(found[-1]) < 0.25 * _SIZE:  # others may change how much is shared
            assert len(found) < 5, found
            found.append(peak_of_a_child())


def test_a_reset_forgets_the_peak() -> None:
    with mmap.mmap(-1, _SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block.write(b"x" * _SIZE)
        high = device.peak_bytes()
    device.reset_peak()
    assert device.peak_bytes() < high - 0.5 * _SIZE
