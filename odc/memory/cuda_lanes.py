"""The lanes of a CUDA device: streams and events."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import cast

import torch

from odc.memory.driver_calls import bindings, call

#: The priority of lanes; compute has 0, and FSDP2's own streams have -1. Torch hands out 32 streams of a device and
#: priority in turn: of FSDP2's, a lane would be the stream in which some later model fetches or pushes.
_URGENT = -2
#: By device and lane, made once in a process: with new ones for each root and recovery two lanes would soon be one.
_streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}
_making = threading.Lock()


class CudaLanes:
    """`Lanes` of a CUDA device: each lane is a stream, each mark an event.

    `streams` are the streams to use, by lane. For fetch and push, FSDP2's own streams keep their priorities, and what
    already waits for them keeps its order. All other lanes follow no compute, and share a stream with those of this
    name in the whole process. It is ahead of compute: a push waits for a slot until the server has added what is in it.

    Made by the training thread, whose current device is the caller's affair. Any other thread is given this device for
    good when it first enters a lane: torch would otherwise go back to device 0 at the end of each, and create a context
    there, half a gigabyte for each rank. Its calls do not break a capture of the training thread's, either: in the
    default mode, "global", any thread's potentially unsafe call would, such as the query of an event.

    With `sleeps` a thread that settles sleeps, and is woken some 20 to 50 us late; else it spins on a core.
    """

    asynchronous = True

    def __init__(
        self, device: torch.device, streams: Mapping[str, torch.cuda.Stream] | None = None, *, sleeps: bool = False
    ) -> None:
        self._device, self._streams = device, dict(streams or {})
        self._sleeps = sleeps
        self._placed = threading.local()
        self._placed.here = True

    def lane(self, name: str) -> AbstractContextManager[object]:
        if not getattr(self._placed, "here", False):
            torch.cuda.set_device(self._device)
            relaxed = bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            call("cuThreadExchangeStreamCaptureMode", relaxed)
            self._placed.here = True
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = _shared_stream(self._device, name)
        return torch.cuda.stream(stream)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def follow(self, mark: object) -> None:
        torch.cuda.current_stream(self._device).wait_event(cast(torch.cuda.Event, mark))

    def settle(self) -> None:
        stream = torch.cuda.current_stream(self._device)
        if not self._sleeps:
            stream.synchronize()
            return
        event = torch.cuda.Event(blocking=True)
        event.record(stream)
        event.synchronize()

    def reached(self, mark: object) -> bool:
        return bool(cast(torch.cuda.Event, mark).query())


def _shared_stream(device: torch.device, lane: str) -> torch.cuda.Stream:
    with _making:
        found = _streams.get((device, lane))
        if found is None:
            found = _streams[device, lane] = torch.cuda.Stream(device, priority=_URGENT)
        return found
