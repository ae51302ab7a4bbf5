"""round, add_rounded and keep, interpreted: the bytes and the numbers of the loops for CPU memory, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.kernel_heaps import same_bits
from support.kernel_references import params_of
from support.on_ranks import on_interpreted_ranks

from odc.protocol.rounding import RoundedUnit

ODD = [np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 1e-45, -1e-45, -0.0]


def sums(generator: np.random.Generator, numel: int, share: float, odd: list[float]) -> torch.Tensor:
    """Of all magnitudes by block, with zeros, halves of a step, subnormal and with what is not finite."""
    powers = generator.integers(-44, 38, numel // 128 + 1).repeat(128)[:numel]
    with np.errstate(over="ignore"):
        values = (generator.standard_normal(numel) * 10.0**powers).astype(np.float32)
    steps = generator.integers(-127, 128, numel).astype(np.float32) * np.float32(0.5)
    values = np.where(generator.random(numel) < 0.2, steps, values)
    values[generator.random(numel) < share] = 0.0
    for one in odd if numel else ():
        values[generator.integers(numel)] = one
    return torch.tensor(values)


PARAMS = st.lists(
    st.tuples(
        st.one_of(st.sampled_from([0, 1, 3, 15, 16, 127, 128, 129, 256, 4096, 4100]), st.integers(0, 10_000)),
        st.booleans(),
    ),
    min_size=1,
    max_size=5,
)


def shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    """A copy that begins `by` elements behind an address of 64 bytes."""
    memory = torch.zeros(len(values) + 16 + by)
    return memory[by : by + len(values)].copy_(values)


@on_interpreted_ranks(1)
def test_rounded_sums_and_residuals_are_those_of_the_cpu(rank: int, world: int) -> None:
    from odc.kernels import RoundingPlan

    seen = set[bool]()

    @settings(deadline=None, max_examples=60, database=None, phases=[Phase.generate])  # in a rank, without a profile
    @given(PARAMS, st.integers(0, 1 << 20), st.sampled_from([0.0, 0.5, 1.0]), st.lists(st.sampled_from(ODD)), st.data())
    def check(params: list[tuple[int, bool]], seed: int, share: float, odd: list[float], data: st.DataObject) -> None:
        generator = np.random.default_rng(seed)
        one = RoundedUnit(params)
        plan = RoundingPlan(params_of(one), torch.device("cpu"))
        total = shifted(sums(generator, one.numel, share, odd), data.draw(st.integers(0, 3)))
        memory, expected = (torch.full((one.nbytes + 64,), 0xAB, dtype=torch.uint8) for _ in range(2))
        plan.write(total, memory[: one.nbytes])
        one.write(total, expected[: one.nbytes])
        for part in one.parts:
            if not part.coarse:  # a NaN may have another payload
                for rounded in (part.rounded(memory), part.rounded(expected)):
                    rounded[rounded.isnan()] = torch.nan
        assert torch.equal(memory, expected), "what crosses, and nothing beside it"

        mine = shifted(sums(generator, one.numel, share, odd), data.draw(st.integers(0, 3)))
        added, wanted = (mine, mine.clone()) if data.draw(st.booleans()) else (shifted(mine, 2), torch.empty_like(mine))
        one.add(mine, expected, wanted)
        plan.add(mine, memory, added)
        assert same_bits(added[~wanted.isnan()], wanted[~wanted.isnan()])
        assert torch.equal(added.isnan(), wanted.isnan())

        used = [data.draw(st.booleans()) for _ in params] if data.draw(st.booleans()) else [True] * len(params)
        seen.add(all(used))
        left = shifted(sums(generator, one.numel, 0.0, []), 0)
        kept = shifted(left, data.draw(st.integers(0, 3)))
        plan.keep(total, memory, kept, used)
        one.keep(total, expected, left, used)
        assert same_bits(kept, left)

    check()
    assert seen == {True, False}


@on_interpreted_ranks(1)
def test_each_call_is_one_launch(rank: int, world: int) -> None:
    from odc.kernels import RoundingPlan
    from odc.kernels.launch import PreparedLaunch

    launched, real = list[str](), PreparedLaunch.__call__

    def note(self: PreparedLaunch, programs: int, *args: object, **options: object) -> None:
        launched.append(self._kernel.__name__)
        real(self, programs, *args, **options)  # type: ignore[arg-type]

    one = RoundedUnit([(300, True), (6, False), (0, False), (300, True)])
    total, memory = torch.ones(one.numel), torch.zeros(one.nbytes, dtype=torch.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreparedLaunch, "__call__", note)
        plan = RoundingPlan(params_of(one), torch.device("cpu"))
        assert launched == ["round_kernel", "add_rounded_kernel", "keep_kernel"], "they are loaded when it is made"
        launched.clear()
        plan.write(total, memory)
        twice = torch.empty_like(total)
        plan.add(total, memory, twice)
        assert torch.equal(twice, 2 * total)
        plan.keep(total, memory, total, [True, False, True, False])
        assert launched == ["round_kernel", "add_rounded_kernel", "keep_kernel"]
    assert not total[:300].any() and total[300:].all(), "the first parameter alone was used and is trained"
