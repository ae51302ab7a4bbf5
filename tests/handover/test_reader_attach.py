"""How a reader attaches by its weight handle: what it may map, what it is refused, and what it leaves behind."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import mmap
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forked import answer_of_child
from support.handover_jobs import Job, changed
from support.waiting import until

from odc.errors import LayoutMismatchError, OdcError, PeerLostError, UnsupportedError
from odc.handover import Reader, reader
from odc.handover.handle import WeightHandle
from odc.net.requests import ask
from odc.runtime import reading


def mapped() -> list[str]:
    """Rights of every mapping of a heap group's memory in this process."""
    gc.collect()  # what earlier tests left
    return [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if "odc.group" in line]


def test_the_memory_is_mapped_without_the_right_to_write(job: Job) -> None:
    before = Counter(mapped())
    with Reader(job.handle):
        assert Counter(mapped()) - before == {"r--s": 2}


def test_a_weight_handle_opens_nothing_but_reading(job: Job) -> None:
    owner = job.owners[0]
    answer = ask(owner.address, {"op": "attach", "root": "group", "token": owner.token}, 60.0)
    assert answer.reply == {"error": "wrong token"} and not answer.fds


def test_a_reader_cannot_write_through_what_it_is_handed(job: Job) -> None:
    owner = job.owners[0]
    request = {"op": "read", "root": "group", "token": owner.token}
    for _ in range(2):  # the rank keeps the descriptor for the next reader
        answer = ask(owner.address, request, 60.0)
        (fd,) = answer.fds
        size = answer.reply["nbytes"]
        try:
            assert fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            mmap.mmap(fd, size, prot=mmap.PROT_READ).close()
            for protection in (mmap.PROT_WRITE, mmap.PROT_READ | mmap.PROT_WRITE):
                with pytest.raises(PermissionError):
                    mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=protection)
            for write, *arguments in (os.write, b"x"), (os.pwrite, b"x", 0), (os.ftruncate, 0):
                with pytest.raises(OSError, match=f"Errno ({errno.EBADF}|{errno.EINVAL})"):
                    write(fd, *arguments)
        finally:
            os.close(fd)


def test_a_wrong_token(job: Job) -> None:
    owners = json.loads(job.handle)["owners"]
    owners[1]["token"] = "0" * 32
    with pytest.raises(PeerLostError, match="rank 13: wrong token"):
        Reader(changed(job.handle, owners=owners))


def test_memory_of_another_size_than_was_answered_is_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """To map it would end the reader with a bus error at its first look."""
    ask_member = reading.ask_member

    def exchanged(*args: Any, **options: Any) -> Any:
        answer = ask_member(*args, **options)
        for fd in answer.fds:
            os.close(fd)
        answer.fds[:] = [os.memfd_create("empty")]
        return answer

    monkeypatch.setattr(reading, "ask_member", exchanged)
    with pytest.raises(LayoutMismatchError, match="rank 10: its heap is not laid out as the weight handle says"):
        Reader(job.handle)


def test_a_weight_handle_of_another_run() -> None:
    with Job() as job:
        handle = job.handle
        with pytest.raises(LayoutMismatchError, match="rank 10: its heap is not laid out as the weight handle says"):
            Reader(changed(handle, digest="0" * 64))
    with pytest.raises(PeerLostError, match="rank 10: its server does not answer"):
        Reader(handle)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": "odc-weight-handle-1"}', '{"schema": "odc-weight-handle-4"}']
)
def test_no_weight_handle_at_all(text: str) -> None:
    with pytest.raises(OdcError, match="this is not a weight handle"):
        Reader(text)


def test_weights_on_a_gpu_need_a_process_that_maps_it_or_ranks_that_listen(job: Job) -> None:
    with pytest.raises(UnsupportedError, match=r"rank 10 has its weights on a GPU, .*; set Settings\(address=...\)"):
        Reader(changed(job.handle, device_bytes=64), device="cpu")


def test_a_rank_that_hands_over_no_device_memory_is_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose weights lie elsewhere than the handle says."""
    monkeypatch.setattr(reader, "_gpu", lambda asked: torch.device("cuda", 0))
    with Reader(job.handle):  # the rank keeps a descriptor for the next reader
        pass
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(LayoutMismatchError, match="rank 10: its heap is not laid out as the weight handle says"):
        Reader(changed(job.handle, device_bytes=64))
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)  # the daemon closes its end when it comes to it


def test_weight_handles_survive_the_journey(job: Job) -> None:
    assert WeightHandle.from_json(job.handle).to_json() == job.handle


@pytest.mark.parametrize("wrong", [{"tries": 0}, {"timeout_s": 0.0}])
def test_wrong_options(job: Job, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tries must be 1 or more"):
        Reader(job.handle, **wrong)


def test_nothing_stays_open(job: Job) -> None:
    with Reader(job.handle):
        pass
    gc.collect()
    maps, files = mapped(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with Reader(job.handle):
            pass
    until(lambda: mapped() <= maps and len(os.listdir("/proc/self/fd")) <= files)


def test_a_forked_child_cannot_read_by_its_parents_reader_but_by_its_own(job: Job) -> None:
    """What it inherits reads as zeros, as of ranks that have died."""
    job.publish([1.0, 2.0])
    with Reader(job.handle) as source:
        message = answer_of_child(lambda: f"read {source.read()}")
        assert message.startswith("UnsupportedError: reader: a process that was forked"), message
        assert answer_of_child(lambda: f"read {Reader(job.handle).read().version}") == "read 1"
        assert source.read().version == 1


def test_a_reader_that_was_closed_says_so(job: Job) -> None:
    job.publish([1.0, 2.0])
    source = Reader(job.handle)
    source.close()
    for use in (source.read, lambda: source.version):
        with pytest.raises(ValueError, match="this reader is closed"):
            use()
