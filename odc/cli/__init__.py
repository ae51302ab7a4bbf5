"""The command line: `odc train | compare | status`."""

from odc.cli.entry import main

__all__ = ["main"]
