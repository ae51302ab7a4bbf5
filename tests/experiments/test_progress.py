from __future__ import annotations

import io
import re

import pytest

from odc.experiments.progress import Progress, end_killed_line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_file_gets_plain_lines_from_the_start() -> None:
    stream = io.StringIO()
    progress = Progress(20, "job", stream=stream)
    progress.phase("reading")
    for step in range(1, 21):
        progress.step(step, 2.5, 1234.4, 0.125)
    progress.close()
    lines = stream.getvalue().splitlines()
    assert re.fullmatch(r"job \[ +\d+\.\d s\] reading", lines[0])
    assert lines[-1].endswith("step 20/20  loss 2.5000  1,234 tokens/s  bubble 12.5%")
    assert len(lines) <= 1 + 11, "at most every tenth step, and one line in two seconds"
    assert all(f"step {step}/20" in stream.getvalue() for step in range(2, 21, 2))


def test_a_terminal_gets_one_live_line() -> None:
    pytest.importorskip("rich", reason="needs the cli extra")
    stream = Terminal()
    progress = Progress(2, "job", stream=stream)
    progress.phase("reading")
    progress.step(2, 2.5, 1000.0, None)
    progress.close()
    progress.close()
    shown = stream.getvalue()
    assert "2/2" in shown and "loss 2.5000" in shown and "bubble" not in shown


def test_a_rank_that_becomes_the_first_goes_on_with_the_lines() -> None:
    pytest.importorskip("rich", reason="needs the cli extra")
    for stream in (io.StringIO(), Terminal()):
        progress = Progress(2, "job", shown=False, stream=stream)
        progress.phase("reading")
        assert stream.getvalue() == ""
        progress.show(True)
        progress.step(2, 2.5, 1000.0, None)
        progress.show(False)
        shown = stream.getvalue()
        assert "2/2" in shown and "loss 2.5000" in shown
        progress.phase("ending")
        assert stream.getvalue() == shown


def test_other_ranks_say_nothing() -> None:
    stream = io.StringIO()
    progress = Progress(1, shown=False, stream=stream)
    progress.phase("reading")
    progress.step(1, 1.0, 1.0, None)
    progress.close()
    assert stream.getvalue() == ""


def test_paths_are_shown_as_they_are() -> None:
    pytest.importorskip("rich", reason="needs the cli extra")
    stream = Terminal()
    progress = Progress(2, "job [/y]", stream=stream)
    progress.phase("exporting to runs/[v2]/out[/x]")
    progress.close()
    assert "exporting to runs/[v2]/out[/x]" in stream.getvalue() and "job [/y]" in stream.getvalue()


def test_a_terminal_whose_line_was_killed_shows_its_cursor_again() -> None:
    pytest.importorskip("rich", reason="needs the cli extra")
    stream, file = Terminal(), io.StringIO()
    Progress(2, "job", stream=stream).phase("reading")
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert stream.getvalue().rfind(hidden) > stream.getvalue().rfind(shown)
    end_killed_line(stream)
    assert stream.getvalue().rfind(shown) > stream.getvalue().rfind(hidden) and stream.getvalue().endswith("\n")
    end_killed_line(file)
    assert file.getvalue() == ""
