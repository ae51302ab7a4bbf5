"""Evaluation on ranks: padded against unpadded under FSDP2 and odc, and gathering results in order.

Run as `OMP_NUM_THREADS=1 python -m bench.evaluation --results bench/results` (about two minutes). Two tables:

* *Forwards*: compute is *emulated*, a request sleeps for as long as its length takes, LongAlign-like; parameters are
  fetched or gathered for real. Documents have one to eight requests each, of one length, which stay on one rank.
  `fsdp2, padded` deals documents out in turn and pads, and so does `odc, padded`. `odc` does not pad; `odc, by length`
  also evens out the ranks' work, whatever the counts. The arms run the same requests in turn, `--repeats` times.
* *Gathering*, measured: 10^5 small results are gathered in order into a function, in order into a list, and by
  `dist.gather_object`, which leaves them rank by rank. Memory is the most that Python holds beyond the rank's own
  results, taken in a separate run, because tracing it takes time.
"""

from __future__ import annotations

import time
import tracemalloc
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from bench.script import Script
from bench.slept import Model
from odc import Settings
from odc.arms import ARMS
from odc.balance import partition
from odc.bench.ranks import RankPool, held
from odc.bench.units import drop
from odc.eval import gather_results, run_requests, session
from odc.experiments.arms import shard_model
from odc.simulate.lengths import NAMED

#: (transport, padded, dealt by length)
WAYS: dict[str, tuple[str, bool, bool]] = {
    "fsdp2, padded": ("fsdp2", True, False),
    "odc, padded": ("odc", True, False),
    "odc": ("odc", False, False),
    "odc, by length": ("odc", False, True),
}


def documents(count: int, mean_s: float, seed: int) -> list[list[float]]:
    """Seconds of every request, by document."""
    generator = np.random.default_rng(seed)
    sizes, lengths = generator.integers(1, 9, count), NAMED["longalign"].draw(count, generator)
    unit = mean_s * sizes.sum() / (lengths * sizes).sum()
    return [[float(length * unit)] * int(size) for size, length in zip(sizes, lengths, strict=True)]


def owners(docs: list[list[float]], world: int, by_length: bool) -> list[int]:
    """The rank of every request."""
    of_document = partition([sum(doc) for doc in docs], world) if by_length else np.arange(len(docs)) % world
    return [int(owner) for owner, doc in zip(of_document, docs, strict=True) for _ in doc]


def evaluate(way: str, docs: list[list[float]]) -> tuple[float, int]:
    """Seconds that the evaluation took, and forwards of this rank. Every rank calls it."""
    transport, pad, by_length = WAYS[way]
    drop()
    torch.manual_seed(0)
    model, world = Model(), dist.get_world_size()
    shard_model(ARMS[transport], model, list(model.layers), Settings())  # type: ignore[index]
    ran = 0

    @torch.no_grad()
    def run(requests: list[float]) -> list[float]:
        nonlocal ran
        one = torch.zeros(1, 1, dtype=torch.int64)
        for request in requests:
            model(one, one, seconds=3 * request, microbatch=0)  # of which a forward sleeps one third
            ran += 1
        return requests

    seconds = [one for doc in docs for one in doc]
    with session(modules=[model]) as peers:
        run_requests([0.0] * world, run, peers)  # builds heaps and buffers
        ran = 0
        dist.barrier()
        begin = time.perf_counter()
        answers = run_requests(seconds, run, peers, owners=owners(docs, world, by_length), pad=pad)
        peers.meet("the end of the measurement")
        took = time.perf_counter() - begin
    assert answers in (None, seconds)
    held.module = model
    drop()
    return took, ran


