from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from odc import Settings
from odc.arms import ARMS, ArmName
from odc.errors import ConfigError, UnsupportedError
from odc.experiments.arms import run_minibatch, shard_model
from odc.experiments.compare import CompareConfig, run_arms
from odc.experiments.config import JobConfig
from odc.experiments.preflight import check_arm, preflight
from odc.experiments.text.step import TextWorkload
from odc.memory import atomics, plain_x86_64
from odc.trace import COLLECTIVE, FETCH, PUSH, recorder


def test_without_libatomic_the_dynamic_arm_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    job = JobConfig(model="m", data="d", output=str(tmp_path))
    with mock.patch.object(atomics, "default_atomics", plain_x86_64):
        check_arm(job, "odc")
        with pytest.raises(UnsupportedError, match="apt-get install libatomic1"):
            run_arms(CompareConfig(TextWorkload(job), arms=("odc", "odc-dynamic")), print)
        with pytest.raises(UnsupportedError, match="apt-get install libatomic1"):
            preflight(job.with_(arm="odc-dynamic"))


def collectives(rank: int, world: int, name: ArmName, counts: list[int]) -> dict[str, Any]:
    """Of one minibatch of an arm of three units: its collectives by microbatch, and the shards' shape and replicas."""
    arm, model = ARMS[name], torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(3)))
    shard_model(arm, model, list(model), Settings(timeout_s=60.0))
    recorder().clear()

    def backward(m: int) -> None:
        with recorder().microbatch(m):
            model(torch.ones(1, 4)).sum().backward()

    run_minibatch(arm, model, counts[rank], backward)
    spans = [span for span in recorder().spans() if span.peer == COLLECTIVE]
    recorder().clear()
    kinds = [(span.microbatch, "all-reduce" if span.unit.endswith("all-reduce") else span.category) for span in spans]
    shards = {tuple(parameter.to_local().shape) for parameter in model.parameters()}  # type: ignore[attr-defined]
    return {"calls": Counter(kinds), "shards": shards}


def test_a_resident_arm_meets_before_its_first_and_in_a_dummy_after_its_last_microbatch(
    ranks: Callable[[int], Any],
) -> None:
    counts = [4, 2]
    for rank, found in enumerate(ranks(2).run(collectives, "fsdp2-resident", counts, timeout=60)):
        assert found["calls"] == {(-1, FETCH): 3, (counts[rank] - 1, PUSH): 3}


def test_gradients_of_a_hybrid_arm_cross_nodes_once_a_minibatch(ranks: Callable[[int], Any]) -> None:
    for found in ranks(4).run(collectives, "fsdp2-hybrid", [3] * 4, timeout=60):
        calls = found["calls"]
        assert {m: calls[m, "all-reduce"] for m in range(3)} == {0: 0, 1: 0, 2: 3}
        assert all(calls[m, PUSH] == 3 <= calls[m, FETCH] for m in range(3))
        assert found["shards"] == {(2, 4)}, "half of each parameter, as two ranks of a node share it"


@pytest.mark.parametrize(("count", "per_node"), [(2, 2), (3, 2), (6, 4), (4, 4)])
def test_a_hybrid_arm_needs_two_nodes_and_says_so_first(tmp_path: Path, count: int, per_node: int) -> None:
    job = JobConfig(model="m", data="d", output=str(tmp_path), ranks=count, per_node=per_node)
    with pytest.raises(
        ConfigError, match=rf"odc-hybrid shards over a 2-D mesh.*at least 2 nodes of per_node={per_node}"
    ):
        CompareConfig(TextWorkload(job), arms=("odc", "odc-hybrid"))
    assert CompareConfig(TextWorkload(job.with_(ranks=2 * per_node)), arms=("odc-hybrid",)).arms == ("odc-hybrid",)
