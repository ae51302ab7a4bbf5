"""What ranks announce in the job's store: processes that are seen to end, and why a rank failed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch.distributed as dist

from odc.net import JobStore, announced
from odc.net.announced import announce_failure, announce_process, failure, process_of


def test_a_rank_that_has_announced_nothing_is_unknown() -> None:
    assert process_of(JobStore(dist.HashStore(), 20.0, 7), 3) is None


def test_a_living_process_is_seen_alive() -> None:
    one = JobStore(dist.HashStore(), 20.0, 7)
    announce_process(one, 0)
    handle = process_of(one, 0)
    assert handle is not None
    assert handle.alive()
    assert process_of(one, 0) is handle, "a poll must not open the process again and again"


def test_a_process_that_has_ended_is_seen_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    one = JobStore(dist.HashStore(), 20.0, 7)
    one.set("odc/process/1", json.dumps([child.pid, announced._namespace()]))
    handle = process_of(one, 1)
    assert handle is not None
    assert not handle.alive()


def test_a_process_id_of_another_host_is_not_taken() -> None:
    one = JobStore(dist.HashStore(), 20.0, 7)
    one.set("odc/process/1", json.dumps([1, "another host"]))
    assert process_of(one, 1) is None
    one.delete_key("odc/process/1")
    one.set("odc/process/1", json.dumps([os.getpid(), announced._namespace()]))
    assert process_of(one, 1) is None, "a poll must not ask the store again and again"


def test_a_failure_is_announced_with_its_reason() -> None:
    one = JobStore(dist.HashStore(), 20.0, 7)
    assert failure(one) is None
    announce_failure(one, "ValueError: no such tokenizer", 5)
    assert failure(one) == (5, "ValueError: no such tokenizer")
