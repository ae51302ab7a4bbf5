"""Divisors over ranks, and several of them in one minibatch, against one process in double precision."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.extent import up_to
from support.on_ranks import on_ranks
from support.ranks import Pools, RanksFailed
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.functional import cross_entropy, mse_loss

from odc import fully_shard, shutdown
from odc.errors import ConfigError
from odc.microbatch import LossNormalizer, Normalization

VOCABULARY, WIDTH, TOKENS = 11, 6, 9
#: (labels, documents) of each microbatch, by rank.
Minibatch = list[list[tuple[int, int]]]
counts_of_ranks = st.lists(
    st.lists(st.tuples(st.integers(0, TOKENS), st.integers(0, 4)), max_size=4), min_size=2, max_size=2
)
few = settings(max_examples=up_to(30), suppress_health_check=[HealthCheck.function_scoped_fixture])


def build(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCABULARY)).to(dtype)


def losses(model: nn.Module, seed: int, labels: int, documents: int) -> tuple[Tensor, Tensor]:
    """Summed losses over `labels` tokens and over `documents`, of one forward."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randint(VOCABULARY, (2, TOKENS), generator=generator)
    wanted = torch.rand(4, VOCABULARY, generator=generator, dtype=torch.float64)
    out = model(x)
    by_token = cross_entropy(out[:labels], y[:labels], reduction="sum")
    return by_token, mse_loss(out[:documents], wanted[:documents].to(out.dtype), reduction="sum")


def seed_of(rank: int, m: int) -> int:
    return 100 * rank + m


def flat(model: nn.Module) -> Tensor:
    def whole(gradient: Any) -> Tensor:
        found: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        return found.double().flatten()

    return torch.cat([whole(p.grad) if p.grad is not None else torch.zeros(p.numel()) for p in model.parameters()])


def reference(minibatch: Minibatch, normalization: Normalization, kinds: int) -> Tensor:
    """Gradients by the definition: `kinds` is 1 for the loss over labels, 2 for its sum with that over documents."""
    model = build()
    most = max(len(mine) for mine in minibatch)
    for rank, mine in enumerate(minibatch):
        for m, counts in enumerate(mine):
            for kind, loss in enumerate(losses(model, seed_of(rank, m), *counts)[:kinds]):
                here = [one[m][kind] for one in minibatch if m < len(one)]
                every = [one[kind] for other in minibatch for one in other]
                total = {
                    "global": sum(every),
                    "per_microbatch": most * sum(here),
                    "per_rank_microbatch": sum(1 for one in every if one) * counts[kind],
                }[normalization]
                if total:
                    (loss / total).backward(retain_graph=True)
    return flat(model)


def train(
    rank: int, minibatch: Minibatch, normalization: Normalization, kinds: int, model: nn.Module
) -> LossNormalizer:
    """The rank's part of the minibatch, up to and without `finish`."""
    names = ("labels", "documents")[:kinds]
    normalizer = LossNormalizer(7, divisor=names, metrics={"loss": "labels"}, normalization=normalization)

    def one(m: int) -> None:
        found = losses(model, seed_of(rank, m), *minibatch[rank][m])
        normalizer.metric("loss", found[0])
        scaled = [
            normalizer.scaled(loss, count, divisor=name)
            for name, loss, count in zip(names, found, minibatch[rank][m], strict=False)
        ]
        sum(scaled[1:], scaled[0]).backward()

    mine = range(len(minibatch[rank]))
    if normalization == "per_microbatch":
        for m in normalizer.microbatches(mine, lambda m: dict(zip(names, minibatch[rank][m], strict=False))):
            one(m)
        return normalizer
    if kinds > 1:
        normalizer.announce({name: sum(c[kind] for c in minibatch[rank]) for kind, name in enumerate(names)})
    for m in mine:
        one(m)
    return normalizer


