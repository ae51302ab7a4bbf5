"""Ratios that others have published, beside those that `odc.simulate` gives; nothing is run.

Run as `python -m bench.reproduction > rows.md`; it takes some minutes. `--only "14B AIME"` prints the rows of one cell.
Sources: tables of the On-Demand Communication paper (arXiv 2601.19362) as public reviews quote them, and AMD's port
(AMD-AGI/Primus, examples/odc). bench/results/reproduction.md says what is assumed.
"""

from __future__ import annotations

import argparse
from functools import cache

from odc.simulate.lengths import lengths_named
from odc.simulate.scenario import Scenario
from odc.simulate.study import Study, study

NEAR = 0.05  # a speed-up agrees within this, and a bubble within as many points
_LONGALIGN = Scenario(
    lengths="longalign", machine="a100-roce", arms=("fsdp2-equal-samples", "odc-equal-samples", "odc")
)
_AMD = _LONGALIGN.with_(machine="mi300x", arms=("fsdp2-padded", "odc"))
CELLS: dict[str, Scenario] = {
    "1.5B LongAlign": _LONGALIGN,
    "14B LongAlign": _LONGALIGN.with_(model="qwen2.5-14b", ranks=16),
    "32B LongAlign": _LONGALIGN.with_(model="qwen2.5-32b", ranks=32),
    "1.5B SWE-Smith": _LONGALIGN.with_(lengths="swe-smith"),
    "14B AIME": _LONGALIGN.with_(lengths="aime", model="qwen2.5-14b", ranks=16),
    "AMD 1.5B": _AMD,
    "AMD 14B": _AMD.with_(model="qwen2.5-14b", ranks=16),
}
#: (source, cell, samples a rank, arm, base, published): a speed-up over `base`, or without a base the arm's bubble on
#: free links. What is published is a figure, or the least and the most.
FIGURES: tuple[tuple[str, str, int, str, str, tuple[float, ...]], ...] = (
    ("reviews", "14B LongAlign", 4, "odc", "fsdp2-equal-samples", (1.36,)),
    ("reviews", "14B LongAlign", 4, "odc-equal-samples", "fsdp2-equal-samples", (1.28,)),
    ("reviews", "14B LongAlign", 4, "fsdp2-equal-samples", "", (0.57,)),
    ("reviews", "14B LongAlign", 4, "odc", "", (0.14,)),
    ("reviews", "1.5B LongAlign", 4, "odc", "fsdp2-equal-samples", (1.34,)),
    ("reviews", "1.5B LongAlign", 4, "odc-equal-samples", "fsdp2-equal-samples", (1.16, 1.23)),
    ("reviews", "1.5B LongAlign", 8, "odc-equal-samples", "fsdp2-equal-samples", (1.16, 1.23)),
    ("reviews", "32B LongAlign", 2, "odc-equal-samples", "fsdp2-equal-samples", (17.0 / 17.3,)),
    ("reviews", "1.5B SWE-Smith", 2, "odc", "odc-equal-samples", (1.27,)),
    ("reviews", "14B AIME", 2, "odc-equal-samples", "fsdp2-equal-samples", (101.0 / 106.4,)),
    ("reviews", "14B AIME", 2, "odc", "fsdp2-equal-samples", (0.96,)),
    ("reviews", "14B AIME", 2, "fsdp2-equal-samples", "", (0.2835,)),
    ("reviews", "14B AIME", 2, "odc-equal-samples", "", (0.2289,)),
    *(
        ("AMD", "AMD 1.5B", samples, "odc", "fsdp2-padded", (published,))
        for samples, published in ((1, 0.911), (2, 1.201), (4, 1.142), (8, 1.083), (16, 1.051))
    ),
    ("AMD re-run", "AMD 1.5B", 2, "odc", "fsdp2-padded", (1.19, 1.21)),
    *(
        ("AMD", "AMD 14B", samples, "odc", "fsdp2-padded", (published,))
        for samples, published in ((1, 0.796), (2, 0.892), (4, 1.120), (8, 1.154))
    ),
)


@cache
def simulated(cell: str, samples: int, change: tuple[tuple[str, object], ...]) -> Study:
    """The study of a cell with some fields changed."""
    return study(CELLS[cell].with_(samples_per_rank=samples, minibatches=20, seed=0, **dict(change)))


def row(source: str, cell: str, samples: int, arm: str, base: str, published: tuple[float, ...]) -> str:
    """A row of bench/results/reproduction.md; other lengths are wider, narrower and shorter ones."""
    free = () if base else (("machine", "a100-free"),)
    longest = lengths_named(CELLS[cell].lengths).longest
    changes = ((), (("sigma", 0.5),), (("sigma", 1.1),), (("max_length", longest // 2),))
    studies = [simulated(cell, samples, (*free, *change)) for change in changes]
    values = [one[base].step_s / one[arm].step_s if base else one[arm].bubble for one in studies]
    show = "{:.2f}x" if base else "{:.1%}"
    cells = (
        source,
        f"{cell} mb{samples}: {f'{arm} over {base}' if base else f'bubble of {arm}'}",
        " to ".join(show.format(value) for value in published),
        show.format(values[0]),
        f"{show.format(min(values))}-{show.format(max(values))}",
        "yes" if published[0] - NEAR <= values[0] <= published[-1] + NEAR else "**no**",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=CELLS, help="rows of one cell")
    only = parser.parse_args().only
    print("| source | what | published | simulated | other lengths | agrees |\n|---|---|---|---|---|---|")
    for figure in FIGURES:
        if only in (None, figure[1]):
            print(row(*figure), flush=True)
