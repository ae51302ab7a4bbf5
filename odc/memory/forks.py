"""What a forked child must let go of.

Chose one handler for the whole process over one per object: `os.register_at_fork` can never be undone. A data loader
worker forked from a rank would otherwise keep the rank's sockets, descriptors and memory alive after the rank has died.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol


class Closes(Protocol):
    """Anything with a `close()` that touches only this process: no unlink, no message, no shared state."""

    def close(self) -> None: ...


_held: weakref.WeakSet[Closes] = weakref.WeakSet()
_registered = False


def close_after_fork(resource: Closes) -> None:
    """Call `resource.close()` in every child that this process forks from now on, while `resource` lives."""
    global _registered
    _held.add(resource)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for resource in list(_held):
        with contextlib.suppress(OSError):  # the others must be closed all the same
            resource.close()
    _held.clear()
