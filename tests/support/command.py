"""The command line, called in this process."""

from __future__ import annotations

import pytest

from odc.cli import main


def odc(*arguments: object) -> int:
    """Runs `odc` with these arguments; returns its exit code."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)
