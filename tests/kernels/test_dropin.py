"""Settings(kernels="triton"): whole minibatches of the drop-in, moved by the interpreted kernels, give torch's bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from support.compare import assert_same
from support.models import Case, train
from support.ranks import Pools

from odc import Settings, fully_shard

#: What each way to accumulate must have used; the model has more than one unit, so more often than once.
USED = {
    "server": {"publish", "gather", "put", "add"},
    "direct": {"publish", "gather", "add"},
}


def same_as_torch(rank: int, world: int, case: Case, settings: dict[str, object]) -> Counter[str]:
    """The same training twice, by torch and by kernels; returns how often each kernel was launched for the second."""
    from odc.movers import triton as triton_mover

    expected = train(fully_shard, case, rank, world, settings=Settings(**settings))  # type: ignore[arg-type]
    launches: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., None]:
        launcher = getattr(triton_mover, name)

        def call(*args: object, **options: object) -> None:
            launches[name] += 1
            launcher(*args, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("publish", "gather", "put", "add"):
            patch.setattr(triton_mover, name, counted(name))
        found = train(fully_shard, case, rank, world, settings=Settings(**settings, kernels="triton"))  # type: ignore[arg-type]
    assert_same(found, expected)
    return launches


@pytest.mark.parametrize("accumulate", USED)
@pytest.mark.parametrize("low_precision", [False, True], ids=["fp32", "bf16"])
def test_one_minibatch_equals_torch(interpreted: Pools, accumulate: str, low_precision: bool) -> None:
    # What a step has changed is published alike, however gradients were summed: one second step shows it.
    steps = 2 if accumulate == "server" else 1
    case = Case(counts=((1, 1),), steps=steps, layers=1, low_precision=low_precision, tied=low_precision)
    for launches in interpreted(2).run(same_as_torch, case, {"accumulate": accumulate}):
        assert launches.keys() == USED[accumulate]
        assert launches.pop("publish") >= steps, "all units in one launch"
        assert min(launches.values()) > 1


@pytest.mark.thorough
def test_fp64_accumulators_small_blocks_and_unequal_counts(interpreted: Pools) -> None:
    case = Case(counts=((2, 0),), idiom="minibatch", steps=1)
    settings = {"reproducible": True, "staging_block_bytes": 4096}
    launches = interpreted(2).run(same_as_torch, case, settings)
    assert launches[0]["put"] > 10 and not launches[1]["put"]