def forward_rows(pool: RankPool, given: Any) -> list[dict[str, Any]]:
    """One row a way, with times relative to the first way's."""
    docs = documents(given.documents, given.seconds, given.seed)
    seconds = [one for doc in docs for one in doc]
    runs: dict[str, list[list[tuple[float, int]]]] = {way: [] for way in WAYS}
    for _ in range(given.repeats):
        for way in WAYS:
            runs[way].append(pool.each(evaluate, way, docs))
    took = {way: [max(one for one, _ in run) for run in some] for way, some in runs.items()}
    rows = []
    for way, times in took.items():
        counts = [count for _, count in runs[way][0]]
        rows.append(
            {
                "way": way,
                "forwards by rank": "+".join(map(str, counts)),
                "forwards": sum(counts),
                "s (median)": median(times),
                "times as fast as the first": median(a / b for a, b in zip(took["fsdp2, padded"], times, strict=True)),
                "share of the best": sum(seconds) / pool.world / median(times),
            }
        )
    return rows


def result(number: int) -> dict[str, Any]:
    """A result of about 300 bytes when pickled."""
    return {"doc_id": number, "answer": f"the answer to question {number}, " + "x" * 100, "scores": [0.5, number / 7]}


def gather(way: str, count: int, trace: bool) -> tuple[float, int]:
    """Seconds and, with `trace`, the most bytes that Python held. Every rank calls it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    rows, everyone = [result(number) for number in range(rank, count, world)], None
    with session() as peers:
        dist.barrier()
        held = _traced() if trace else 0
        begin, taken = time.perf_counter(), [0]
        if way == "dist.gather_object":
            everyone = [None] * world if rank == 0 else None
            dist.gather_object(rows, everyone)
        else:
            into = (lambda row: taken.__setitem__(0, taken[0] + 1)) if way == "in order, into a function" else None
            everyone = gather_results(rows, range(rank, count, world), peers, expected=count, into=into)
        took = time.perf_counter() - begin
        peak = tracemalloc.get_traced_memory()[1] - held if trace else 0
    assert rank or taken[0] == count or everyone
    return took, peak


def _traced() -> int:
    """Have Python count its memory from now on; returns what of that is held now.

    It goes on counting: up to Python 3.13 `tracemalloc.stop` crashes where another thread allocates meanwhile.
    """
    tracemalloc.start()
    tracemalloc.reset_peak()
    return tracemalloc.get_traced_memory()[0]


def gather_rows(pool: RankPool, given: Any) -> list[dict[str, Any]]:
    """One row a way; times and memory on rank 0."""
    ways = ("dist.gather_object", "in order, into a list", "in order, into a function")
    took: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(given.repeats):
        for way in ways:
            took[way].append(pool.each(gather, way, given.results_count, False)[0][0])
    peaks = {way: pool.each(gather, way, given.results_count, True)[0][1] for way in ways}
    return [
        {
            "way": way,
            "s (median)": median(took[way]),
            "times as long as gather_object": median(
                a / b for a, b in zip(took[way], took["dist.gather_object"], strict=True)
            ),
            "MiB held on rank 0": round(peaks[way] / 2**20, 1),
        }
        for way in ways
    ]


def main() -> None:
    script = Script(
        __doc__,
        ranks=(4, "number of ranks"),
        documents=(14, "of one to eight requests"),
        seconds=(0.25, "slept for a request of mean length"),
        results_count=(100_000, "small results to gather"),
        repeats=(3, "runs of each way"),
        seed=(0, "of the lengths"),
    )
    given = script.given
    with RankPool(given.ranks, timeout_s=1800) as pool:
        forwards, gathered = forward_rows(pool, given), gather_rows(pool, given)
    title = f"{given.documents} documents on {given.ranks} ranks: scheduling, with slept compute"
    lengths = f"LongAlign-like; the mean request sleeps {given.seconds:g} s"
    best = "all work, evenly over the ranks, without any communication"
    script.store("evaluation", title, forwards, seed=given.seed, lengths=lengths, best=best)
    title = f"{given.results_count} small results of {given.ranks} ranks gathered on rank 0, measured"
    script.store("gather", title, gathered)


if __name__ == "__main__":
    main()
