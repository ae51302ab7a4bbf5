"""The lanes of a CUDA device, over a double of torch's calls; `tests/gpu` has them on a device."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from odc.memory import cuda_lanes
from odc.memory.cuda_lanes import CudaLanes


def test_threads_other_than_the_training_thread_get_its_device_before_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a lane torch goes back to what was current: a context on device 0 for every rank."""
    monkeypatch.setattr(cuda_lanes, "_streams", {})
    calls: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(("device", device.index)))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: calls.append(("lane", stream)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: f"{device}, priority {priority}")
    modes = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
    monkeypatch.setattr(cuda_lanes, "bindings", lambda: SimpleNamespace(CUstreamCaptureMode=modes))
    monkeypatch.setattr(cuda_lanes, "call", lambda *call: calls.append(call))
    lanes = CudaLanes(torch.device("cuda", 3), {"fetch": "torch's"})  # type: ignore[dict-item]
    lanes.lane("fetch")
    assert calls == [("lane", "torch's")], "the training thread's device is the caller's affair"
    calls.clear()
    thread = threading.Thread(target=lambda: [lanes.lane("server") for _ in range(2)])
    thread.start()
    thread.join()
    mode = "cuThreadExchangeStreamCaptureMode", "relaxed"  # or its calls would end a capture of another thread's
    assert calls == [("device", 3), mode, *[("lane", "cuda:3, priority -2")] * 2]


def test_no_lane_is_a_stream_in_which_a_root_fetches_or_pushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Roots over hosts, made one after the other: torch hands out 32 streams of a priority in turn, three to each."""
    pools: dict[int, Any] = {priority: itertools.cycle([(priority, i) for i in range(32)]) for priority in (0, -1, -2)}
    monkeypatch.setattr(cuda_lanes, "_streams", {})
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: next(pools[priority]))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    device = torch.device("cuda", 0)
    used = set[Any]()
    found = dict[str, set[Any]]()
    for _ in range(22):
        streams = {lane: next(pools[-1]) for lane in ("fetch", "copy in", "push")}  # FSDP2's, as it makes them
        used |= set(streams.values())
        lanes, stages = CudaLanes(device, streams), CudaLanes(device)
        assert [lanes.lane(lane) for lane in streams] == list(streams.values())
        for name in ("server", "patch", "sums", "node", "ahead"):
            found.setdefault(name, set()).add(lanes.lane(name))
        for name in (f"network {number}.{half}" for number in range(8) for half in range(2)):
            found.setdefault(name, set()).add(stages.lane(name))
    assert not any(streams & used for streams in found.values())
    assert [len(streams) for streams in found.values()] == [1] * 21 and len(set.union(*found.values())) == 21
    assert CudaLanes(torch.device("cuda", 1)).lane("server") not in found["server"]


@pytest.mark.parametrize("sleeps", [True, False])
def test_a_thread_that_settles_sleeps_where_cores_are_few(monkeypatch: pytest.MonkeyPatch, sleeps: bool) -> None:
    calls: list[tuple[object, ...]] = []

    class Event:
        def __init__(self, **options: bool) -> None:
            calls.append(("event", options))

        def record(self, stream: object) -> None:
            calls.append(("record",))

        def synchronize(self) -> None:
            calls.append(("await",))

    stream = SimpleNamespace(synchronize=lambda: calls.append(("spin",)))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    CudaLanes(torch.device("cuda", 0), sleeps=sleeps).settle()
    assert calls == ([("event", {"blocking": True}), ("record",), ("await",)] if sleeps else [("spin",)])
