"""Planning time of LB-Micro and LB-Mini on lengths like LongAlign's, with the quality of the plan beside it.

Lengths: lognormal, mean about 16K, clipped at 64K. Cost: linear plus quadratic, equal at about 66K tokens.
"""

from __future__ import annotations

import random

import pytest

from odc.balance import lb_micro, lb_mini, quadratic

CAP = 65536
COST = quadratic(8.768 / 32768, 4.348 / 32768**2)


def lengths(count: int) -> list[int]:
    draw = random.Random(1)
    return [max(64, min(CAP, int(draw.lognormvariate(9.25, 1.05)))) for _ in range(count)]


@pytest.mark.parametrize(("samples", "ranks"), [(32, 8), (256, 16), (2048, 64)])
@pytest.mark.parametrize("policy", [lb_micro, lb_mini])
def test_plan(benchmark, policy, samples: int, ranks: int):
    benchmark.group = f"{samples} samples on {ranks} ranks"
    plan = benchmark.pedantic(policy, (lengths(samples), ranks, CAP, COST), rounds=3, warmup_rounds=1)
    benchmark.extra_info["gap"] = plan.gap
    benchmark.extra_info["bubble"] = plan.bubble
    benchmark.extra_info["bubble_per_microbatch"] = plan.bubble_per_microbatch
