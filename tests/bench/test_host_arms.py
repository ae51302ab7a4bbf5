"""The arms of `bench.hosts`."""

from __future__ import annotations

import pytest
from support.rank_worker import check_protocol

from bench.host_arms import settings_of
from odc import Settings


def test_what_is_measured_does_not_check_the_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings.__init__, "__defaults__", Settings.__init__.__defaults__)  # put back at the end
    check_protocol()
    assert Settings().check_protocol
    assert not settings_of("odc").check_protocol
