from __future__ import annotations

import os
import platform

import torch

from odc.experiments.machine import machine, steal, versions


def test_facts_are_this_machines_and_hold_no_names() -> None:
    facts = machine()
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert isinstance(facts["memory_bytes"], int) and facts["memory_bytes"] > 1 << 28
    assert platform.node() not in str(facts)
    assert versions()["torch"] == torch.__version__
    assert versions()["python"] == platform.python_version()


def test_steal_is_the_share_of_all_cores_time_that_was_taken() -> None:
    assert steal((100, 1000), (130, 1200)) == 0.15
    assert steal((100, 1000), (100, 1200)) == 0.0
    assert steal(None, (1, 2)) is None and steal((1, 2), None) is None
    assert steal((1, 2), (1, 2)) is None, "no time has passed"
