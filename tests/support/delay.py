"""Joins two TAP devices so that every frame takes a given time longer; run in the switch's network namespace.

`delay.py NEAR FAR MICROSECONDS` makes the devices, prints "ready" and passes frames on until its standard input ends.
Frames of 64 KiB pass whole (the kernel's segmentation offload), so 1 Gbit/s costs a tenth of a core.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_TAP, _NO_HEADER, _VIRTIO_HEADER = 0x0002, 0x1000, 0x4000
_OFFLOADS = 0x01 | 0x02 | 0x04  # checksums, TCP segmentation over IPv4 and IPv6
_FRAME = 70_000
_QUEUED = 4096


def tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _NO_HEADER | _VIRTIO_HEADER))
    fcntl.ioctl(fd, _TUNSETOFFLOAD, _OFFLOADS)
    return fd


def relay(ends: tuple[int, int], delay_s: float) -> None:
    """Pass frames on, in order, until standard input ends."""
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    queue: deque[tuple[float, int, bytes]] = deque()  # one for both ways: all are delayed alike
    while True:
        wait = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        readable, _, _ = select.select([0, *(ends if len(queue) < _QUEUED else ())], [], [], wait)
        if 0 in readable and not os.read(0, 1):
            return
        for fd in readable:
            for _ in range(16 if fd else 0):
                try:
                    frame = os.read(fd, _FRAME)
                except (BlockingIOError, OSError):  # nothing more, or the device is not up yet
                    break
                queue.append((time.monotonic() + delay_s, other[fd], frame))
        while queue and queue[0][0] <= time.monotonic():
            _, to, frame = queue.popleft()
            with contextlib.suppress(OSError):  # its queue is full: lost, as in a switch
                os.write(to, frame)


if __name__ == "__main__":
    devices = tap(sys.argv[1]), tap(sys.argv[2])
    print("ready", flush=True)
    relay(devices, float(sys.argv[3]) * 1e-6)
