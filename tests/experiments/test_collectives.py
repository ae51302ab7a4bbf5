from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from odc.experiments import collectives
from odc.experiments.collectives import record_collectives, recorded_stalls
from odc.trace import COLLECTIVE, COLLECTIVE_LANES, FETCH, PUSH, WAIT, recorder

Pools = Callable[[int], Any]


def _model() -> torch.nn.Sequential:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 4))
    fully_shard(model[1])
    fully_shard(model)
    return model


def _gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    model(torch.ones(3, 6)).square().sum().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]


def recorded(rank: int, world: int) -> list[tuple[str, str, int, int]]:
    expected = _gradients(_model())
    model = _model()
    record_collectives(model)
    recorder().clear()
    for mine, theirs in zip(_gradients(model), expected, strict=True):
        assert torch.equal(mine, theirs), (mine, theirs)
    spans = [span for span in recorder().spans() if span.peer == COLLECTIVE]
    assert all(span.end_ns > span.start_ns for span in spans), spans
    return [(span.category, span.unit, span.peer, span.nbytes) for span in spans]


def test_stock_collectives_are_recorded_by_unit_and_change_nothing(ranks: Pools) -> None:
    root, last = (6 * 8 + 8) * 4, (8 * 4 + 4) * 4
    for spans in ranks(2).run(recorded):
        assert spans == [
            (FETCH, "", COLLECTIVE, root),
            (FETCH, "1", COLLECTIVE, last),
            (FETCH, "1", COLLECTIVE, last),
            (PUSH, "1", COLLECTIVE, last),
            (PUSH, "", COLLECTIVE, root),
        ]


def test_only_waits_of_the_compute_stream_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the lane of the collectives after which the event was recorded."""
    made: list[tuple[str, object]] = []

    class Stream(str):
        def wait_event(self, event: object) -> None:
            made.append((str(self), event))

        def record_event(self, event: object = None) -> object:
            return event or SimpleNamespace(of=str(self))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(collectives, "_lanes", {"gather": COLLECTIVE_LANES[FETCH]})
    plain = Stream.wait_event, Stream.record_event
    recorder().clear()
    with recorded_stalls(None):
        Stream("compute").wait_event(0)
    with recorded_stalls(Stream("compute")):  # type: ignore[arg-type]
        gathered, copied = Stream("gather").record_event(), Stream("copies").record_event()
        Stream("compute").wait_event(1)
        Stream("gather").wait_event(2)
        Stream("compute").wait_event(gathered)
        Stream("compute").wait_event(copied)
    Stream("compute").wait_event(3)
    assert (Stream.wait_event, Stream.record_event) == plain
    assert [event for _, event in made] == [0, 1, 2, gathered, copied, 3]
    assert [(span.category, span.peer, span.unit) for span in recorder().spans()] == [
        (WAIT, COLLECTIVE, ""),
        (WAIT, COLLECTIVE, COLLECTIVE_LANES[FETCH]),
        (WAIT, COLLECTIVE, ""),
    ]
