"""What recording one `add`, one `span` and all spans of a minibatch costs, as shares of a step.

The minibatch has 4 microbatches of 24 units; each unit has a fetch in forward, a fetch and a push in backward, and the
same again from the background threads. Read `min_ns` where the machine is busy with something else.
"""

from __future__ import annotations

from statistics import median

import pytest

from odc.trace import FETCH, OPTIMIZER, PUSH, Recorder

CALLS = 1000
MICROBATCHES, UNITS = 4, 24


def adds(recorder: Recorder) -> None:
    for _ in range(CALLS):
        recorder.add(FETCH, 0, unit="layers.1", peer=3, nbytes=1 << 20)


def disabled_adds(recorder: Recorder) -> None:
    recorder.enabled = False
    adds(recorder)


def clock_reads(recorder: Recorder) -> None:
    for _ in range(CALLS):
        recorder.now()


def spans(recorder: Recorder) -> None:
    for _ in range(CALLS):
        with recorder.span(FETCH, unit="layers.1", peer=3, nbytes=1 << 20):
            pass


def minibatch(recorder: Recorder) -> None:
    with recorder.window(0):
        for index in range(MICROBATCHES):
            with recorder.microbatch(index):
                for _ in range(UNITS):
                    for category in (FETCH, FETCH, PUSH):
                        recorder.add(category, recorder.now(), unit="layers.1", nbytes=1 << 20)
                        recorder.add(category, recorder.now(), unit="layers.1", nbytes=1 << 20, lane="background")
    with recorder.span(OPTIMIZER):
        pass


@pytest.mark.parametrize(
    ("work", "calls"), [(clock_reads, CALLS), (adds, CALLS), (disabled_adds, CALLS), (spans, CALLS), (minibatch, 1)]
)
def test_cost(benchmark, note, work, calls: int):
    recorder = Recorder()

    def fresh() -> tuple[tuple[Recorder], dict[str, object]]:
        recorder.clear()
        return (recorder,), {}

    benchmark.pedantic(work, setup=fresh, rounds=400, warmup_rounds=10)
    seconds = [each / calls for each in benchmark.stats.stats.data]
    note(
        what=work.__name__.removesuffix("s").replace("_", " "),
        spans=len(recorder.spans()) // calls,
        min_ns=min(seconds) * 1e9,
        median_ns=median(seconds) * 1e9,
        of_1ms_step=f"{median(seconds) / 1e-3:.3%}",
        of_100ms_step=f"{median(seconds) / 100e-3:.5%}",
    )
