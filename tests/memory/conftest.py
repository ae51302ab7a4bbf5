"""Helpers of the memory tests (`conformance`, `_groups`) are found here; rank processes get this path too."""

from __future__ import annotations

import sys
from pathlib import Path

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))
