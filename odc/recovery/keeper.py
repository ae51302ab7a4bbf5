"""A process that holds the slots of a host's ranks and does nothing else, for launchers that restart all of them.

`torchrun` ends every rank of a host when one has ended. The keeper is started by a rank, inherits the descriptors of
all slots there, and so holds them from its first moment on. It ends with the launcher, when the job is over, when the
next generation has one of its own, or once its ranks have been gone for too long.

This file is also its program, which imports nothing that takes time.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys

_GIVEN = b"TORCHELASTIC_RUN_ID="
_LONGEST_MS = (1 << 31) - 1  # of a poll: 24 days


def start(fds: list[int], ranks: list[int], patience_s: float) -> subprocess.Popen[bytes]:
    """Start a keeper of these descriptors, which has them under the same numbers. Does not wait.

    `ranks` are the process ids of the host's ranks.
    """
    given = json.dumps([patience_s, find_launcher(), ranks])
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, given],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a launcher ends a rank's session, too
        cwd="/",
    )


def find_launcher() -> int:
    """The nearest process above this one that was not given torchrun's variables: a script may stand between them."""
    from odc.launchers import parent_of  # in a rank; the keeper itself has no odc to import

    found = os.getppid()
    try:
        while found > 1 and _was_given_variables(found):
            found = parent_of(found)
    except OSError:  # it has ended, or is another user's
        pass
    return found


def _was_given_variables(pid: int) -> bool:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return any(one.startswith(_GIVEN) for one in file.read().split(b"\0"))


def keep(patience_s: float, launcher: int, ranks: list[int]) -> None:
    """Return when the launcher has ended, or all ranks have and `patience_s` have gone by."""
    poll = select.poll()
    launching = _opened(launcher)
    alive = {fd for pid in ranks if (fd := _opened(pid)) >= 0}
    for fd in (launching, *alive):
        poll.register(fd, select.POLLIN)
    while launching >= 0:
        found = {fd for fd, _ in poll.poll(None if alive else min(1000 * patience_s, _LONGEST_MS))}
        if launching in found or not found:
            return
        for fd in found & alive:
            poll.unregister(fd)
        alive -= found


def _opened(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1 if it has."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


if __name__ == "__main__":
    keep(*json.loads(sys.argv[1]))
