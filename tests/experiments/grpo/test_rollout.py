"""The feed of samples that a rollout draws for the ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from odc.experiments.grpo.rollout import SampleFeed


def test_samples_that_are_held_twice_are_collected_once() -> None:
    """A checkpoint and a kept step both hold those of the next step: there is one answer to wait for."""
    feed: Any = SampleFeed.__new__(SampleFeed)
    collected = list[int]()

    def answer(step: int) -> tuple[int, list[Any]]:
        collected.append(step)
        return 4, []

    feed._config, feed._held, feed._collected = SimpleNamespace(lag=1, steps=9), None, answer
    assert feed.hold(5) == feed.hold(5) == {"version": 4, "samples": []}
    assert collected == [5]
