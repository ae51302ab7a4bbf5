"""Skips these tests where the train extra is missing."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", reason="needs the train extra")
