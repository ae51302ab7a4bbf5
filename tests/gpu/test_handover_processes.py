"""Processes that read weights on a device: what they may do to it, what they hold, and what the end of one means."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.device import EMULATED, own_device
from support.handover_jobs import end, publishing_job, read_for_ever
from support.rank_worker import report
from support.ranks import spawn_ranks
from support.waiting import until

from odc.errors import PeerLostError, UnsupportedError
from odc.handover import Reader
from odc.memory import driver_memory
from odc.memory.driver_calls import DriverError

TESTS = Path(__file__).parents[1]


WRITE = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import torch
from support.device import own_device
from odc.handover import Reader

own_device(0)
with Reader(sys.argv[1], tries=100_000) as reader:
    reader.read()
    print("read", flush=True)
    reader._sources[0]._data.fill_(1)
    torch.cuda.synchronize()
    print("written", flush=True)
"""


def test_a_write_through_a_readers_map_faults(device: torch.device, tmp_path: Path) -> None:
    """An emulated device ends the process, a real one every later use of CUDA in it. The job goes on."""
    with publishing_job(tmp_path, device="cuda") as (running, text), Reader(text, tries=100_000) as watch:
        writer = subprocess.run([sys.executable, "-c", WRITE, text], capture_output=True, text=True, timeout=240)
        assert writer.stdout == "read\n" and writer.returncode != 0, writer
        assert writer.returncode == -signal.SIGSEGV if EMULATED else "CUDA error" in writer.stderr, writer
        newest = watch.version
        number, tensors = watch.read(at_least=newest + 5)
        assert all(bool((one == number).all()) for one in tensors.values())
        end(running, tmp_path)


def descriptors(pid: int | str = "self") -> Counter[str]:
    """What the open descriptors of a process are of, without those that a driver opens for itself."""
    found = Counter[str]()
    for fd in list(Path(f"/proc/{pid}/fd").iterdir()):
        try:
            what = os.readlink(fd).split(":[")[0]
        except FileNotFoundError:  # closed meanwhile, as is that of the listing
            continue
        found[what] += not what.startswith("/dev/nvidia")
    return +found


def test_a_reader_holds_mappings_as_long_as_it_lives_and_no_descriptor_of_memory(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, calls = driver_memory.call, Counter[str]()

    def counted(function: str, *args: object) -> Any:
        calls[function] += 1
        return call(function, *args)

    with publishing_job(tmp_path, device="cuda") as (running, text):
        with Reader(text, tries=100_000) as reader:
            reader.read()  # what CUDA opens for good
        monkeypatch.setattr(driver_memory, "call", counted)
        before = descriptors()
        for times in range(1, 3):
            with Reader(text, tries=100_000) as reader:
                reader.read()
                held = descriptors() - before  # of the ranks' processes, and what a driver may keep
                assert held["anon_inode"] == 2 and not any("memfd:odc" in name for name in held), held
                assert (calls["cuMemMap"], calls["cuMemUnmap"]) == (2 * times, 2 * times - 2)
                rights = [
                    line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if "odc." in line
                ]
                assert rights == ["r--s"] * 2, "the words are mapped for reading alone"
                members = [*reader._sources]  # as a traceback may keep them
            assert descriptors() == before
            with pytest.raises(PeerLostError, match="the memory of rank 0 is mapped no more"):
                members[0].copy(0, torch.empty(8, dtype=torch.uint8))
            del members  # which keep the words
            assert calls["cuMemMap"] == calls["cuMemUnmap"] == calls["cuMemAddressFree"] == 2 * times
        end(running, tmp_path)


def test_memory_that_a_device_cannot_map_is_named(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(function: str, *args: object) -> None:
        raise DriverError(function, _Refusal(101))

    with publishing_job(tmp_path, device="cuda") as (running, text):
        before = descriptors()
        with monkeypatch.context() as patched:
            patched.setattr(driver_memory, "call", refusing)
            with pytest.raises(
                UnsupportedError, match=rf"rank 0: {device} cannot map its memory: .*odc doctor"
            ) as caught:
                Reader(text)
        assert caught.value.culprit == 0 and descriptors() == before
        end(running, tmp_path)


class _Refusal(int):
    name = "CUDA_ERROR_INVALID_DEVICE"


def read_without_pause(rank: int, world: int, text: str) -> None:
    own_device(0)
    with Reader(text, tries=10**9) as source:
        source.read()
        report("reading")
        read_for_ever(source)


def test_a_killed_reader_leaves_nothing_and_holds_up_no_rank(device: torch.device, tmp_path: Path) -> None:
    with publishing_job(tmp_path, device="cuda") as (running, text), Reader(text) as watch:
        until(lambda: watch.version >= 5, "versions in which both ranks have mapped each other", 300.0)
        before = [descriptors(pid) for pid in running.pids]  # with what is still to be closed of the reader's arrival

        def more() -> list[Counter[str]]:
            return [descriptors(pid) - one for pid, one in zip(running.pids, before, strict=True)]

        with spawn_ranks(1, read_without_pause, text) as loop:
            loop.until_reported(1)
            os.kill(loop.pids[0], signal.SIGKILL)
            loop.wait()
        newest = watch.version
        until(lambda: watch.version >= newest + 20, "20 more versions", 300.0)
        until(lambda: not any(more()), lambda: f"descriptors of ranks to be closed: {more()}", 60.0)
        end(running, tmp_path)


def test_a_killed_trainer_is_named_while_it_is_read_from(device: torch.device, tmp_path: Path) -> None:
    with (
        publishing_job(tmp_path, device="cuda") as (running, text),
        Reader(text, tries=10**9, timeout_s=3600.0) as reader,
        ThreadPoolExecutor(1) as thread,
    ):
        reader.read()
        going = thread.submit(read_for_ever, reader)
        running.kill(1)
        error = going.exception(600.0)
        assert isinstance(error, PeerLostError) and error.culprit == 1 and "rank 1 died" in str(error), error


def test_a_process_that_does_not_map_gpus_is_refused_where_no_rank_listens(
    device: torch.device, tmp_path: Path
) -> None:
    with publishing_job(tmp_path, device="cuda") as (running, text):
        why = r"rank 0 has its weights on a GPU, which this process does not map .*; set Settings\(address=...\)"
        with pytest.raises(UnsupportedError, match=why):
            Reader(text, device="cpu")
        end(running, tmp_path)
