"""What a process records of the orders that Python sees."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.ordered.log import Key, Kind, Logs

ACQUIRES = """
import torch
from recorded.notes import ACQUIRE, note

for kind in ({kind}, {kind}):
    note(ACQUIRE, 7, 1, kind)
"""


@pytest.mark.parametrize(("kind", "times"), [(Key.WORD, 1), (Key.LOCK, 2), (Key.OBJECT, 2), (Key.MESSAGE, 2)])
def test_all_but_a_word_that_is_polled_is_acquired_each_time(tmp_path: Path, kind: Key, times: int) -> None:
    """A word that has not changed says nothing new; another message has the same number as the one before."""
    environment = {**os.environ, "EMULATED_RECORD": str(tmp_path)}
    subprocess.run([sys.executable, "-c", ACQUIRES.format(kind=int(kind))], env=environment, check=True)
    ((_, records, _),) = Logs(tmp_path).batch(all_of_it=True)
    assert int(((records["kind"] == Kind.ACQUIRE) & (records["a"] == 7)).sum()) == times
