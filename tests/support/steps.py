"""Random steps for properties, and the arms' transports."""

from __future__ import annotations

from hypothesis import strategies as st

from odc.simulate import Cluster, Model, Step, Unit
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
        accumulate_bandwidth=draw(_positive),
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
