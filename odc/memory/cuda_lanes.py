"""Lanes on a CUDA device: streams and events.

Chose streams that FSDP2 has made already for fetch (its all-gather stream) and push (its reduce-scatter stream): their
priorities and what already waits for them are torch's. The server's lane is a stream of our own.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import cast

import torch


class CudaLanes:
    """See `Lanes`.

    Args:
        device: of the heap.
        streams: by lane; a lane that is missing gets a stream of its own.
    """

    asynchronous = True

    def __init__(self, device: torch.device, streams: Mapping[str, torch.cuda.Stream] | None = None) -> None:
        self._device, self._streams, self._making = device, dict(streams or {}), threading.Lock()

    def lane(self, name: str) -> AbstractContextManager[object]:
        with self._making:
            stream = self._streams.get(name)
            if stream is None:
                stream = self._streams[name] = torch.cuda.Stream(self._device)
        return torch.cuda.stream(stream)  # makes the device current too: another thread's may be another

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def follow(self, mark: object) -> None:
        torch.cuda.current_stream(self._device).wait_event(cast(torch.cuda.Event, mark))

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()
