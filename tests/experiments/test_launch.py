from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from odc.experiments.launch import JobFailedError, launch, start_server


def _add_rank(number: int) -> int:
    return number + int(os.environ["RANK"])


def _raise_on_one() -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("no 'good' \"here\"")
    time.sleep(600)


def _killed() -> None:
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def _exit_on_zero() -> None:
    if os.environ["RANK"] == "0":
        sys.exit(3)
    time.sleep(600)


def _children() -> set[str]:
    me = str(os.getpid())
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        command = (stat.parent / "cmdline").read_bytes() if stat.parent.exists() else b""
        helper = b"resource_tracker" in command or b"odc.ranks.worker" in command  # they end with this process
        if fields[1] == me and fields[0] != "Z" and not helper:
            found.add(stat.parent.name)
    return found


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_after_a_failure_the_terminal_shows_its_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0, which may have hidden it, is killed."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    launch(_add_rank, 5, ranks=1)
    assert terminal.getvalue() == ""
    with pytest.raises(JobFailedError):
        launch(_raise_on_one, ranks=2)
    assert terminal.getvalue().endswith("\x1b[?25h\n")


def test_results_come_back_in_rank_order() -> None:
    before = _children()
    assert launch(_add_rank, 5, ranks=2) == [5, 6]
    assert _children() == before


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (_raise_on_one, "rank 1 failed: ValueError: no 'good' \"here\""),
        (_killed, "rank 0 failed: the process was killed by SIGKILL"),
        (_exit_on_zero, "rank 0 failed: the process exited with code 3"),
    ],
)
def test_the_culprit_is_named_and_nothing_stays(
    entry: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    start_server()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    children = _children()
    with pytest.raises(JobFailedError) as caught:
        launch(entry, ranks=2)
    assert str(caught.value).startswith(message)
    if entry is _raise_on_one:
        assert "_raise_on_one" in caught.value.tracebacks[1] and caught.value.failures[0][0] == 1
    assert _children() == children
    assert not os.listdir(tmp_path)
    assert capfd.readouterr().err == ""


def _linger(folder: str) -> None:
    Path(folder, os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(600)


def test_ranks_die_with_the_process_that_started_them(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(
        "import sys\n"
        f"sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}\n"
        "from test_launch import _linger\n"
        "from odc.experiments import launch as here\n"
        "here._PRELOADED = ('torch.distributed.elastic.multiprocessing',)  # what ranks that only sleep load\n"
        "from odc.experiments.launch import launch\n"
        f"if __name__ == '__main__':\n    launch(_linger, {str(tmp_path)!r}, ranks=2)\n"
    )
    # As in a shell's background job, where the interrupt signal is ignored.
    starter = subprocess.Popen(
        [sys.executable, str(script)], preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)
    )
    try:
        pids = [_written(tmp_path / str(rank)) for rank in range(2)]
        starter.kill()
        starter.wait(60.0)
        deadline = time.monotonic() + 60
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            assert time.monotonic() < deadline, f"ranks {pids} live on"
            time.sleep(0.05)
    finally:
        starter.kill()
        starter.wait()


def _written(path: Path) -> int:
    deadline = time.monotonic() + 600
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"{path.name} did not start"
        time.sleep(0.05)
    return int(path.read_text())
