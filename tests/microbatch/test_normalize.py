"""Deferred divisors against a double-precision reference, on raw gradients: an optimizer like Adam hides a factor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import up_to
from support.on_ranks import on_ranks
from support.ranks import Pools, RanksFailed
from torch import nn
from torch.nn.functional import cross_entropy

from odc.errors import ConfigError, OdcError
from odc.microbatch import LossNormalizer, Normalization

VOCABULARY, WIDTH = 17, 8
IGNORED = -100


def build(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Tanh(), nn.Linear(WIDTH, VOCABULARY)).to(dtype)


def microbatch(seed: int, tokens: int, labels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets, of which `labels` count."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(VOCABULARY, (tokens,), generator=generator)
    y = torch.randint(VOCABULARY, (tokens,), generator=generator)
    y[labels:] = IGNORED
    return x, y


def loss_sum(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return cross_entropy(
        model(x).float() if next(model.parameters()).dtype.itemsize < 4 else model(x), y, reduction="sum"
    )


def gradients(model: nn.Module) -> torch.Tensor:
    """All of them as one vector in double precision."""
    assert all(p.grad is not None for p in model.parameters()), "a parameter has no gradient"
    return torch.cat([p.grad.double().flatten() for p in model.parameters()])


def reference(counts: Sequence[int], weight: Callable[[int, int], float]) -> torch.Tensor:
    """Double-precision gradients of sum over microbatches of weight(n_m, number of nonempty ones) * S_m."""
    model, nonempty = build(), sum(1 for n in counts if n)
    for m, labels in enumerate(counts):
        (loss_sum(model, *microbatch(m, max(counts) + 2, labels)) * weight(labels, nonempty)).backward()
    return gradients(model)


def run(counts: Sequence[int], normalizer: LossNormalizer, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """One rank's gradients of these microbatches; a low dtype computes in it and accumulates in fp32."""
    model = build(dtype)
    totals = [
        torch.zeros_like(p, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        for p in model.parameters()
    ]
    for m, labels in enumerate(counts):
        normalizer.scaled(loss_sum(model, *microbatch(m, max(counts) + 2, labels)), labels).backward()
        for total, p in zip(totals, model.parameters(), strict=True):
            total += p.grad
            p.grad = None
    grown = [nn.Parameter(torch.zeros_like(total)) for total in totals]
    for parameter, total in zip(grown, totals, strict=True):
        parameter.grad = total
    normalizer.finish(grown)
    return torch.cat([p.grad.double().flatten() for p in grown])


def off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@settings(max_examples=up_to(40))
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    st.integers(1, 10**6),
    st.sampled_from([1.0, 1024.0]),
)
def test_option_a_is_exact_for_any_counts_and_proxy(counts: list[int], proxy: int, grad_scale: float) -> None:
    found = run(counts, LossNormalizer(proxy, grad_scale=grad_scale))
    assert off(found, reference(counts, lambda n, _: 1 / sum(counts))) < 1e-12


@settings(max_examples=up_to(40))
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any), st.integers(1, 50))
def test_each_ranks_microbatches_weigh_alike(counts: list[int], proxy: int) -> None:
    found = run(counts, LossNormalizer(proxy, normalization="per_rank_microbatch"))
    assert off(found, reference(counts, lambda n, nonempty: 1 / (nonempty * n) if n else 0.0)) < 1e-12


@pytest.mark.parametrize(("dtype", "proxy", "grad_scale", "within"), [
    (torch.bfloat16, 53, 1.0, 3e-2),
    (torch.float16, 53, 1024.0, 3e-3),
])  # fmt: skip
def test_sixteen_bit_gradients_stay_in_range(dtype: torch.dtype, proxy: int, grad_scale: float, within: float) -> None:
    counts = [40, 12, 1]
    found = run(counts, LossNormalizer(proxy, grad_scale=grad_scale), dtype)
    assert off(found, reference(counts, lambda n, _: 1 / sum(counts))) < within


def test_a_proxy_far_off_loses_fp16_gradients() -> None:
    """That the test above can fail: a tiny scale underflows."""
    counts = [40, 12, 1]
    found = run(counts, LossNormalizer(1 << 30), torch.float16)
    assert off(found, reference(counts, lambda n, _: 1 / sum(counts))) > 0.5


