"""Minibatches on several hosts that `odc.simulate` predicts, beside those that `bench.hosts` has measured.

Run as `python -m bench.simulated_hosts --results bench/results`; it takes a second, and measures nothing itself.

Hosts of `bench.hosts` share the cores of one machine, which copy every byte. What that costs is the only quantity taken
from a measurement: `gloo` and `odc` each get the seconds a byte with which their row *without a limit on the link* (2
hosts of 2 ranks, 2 microbatches) comes out as measured. Those of `gloo` hold for all of torch's arms, and those of
`odc` for odc's; in proportion to the ranks, as cores are shared. Nothing is fitted to the rows that are compared. A
limited link carries the payload of full Ethernet frames.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any

from bench.host_arms import Work
from bench.quoted import Result, find, load
from odc.bench.report import store
from odc.provenance import begin
from odc.simulate import Cluster, Model, Step, StepResult, Unit, simulate

NAME = "simulated_hosts"
_FRAME = 1448 / 1514  # payload of TCP in a full frame
_GBIT = 1e9 / 8
_EXCHANGE = Work("exchange", 2, 2)
_UNIT = 4.0 * _EXCHANGE.side**2  # bytes
_MODEL = Model((Unit(_UNIT, _UNIT, 1 / _EXCHANGE.units),) * _EXCHANGE.units)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("runs/bench"))
    arguments = parser.parse_args()
    begun = begin()
    title = "Seconds of a minibatch on several hosts: simulated, and measured by bench.hosts"
    store(arguments.results, NAME, title, rows(load("hosts")), begun=begun)


def rows(measured: Result) -> list[dict[str, Any]]:
    """Every row of an exchange over limited links, with what is simulated."""
    bandwidths = {family: bandwidth(measured, family) for family in ("gloo", "odc")}
    found = []
    for row in measured["rows"]:
        if row["work"] != "exchange" or row["link"] == "not limited":
            continue
        made = predicted(row, bandwidths["odc" if row["arm"].startswith("odc") else "gloo"])
        found.append(
            {
                **{key: row[key] for key in ("hosts x ranks", "microbatches", "link", "arm")},
                "measured_s": row["seconds"],
                "simulated_s": made.seconds,
                "simulated / measured": made.seconds / row["seconds"],
                "measured bytes out / parameters": row["bytes out / parameters"],
                "simulated bytes out / parameters": made.node_bytes / _MODEL.parameter_bytes,
            }
        )
    return found


def bandwidth(measured: Result, arm: str) -> float:
    """Bytes/s that all ranks together move, with which the arm's row without limit takes what was measured."""
    row = find(measured, arm=arm, link="not limited", work="exchange")
    low, high = 1e6, 1e13
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if predicted(row, middle).seconds > row["seconds"] else (low, middle)
    return math.sqrt(low * high)


def predicted(row: Result, moved: float) -> StepResult:
    """The simulated minibatch of a row's case and arm; `moved` is what all ranks together move, in bytes/s."""
    hosts, per_host = map(int, row["hosts x ranks"].split(" x "))
    rate = re.match(r"(\d+)gbit", row["link"])
    delay = re.search(r"([\d.]+) ms each way", row["link"])
    world, arm = hosts * per_host, row["arm"]
    cluster = Cluster(
        world,
        per_host,
        intra_bandwidth=moved / world,
        inter_bandwidth=int(rate[1]) * _GBIT * _FRAME / per_host if rate else math.inf,
        inter_latency=float(delay[1]) / 1000 if delay else 0.0,
        collective="gloo",
        node_cache=True,
        reductions_in_flight=0,
    )
    return simulate(
        Step(
            cluster,
            _MODEL,
            [[0.0] * row["microbatches"]] * world,
            "on demand" if arm.startswith("odc") else "collectives",
            within_node="hybrid" in arm,
            reduce_once=arm.startswith("fsdp2"),
        )
    )


if __name__ == "__main__":
    main()
