"""Twin of odc/server/presence.py."""

from __future__ import annotations

import json
import subprocess
import sys

import torch.distributed as dist

from odc.server import presence
from odc.server.presence import announce_process, process_of


def test_a_rank_that_has_not_said_is_unknown() -> None:
    assert process_of(dist.HashStore(), 3) is None


def test_the_own_process_is_seen_alive() -> None:
    store = dist.HashStore()
    announce_process(store, 0)
    handle = process_of(store, 0)
    assert handle is not None
    assert handle.alive()
    handle.close()


def test_a_process_that_has_ended_is_seen_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    store = dist.HashStore()
    store.set("odc/process/1", json.dumps([child.pid, presence._namespace()]))
    handle = process_of(store, 1)
    assert handle is not None
    assert not handle.alive()
    handle.close()


def test_a_process_id_of_another_host_is_not_looked_at() -> None:
    store = dist.HashStore()
    store.set("odc/process/1", json.dumps([1, "another host"]))
    assert process_of(store, 1) is None
