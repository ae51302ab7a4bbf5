"""Minibatches on several hosts that `odc.simulate` predicts, beside those that `bench.hosts` has measured.

Run as `python -m bench.simulated_hosts --results bench/results`; it takes a second, and measures nothing itself.

Hosts of `bench.hosts` share the cores of one machine, which copy every byte. What that costs is all that is taken from
measurements, and only from runs *without a limit on the link*, of 2 hosts of 2 ranks: `gloo` and `odc` each take the
seconds of their row there. What part of odc's goes with the microbatches, and what with the bytes that cross once a
minibatch, follows from the processor time of 2 and of 8 microbatches, of which only this ratio is used. Costs of `gloo`
hold for all of torch's arms and those of `odc` for odc's, in proportion to the ranks, as cores are shared. Nothing is
fitted to the rows that are compared. A limited link carries the payload of full Ethernet frames.

A second table has the bytes that leave one of two hosts in a minibatch of bf16 training, by what crosses of the weights
and by the dtype of sums; those of FSDP2 over all ranks grow with the microbatches, of which it takes 8. The shares of
the weights that change are those that `bench.changes` has measured, the bytes of a sum in int8 those of the larger
model of `bench.int8_sums`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from bench.host_arms import Work
from bench.script import Script
from bench.stored import Result, find, load
from bench.stored import rows as rows_with
from odc.simulate import Cluster, Model, Step, StepResult, Unit, simulate
from odc.simulate.cluster import Algorithm

NAME, BYTES = "simulated_hosts", "hosts_bytes"
_FREE = "not limited"
_FRAME = 1448 / 1514  # payload of TCP in a full frame
_GBIT = 1e9 / 8
_EXCHANGE = Work("exchange", 2, 2)
_UNIT = 4.0 * _EXCHANGE.side**2  # bytes
_SUMS, _MICROBATCHES = {"fp32": 4.0, "bf16": 2.0}, 8  # bytes; of each rank under FSDP2
_COLLECTIVES: dict[str, Algorithm] = {"gloo": "gloo", "rings that know hosts": "ring"}
_REDUCED = {"the last": True, "each": False}
_MODEL = Model((Unit(_UNIT, _UNIT, 1 / _EXCHANGE.units),) * _EXCHANGE.units)


def main() -> None:
    title = "Seconds of a minibatch on several hosts: simulated, and measured by bench.hosts"
    script = Script(__doc__)
    script.store(NAME, title, rows(load("hosts")), measured=False)
    shares = changed_shares(load("changes"))
    title = "Bytes of a parameter that leave one of two hosts in a minibatch: simulated"
    int8 = next(row for row in rows_with(load("int8_sums"), sums="int8") if row["model"].startswith("larger"))
    script.store(BYTES, title, bytes_rows(shares, _SUMS | {"int8": int8["bytes an element"]}), measured=False)


@dataclass(frozen=True)
class Costs:
    """What the processors of all hosts together do, in bytes/s: copies within hosts, and transfers between hosts."""

    copies: float
    transfers: float


def rows(measured: Result) -> list[dict[str, Any]]:
    """Every row of an exchange over limited links, with what is simulated."""
    costs = {arm: costs_of(arm, measured) for arm in ("gloo", "odc")}
    found = []
    for row in measured["rows"]:
        if row["work"] != "exchange" or row["link"] == _FREE:
            continue
        made = predicted(row, costs["odc" if row["arm"].startswith("odc") else "gloo"])
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


def costs_of(arm: str, measured: Result) -> Costs:
    """Costs with which the arm's minibatch over links without a limit takes what was measured."""
    row = find(measured, arm=arm, link=_FREE, work="exchange", microbatches=2)
    few, many = (find(measured, arm=arm, link=_FREE, microbatches=m)["CPU s"] for m in (2, 8))
    each = min(1.0, 2 * (many - few) / 6 / few) if arm == "odc" else 1.0  # share that goes with the microbatches
    low, high = 1e6, 1e13
    for _ in range(100):
        middle = math.sqrt(low * high)
        late = predicted(row, Costs(middle, math.inf)).seconds > each * row["seconds"]
        low, high = (middle, high) if late else (low, middle)
    crossing = 2 * predicted(row, Costs(low, math.inf)).node_bytes  # of both hosts
    beside = (1 - each) * row["seconds"]
    return Costs(low, crossing / beside if beside else math.inf)


