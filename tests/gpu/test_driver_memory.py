"""Device memory that processes pass to each other, and what ends with its last view."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.device import EMULATED, cuda_group
from support.ranks import RankPool

from odc.doctor import gpu
from odc.memory import device_links, driver_memory
from odc.memory.driver_calls import DriverError

NBYTES = (3 << 20) + 100
TESTS = Path(__file__).parents[1]


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def free_bytes(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


def test_a_mapping_is_the_same_memory(device: torch.device) -> None:
    made, fd = driver_memory.allocate(NBYTES, device)
    assert not os.get_inheritable(fd)
    mapped = driver_memory.map_shared(fd, NBYTES, device)
    os.close(fd)
    for one in (made, mapped):
        assert (one.shape, one.dtype, one.device) == ((NBYTES,), torch.uint8, device)
    assert made.data_ptr() != mapped.data_ptr()
    made.fill_(7)
    assert bool((mapped == 7).all())
    mapped[-4:].view(torch.float32).fill_(1.5)
    assert made[-4:].view(torch.float32).item() == 1.5


def test_memory_ends_with_its_last_view_and_not_before(device: torch.device) -> None:
    before = free_bytes(device)
    made, fd = driver_memory.allocate(NBYTES, device)
    mapped = driver_memory.map_shared(fd, NBYTES, device)
    os.close(fd)
    view = made[8:16].view(torch.int64)
    del made
    assert free_bytes(device) <= before - NBYTES
    view.fill_(5)
    assert mapped[8:16].view(torch.int64).tolist() == [5]
    part = mapped[8:]
    del mapped, view
    part.fill_(6)
    assert int(part.min()) == 6
    del part
    assert free_bytes(device) == before


def test_the_end_of_a_view_waits_for_the_device_and_lets_other_threads_run(device: torch.device) -> None:
    made, fd = driver_memory.allocate(NBYTES, device)
    os.close(fd)
    stream, written = torch.cuda.Stream(device), torch.cuda.Event()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        made.fill_(1)
        written.record(stream)
    ran, ending = 0, threading.Event()

    def run() -> None:
        nonlocal ran
        while not ending.wait(0.001):
            ran += not written.query()

    thread = threading.Thread(target=run)
    thread.start()
    assert not written.query(), "the device was not kept busy"
    ran = 0
    del made
    assert written.query(), "its memory was taken from work that the device had still to do"
    ending.set()
    thread.join()
    assert ran, "the thread that lets go of memory kept all others from running"


def test_a_forked_child_lets_go_without_the_driver(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot call CUDA, and its copy of a view must not end the mapping of its parent."""
    made, fd = driver_memory.allocate(NBYTES, device)
    os.close(fd)
    made.fill_(3)
    calls: list[str] = []
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(driver_memory, "call", lambda function, *args: calls.append(function))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: calls.append("synchronize"))
        del made
        os._exit(len(calls))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bool((made == 3).all())