def replicated(rank: int, world: int, minibatch: Minibatch, normalization: Normalization, kinds: int) -> None:
    """Every rank has the whole model; gradients are averaged over ranks, as FSDP2 and odc do."""
    model = build()
    normalizer = train(rank, minibatch, normalization, kinds, model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    totals = normalizer.finish(model.parameters())
    every = [counts for mine in minibatch for counts in mine]
    assert totals.divisors["labels"] == sum(labels for labels, _ in every), totals
    assert totals.skip == (not any(any(counts[:kinds]) for counts in every)), totals
    if not totals.skip:
        expected = reference(minibatch, normalization, kinds)
        assert torch.allclose(flat(model), expected, rtol=1e-10, atol=1e-13), (flat(model) - expected).abs().max()


@few
@given(counts_of_ranks, st.sampled_from([1, 2]))
def test_option_b_divides_by_what_all_ranks_count_at_a_position(ranks: Pools, minibatch: Minibatch, kinds: int) -> None:
    ranks(2).run(replicated, minibatch, "per_microbatch", kinds)


@few
@given(counts_of_ranks)
def test_two_divisors_in_one_minibatch(ranks: Pools, minibatch: Minibatch) -> None:
    ranks(2).run(replicated, minibatch, "global", 2)


@pytest.mark.parametrize("normalization", ["global", "per_microbatch"])
def test_on_four_ranks(ranks: Pools, normalization: Normalization) -> None:
    minibatch = [[(3, 1), (0, 2), (9, 0)], [], [(5, 0)], [(0, 0), (1, 4)]]
    ranks(4).run(replicated, minibatch, normalization, 2)


@pytest.mark.parametrize(
    ("normalization", "kinds"), [("global", 1), ("global", 2), ("per_microbatch", 2), ("per_rank_microbatch", 1)]
)
@pytest.mark.parametrize(("transport", "minibatch"), [
    ("odc", [[(9, 1), (0, 3), (4, 0)], [(2, 2)]]),
    ("odc", [[], [(8, 0), (1, 1)]]),
    ("fsdp2", [[(9, 1), (0, 3)], [(2, 2), (5, 0)]]),
])  # fmt: skip
@on_ranks(2)
def test_over_shards(
    rank: int, world: int, transport: str, minibatch: Minibatch, normalization: Normalization, kinds: int
) -> None:
    model: Any = build(torch.float32)
    shard = fully_shard if transport == "odc" else torch_fully_shard
    shard(model[2])
    shard(model)
    with model.minibatch() if transport == "odc" else contextlib.nullcontext():
        normalizer = train(rank, minibatch, normalization, kinds, model)
    totals = normalizer.finish(model.parameters())
    expected = reference(minibatch, normalization, kinds)
    assert (flat(model) - expected).norm() < 1e-6 * expected.norm(), (flat(model), expected)
    alone = [losses(build(), seed_of(r, m), *counts) for r, own in enumerate(minibatch) for m, counts in enumerate(own)]
    mean = float(sum(loss for loss, _ in alone)) / totals.divisors["labels"]
    assert totals.metrics["loss"] == pytest.approx(mean, rel=1e-5)
    if transport == "odc":
        shutdown()


def promises(rank: int, world: int, promised: list[int], trained: list[int]) -> None:
    normalizer = LossNormalizer(4)
    assert normalizer.announce({"labels": promised[rank]}) == {"labels": sum(promised)}, "not the total"
    normalizer.scaled(torch.ones((), requires_grad=True), trained[rank]).backward()
    normalizer.finish([])


def test_other_counts_than_announced_are_an_error_on_every_rank(ranks: Pools) -> None:
    with pytest.raises(RanksFailed) as failed:
        ranks(2).run(promises, [3, 4], [3, 5])
    assert str(failed.value).count("divided by 7 labels as the ranks had announced, but they trained on 8") >= 2


def test_the_next_minibatch_starts_anew() -> None:
    """Alone, without a process group: announced, then deferred, then announced again."""
    normalizer = LossNormalizer(10)
    for counts in ([2, 3], None, [5]):
        if counts is not None:
            with torch.device("meta"):  # torch's default says nothing of counts
                assert normalizer.announce({"labels": sum(counts)}) == {"labels": sum(counts)}
        weight = torch.ones((), requires_grad=True)
        for count in counts or [4]:
            normalizer.scaled(weight * count, count).backward()
        totals = normalizer.finish([weight])
        assert float(weight.grad) == pytest.approx(1.0)
        assert totals.divisors == {"labels": float(sum(counts or [4]))}


def test_a_microbatch_is_taken_while_the_one_before_it_is_used() -> None:
    """What hides the all-reduce: it is under way before the loop's body runs."""
    taken: list[int] = []

    def source() -> Any:
        for m in range(3):
            taken.append(m)
            yield m

    normalizer = LossNormalizer(3, normalization="per_microbatch")
    seen = [(m, len(taken)) for m in normalizer.microbatches(source(), lambda m: m + 1)]
    assert seen == [(0, 2), (1, 3), (2, 3)]


def test_what_is_refused() -> None:
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(ConfigError, match="normalization must be one of global, per_microbatch"):
        LossNormalizer(1, normalization="local")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="2 divisors are no objective under 'per_rank_microbatch'"):
        LossNormalizer(1, divisor=("labels", "documents"), normalization="per_rank_microbatch")
    with pytest.raises(ConfigError, match="0 divisors"):
        LossNormalizer(1, divisor=())
    two = LossNormalizer(1, divisor=("labels", "documents"))
    with pytest.raises(ConfigError, match=r"must be known before it: call announce\(\) first"):
        two.scaled(loss, 1)
    with pytest.raises(ConfigError, match="samples: losses are divided by labels, documents"):
        two.announce({"samples": 3})
    two = LossNormalizer(1, divisor=("labels", "documents"))
    two.announce({"labels": 1})
    with pytest.raises(ConfigError, match="was announced already"):
        two.announce({"labels": 1})
    with pytest.raises(ConfigError, match="is not for 'global'"):
        two.microbatches([], int)
    apart = LossNormalizer(1, normalization="per_microbatch")
    with pytest.raises(ConfigError, match=r"in `for mb in normalizer.microbatches"):
        apart.scaled(loss, 1)
    with pytest.raises(ConfigError, match="needs none: per_microbatch"):
        apart.announce({"labels": 1})
    with pytest.raises(ValueError, match="counts name tokens, but the losses are divided by labels"):
        list(apart.microbatches([1], lambda m: {"tokens": m}))
    with pytest.raises(ConfigError, match="in this minibatch already"):
        apart.microbatches([1], int)
