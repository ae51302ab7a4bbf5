"""What a crew on CUDA needs, without CUDA: a process of its own."""

from __future__ import annotations

import os

import pytest

from odc.bench import crew


def test_apart_is_another_process_each_time() -> None:
    first, second = crew.apart(os.getpid), crew.apart(os.getpid)
    assert len({first, second, os.getpid(), crew.here(os.getpid)}) == 3


def test_apart_raises_what_the_function_raises() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        crew.apart(int, "no number")


def test_a_second_crew_on_cuda_in_one_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ranks would wait for each other for ever: torch numbers exchanges of symmetric memory by process."""
    monkeypatch.setattr(crew, "_on_cuda", [2])
    with pytest.raises(RuntimeError, match="already; run each in one of its own"):
        crew.Crew(4, device="cuda")
