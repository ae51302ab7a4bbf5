"""Which thread compiles and loads kernels: the one that trains, before the others launch any."""

from __future__ import annotations

from pathlib import Path

from support.uninterpreted import run_uninterpreted


def test_no_thread_but_the_training_one_compiles_or_loads(tmp_path: Path) -> None:
    """By triton's own launches, with a stand-in for its driver; what is loaded was compiled first."""
    found, _ = run_uninterpreted("prepared.py", tmp_path)
    assert found["launched"] > 300, "the threads launched nothing"
    assert found["late"] == [], f"{len(found['late'])} kernels were loaded by other threads"
    assert found["early"] == 10 + 6, "five kernels a dtype; then four, and those of 2-byte words are there"
