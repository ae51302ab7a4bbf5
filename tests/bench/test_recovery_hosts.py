"""When the deaths of hosts are noted: by the clock of the notes that ranks write."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support import recovering_hosts

from bench.recovery_hosts import kill_hosts


def test_a_death_is_noted_by_the_clock_of_the_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[dict[str, Any]] = []
    hosts: Any = ["first", "second"]
    gone: list[str] = []
    monkeypatch.setattr(recovering_hosts, "kill_ranks", lambda host: gone.append(host) or 2)
    (tmp_path / "3.jsonl").write_text('{"what": "begin", "step": 7, "at": 1}\n{"what": "begin", "step": 9, "at": 2}\n')
    before = time.monotonic()
    kill_hosts(hosts, tmp_path, [7, 9], killed)
    times = [each["at"] for each in killed]
    assert gone == ["second", "first"] and [each["host"] for each in killed] == [1, 0]
    assert before <= times[0] <= times[1] <= time.monotonic()
