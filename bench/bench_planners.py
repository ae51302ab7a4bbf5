"""Time and evenness of planners, against Karmarkar-Karp and plain longest-first on the same lengths.

`above_mean` is max/mean - 1 over the parts. LPT is the engine's own heap of loads, compiled, without trades; it starts
from the same unsorted costs. KK is `odc.balance.karmarkar_karp` (interpreted, sparse), verl_KK is verl's own function
where verl is installed. Lengths are LongAlign-like, costs verl's 24576 l + l^2. Times are the least of several
interleaved repetitions. The cost of the first call is measured in fresh processes, with an empty and a filled cache.
"""

from __future__ import annotations

import ast
import heapq
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.turns import in_turns
from odc.balance import lb_micro, lb_mini, local_sort, lower_bound, partition
from odc.balance.state import Ints
from odc.bench.dispatching import COST, draw_lengths, owners_of, plain_lpt, sparse_kk

SIZES = [(512, 64), (2048, 64), (4096, 64), (153_600, 2560), (1_000_000, 4096)]
KK_UP_TO = 4096


def verl_kk() -> Callable[[Ints, int, bool], Ints] | None:
    """The function of verl, taken from its file without importing verl."""
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / "utils" / "seqlen_balancing.py"
    found: dict[str, Any] = {"heapq": heapq}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == "karmarkar_karp":
            exec(ast.unparse(node), found)
    return lambda costs, parts, equal: owners_of(found["karmarkar_karp"](costs.tolist(), parts, equal), len(costs))


def above_mean(costs: Ints, owners: Ints, parts: int) -> str:
    loads = np.bincount(owners, weights=costs, minlength=parts)
    return f"{loads.max() / loads.mean() - 1:.1e}"


@pytest.mark.parametrize("equal_sizes", [False, True], ids=["unequal", "equal"])
@pytest.mark.parametrize(("samples", "parts"), SIZES)
def test_partition(note, samples: int, parts: int, equal_sizes: bool):
    lengths = draw_lengths(samples)
    costs = 24576 * lengths + lengths**2
    baselines: dict[str, Callable[[], Ints]] = {"odc": lambda: partition(costs, parts, equal_sizes=equal_sizes)}
    if not equal_sizes:
        baselines["LPT"] = lambda: plain_lpt(costs, parts)
    if samples <= KK_UP_TO:
        baselines["KK"] = lambda: sparse_kk(costs, parts, equal_sizes)
        if (verls := verl_kk()) is not None:
            baselines["verl_KK"] = lambda: verls(costs, parts, equal_sizes)
    owners = {name: baseline() for name, baseline in baselines.items()}
    quick = {name: baseline for name, baseline in baselines.items() if "KK" not in name}
    slow = {name: baseline for name, baseline in baselines.items() if "KK" in name}
    times = {**in_turns(quick, 30 if samples < 10_000 else 10), **in_turns(slow, 3)}
    row: dict[str, Any] = {"samples": samples, "parts": parts, "sizes": "equal" if equal_sizes else "unequal"}
    for name in ("odc", "LPT", "KK", "verl_KK"):
        row[f"{name}_ms"] = f"{min(times[name]) * 1e3:.3g}" if name in baselines else ""
    for name in ("odc", "LPT", "KK", "verl_KK"):
        row[f"{name}_above_mean"] = above_mean(costs, owners[name], parts) if name in baselines else ""
    row["bound_above_mean"] = f"{lower_bound(costs, parts) / (costs.sum() / parts) - 1:.1e}"
    note(**row)


FIRST = """
import time
import numpy as np
from odc.balance import partition
costs = np.arange(1, 2049) ** 2
began = time.perf_counter()
partition(costs, 64)
print(time.perf_counter() - began)
"""


def test_first_call(note, tmp_path: Path):
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    for cache in ("empty", "filled"):
        done = subprocess.run([sys.executable, "-c", FIRST], env=env, capture_output=True, text=True, check=True)
        note(samples=2048, parts=64, sizes=f"first call, {cache} cache", odc_ms=f"{float(done.stdout) * 1e3:.0f}")


@pytest.mark.parametrize("policy", [local_sort, lb_micro, lb_mini], ids=lambda policy: policy.__name__)
@pytest.mark.parametrize(("samples", "parts"), [(64, 8), (512, 64), (4096, 64), (153_600, 2560)])
def test_policy(note, policy: Callable[..., Any], samples: int, parts: int):
    if policy is lb_micro and samples > KK_UP_TO:
        pytest.skip("evening out so many microbatches was not tried")
    lengths = draw_lengths(samples).tolist()
    partition(np.arange(1000), 4)  # numba is loaded
    seconds = in_turns({"plan": lambda: policy(lengths, parts, 65536, COST)}, 5 if samples < 10_000 else 2)["plan"]
    plan = policy(lengths, parts, 65536, COST)
    note(
        samples=samples,
        parts=parts,
        sizes=policy.__name__,
        odc_ms=f"{min(seconds) * 1e3:.3g}",
        odc_above_mean=f"{plan.longest / np.mean(plan.rank_costs) - 1:.1e}",
        bound_above_mean=f"{plan.bound / np.mean(plan.rank_costs) - 1:.1e}",
    )
