"""The stand-in for a device counts what a unit asks for; figures of it are never asserted."""

from __future__ import annotations

from pathlib import Path

from support.uninterpreted import run_uninterpreted


def test_what_each_call_asks_a_device_for(tmp_path: Path) -> None:
    """Of whose matrices go by the copy engine, and whose norms a kernel takes."""
    asked, _ = run_uninterpreted("asked.py", tmp_path)
    assert asked == {
        "fetch": {"launches": 2, "batches": 1, "waits": 0, "memsets": 0},  # the small pieces, and this rank's shard
        "fetch into new memory": {"launches": 2, "batches": 1, "waits": 0, "memsets": 0},
        "push": {"launches": 2, "batches": 1, "waits": 2, "memsets": 0},  # the small pieces, and this rank's part
        "drain": {"launches": 1, "batches": 0, "waits": 0, "memsets": 0},
        "publish": {"launches": 1, "batches": 0, "waits": 1, "memsets": 3},  # of all units; a memset each
        "stale check": {"launches": 1, "batches": 0, "waits": 0, "memsets": 0},
    }
