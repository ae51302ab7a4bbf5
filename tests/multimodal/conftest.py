"""Makes `_tiny` importable, also on rank processes: they get pytest's path. Skips where the extra is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for _extra in ("transformers", "PIL", "soundfile"):
    pytest.importorskip(_extra, reason="needs the multimodal extra")

if str(Path(__file__).parent) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parent))
