"""Finds the helpers of these tests, and those that make heaps."""

from __future__ import annotations

import sys
from pathlib import Path

for _helpers in (Path(__file__).parent, Path(__file__).parents[1] / "memory"):
    if str(_helpers) not in sys.path:
        sys.path.insert(0, str(_helpers))