@pytest.mark.parametrize("captured", [True, False])
def test_what_cannot_be_waited_for_stays_mapped(
    captured: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken device may still write there, and a wait would end a capture of this thread's."""
    made, fd = driver_memory.allocate(NBYTES, device)
    os.close(fd)
    calls: list[str] = []

    def fail(*_: object) -> None:
        calls.append("synchronize")
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
        patch.setattr(torch.cuda, "synchronize", fail)
        patch.setattr(driver_memory, "call", lambda function, *args: calls.append(function))
        del made
    assert calls == ([] if captured else ["synchronize"])


CALLS = ["cuMemExportToShareableHandle", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]


@pytest.mark.parametrize("refused", CALLS)
def test_a_refusal_in_the_midst_leaves_nothing(
    refused: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, open_before, before = driver_memory.call, descriptors(), free_bytes(device)

    def refusing(function: str, *args: object) -> Any:
        if function == refused:
            raise DriverError(function, _Refusal(1))
        return call(function, *args)

    monkeypatch.setattr(driver_memory, "call", refusing)
    with pytest.raises(DriverError, match=refused):
        driver_memory.allocate(NBYTES, device)
    assert (descriptors(), free_bytes(device)) == (open_before, before)


class _Refusal(int):
    name = "CUDA_ERROR_INVALID_VALUE"


def test_what_is_no_device_memory_is_refused(device: torch.device, tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file, pytest.raises(DriverError, match="cuMemImportFromShareableHandle"):
        driver_memory.map_shared(file.fileno(), NBYTES, device)


OTHER = f"""
import os, socket, sys
sys.path.insert(0, {str(TESTS)!r})
import torch
from support.device import own_device
from odc.doctor import gpu
from odc.memory import driver_memory

passing = socket.socket(fileno=int(sys.argv[2]))
device = own_device(0)
"""
MAKER = (
    OTHER
    + """
made, fd = driver_memory.allocate(int(sys.argv[1]), device)
made.fill_(9)
torch.cuda.synchronize()
socket.send_fds(passing, [b"made"], [fd])
passing.recv(1)
"""
)
READER = (
    OTHER
    + """
_, (fd,), _, _ = socket.recv_fds(passing, 4, 1)
seen = driver_memory.map_shared(fd, int(sys.argv[1]), device, writable=False)
print("read", int(seen.sum()), flush=True)
seen.fill_(1)
torch.cuda.synchronize()
print("written", flush=True)
"""
)


def start(program: str) -> tuple[subprocess.Popen[str], socket.socket]:
    here, there = socket.socketpair()
    with there:
        command = [sys.executable, "-c", program, str(NBYTES), str(there.fileno())]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[there.fileno()]), here


def test_memory_outlives_the_process_that_made_it(device: torch.device) -> None:
    maker, passing = start(MAKER)
    with passing:
        _, (fd,), _, _ = socket.recv_fds(passing, 4, 1)
        maker.send_signal(signal.SIGKILL)
        assert maker.wait(60) == -signal.SIGKILL
    mapped = driver_memory.map_shared(fd, NBYTES, device)
    os.close(fd)
    assert bool((mapped == 9).all())
    maker.communicate()


def test_a_reader_cannot_write(device: torch.device) -> None:
    """An emulated device ends the process, a real one every later use of CUDA in it."""
    made, fd = driver_memory.allocate(NBYTES, device)
    made.fill_(9)
    torch.cuda.synchronize(device)
    reader, passing = start(READER)
    with passing:
        socket.send_fds(passing, [b"made"], [fd])
        os.close(fd)
        output, _ = reader.communicate(timeout=240)
    assert output == f"read {9 * NBYTES}\n" and reader.returncode != 0
    assert not EMULATED or reader.returncode == -signal.SIGSEGV
    assert bool((made == 9).all())


def on_devices_of_their_own(rank: int, world: int) -> tuple[bool, list[float]]:
    """What a rank computes from its own memory and a peer's, which torch would not mix on two devices."""
    with cuda_group("devices", tuple(range(world)), rank, 60.0) as heap:
        heap.allocate("data", 64)
        heap.seal()
        peer = heap.tensor(1 - rank, "data", torch.float32)
        assert peer.device == heap.device == torch.device("cuda", rank)
        mine = heap.tensor(rank, "data", torch.float32)
        mine.fill_(1.0 + rank)
        torch.cuda.synchronize()
        torch.distributed.barrier()
        both = (mine + peer).tolist()
        torch.distributed.barrier()
        return device_links.is_gpudirect_capable(mine) and device_links.is_gpudirect_capable(peer), both


@pytest.mark.parametrize("gpudirect", [True, False])
def test_a_peers_memory_is_on_this_device_and_network_cards_reach_it(gpudirect: bool, device: torch.device) -> None:
    if not EMULATED and torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    if not EMULATED and not gpudirect:
        pytest.skip("asks a device without GPUDirect")
    pool = RankPool(2, (("EMULATED_DEVICES", "2"), ("EMULATED_GPUDIRECT", str(int(gpudirect)))))
    try:
        found = pool.run(on_devices_of_their_own, timeout=240)
    finally:
        pool.close()
    assert [both for _, both in found] == [[3.0] * 16] * 2
    assert not EMULATED or [capable for capable, _ in found] == [gpudirect] * 2


def test_the_doctor_finds_memory_for_peers(device: torch.device) -> None:
    assert re.match(r"made and mapped( on \d+ devices, by all of them)?; ", gpu.peer_memory())
