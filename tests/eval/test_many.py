"""10^5 small results from 4 ranks, in order, in bounded memory on the rank that gathers them (issue 6)."""

from __future__ import annotations

import resource
import tracemalloc
from typing import Any

import pytest
import torch.distributed as dist

from odc.eval import gather_results, session

ROWS, WORLD = 100_000, 4


def result(number: int) -> dict[str, Any]:
    """What a harness logs of a small sample: about 300 bytes pickled, 1 KiB as an object."""
    return {"doc_id": number, "answer": f"the answer to question {number}, " + "x" * 100, "scores": [0.5, number / 7]}


def peak_rss() -> int:
    """Bytes this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _gathered(rank: int, world: int) -> tuple[int, ...]:
    """Rows taken, the bytes Python held at most beyond the start, and the process's peak before and after."""
    mine = range(rank, ROWS, world)
    rows = [result(number) for number in mine]
    taken, before = 0, peak_rss()

    def take(row: dict[str, Any]) -> None:
        nonlocal taken
        assert row["doc_id"] == taken, (row["doc_id"], taken)
        taken += 1

    with session(timeout_s=100.0) as peers:
        first = _traced() if rank == 0 else 0
        gather_results(rows, mine, peers, expected=ROWS, into=take)
        held = tracemalloc.get_traced_memory()[1] - first if rank == 0 else 0
    return taken, held, before, peak_rss()


def _at_once(rank: int, world: int) -> tuple[int, int]:
    """The control: `dist.gather_object`; bytes Python held at most on rank 0."""
    rows = [result(number) for number in range(rank, ROWS, world)]
    everyone: Any = [None] * world if rank == 0 else None
    first = _traced()
    dist.gather_object(rows, everyone)
    return sum(map(len, everyone or ())), tracemalloc.get_traced_memory()[1] - first


def _traced() -> int:
    """Python counts its memory from now on; what of that is held now. `tracemalloc.stop` may crash beside threads."""
    tracemalloc.start()
    tracemalloc.reset_peak()
    return tracemalloc.get_traced_memory()[0]


@pytest.mark.thorough
def test_many_small_results_in_bounded_memory(ranks, capsys):
    taken, held, before, after = ranks(WORLD).run(_gathered)[0]
    assert taken == ROWS
    found, control = ranks(WORLD).run(_at_once)[0]
    assert found == ROWS
    with capsys.disabled():
        print(
            f"\n{ROWS} results of {WORLD} ranks in order: rank 0 held {held / 2**20:.1f} MiB beyond its own, its peak "
            f"memory grew by {(after - before) / 2**20:.1f} MiB; dist.gather_object held {control / 2**20:.1f} MiB"
        )
    # 25,000 rows to sort; of each stream a message, its rows as objects and what is being read.
    assert held < 16 << 20
    assert control > 4 * held