def test_counts_on_the_device_are_not_waited_for() -> None:
    normalizer = LossNormalizer(10, metrics={"loss": "labels"})
    model = build()
    loss = loss_sum(model, *microbatch(0, 9, 4))
    normalizer.scaled(loss, torch.tensor(4)).backward()
    normalizer.metric("loss", loss)
    totals = normalizer.finish(model.parameters())
    assert totals.divisors == {"labels": 4.0}
    assert totals.metrics["loss"] == pytest.approx(float(loss.detach()) / 4)
    assert off(gradients(model), _alone(4)) < 1e-12


@pytest.mark.parametrize("normalization", ["global", "per_rank_microbatch"])
def test_a_count_of_0_on_the_device_adds_nothing(normalization: Normalization) -> None:
    """Losses are masked by a product, through which an infinite weight would become NaN in the gradients."""
    normalizer, model = LossNormalizer(3, normalization=normalization), build()
    for m, labels in enumerate([0, 4, 0]):
        x, y = microbatch(m, 9, labels)
        masked = cross_entropy(model(x), y.clamp(min=0), reduction="none") * (y != IGNORED)
        normalizer.scaled(masked.sum(), (y != IGNORED).sum()).backward()
    normalizer.finish(model.parameters())
    expected = build()
    (loss_sum(expected, *microbatch(1, 9, 4)) / 4).backward()
    assert off(gradients(model), gradients(expected)) < 1e-12


def _alone(labels: int) -> torch.Tensor:
    model = build()
    (loss_sum(model, *microbatch(0, 9, labels)) / labels).backward()
    return gradients(model)


@pytest.mark.parametrize("normalization", ["global", "per_rank_microbatch"])
def test_nothing_to_train_on_skips_the_step(normalization: Normalization, caplog: pytest.LogCaptureFixture) -> None:
    normalizer, model = LossNormalizer(5, metrics={"loss": "labels"}, normalization=normalization), build()
    normalizer.scaled(loss_sum(model, *microbatch(0, 6, 0)), 0).backward()
    totals = normalizer.finish(model.parameters())
    assert totals.skip and totals.factor is None and math.isnan(totals.metrics["loss"])
    assert all(p.grad is None for p in model.parameters())
    assert "skip its step" in caplog.text
    normalizer.scaled(loss_sum(model, *microbatch(0, 9, 4)), 4).backward()  # and the next one is a new one
    assert normalizer.finish(model.parameters()).divisors["labels"] == 4.0
    assert off(gradients(model), _alone(4)) < 1e-12


def test_metrics_are_numerators_over_their_own_divisors() -> None:
    normalizer = LossNormalizer(8, metrics={"loss": "labels", "reward": "samples", "correct": "labels"})
    model = build()
    for m, labels in enumerate([3, 5]):
        normalizer.scaled(loss_sum(model, *microbatch(m, 7, labels)), labels).backward()
        normalizer.metric("loss", 2.0 * labels)
        normalizer.metric("correct", 1.0)
        normalizer.metric("reward", torch.tensor(0.5))
        normalizer.count("samples", 1)
    totals = normalizer.finish(model.parameters())
    assert totals.metrics == {"loss": 2.0, "reward": 0.5, "correct": 0.25}
    assert totals.divisors == {"labels": 8.0, "samples": 2.0}


def test_what_is_refused() -> None:
    for wrong in (0, -1, 2.0, True, 1 << 40):
        with pytest.raises(ConfigError, match="proxy"):
            LossNormalizer(wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="grad_scale"):
        LossNormalizer(1, grad_scale=0.0)
    normalizer = LossNormalizer(4)
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(ConfigError, match="over 'documents', but the normalizer divides by labels"):
        normalizer.scaled(loss, 3, divisor="documents")
    with pytest.raises(ValueError, match="scalar"):
        normalizer.scaled(torch.ones(2), 3)
    with pytest.raises(ValueError, match="0 or more"):
        normalizer.scaled(loss, -1)
    with pytest.raises(ConfigError, match="'reward' was not named"):
        normalizer.metric("reward", 1.0)