def predicted(row: Result, costs: Costs) -> StepResult:
    """The simulated minibatch of a row's case and arm."""
    hosts, per_host = map(int, row["hosts x ranks"].split(" x "))
    rate = re.match(r"(\d+)gbit", row["link"])
    delay = re.search(r"([\d.]+) ms each way", row["link"])
    world, arm = hosts * per_host, row["arm"]
    link = min(int(rate[1]) * _GBIT * _FRAME if rate else math.inf, costs.transfers / hosts)
    cluster = Cluster(
        world,
        per_host,
        intra_bandwidth=costs.copies / world,
        inter_bandwidth=link / per_host,
        inter_latency=float(delay[1]) / 1000 if delay else 0.0,
        collective="gloo",
        node_cache=True,
        reductions_in_flight=0,
    )
    return simulate(
        Step(
            cluster,
            replace(_MODEL, accumulator=0.5) if arm.endswith("bf16") else _MODEL,
            [[0.0] * row["microbatches"]] * world,
            "on demand" if arm.startswith("odc") else "collectives",
            within_node="hybrid" in arm,
            reduce_once=arm.startswith("fsdp2"),
        )
    )


def changed_shares(changes: Result) -> dict[str, float]:
    """What part of the weights' bytes crosses, as `bench.changes` has measured it: at every rate, of the arm that
    always sends changes.
    """
    link = changes["rows"][0]["link"]
    rates = (row for row in rows_with(changes, link=link, arm="changes"))
    return {"whole": 1.0, **{f"changed, lr {row['learning rate']:g}": row["weights of whole"] for row in rates}}


def bytes_rows(shares: Mapping[str, float], sums: Mapping[str, float]) -> list[dict[str, Any]]:
    """By arm, what crosses of the weights, and the dtype of sums (of which `sums` has the bytes): bytes a parameter,
    the fewest first.
    """
    found = []
    for weights, share in shares.items():
        for dtype, nbytes in sums.items():
            cluster = Cluster(4, 2, node_cache=True, changed=share)
            out = _out(Step(cluster, Model((Unit(2.0, 2.0, 1.0),), accumulator=nbytes / 2), [[0.0]] * 4, "on demand"))
            found.append({"arm": "odc", "weights": weights, "sums": dtype, "bytes out a parameter": out})
    for dtype, nbytes in _SUMS.items():
        model = Model((Unit(nbytes, nbytes, 1.0),))
        out = _out(Step(Cluster(4, 2), model, [[0.0]] * 4, "collectives", within_node=True))
        found.append({"arm": "fsdp2-hybrid", "weights": "none", "sums": dtype, "bytes out a parameter": out})
    model, each = Model((Unit(2.0, _SUMS["fp32"], 1.0),)), [[0.0] * _MICROBATCHES] * 4
    for (by, collective), (when, once) in itertools.product(_COLLECTIVES.items(), _REDUCED.items()):
        out = _out(Step(Cluster(4, 2, collective=collective), model, each, "collectives", reduce_once=once))
        arm = f"fsdp2 by {by}, {_MICROBATCHES} microbatches, reduced in {when}"
        found.append({"arm": arm, "weights": "whole", "sums": "fp32", "bytes out a parameter": out})
    return sorted(found, key=lambda row: row["bytes out a parameter"])


def _out(step: Step) -> float:
    return simulate(step).node_bytes


if __name__ == "__main__":
    main()
