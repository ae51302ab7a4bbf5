"""Ranks on several hosts, which are network namespaces of this machine: time, bytes and processor time of a minibatch.

Run as root, as `OMP_NUM_THREADS=1 python -m bench.hosts --results bench/results`, on a machine with nothing else to do
(five minutes on two cores). Each case makes its hosts anew, limits both ends of every link by `tbf`, and measures its
arms in turn. Bytes are what the host's device counts.

Arms: `gloo` is FSDP2's collectives alone; `fsdp2` and `fsdp2-hybrid` reduce in the last microbatch only. `odc` marks
the last backward, as `odc train` does, so that sums cross while it runs; `odc-unmarked` does not, `odc-bf16` rounds the
sums too, and `odc-inline` fetches and pushes without threads (`prefetch=0, push_overlap=False`). `odc-nixl` is left out
where NIXL is not installed. "exchange" computes nothing, "demo" is the model of `odc compare --demo`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench import host_arms
from bench.host_arms import Work, bytes_out
from bench.script import Script
from odc.net.engines.nixl import installed
from odc.ranks.processes import RanksFailed

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))  # the hosts are those of the tests

ALL_ARMS = ("gloo", "fsdp2", "fsdp2-hybrid", "odc", "odc-unmarked", "odc-bf16", "odc-hybrid", "odc-nixl")


@dataclass(frozen=True)
class Case:
    """Hosts, the link between them (`rate` as tc has it, or "none"; `delay_us` each way), and what is done."""

    hosts: int
    work: Work
    rate: str = "1gbit"
    delay_us: int = 0
    arms: tuple[str, ...] = ALL_ARMS
    repeats: int = 5

    def describe(self) -> dict[str, Any]:
        link = self.rate if self.rate != "none" else "not limited"
        return {
            "hosts x ranks": f"{self.hosts} x {self.work.per_host}",
            "microbatches": self.work.microbatches,
            "work": self.work.kind,
            "link": link + (f", {self.delay_us / 1000:g} ms each way" if self.delay_us else ""),
        }


FEW = ("gloo", "fsdp2-hybrid", "odc", "odc-hybrid")
DEMO = ("fsdp2", "fsdp2-hybrid", "odc", "odc-inline", "odc-unmarked", "odc-bf16", "odc-hybrid")
CASES = (
    Case(2, Work("exchange", 2, 2)),
    Case(2, Work("exchange", 2, 8), arms=FEW, repeats=3),
    Case(2, Work("exchange", 1, 2), arms=FEW),
    Case(2, Work("exchange", 4, 2), arms=FEW),
    Case(3, Work("exchange", 2, 2), arms=FEW),
    Case(2, Work("exchange", 2, 2), rate="none", arms=(*FEW, "odc-nixl")),
    Case(2, Work("exchange", 2, 2), delay_us=500, arms=FEW),
    Case(2, Work("demo", 2, 2), arms=DEMO),
    Case(2, Work("demo", 2, 8), arms=DEMO),
    Case(2, Work("exchange", 2, 8), rate="none", arms=FEW, repeats=3),
)


def measure(case: Case) -> list[dict[str, Any]]:
    """One row an arm."""
    from support.host_ranks import HostPool
    from support.hosts import Hosts

    arms = [arm for arm in case.arms if "nixl" not in arm or installed()]
    found: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    with Hosts(case.hosts) as hosts:
        pool = HostPool(hosts, case.work.per_host)
        if case.rate != "none":
            hosts.shape(case.rate)
        if case.delay_us:
            hosts.delay(case.delay_us)
        for arm in arms:
            pool.run(host_arms.build, arm, case.work)
        for _ in range(case.repeats):
            for arm in arms:
                before = [host.counted()[0] for host in hosts]
                took = pool.run(host_arms.measure, arm, case.work)
                out = max(host.counted()[0] - then for host, then in zip(hosts, before, strict=True))
                found[arm].append((max(s for s, _ in took), sum(cpu for _, cpu in took), out))
        pool.close()
    base, whole = found[arms[0]], host_arms.parameter_bytes(case.work)
    return [_row(case, arm, runs, base, whole) for arm, runs in found.items()]


def _row(
    case: Case, arm: str, runs: Sequence[tuple[float, ...]], base: Sequence[tuple[float, ...]], whole: int
) -> dict[str, Any]:
    seconds, computed, out = (median(column) for column in zip(*runs, strict=True))
    base_s, base_cpu, _ = (median(column) for column in zip(*base, strict=True))
    expected = bytes_out(arm, case.work, case.hosts)
    row = {
        **case.describe(),
        "arm": arm,
        "seconds": seconds,
        "of the first": seconds / base_s,
        "CPU s": computed,
        "CPU of the first": computed / base_cpu,
        "bytes out / parameters": out / whole,
        "formula": expected,
        "bytes / formula": out / whole / expected,
        "runs_s": " ".join(f"{one[0]:.2f}" for one in runs),
    }
    print(f"{row['hosts x ranks']} M={row['microbatches']} {row['link']}: {arm}: {seconds:.3f} s", file=sys.stderr)
    return row


def main() -> None:
    script = Script(
        __doc__,
        cases=(",".join(map(str, range(len(CASES)))), "numbers of cases, with commas between them"),
        name=("hosts", "of the result that is stored"),
    )
    rows: list[dict[str, Any]] = []
    failed: list[int] = []
    for number in map(int, script.given.cases.split(",")):
        try:
            rows += measure(CASES[number])
        except RanksFailed as error:
            failed.append(number)
            print(f"case {number} failed: {error}", file=sys.stderr, flush=True)
    units = f"{CASES[0].work.units} units of {CASES[0].work.side ** 2 * 4 / 2**20:.0f} MiB, fp32"
    script.store(script.given.name, f"Hosts as namespaces of one machine: minibatches of {units}", rows)
    sys.exit(f"cases that failed: {failed}" if failed else 0)


if __name__ == "__main__":
    main()