# ranks ---------------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_all_ranks_skip_together(rank: int, world: int) -> None:
    model, normalizer = build(), LossNormalizer(4, metrics={"loss": "labels"})
    if rank == 0:
        normalizer.scaled(loss_sum(model, *microbatch(0, 5, 0)), 0).backward()
    totals = normalizer.finish(model.parameters())
    assert totals.skip, totals
    assert all(p.grad is None for p in model.parameters()), "gradients stay"


@on_ranks(2)
def test_metrics_are_summed_by_name_in_whichever_order_a_rank_names_them(rank: int, world: int) -> None:
    names = ["loss", "reward"] if rank else ["reward", "loss"]
    normalizer = LossNormalizer(1, metrics=dict.fromkeys(names, "labels"))
    normalizer.count("labels", 1)
    for name, value in (("loss", 1.0), ("reward", 4.0)):
        normalizer.metric(name, value)
    assert normalizer.finish([]).metrics == {"loss": 1.0, "reward": 4.0}


@pytest.mark.parametrize("normalization", ["global", "per_microbatch", "per_rank_microbatch"])
@on_ranks(2)
def test_sums_over_a_row_of_one_sample_are_numbers(rank: int, world: int, normalization: Normalization) -> None:
    """Of shape [1], as `scaled` takes a loss; a rank without a microbatch has plain zeros."""
    weight, row = nn.Parameter(torch.ones((), dtype=torch.float64)), torch.tensor([[2.0, 4.0]])
    normalizer = LossNormalizer(7, normalization=normalization, metrics={"loss": "labels"})
    mine: Any = [row] * (1 - rank)
    if normalization == "per_microbatch":
        mine = normalizer.microbatches(mine, lambda row: (row > 0).sum(-1))
    if normalization == "global":
        normalizer.announce({"labels": (row > 0).sum(-1)} if rank == 0 else {})
    for one in mine:
        loss = (weight * one).sum(-1)
        normalizer.scaled(loss, (one > 0).sum(-1)).backward()
        normalizer.metric("loss", loss)
    totals = normalizer.finish([weight])
    assert totals.divisors["labels"] == 2.0 and totals.metrics == {"loss": 3.0}, totals
    if rank == 0:  # ranks x the mean: nothing has averaged it here
        assert weight.grad is not None and float(weight.grad) == pytest.approx(6.0), weight.grad
    with pytest.raises(RuntimeError, match="invalid for input of size 2"):
        normalizer.metric("loss", row[0])


def unequal(rank: int, world: int, proxies: list[int]) -> None:
    LossNormalizer(proxies[rank]).finish([])


@pytest.mark.parametrize("proxies", [[10, 11], [10, 11, 12]])
def test_unequal_proxies_are_an_error_on_every_rank(ranks: Pools, proxies: list[int]) -> None:
    with pytest.raises(RanksFailed) as failed:
        ranks(len(proxies)).run(unequal, proxies)
    for rank, proxy in enumerate(proxies):
        assert f"rank {rank} (epoch" in str(failed.value) or f"by 1/{proxy}," in str(failed.value)
    assert str(failed.value).count("it must be the same on every rank") >= len(proxies)


def test_groups_of_one_rank_need_no_process_group() -> None:
    assert not dist.is_initialized()
    assert LossNormalizer(3).finish([]).skip


@pytest.mark.parametrize("recovered", [False, True])
def test_what_a_lost_minibatch_has_counted_is_not_counted_again(recovered: bool) -> None:
    model, normalizer = build(), LossNormalizer(proxy=7, metrics={"loss": "labels"})
    lost, kept = microbatch(1, 9, 4), microbatch(2, 9, 6)
    normalizer.scaled(loss_sum(model, *lost), 4)
    normalizer.metric("loss", 100.0)
    if recovered:
        normalizer.load_state_dict(normalizer.state_dict())
    else:
        normalizer.discard()
    summed = loss_sum(model, *kept)
    normalizer.scaled(summed, 6).backward()
    normalizer.metric("loss", summed)
    totals = normalizer.finish(model.parameters())
    assert totals.divisors["labels"] == 6 and totals.metrics["loss"] == pytest.approx(summed.item() / 6)
    alone = build()
    (loss_sum(alone, *kept) / 6).backward()
    torch.testing.assert_close(gradients(model), gradients(alone))


