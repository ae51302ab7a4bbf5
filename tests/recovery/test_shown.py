"""What `odc status` and traces show of recoveries."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.listeners import status_of
from support.recovering import Death, run
from torch import nn

import odc
from odc.recovery.generations import Generations
from odc.runtime.daemon import process_status
from odc.trace import GIVEN_UP, MAIN, RECOVERY, WINDOW, Span, breakdown, write_trace


def marks(spans: list[Span], category: str) -> list[Span]:
    return [span for span in spans if span.category == category]


def test_a_trace_goes_on_over_generations(tmp_path: Path) -> None:
    deaths = [Death(1, 3, "backward"), Death(1, 6, "backward")]
    survivor, replacement = (one["spans"] for one in run(tmp_path, 2, deaths))
    windows = [span.epoch for span in marks(survivor, WINDOW)]
    assert windows == [1, 2, 3, 4, 5, 6, 7, 8], "each minibatch that counts has one mark, and the number it has alone"
    assert [span.epoch for span in marks(replacement, WINDOW)] == [7, 8]
    assert [span.unit for span in marks(survivor, GIVEN_UP)] == ["minibatch 4", "minibatch 7"]
    units = [span.unit for span in marks(survivor, RECOVERY)]
    assert [unit.partition(": ")[0] for unit in units] == [
        "generation 1, back to step 3",
        "generation 2, back to step 6",
    ]
    assert all("rank 1" in unit and span.peer == 1 for unit, span in zip(units, marks(survivor, RECOVERY), strict=True))
    (began,) = marks(replacement, RECOVERY)
    assert began.unit == "generation 2, back to step 6: a new process takes the place of one that has ended"
    assert [step.epoch for step in breakdown({0: survivor, 1: replacement}).steps] == [7, 8]
    write_trace(tmp_path / "trace.json", {0: survivor, 1: replacement})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") in (RECOVERY, GIVEN_UP) and event["pid"] == 1]
    assert names[0] == "given up: minibatch 4" and names[1].startswith("recovery: generation 1, back to step 3: ")
    assert all(span.lane != MAIN for span in (*marks(survivor, RECOVERY), *marks(survivor, GIVEN_UP)))


def test_minibatches_that_are_done_again_are_marked(tmp_path: Path) -> None:
    deaths = [Death(1, 5, "step")]
    survivor, _ = (one["spans"] for one in run(tmp_path, 2, deaths, every=3))
    assert [span.epoch for span in marks(survivor, WINDOW)] == [1, 2, 3, 4, 5, 6, 7, 8]
    given_up = [span.unit for span in marks(survivor, GIVEN_UP)]
    assert given_up[:3] == ["minibatch 4", "minibatch 5", "minibatch 6"], "and the one that was open, if any"


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")  # put back at the end
    yield
    odc.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def shown() -> Any:
    (mine,) = status_of([os.getpid()])
    return mine.recovery


def test_status_shows_generation_and_kept_step(environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    enter, asked = Generations.enter, []

    def asking(self: Generations, *given: Any) -> None:
        asked.append(shown())
        enter(self, *given)

    monkeypatch.setattr(Generations, "enter", asking)
    made: Any = dist
    with odc.Recovery(made.HashStore(), rejoin_s=5.0) as recovery:
        assert asked == [{"generation": 0, "recoveries": 0, "kept": None, "connecting": True}]
        model: Any = odc.fully_shard(nn.Linear(4, 4))
        recovery.protect(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
        with recovery.attempt():
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
        assert shown() == {"generation": 0, "recoveries": 0, "kept": 1, "connecting": False}
    assert "recovery" not in process_status and shown() is None
