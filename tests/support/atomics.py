"""The atomics that this machine has, and values of a word."""

from __future__ import annotations

import platform

from hypothesis import strategies as st

from odc.memory import Atomics, libatomic, plain_x86_64

WORD = st.integers(-(1 << 63), (1 << 63) - 1)


def backends() -> list[Atomics]:
    found = [plain_x86_64()] if platform.machine() == "x86_64" else []
    try:
        return [libatomic(), *found]
    except OSError:
        return found
