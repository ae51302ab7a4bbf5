"""Finds the helpers of these tests, and those that make heaps."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
for _helpers in (HERE, HERE.parent / "memory"):
    if str(_helpers) not in sys.path:
        sys.path.insert(0, str(_helpers))
