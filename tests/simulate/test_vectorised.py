"""The fast simulator against the reference."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.extent import up_to
from support.steps import TRANSPORTS, steps

from odc.errors import ConfigError
from odc.simulate import Cluster, Step, even_model, simulate, simulate_events, simulate_vectorised


@pytest.mark.parametrize("transport", TRANSPORTS)
@settings(max_examples=up_to(60), deadline=None)
@given(data=st.data())
def test_agrees_with_the_reference(transport: str, data: st.DataObject) -> None:
    step = data.draw(steps(transport=transport))
    fast, slow = simulate_vectorised(step), simulate_events(step)
    assert fast.seconds == pytest.approx(slow.seconds, rel=1e-9)
    assert fast.busy == pytest.approx(slow.busy, rel=1e-9)
    assert fast.transfer == pytest.approx(slow.transfer, rel=1e-9, abs=1e-9)
    assert fast.microbatches == slow.microbatches
    assert fast.node_bytes == slow.node_bytes


def test_leaves_queues_at_an_owner_to_the_reference() -> None:
    cluster = Cluster(4, intra_bandwidth=1.0, owner_skew=4.0)
    step = Step(cluster, even_model(1, 1.0), [[1.0]] * 4, "on demand")
    with pytest.raises(ConfigError, match="owner_skew"):
        simulate_vectorised(step)
    assert simulate(step) == simulate_events(step)


def test_leaves_the_node_cache_to_the_reference() -> None:
    step = Step(Cluster(4, 2, node_cache=True), even_model(1, 1.0), [[1.0]] * 4, "on demand")
    with pytest.raises(ConfigError, match="node cache"):
        simulate_vectorised(step)
    assert simulate(step) == simulate_events(step)
    within = Step(step.cluster, step.model, step.seconds, "on demand", within_node=True)
    assert simulate_vectorised(within).seconds == simulate_events(within).seconds, "nothing is cached within a node"
