"""What must hold for any step."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import up_to

from odc.arms import ARMS
from odc.balance import Plan, SplitSample, compiled, lb_mini, lower_bound, quadratic
from odc.simulate import Cluster, Model, Step, Unit, even_model, event_loops, simulate, simulate_plan
from odc.simulate.workload import Gang

TRANSPORTS = ("collectives", "resident", "on demand", "dynamic")
_positive = st.floats(0.5, 50.0)
_short = st.floats(0.0, 0.1)
_in_flight = st.sampled_from([0, 1, 2, 99])


@st.composite
def clusters(draw: st.DrawFn, *, free: bool = False) -> Cluster:
    """Up to 12 ranks; `free`: communication costs nothing."""
    nodes, node = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    ranks = nodes * node
    slow = draw(st.dictionaries(st.integers(0, ranks - 1), st.floats(0.5, 3.0), max_size=3))
    if free:
        return Cluster(ranks, node, slow=slow, reductions_in_flight=draw(_in_flight))
    return Cluster(
        ranks,
        node,
        intra_bandwidth=draw(_positive),
        inter_bandwidth=draw(_positive),
        intra_latency=draw(_short),
        inter_latency=draw(_short),
        call_seconds=draw(_short),
        collective=draw(st.sampled_from(["ring", "tree", "gloo"])),
        reductions_in_flight=draw(_in_flight),
        slow=slow,
        jitter=draw(st.sampled_from([0.0, 0.3])),
    )


@st.composite
def models(draw: st.DrawFn) -> Model:
    """A root that stays and up to 3 layers of different sizes."""
    layers = draw(st.lists(st.tuples(_positive, _positive), min_size=1, max_size=3))
    units = [Unit(draw(st.floats(0, 5)), draw(st.floats(0, 5)), 0.0, kept=True)]
    units += [Unit(parameters, gradients, 1 / len(layers)) for parameters, gradients in layers]
    return Model(tuple(units), draw(st.sampled_from([1 / 3, 1 / 4])), draw(_short), draw(_short))


@st.composite
def steps(draw: st.DrawFn, *, free: bool = False, transport: str | None = None) -> Step:
    """A step of few microbatches. The compute of no two is exactly alike, so that no tie is broken by rounding."""
    cluster, model = draw(clusters(free=free)), draw(models())
    counts = draw(st.lists(st.integers(0, 4), min_size=cluster.ranks, max_size=cluster.ranks))
    count = sum(counts)
    all_seconds = iter(draw(st.lists(st.floats(0.1, 10.0), min_size=count, max_size=count, unique=True)))
    seconds = [[next(all_seconds) for _ in range(own)] for own in counts]
    chosen = transport or draw(st.sampled_from(TRANSPORTS))
    gangs = draw(st.lists(gangs_of(cluster.ranks), max_size=5)) if chosen == "on demand" and cluster.ranks > 1 else []
    options = draw(st.booleans()), draw(st.integers(0, 1)), draw(st.integers(0, 9))
    return Step(cluster, model, seconds, chosen, *options, gangs, draw(st.booleans()))


@st.composite
def gangs_of(draw: st.DrawFn, ranks: int) -> Gang:
    """Two or more pieces on ranks in any order."""
    members = draw(st.lists(st.integers(0, ranks - 1), min_size=2, max_size=min(ranks, 5), unique=True))
    seconds = draw(st.lists(st.floats(0.1, 10.0), min_size=len(members), max_size=len(members)))
    return Gang(tuple(members), tuple(seconds), draw(_short))


_few = settings(max_examples=up_to(50), deadline=None)


@pytest.mark.thorough
@settings(max_examples=up_to(50), deadline=None)
@given(data=st.data())
def test_the_same_to_the_bit_compiled_and_interpreted(data: st.DataObject) -> None:
    pytest.importorskip("numba", reason="needs the fast extra")
    step = data.draw(steps())
    cluster, queues = step.cluster, data.draw(st.sampled_from(["none", "cache", "owner"]))
    if step.transport in ("on demand", "dynamic") and queues != "none":
        skew = float(cluster.ranks) if queues == "owner" else 1.0
        step = replace(step, cluster=replace(cluster, node_cache=queues == "cache", owner_skew=skew))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "WORTH", 0)
        assert compiled.loops_of(event_loops, 0)[1]
        fast = simulate(step)
        patch.setattr(compiled, "_numba", lambda: None)
        assert fast == simulate(step)


def on_ranks(step: Step) -> list[float]:
    """Compute of each rank without jitter, fixed times left out."""
    slow = step.cluster.slowness()
    pieces = [
        [seconds for gang in step.gangs for rank, seconds in zip(gang.ranks, gang.seconds, strict=True) if rank == mine]
        for mine in range(step.cluster.ranks)
    ]
    return [(sum(own) + sum(pieces[rank])) * slow[rank] for rank, own in enumerate(step.seconds)]


def quiet(step: Step) -> Step:
    """The same without jitter and without fixed times."""
    model = replace(step.model, unit_seconds=0.0, optimizer_seconds=0.0)
    return replace(step, cluster=replace(step.cluster, jitter=0.0), model=model)


@pytest.mark.parametrize("transport", ["collectives", "resident", "on demand"])
@_few
@given(data=st.data())
def test_never_below_the_longest_rank(transport: str, data: st.DataObject) -> None:
    step = quiet(data.draw(steps(transport=transport)))
    result = simulate(step)
    assert result.seconds >= max(on_ranks(step)) * (1 - 1e-9)
    assert 0 <= result.bubble < 1 + 1e-9
    assert result.busy == pytest.approx(on_ranks(step))


@_few
@given(steps(transport="dynamic"))
def test_dynamic_never_below_what_the_fastest_ranks_could_do(step: Step) -> None:
    step = quiet(step)
    slow = step.cluster.slowness()
    work, longest = sum(map(sum, step.seconds)), max((s for own in step.seconds for s in own), default=0.0)
    result = simulate(step)
    assert result.seconds >= max(work / sum(1 / s for s in slow), longest * min(slow)) * (1 - 1e-9)
    assert sum(result.microbatches) == sum(map(len, step.seconds))


@_few
@given(steps(free=True, transport="on demand"))
def test_free_links_on_demand_take_the_longest_rank(step: Step) -> None:
    step = replace(quiet(step), gangs=())
    assert simulate(step).seconds == pytest.approx(max(on_ranks(step)))


@_few
@given(steps(free=True, transport="on demand"))
def test_free_links_and_pieces_alike_take_what_the_plan_says(step: Step) -> None:
    """Pieces of one sample start together and end together, as `Plan.split_ends` has it."""
    alike = tuple(replace(gang, seconds=(gang.seconds[0],) * len(gang.ranks)) for gang in step.gangs)
    step = replace(quiet(step), gangs=tuple(replace(gang, exchange_seconds=0.0) for gang in alike))
    step = replace(step, cluster=replace(step.cluster, slow={}))
    splits = [
        SplitSample(sample, list(gang.ranks), [[(i, i + 1)] for i in range(len(gang.ranks))], list(gang.seconds))
        for sample, gang in enumerate(step.gangs)
    ]
    whole = [[[] for _ in own] for own in step.seconds]
    plan = Plan(whole, [list(own) for own in step.seconds], 1.0, splits=splits)
    assert simulate(step).seconds == pytest.approx(plan.longest)


@_few
@given(steps(free=True, transport="resident"))
def test_free_links_resident_take_the_longest_rank(step: Step) -> None:
    step = quiet(step)
    assert simulate(step).seconds == pytest.approx(max(on_ranks(step)))


@pytest.mark.parametrize("transport", ["collectives", "resident"])
@_few
@given(data=st.data())
def test_reductions_that_block_never_help(transport: str, data: st.DataObject) -> None:
    step = data.draw(steps(transport=transport))
    cluster = step.cluster
    seconds = [
        simulate(replace(step, cluster=replace(cluster, reductions_in_flight=most))).seconds for most in (0, 1, 2, 99)
    ]
    assert all(fewer >= more * (1 - 1e-9) for fewer, more in pairwise(seconds))


@_few
@given(steps(free=True, transport="collectives"))
def test_free_links_collectives_take_the_sum_of_maxima(step: Step) -> None:
    step = replace(quiet(step), within_node=False)
    slow = step.cluster.slowness()
    count = max(map(len, step.seconds))
    columns = [[own[m] * slow[r] if m < len(own) else 0.0 for r, own in enumerate(step.seconds)] for m in range(count)]
    stepped = sum(map(max, columns))
    # A unit of another rank may still run while the next is gathered: one unit of slack at each unit's end is all that
    # fetching ahead gives away, and none of it without.
    if step.prefetch == 0:
        assert simulate(step).seconds == pytest.approx(stepped)
    else:
        assert max(on_ranks(step)) * (1 - 1e-9) <= simulate(step).seconds <= stepped * (1 + 1e-9)


@pytest.mark.parametrize("transport", TRANSPORTS)
@_few
@given(data=st.data())
def test_names_of_ranks_change_nothing(transport: str, data: st.DataObject) -> None:
    """Ranks of one node change places with what they have to do; without jitter, which is drawn by place."""
    step = data.draw(steps(transport=transport))
    cluster = replace(step.cluster, jitter=0.0)
    node = cluster.node
    order = [n * node + place for n in range(cluster.nodes) for place in data.draw(st.permutations(range(node)))]
    moved = replace(
        step,
        cluster=replace(cluster, slow={at: cluster.slow.get(rank, 1.0) for at, rank in enumerate(order)}),
        seconds=[step.seconds[rank] for rank in order],
        gangs=[replace(gang, ranks=tuple(order.index(rank) for rank in gang.ranks)) for gang in step.gangs],
    )
    before, after = simulate(replace(step, cluster=cluster)), simulate(moved)
    if transport != "dynamic" or not cluster.slow:  # who of two free ranks takes a job is decided by their order
        assert after.seconds == pytest.approx(before.seconds)
    if transport != "dynamic":
        assert after.busy == pytest.approx([before.busy[rank] for rank in order])


@_few
@given(steps(transport="on demand"), st.floats(1.0, 10.0))
def test_slower_links_never_help(step: Step, factor: float) -> None:
    slower = replace(step.cluster, intra_bandwidth=step.cluster.intra_bandwidth / factor)
    assert simulate(replace(step, cluster=slower)).seconds >= simulate(step).seconds * (1 - 1e-9)


@_few
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 6))
def test_no_arm_beats_the_bound_of_its_samples(lengths: list[int], ranks: int) -> None:
    cost = quadratic(1.0, 0.01)
    cluster = Cluster(ranks, intra_bandwidth=1e3, intra_latency=0.01)
    bound = lower_bound([cost(length) for length in lengths], ranks)
    for arm in ARMS.values():
        plan = arm.plan(lengths, ranks, 1000, cost, 0, floor=1)
        least = plan.bound if arm.splits else bound
        assert simulate_plan(plan, arm, cluster, even_model(2, 10.0)).seconds >= least * (1 - 1e-9)


def test_the_plan_of_lb_mini_on_free_links_takes_its_longest_rank() -> None:
    plan = lb_mini([50, 900, 300, 20, 700, 10], 3, 1000)
    for name in ("odc", "odc-hybrid"):
        assert simulate_plan(plan, ARMS[name], Cluster(3), even_model(4, 1.0)).seconds == pytest.approx(plan.longest)
