"""A session of tests over emulated CUDA in which every access to device memory is judged: a plugin of pytest.

    tests/emulated/run.sh python -m pytest -m gpu tests/gpu -p emulated_session -p ordered_session

A test fails with a report of every pair of accesses to the same bytes that nothing orders.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import pytest

_SETTLING_S = 0.1
#: Tests whose accesses meet on purpose, by the end of their names.
_ON_PURPOSE = {
    "test_message_streaming": "a payload may be newer than the word that announced it",
    "test_a_reader_cannot_write": "the write is one that kills who tries",
    **dict.fromkeys(
        (
            "test_reading_while_the_job_publishes_without_pause[False]",
            "test_reading_while_the_job_publishes_without_pause[True]",
            "test_a_write_through_a_readers_map_faults",
            "test_a_reader_holds_mappings_as_long_as_it_lives_and_no_descriptor_of_memory",
            "test_a_killed_reader_leaves_nothing_and_holds_up_no_rank",
            "test_a_killed_trainer_is_named_while_it_is_read_from",
        ),
        "readers copy while a rank publishes, and drop what was overtaken",
    ),
    "test_equal_to_fsdp2[1]": "a backward that is marked as the last too early has its sums read twice",
    "-2-1-on]": "the same, in test_changes_equal_fsdp2",
    "-2-1-auto]": "the same, in test_changes_equal_fsdp2",
}
_folder, _own = Path(), False


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before anything imports torch: a process that has begun without a folder records nothing."""
    global _folder, _own
    given = os.environ.get("EMULATED_RECORD", "")
    _folder, _own = Path(given or tempfile.mkdtemp(prefix="ordered.")), not given
    os.environ["EMULATED_RECORD"] = str(_folder)


class OrderedSession:
    """The judge of a session, by the name "ordered" among its plugins."""

    def __init__(self) -> None:
        from support.ordered import Judge, Logs

        self._logs, self._judge = Logs(_folder), Judge()
        self._seconds = 0.0

    def found(self) -> list[str]:
        """Reports of what has not been judged yet."""
        from support.ordered import report

        begin = time.monotonic()
        time.sleep(_SETTLING_S)  # what is younger is left to the next call
        texts = report(self._judge, self._logs, self._judge.judge(self._logs))
        self._seconds += time.monotonic() - begin
        return texts

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Generator[None]:
        try:
            return (yield)
        finally:
            if texts := self.found():
                raise UnorderedAccesses(f"{len(texts)} pairs of accesses that nothing orders\n" + "\n".join(texts[:20]))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.line(
            f"{self._judge.accesses} accesses by {len(self._judge.processes)} processes were judged in "
            f"{self._seconds:.1f} s (tests/emulated/README.md)"
        )
        if _own:
            shutil.rmtree(_folder, ignore_errors=True)


class UnorderedAccesses(Exception):
    """Two accesses to the same bytes, one of them a write, that nothing orders."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name, why in _ON_PURPOSE.items():
            if item.nodeid.endswith(name):
                item.add_marker(pytest.mark.skip(reason=f"emulated: not judged, as {why}"))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(OrderedSession(), "ordered")
