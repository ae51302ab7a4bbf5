"""Memory, age of samples and time of a step whose inputs are prepared all at its start, or shortly before use.

There are one rank and 32 microbatches of 4 MiB. A rollout server makes a sample every 20 ms; the trainer takes 5 ms to
prepare one and 30 ms to train on it. Server and training are *emulated* by sleeping. A sample's age runs from when it
was made to its use.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from queue import Queue

import pytest
import torch

from odc.microbatch import LazyMicrobatches, input_figures
from odc.trace import recorder

MICROBATCHES, NBYTES = 32, 4 << 20
MAKE_S, PREPARE_S, COMPUTE_S = 0.02, 0.005, 0.03


def rollouts(room: int) -> Iterator[float]:
    """Times at which samples were made by a server that is at most `room` samples ahead of the one that is pulled."""
    made: Queue[float] = Queue(room)

    def serve() -> None:
        for _ in range(MICROBATCHES):
            time.sleep(MAKE_S)
            made.put(time.monotonic())

    threading.Thread(target=serve, daemon=True).start()
    for _ in range(MICROBATCHES):
        yield made.get()


def prepare(made: float) -> torch.Tensor:
    time.sleep(PREPARE_S)
    return torch.ones(NBYTES, dtype=torch.uint8)


def step(prefetch: int | None) -> float:
    recorder().clear()
    begin = time.perf_counter()
    with LazyMicrobatches(rollouts(1), prepare, prefetch=prefetch, born=lambda made: made) as microbatches:
        for _ in microbatches:
            time.sleep(COMPUTE_S)
    return time.perf_counter() - begin


@pytest.mark.parametrize("prefetch", [None, 0, 1, 4])
def test_inputs(note, prefetch: int | None):
    step(prefetch)  # warms up
    eager = step(None)
    seconds = eager if prefetch is None else step(prefetch)
    figures = input_figures(recorder().spans())
    note(
        prefetch="all (eager)" if prefetch is None else str(prefetch),
        step_s=seconds,
        of_eager=seconds / eager,
        peak_MiB=figures.peak_bytes / 2**20,
        mean_age_ms=figures.mean_age_s * 1e3,
        max_age_ms=figures.max_age_s * 1e3,
        waited_s=figures.waited_s,
    )
