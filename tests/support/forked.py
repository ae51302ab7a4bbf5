"""What a forked child, as a data loader's worker is, makes of what its parent has."""

from __future__ import annotations

import os
from collections.abc import Callable


def answer_of_child(work: Callable[[], str]) -> str:
    """What `work` returns in a forked child, or the type and text of what it raises there."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            found = work()
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        os.write(write, found.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with open(read) as answer:
        return answer.read()
