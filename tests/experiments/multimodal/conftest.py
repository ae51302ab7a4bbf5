"""Skips these tests where the multimodal extra is missing."""

from __future__ import annotations

import pytest

for _extra in ("transformers", "PIL", "soundfile"):
    pytest.importorskip(_extra, reason="needs the multimodal extra")
