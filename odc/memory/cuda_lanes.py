"""The lanes of a CUDA device: streams and events."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import cast

import torch

from odc.memory.driver_calls import bindings, call

_URGENT = -1  # a stream's priority; compute has 0


class CudaLanes:
    """`Lanes` of a CUDA device: each lane is a stream, each mark an event.

    `streams` are the streams to use, by lane; a lane without one gets a new stream, ahead of compute: a push waits for
    a slot until the server has added what is in it. For fetch and push, FSDP2's own streams keep their priorities, and
    what already waits for them keeps its order.

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
        self._device, self._streams, self._making = device, dict(streams or {}), threading.Lock()
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
            with self._making:
                stream = self._streams.setdefault(name, torch.cuda.Stream(self._device, priority=_URGENT))
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