def test_fractions_of_a_label_count_as_such() -> None:
    """Weighted tokens: each microbatch's own mean, of weights that sum up to less than one."""
    for counts in ([0.15, 0.5, 0.0], [torch.tensor(count) for count in (0.15, 0.5, 0.0)]):
        weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        normalizer = LossNormalizer(3, normalization="per_rank_microbatch")
        for count in counts:
            normalizer.scaled(2.0 * weight * float(count), count).backward()
        normalizer.finish([weight])
        assert weight.grad is not None and float(weight.grad) == pytest.approx(2.0)


def test_sums_of_fractions_are_compared_as_rounded_ones() -> None:
    weight = nn.Parameter(torch.ones((), dtype=torch.float64))
    for announced, found in (([0.1, 0.2, 0.3], [0.3, 0.2, 0.1]), ([0.6], [0.1, 0.2, 0.31]), ([10.0**12], [1e12 + 1])):
        normalizer = LossNormalizer(3)
        normalizer.announce({"labels": sum(announced)})
        for count in found:
            normalizer.scaled(weight * count, count)
        if announced[0] == 0.1:
            normalizer.finish([])
        else:
            with pytest.raises(OdcError, match=f"divided by {sum(announced):.15g} .* trained on {sum(found):.15g}"):
                normalizer.finish([])


@settings(max_examples=up_to(100))
@given(st.lists(st.floats(1 / 64, 4.0, width=32), min_size=2, max_size=40), st.data())
def test_sums_of_fp32_weights_are_compared_as_such(weights: list[float], data: st.DataObject) -> None:
    """Announced as one sum of the minibatch, and trained on in microbatches."""
    cuts = sorted(data.draw(st.sets(st.integers(1, len(weights) - 1), min_size=1, max_size=8)))
    everything = torch.tensor(weights)
    normalizer = LossNormalizer(3)
    total = normalizer.announce({"labels": float(everything.sum())})["labels"]
    for part in everything.tensor_split(cuts):
        normalizer.scaled(torch.ones(()), part.sum())
    assert normalizer.finish([]).divisors["labels"] == pytest.approx(total, rel=1e-6)
    normalizer.announce({"labels": total})
    for part in everything.tensor_split(cuts)[1:]:
        normalizer.scaled(torch.ones(()), part.sum())
    with pytest.raises(OdcError, match="but they trained on"):
        normalizer.finish([])


def test_a_parameter_that_is_listed_twice_is_divided_once() -> None:
    weight = nn.Parameter(torch.ones((), dtype=torch.float64))
    normalizer = LossNormalizer(7)
    normalizer.scaled(weight * 6.0, 3).backward()
    normalizer.finish([weight, weight])
    assert weight.grad is not None and float(weight.grad) == pytest.approx(2.0)


def test_in_step_it_is_known_which_microbatch_is_the_last() -> None:
    for count in (0, 1, 4):
        normalizer = LossNormalizer(3, normalization="per_microbatch")
        marks = [normalizer.last for _ in normalizer.microbatches(range(count), lambda _: 1)]
        assert marks == [False] * (count - 1) + [True] * (count > 0)
        normalizer.discard()
        assert not normalizer.last


@on_ranks(2)
def test_the_last_is_each_ranks_own(rank: int, world: int) -> None:
    normalizer = LossNormalizer(3, normalization="per_microbatch")
    marks = [normalizer.last for _ in normalizer.microbatches(range((3, 1)[rank]), lambda _: 1)]
    assert marks == [[False, False, True], [True]][rank]


@on_ranks(2)
def test_a_metric_may_be_divided_by_the_positions_of_all_ranks(rank: int, world: int) -> None:
    normalizer = LossNormalizer(3, normalization="per_microbatch", metrics={"loss": "microbatches"})
    for size in normalizer.microbatches((2, 4), lambda size: size):
        normalizer.scaled(torch.zeros(()), size)
        normalizer.metric("loss", float(size) * (rank + 1))
    totals = normalizer.finish([])
    assert totals.divisors["microbatches"] == 2 and totals.metrics["loss"] == (2 + 4) * 3 / 2
