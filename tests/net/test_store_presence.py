"""What ranks say of themselves in the job's store."""

from __future__ import annotations

import json
import subprocess
import sys

import torch.distributed as dist

from odc.net import JobStore
from odc.net import store as job_store
from odc.net.store import announce_failure, announce_process, failure, process_of


def store() -> JobStore:
    return JobStore(dist.HashStore(), 20.0, 7)


def test_a_rank_that_has_not_said_is_unknown() -> None:
    assert process_of(store(), 3) is None


def test_the_own_process_is_seen_alive() -> None:
    one = store()
    announce_process(one, 0)
    handle = process_of(one, 0)
    assert handle is not None
    assert handle.alive()
    assert process_of(one, 0) is handle, "a poll must not open the process again and again"


def test_a_process_that_has_ended_is_seen_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    one = store()
    one.set("odc/process/1", json.dumps([child.pid, job_store._namespace()]))
    handle = process_of(one, 1)
    assert handle is not None
    assert not handle.alive()


def test_a_process_id_of_another_host_is_not_looked_at() -> None:
    one = store()
    one.set("odc/process/1", json.dumps([1, "another host"]))
    assert process_of(one, 1) is None


def test_why_a_rank_ends_is_told() -> None:
    one = store()
    assert failure(one) is None
    announce_failure(one, "ValueError: no such tokenizer", 5)
    assert failure(one) == (5, "ValueError: no such tokenizer")
