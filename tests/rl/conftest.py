"""Makes `_small_model` and the handover's `_jobs` importable, also on rank processes: they get pytest's path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the train extra")
for _helpers in (Path(__file__).parent, Path(__file__).parents[1] / "handover"):
    if str(_helpers) not in sys.path:
        sys.path.insert(0, str(_helpers))
