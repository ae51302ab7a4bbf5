from __future__ import annotations

import os
import platform

import torch

from odc.train.machine import machine, versions


def test_facts_are_this_machines_and_name_nobody() -> None:
    facts = machine()
    assert facts["cores"] == len(os.sched_getaffinity(0))
    assert isinstance(facts["memory_bytes"], int) and facts["memory_bytes"] > 1 << 28
    assert platform.node() not in str(facts)
    assert versions()["torch"] == torch.__version__
    assert versions()["python"] == platform.python_version()
