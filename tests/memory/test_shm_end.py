"""The end of shared memory: it goes with the last view, with a killed rank, and not with a forked child."""

from __future__ import annotations

import gc
import os
import time
import uuid
from pathlib import Path

import pytest
import torch
from support.heaps import address, lone, mapped, pair, shm_group
from support.leaks import assert_nothing_left, memfds_of, processes_of, shared_files
from support.rank_worker import report
from support.ranks import spawn_ranks
from support.waiting import until

from odc.errors import OdcError
from odc.net.listener import list_listeners
from odc.ranks import worker

MIB = 1 << 20


def test_the_memory_goes_with_the_last_view() -> None:
    one, two = pair("views")
    view, words = two.tensor(0, "data", torch.float32), one.words(0, "flags")
    assert mapped("views") == 3 + 2  # three mappings, two descriptors
    one.close()
    two.close()
    del one, two
    gc.collect()
    assert mapped("views") == 2  # each in a mapping of its own
    bulk = words.as_tensor()
    del view, words
    gc.collect()
    bulk[0] = 5
    assert mapped("views") == 1
    del bulk
    gc.collect()
    assert mapped("views") == 0


def test_closing_before_sealing_and_after() -> None:
    heap = lone()
    heap.close()
    for use in (lambda: heap.allocate("a", 1), lambda: heap.seal()):
        with pytest.raises(OdcError):
            use()
    sealed = lone()
    sealed.allocate("a", 1)
    sealed.seal()
    sealed.close()
    sealed.close()
    with pytest.raises(OdcError, match="closed"):
        _ = sealed.fd


def test_fifty_cycles_leak_nothing() -> None:
    def cycle() -> None:
        one, two = pair("cycle", 100_000)
        one.tensor(1, "data", torch.uint8).fill_(1)
        two.words(0, "flags").store(0, 1)
        one.close()
        two.close()

    cycle()
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        cycle()
    until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
    assert not mapped("cycle")


# other processes --------------------------------------------------------------------------------------------------


def survive(rank: int, world: int, identity: str) -> list[str]:
    """Rank 1 is killed while rank 0 has its memory mapped."""
    with shm_group(identity, (0, 1), rank, 60.0) as heap:
        heap.allocate("flags", 64)
        heap.allocate("data", MIB)
        heap.seal()
        heap.words(rank, "flags").store(0, 1)
        peer = heap.tensor(1 - rank, "data", torch.uint8)
        peer.fill_(rank + 1)
        while heap.words(1 - rank, "flags").load(0) == 0:
            time.sleep(0.001)
        report("ready")
        while rank != 0 or address(identity, 1) in list_listeners(address(identity, 1)):
            time.sleep(0.01)
        assert int(peer[0]) == 1, "a dead rank's memory must stay readable"
        before = memfds_of(os.getpid())
    del heap, peer
    gc.collect()
    return before[:1] + memfds_of(os.getpid())


def test_kill_9_leaves_no_process_and_no_memory() -> None:
    before, held, identity = shared_files(), memfds_of(os.getpid()), uuid.uuid4().hex[:12]
    with spawn_ranks(2, survive, identity) as job:
        job.until_reported(1)
        job.kill(1)
        survivor, killed = job.wait()
    assert killed.exit_code == -9
    assert survivor.exit_code == 0, survivor.describe()
    assert len(survivor.value) == 1, "after close nothing of either rank's memory is held"
    assert_nothing_left(job.pids, before, held)
    assert not list_listeners(address(identity, 0)[:-1])


def fork_a_worker(rank: int, world: int, identity: str) -> None:
    """As a data loader does; the child lives on when the rank is killed."""
    with shm_group(identity, (0,), rank, 60.0) as heap:
        heap.allocate("flags", 64)
        heap.allocate("data", MIB)
        heap.seal()
        view, words = heap.tensor(0, "data", torch.int64), heap.words(0, "flags")
        view.fill_(7)
        words.store(0, 7)
        ready, done = os.pipe()
        pid = os.fork()
        if pid == 0:
            worker._reporter.close()  # or the test would wait for the child to end
            found = [memfds_of(os.getpid()), words.load(0), int(view.sum())]
            words.store(0, 8)  # into the child's own zeros
            view[0] = 8
            try:
                heap.tensor(0, "data", torch.int64)
            except OdcError as error:
                found.append(str(error))
            del view, words, heap
            gc.collect()
            Path(f"/proc/self/fd/{done}").write_text(repr(found))
            os.close(done)
            time.sleep(600)
            os._exit(0)
        os.close(done)
        with open(ready) as found:
            report((pid, eval(found.read()), words.load(0), int(view[0])))
        time.sleep(600)


def test_a_forked_child_holds_nothing_and_harms_nothing() -> None:
    identity, held_before = uuid.uuid4().hex[:12], memfds_of(os.getpid())
    with spawn_ranks(1, fork_a_worker, identity) as job:
        job.until_reported(1)
        child, (held, word, total, refusal), parents_word, parents_data = job.outcomes[0].reports[0]
        assert list_listeners(address(identity, 0)) == [address(identity, 0)]
        job.kill(0)
        job.wait()
        assert child in processes_of(job.pids), "the child must outlive its parent for this test to say something"
        assert not list_listeners(address(identity, 0)), "a child keeps its dead parent's address alive"
        os.kill(child, 9)
    assert (held, word, total) == ([], 0, 0)
    assert "closed" in refusal
    assert (parents_word, parents_data) == (7, 7)
    assert_nothing_left(job.pids, shared_files(), held_before)
