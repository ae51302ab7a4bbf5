"""Ratios that others have published, and which scenario of ours each is compared with.

Sources: the On-Demand Communication paper (arXiv 2601.19362; "text": its own words, "reviews": its tables as public
machine-written reviews quote them) and AMD's port (AMD-AGI/Primus, examples/odc).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from odc.simulate.scenario import Scenario

Kind = Literal["speedup", "bubble"]

_LONGALIGN = Scenario(
    lengths="longalign", machine="a100-roce", arms=("fsdp2-equal-samples", "odc-equal-samples", "odc")
)
_AIME = _LONGALIGN.with_(lengths="aime", samples_per_rank=2)
_B14 = _LONGALIGN.with_(model="qwen2.5-14b", ranks=16)
_AMD = _LONGALIGN.with_(machine="mi300x", arms=("fsdp2-padded", "odc"))

#: Cells of the paper's and of AMD's tables. What the sources do not say is assumed, and said on the page.
CELLS: dict[str, Scenario] = {
    "1.5B LongAlign": _LONGALIGN,
    "7B LongAlign": _LONGALIGN.with_(model="qwen2.5-7b"),
    "14B LongAlign": _B14,
    "32B LongAlign": _LONGALIGN.with_(model="qwen2.5-32b", ranks=32),
    "1.5B SWE-Smith": _LONGALIGN.with_(lengths="swe-smith"),
    "14B AIME": _AIME.with_(model="qwen2.5-14b", ranks=16),
    "1.5B AIME": _AIME,
    "AMD 1.5B": _AMD,
    "AMD 14B": _AMD.with_(model="qwen2.5-14b", ranks=16),
}


@dataclass(frozen=True)
class Figure:
    """One published figure."""

    source: str  # where it stands
    cell: str  # of CELLS
    samples: int  # per rank in a minibatch ("mb4": 4)
    kind: Kind  # "speedup" of `arm` over `base`, or "bubble" of `arm`
    arm: str
    low: float  # the published figure, or the range from `low` to `high`
    base: str = "fsdp2-equal-samples"
    high: float | None = None
    # links cost nothing. So the paper made its bubbles: the packer's estimate of compute and waiting.
    free: bool = False
    why: str = ""  # what explains a difference, where there is one


_TABLES = "reviews"
_PLANNER = (
    "neither another width nor another cut of our lognormal gives it: the real lengths must differ in shape, or the "
    "reviews count minibatches otherwise than samples a rank"
)
_ACROSS = (
    "with two samples a rank there is little to gain, and costs decide that we do not simulate: real transfers across "
    "nodes compute on the same GPU, and they are hidden less well than ours"
)
_FIXED = (
    "with one or two samples a rank both arms run one microbatch here and are equal; the port's loss is its own cost: "
    "host work, transfers that are not overlapped, write visibility for each layer"
)
_DUMMIES = (
    "AMD names neither lengths nor cap. With 64K two samples of 16.5K fit into one microbatch and nothing is left to "
    "decouple; its gain at two a rank, falling from there, speaks for a smaller cap"
)

FIGURES: tuple[Figure, ...] = (
    Figure(_TABLES, "14B LongAlign", 4, "speedup", "odc", 1.36, why=_PLANNER),
    Figure(_TABLES, "14B LongAlign", 4, "speedup", "odc-equal-samples", 1.28, why=_PLANNER),
    Figure(_TABLES, "14B LongAlign", 4, "bubble", "fsdp2-equal-samples", 0.57, free=True, why=_PLANNER),
    Figure(_TABLES, "14B LongAlign", 4, "bubble", "odc", 0.14, free=True, why=_PLANNER),
    Figure(_TABLES, "1.5B LongAlign", 4, "speedup", "odc", 1.34, why=_PLANNER),
    Figure(_TABLES, "1.5B LongAlign", 4, "speedup", "odc-equal-samples", 1.16, high=1.23, why=_PLANNER),
    Figure(_TABLES, "1.5B LongAlign", 8, "speedup", "odc-equal-samples", 1.16, high=1.23, why=_PLANNER),
    Figure(_TABLES, "32B LongAlign", 2, "speedup", "odc-equal-samples", 17.0 / 17.3, why=_ACROSS),
    Figure(_TABLES, "1.5B SWE-Smith", 2, "speedup", "odc", 1.27, base="odc-equal-samples", why=_PLANNER),
    Figure(_TABLES, "14B AIME", 2, "speedup", "odc-equal-samples", 101.0 / 106.4, why=_ACROSS),
    Figure(_TABLES, "14B AIME", 2, "speedup", "odc", 0.96, why=_ACROSS),
    Figure(_TABLES, "14B AIME", 2, "bubble", "fsdp2-equal-samples", 0.2835, free=True, why=_PLANNER),
    Figure(_TABLES, "14B AIME", 2, "bubble", "odc-equal-samples", 0.2289, free=True, why=_PLANNER),
    Figure("AMD", "AMD 1.5B", 1, "speedup", "odc", 0.911, base="fsdp2-padded", why=_FIXED),
    Figure("AMD", "AMD 1.5B", 2, "speedup", "odc", 1.201, base="fsdp2-padded", why=_DUMMIES),
    Figure("AMD", "AMD 1.5B", 4, "speedup", "odc", 1.142, base="fsdp2-padded", why=_DUMMIES),
    Figure("AMD", "AMD 1.5B", 8, "speedup", "odc", 1.083, base="fsdp2-padded", why=_DUMMIES),
    Figure("AMD", "AMD 1.5B", 16, "speedup", "odc", 1.051, base="fsdp2-padded", why=_DUMMIES),
    Figure("AMD re-run", "AMD 1.5B", 2, "speedup", "odc", 1.19, base="fsdp2-padded", high=1.21, why=_DUMMIES),
    Figure("AMD", "AMD 14B", 1, "speedup", "odc", 0.796, base="fsdp2-padded", why=_FIXED),
    Figure("AMD", "AMD 14B", 2, "speedup", "odc", 0.892, base="fsdp2-padded", why=_FIXED),
    Figure("AMD", "AMD 14B", 4, "speedup", "odc", 1.120, base="fsdp2-padded", why=_DUMMIES),
    Figure("AMD", "AMD 14B", 8, "speedup", "odc", 1.154, base="fsdp2-padded", why=_DUMMIES),
)
